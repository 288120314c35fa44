"""Streaming: pieces joined are what `generate` gives, text and tokens."""

import io
import re

import jax
import numpy as np
import pytest
import tokenizers
from rich.console import Console, Group

from eagle3_jax import testing
from eagle3_jax.configs import Sampling, Speculation
from eagle3_jax.console import Answer, pieces
from eagle3_jax.contracts import RequestError
from eagle3_jax.generation import (
    CYCLES,
    Output,
    Piece,
    generate,
    make_batch,
    output_of,
    stream,
)
from eagle3_jax.tokenizer import Tokenizer
from eagle3_jax.verbs import decode as verb
from eagle3_jax.verbs.common import SpeculationFlags
from eagle3_jax.verifier import Verifier

DRAFTER = testing.tiny_drafter("llama")
HOW = {"max_new_tokens": 40, "rows": 3, "speculation": Speculation(depth=2), "raw": True}


def bytes_tokenizer() -> Tokenizer:
    """64 tokens, each one byte: most of them parts of characters of two to four bytes."""
    letters = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    some = "abcé€😀ñ"
    known = {c for (word, _) in letters.pre_tokenize_str(some) for c in word}
    rest = sorted(set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) - known)
    model = tokenizers.models.WordLevel(
        {c: i for i, c in enumerate([*sorted(known), *rest][:64])}, unk_token="a"
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [letters, tokenizers.pre_tokenizers.Split(tokenizers.Regex("[\\s\\S]"), "isolated")]
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend.to_str())


def with_tokenizer(tokenizer: Tokenizer) -> Verifier:
    config = testing.tiny_verifier("llama").config
    return Verifier(config, jax.random.key(0), "tiny", tokenizer)


@pytest.fixture(scope="module")
def letters():
    return with_tokenizer(testing.tiny_tokenizer())


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(3)
    return [rng.integers(2, 64, n).tolist() for n in (3, 130, 17, 40, 5, 9)]


def joined(found: list[Piece], count: int) -> tuple[list[list[int]], list[str], list[list[bool]]]:
    """Tokens, text and marks by prompt."""
    own = [[piece for piece in found if piece.prompt == i] for i in range(count)]
    assert all([piece.done for piece in each] == [False] * (len(each) - 1) + [True] for each in own)
    return (
        [sum((piece.tokens for piece in each), []) for each in own],
        ["".join(piece.text for piece in each) for each in own],
        [sum((piece.drafted for piece in each), []) for each in own],
    )


def test_pieces_joined_are_the_rows_of_generate(letters, prompts):
    out = generate(letters, DRAFTER, prompts, **HOW)
    found = list(stream(letters, DRAFTER, prompts, **HOW))
    assert joined(found, 6) == (out.tokens, out.text, [row.drafted for row in out.rows])
    # Three rows: prompts that sit side by side alternate, the others follow.
    assert [piece.prompt for piece in found[:6]] == [0, 1, 2, 0, 1, 2]
    assert max(len(piece.tokens) for piece in found) <= 1 + CYCLES * 3


def test_stop_texts_never_show(letters, prompts):
    """Each prompt has a stop text longer than a piece, and one that only begins."""
    plain = generate(letters, DRAFTER, prompts, **HOW)
    text = [row.text or "" for row in plain.rows]
    sampling = [Sampling(stop=(each[5:20], each[3] + "\n\n\n")) for each in text]
    out = generate(letters, DRAFTER, prompts, sampling=sampling, **HOW)
    assert [row.text for row in out.rows] == [each[: each.index(each[5:20])] for each in text]
    found = list(stream(letters, DRAFTER, prompts, sampling=sampling, **HOW))
    assert joined(found, 6)[:2] == (out.tokens, out.text)


def other_tokenizer(letters, prompts, tokenizer) -> tuple[list[Piece], Output]:
    """Pieces and result of the same model with another tokenizer, which compiles nothing new."""
    batch = make_batch(letters, DRAFTER, prompts, capacity=None, sampling=Sampling(), **HOW)
    batch.tokenizer = tokenizer
    return list(batch.pieces(CYCLES)), output_of(batch)


def test_characters_come_whole(letters, prompts):
    """The same tokens as bytes; broken ends wait, broken middles are shown as they are."""
    tokenizer = bytes_tokenizer()
    assert tokenizer.decode(tokenizer.encode("é€😀")) == "é€😀"
    found, out = other_tokenizer(letters, prompts, tokenizer)
    assert joined(found, 6)[1] == out.text
    unfinished = [piece for piece in found if not piece.done]
    assert not any(piece.text.endswith("\N{REPLACEMENT CHARACTER}") for piece in unfinished)


def test_without_a_tokenizer_there_are_tokens(letters, prompts):
    found, out = other_tokenizer(letters, prompts, None)
    assert joined(found, 6)[:2] == (out.tokens, [""] * 6)


def test_left_early_and_refused_at_once(letters, prompts):
    found = stream(letters, DRAFTER, prompts, **HOW)
    assert next(found).prompt == 0
    found.close()
    with pytest.raises(RequestError, match="no prompts"):
        stream(letters, DRAFTER, [])


@pytest.mark.parametrize("colour", ["standard", None])
def test_an_answer_is_shown_as_it_comes(letters, prompts, colour):
    """In colour what is printed at last is what is printed piece by piece."""
    tokenizer = bytes_tokenizer()
    found, out = other_tokenizer(letters, prompts, tokenizer)
    for i, row in enumerate(out.rows):
        shown = []
        for live in (True, False):
            file = io.StringIO()
            console = Console(file=file, force_terminal=True, color_system=colour, highlight=False)
            if live:
                mine = [piece for piece in found if piece.prompt == i]
                Answer("a b  ", ()).live(console, mine, tokenizer)
            else:
                console.print(Answer("a b  ", pieces(row, tokenizer)), crop=False)
            shown.append(bare(file.getvalue()))
        assert shown[0] == shown[1]


def bare(text: str) -> str:
    """Without colours and marks."""
    return re.sub("\x1b\\[[0-9;]*m|[‹›]", "", text).rstrip("\n")


def test_decode_shows_it_on_a_terminal(letters, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr(verb, "load", lambda *_: (letters, {"drafter": DRAFTER}))
    flags = SpeculationFlags(depth=2)
    decode = verb.Decode(prompt=("abc def",), max_new_tokens=40, speculation=flags)
    found, shown = decode.execute()
    text = found["rows"][0]["text"]
    assert text == generate(letters, DRAFTER, ["abc def"], **HOW).text[0]
    assert text in bare(terminal.getvalue()) and isinstance(shown, Group)
    assert len(shown.renderables) == 1  # the figures alone
