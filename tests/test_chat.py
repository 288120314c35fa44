"""Conversations: every turn is that of the whole conversation, of which little is read again."""

import jax
import numpy as np
import pytest

from eagle3_jax import testing
from eagle3_jax.batch import seat
from eagle3_jax.chat import FIRST, Chat
from eagle3_jax.configs import Sampling, Speculation
from eagle3_jax.contracts import CapacityError, RequestError
from eagle3_jax.generation import encode_prompt, generate
from eagle3_jax.loop import prefill
from eagle3_jax.tokenizer import Tokenizer
from eagle3_jax.verifier import Verifier

TEMPLATE = (
    "{% for m in messages %}{{ m.role[:1] }}: {{ m.content }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
TOKENIZER = Tokenizer(testing.tiny_tokenizer()._backend.to_str(), TEMPLATE)
TURNS = ("def f(x):", "ab " * 60, "and then 42")
"""The second is longer than a chunk."""

CHAIN = Speculation(depth=3)
TREE = Speculation(depth=3, topk=2, nodes=5)
WARM = Sampling(temperature=0.9, seed=5, top_p=0.95, repetition_penalty=1.2)


def verifier_of(family, **changes) -> Verifier:
    """A tiny verifier that can talk."""
    config = testing.tiny_verifier(family, **changes).config
    return Verifier(config, jax.random.key(0), "tiny", TOKENIZER)


@pytest.fixture(scope="module")
def llama():
    return verifier_of("llama")


@pytest.fixture(scope="module")
def deepseek():
    return verifier_of("deepseek")


@pytest.fixture
def read(monkeypatch):
    """Positions at which chunks begin, one list entry a chunk."""
    starts = []
    whole = prefill.prefill_chunk

    def counted(stages, state, row, tokens, start, *rest):
        starts.append(int(start))
        return whole(stages, state, row, tokens, start, *rest)

    monkeypatch.setattr("eagle3_jax.batch.prefill_chunk", counted)
    return starts


def again(chat: Chat, verifier, drafter, **settings):
    """The last turn by `generate`: the whole conversation before it as token ids."""
    tokens = encode_prompt(verifier, chat.messages[:-1])
    return generate(verifier, drafter, [tokens], rows=1, capacity=FIRST, **settings)


@pytest.mark.parametrize(
    ("family", "speculation", "sampling", "system"),
    [
        ("llama", None, Sampling(), None),
        ("llama", TREE, WARM, "be brief"),
        ("deepseek", CHAIN, Sampling(), None),
    ],
)
def test_every_turn_is_that_of_the_whole_conversation(
    request, family, speculation, sampling, system, read
):
    verifier = request.getfixturevalue(family)
    drafter = None if speculation is None else testing.tiny_drafter(family)
    how = {"sampling": sampling, "speculation": speculation, "max_new_tokens": 40}
    chat = Chat(verifier, drafter, system=system, **how)
    begun = []
    for text in TURNS:
        del read[:]
        pieces = list(chat.stream(text))
        begun.append([start for start in read if start])
        out = again(chat, verifier, drafter, **how)
        assert sum((piece.tokens for piece in pieces), []) == out.tokens[0]
        assert chat.messages[-1] == {"role": "assistant", "content": out.text[0]}
        assert chat.stats is not None and chat.stats.cycles == out.stats.cycles
    assert len(chat.messages) == 6 + (system is not None)
    # The second turn starts behind the first, the third behind the second.
    first = len(TURNS[0]) + 20
    assert begun[0] == [] and begun[1][0] >= first and begun[2][0] >= first + len(TURNS[1])


def test_a_changed_history_is_read_again_from_the_change_on(llama, read):
    drafter = testing.tiny_drafter("llama")
    how = {"sampling": WARM, "speculation": TREE, "max_new_tokens": 40}
    chat = Chat(llama, drafter, **how)
    chat.send(TURNS[0])
    chat.send(TURNS[1])
    chat.messages[0]["content"] = "def g(x):"
    del read[:]
    chat.send("x")
    assert read[0] == len("u: def ") - 1
    assert chat.messages[-1]["content"] == again(chat, llama, drafter, **how).text[0]
    # Drafts do not change the text, so their rows are compared with those of a fresh reading.
    tokens, state, stages = encode_prompt(llama, chat.messages[:-1]), chat._state, chat._stages
    fresh = seat(stages, stages.make_state(1, FIRST), 0, tokens, 40, WARM)
    assert state is not None
    for mine, other, n in (
        (state.cache, fresh.cache, len(tokens)),
        (state.draft_cache, fresh.draft_cache, len(tokens) - 1),
    ):
        for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(other), strict=True):
            np.testing.assert_allclose(x[..., :n, :], y[..., :n, :], atol=2e-5)
    del chat.messages[:]
    chat.send("again")
    assert chat.messages[-1]["content"] == again(chat, llama, drafter, **how).text[0]


def test_an_answer_left_early_is_gone_on_from(llama):
    chat = Chat(llama, None, max_new_tokens=40)
    pieces = chat.stream(TURNS[0])
    assert chat.messages == []
    piece = next(pieces)
    assert not piece.done and 0 < len(piece.tokens) < 40
    said = chat.messages[-1]["content"]
    assert said == piece.text and chat.stats is not None
    assert chat.stats.new_tokens == len(piece.tokens)
    answer = chat.send("go on")
    assert list(pieces) == []
    assert [m["content"] for m in chat.messages] == [TURNS[0], said, "go on", answer]
    assert answer == again(chat, llama, None, max_new_tokens=40).text[0]


def test_an_interrupted_turn_is_read_again(llama, monkeypatch, read):
    chat = Chat(llama, None, max_new_tokens=40)
    chat.send(TURNS[0])
    with monkeypatch.context() as patch:

        def interrupted(*arguments):
            raise KeyboardInterrupt

        patch.setattr("eagle3_jax.batch.run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            chat.send(TURNS[1])
    assert len(chat.messages) == 2
    del read[:]
    chat.send(TURNS[1])
    assert read[:2] == [0, 0]  # the first compiles
    assert chat.messages[-1]["content"] == again(chat, llama, None, max_new_tokens=40).text[0]


def test_a_conversation_outgrows_its_row(llama, read):
    chat = Chat(llama, None, capacity=256, max_new_tokens=40)
    chat.send("ab " * 50)
    chat.send("ab " * 50)
    state = chat._state
    assert state is not None
    shape = state.tokens.shape
    assert shape == (1, 512) and read[-2] > 150
    assert chat.messages[-1]["content"] == again(chat, llama, None, max_new_tokens=40).text[0]


def test_the_models_longest_text():
    small = verifier_of("llama", max_length=400)
    chat = Chat(small, None, max_new_tokens=100)
    with pytest.raises(CapacityError, match=r"of 308 tokens, and 100 new .* text of 400 tokens;"):
        chat.send("a" * 300)
    assert chat.messages == [] and chat._first == 512


def test_what_cannot_be_talked_to(llama):
    with pytest.raises(RequestError, match="tiny-llama has no chat template"):
        Chat(testing.tiny_verifier("llama"), None)
    with pytest.raises(RequestError, match="max_new_tokens 0"):
        Chat(llama, None, max_new_tokens=0)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        Chat(llama, None, sampling=Sampling(stop_tokens=(64,)))
    with pytest.raises(CapacityError, match="multiple of 256"):
        Chat(llama, None, capacity=300)
