"""`eagle3 decode`: its JSON object, what it shows, settings over the recommended ones."""

import dataclasses
import functools
import io
import json

import jax
import pytest
import tokenizers
from rich.console import Console

from eagle3_jax import load, testing
from eagle3_jax.configs import Speculation
from eagle3_jax.console import Answer, pieces
from eagle3_jax.contracts import FeatureSpec, RequestError
from eagle3_jax.drafter import Drafter
from eagle3_jax.generation import Row, generate
from eagle3_jax.tokenizer import Tokenizer
from eagle3_jax.verbs import decode
from eagle3_jax.verbs.common import SpeculationFlags, shape_of
from eagle3_jax.verbs.decode import default_prompt
from tests import command_line

pair, run = command_line.pair, command_line.run


def test_decode_json(run):
    words = ("decode", "def f", "abc def", "--max-new-tokens", 12, "--rows", 1)
    status, out, err = run(*words, "--compare-plain", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert set(found) == {"rows", "speedup"} and len(found["rows"]) == 2
    for row in found["rows"]:
        assert set(row) == {
            *("tokens", "text", "stats", "dtype", "plain", "same_tokens"),
            *("differing_tokens", "first_difference"),
        }
        assert row["same_tokens"] and row["tokens"] == row["plain"]["tokens"]
        assert set(row["plain"]) == {"tokens", "stats", "dtype"}
        assert set(row["stats"]) == {
            *("new_tokens", "cycles", "accept_length", "acceptance_by_depth"),
            *("prefill_seconds", "seconds", "tokens_per_second"),
        }
        assert row["stats"]["new_tokens"] == len(row["tokens"]) == 12
        assert row["stats"]["accept_length"] == 11 / row["stats"]["cycles"]
        assert len(row["stats"]["acceptance_by_depth"]) == 3  # the manifest's depth
        assert row["plain"]["stats"]["accept_length"] == 1.0
        assert row["dtype"] == row["plain"]["dtype"] == "float32"


def test_decode_shows_text_and_figures(run, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("abc\ndef")
    words = ("decode", "--prompt-file", prompt, "--max-new-tokens", 5)
    status, out, _ = run(*words, "--compare-plain", "--plain-dtype", "bfloat16")
    assert status == 0
    assert out.startswith("abc\ndef\n\n-- new text; ‹accepted drafts›, the verifier's own --\n")
    assert "speculation (depth 3)" in out and "bfloat16" in out
    for name in ("new tokens", "accept length", "acceptance by depth", "tokens a second"):
        assert name in out
    assert "speed ratio" in out and "the tokens " in out


def test_decode_draws_with_trees(run):
    sampling = {"temperature": 0.8, "top-k": 50, "top-p": 0.95, "seed": 3, "min-new-tokens": 4}
    flags = [word for key, value in sampling.items() for word in (f"--sampling.{key}", value)]
    several = ("--sampling.stop", "\n\n", "--sampling.stop", "qqq", "--sampling.logit-bias", 9, -2)
    tree = ("--speculation.topk", 3, "--speculation.nodes", 7)
    words = ("decode", *flags, *several, *tree, "def f", "abc", "--max-new-tokens", 8)
    status, out, err = run(*words, "--compare-plain", "--json")
    assert (status, err) == (0, "")
    rows = json.loads(out)["rows"]
    assert [row["same_tokens"] for row in rows] == [True, True]
    assert rows[0]["tokens"] != rows[1]["tokens"]


def test_the_comparison_says_what_it_compares():
    found = {"speedup": 1.5, "rows": [{"same_tokens": True}, {"same_tokens": False}]}
    line = "speed ratio 1.50 (median of 3 runs in turn); the tokens are the same in 1 of 2 texts"
    assert decode.comparison(found) == [line]
    (line,) = decode.comparison(found, sampled=True)
    assert line.endswith("(sampled candidates give another draw of the same distribution)")
    assert decode.comparison({"rows": []}) == []
    assert shape_of(Speculation(depth=3, topk=3, nodes=7)) == "depth 3, topk 3, nodes 7"
    assert shape_of(Speculation(depth=3)) == "depth 3"


def test_decode_plainly_from_the_default_prompt(run):
    status, out, err = run("decode", "--no-drafter", "--max-new-tokens", 3, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert set(found) == {"rows"}
    assert set(found["rows"][0]) == {"tokens", "text", "stats", "dtype"}


def test_default_prompt_is_source():
    prompt = default_prompt()
    assert "import" in prompt and 5 <= prompt.count("\n") <= 25
    assert not prompt.startswith(('"""', "\n"))


def test_settings_go_over_the_recommended():
    recommended = (("speculation", (("depth", 5), ("nodes", 5))),)
    spec = FeatureSpec((1, 2, 3), command_line.CONFIG.width, command_line.CONFIG.num_layers)
    drafter = jax.eval_shape(
        functools.partial(Drafter, command_line.DRAFTER, spec, jax.random.key(0), recommended)
    )
    assert SpeculationFlags().over(drafter) == Speculation(depth=5, nodes=5)
    assert SpeculationFlags(depth=2).over(drafter) == Speculation(depth=2)
    assert SpeculationFlags().over(None) == Speculation(depth=0)
    assert SpeculationFlags(sampled=True).over(drafter) == Speculation(5, nodes=5, sampled=True)
    assert SpeculationFlags(block=False).over(drafter) == Speculation(5, nodes=5, block=False)
    tree = SpeculationFlags(topk=2, nodes=8).over(drafter)
    assert tree == Speculation(depth=5, topk=2, nodes=8)
    with pytest.raises(RequestError, match="depth was given, but no drafter"):
        SpeculationFlags(depth=2).over(None)
    flags = {field.name for field in dataclasses.fields(SpeculationFlags)}
    assert flags == {field.name for field in dataclasses.fields(Speculation)}


def test_drafted_tokens_are_told_apart(pair):
    verifier = load.load_verifier(pair)
    drafter = load.load_drafter(pair, verifier)
    prompts = [[i, i + 1, 5] for i in range(2, 34)]
    plain = generate(verifier, None, prompts, max_new_tokens=40, rows=1)
    assert not any(any(row.drafted) for row in plain.rows)
    output = generate(verifier, drafter, prompts, max_new_tokens=40, rows=1)
    for row in output.rows:
        assert len(row.drafted) == len(row.tokens) and not row.drafted[0]
        # The prefill's token and one bonus token a cycle, unless the last cycle was cut short.
        assert row.cycles <= row.drafted.count(False) <= row.cycles + 1
        assert 0 <= sum(row.accepted) - sum(row.drafted) <= 3
    assert sum(sum(row.drafted) for row in output.rows) > 0


def answer_of(**console) -> str:
    row = Row([39, 4, 5, 2, 8], [False, True, True, False, True], None, 2, (2, 1))
    runs = pieces(row, testing.tiny_tokenizer())
    assert "".join(text for text, _ in runs) == testing.tiny_tokenizer().decode(row.tokens)
    out = io.StringIO()
    Console(file=out, highlight=False, **console).print(Answer("x" * 100, runs), crop=False)
    return out.getvalue()


def test_answers_with_and_without_colour():
    text = testing.tiny_tokenizer().decode([39, 4, 5, 2, 8])
    marked = f"{text[0]}‹{text[1:3]}›{text[3]}‹{text[4]}›"
    assert answer_of().startswith("x" * 100 + "\n")
    assert marked in answer_of() and "\x1b" not in answer_of()
    assert marked in answer_of(force_terminal=True, no_color=True, color_system="standard")
    coloured = answer_of(force_terminal=True, no_color=False, color_system="standard")
    assert f"\x1b[32m{text[1:3]}\x1b[0m" in coloured and f"\x1b[1m{text[3]}\x1b[0m" in coloured
    assert "‹" not in coloured and "accepted drafts" in coloured


def test_pieces_keep_characters_whole():
    # One token a byte, the bytes spelt as byte-level vocabularies spell them.
    signs = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({s: i for i, s in enumerate(signs)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = Tokenizer(backend.to_str())
    tokens = tokenizer.encode("aé€")
    assert len(tokens) == 6
    row = Row(tokens, [False, True, False, False, True, True], "aé€", 2, (2,))
    runs = pieces(row, tokenizer)
    assert "".join(text for text, _ in runs) == "aé€"
    assert not any("\N{REPLACEMENT CHARACTER}" in text for text, _ in runs)
