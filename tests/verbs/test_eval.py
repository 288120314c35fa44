"""`eagle3 eval`: its JSON object, and what it shows."""

import json

from eagle3_jax import load
from eagle3_jax.verbs.eval import slower
from tests import command_line

pair, run = command_line.pair, command_line.run


def test_eval(run, tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text('{"turns": ["def f", "abc"]}\n{"prompt": "x"}\n')
    files = ("--prompts", tmp_path / "one.jsonl", tmp_path / "two.jsonl")
    drawn = ("--sampling.temperature", 0.9, "--sampling.min-new-tokens", 3)
    words = ("eval", *files, "--max-new-tokens", 5, "--limit", 1, *drawn)
    status, out, err = run(*words, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert set(found) == {"sets", "mean"} and set(found["sets"]) == {"one", "two"}
    assert found["mean"]["same_tokens"] == 1.0
    wanted = {"accept_length", "acceptance_by_depth", "tokens_per_second"}
    wanted |= {"plain_tokens_per_second", "speedup"}
    for figures in (*found["sets"].values(), found["mean"]):
        assert wanted <= set(figures)

    drafter = load.BUNDLED / "tiny-kimi"
    status, out, _ = run(*words, "--drafter", "tiny-kimi", "--drafter", drafter)
    assert status == 0
    assert out.count("drafter ") >= 2 and out.count("mean") == 2 and "speedup" in out


def test_eval_says_where_speculation_is_slower():
    sets = {"a": {"mean": {"speedup": 0.5}}, "b": {"mean": {"speedup": 0.9}}}
    assert "the best drafter, b, is slower" in str(slower(sets))
    assert "speculation is slower" in str(slower({"a": sets["a"]}))
    assert slower({**sets, "c": {"mean": {"speedup": 1.2}}}) is None
