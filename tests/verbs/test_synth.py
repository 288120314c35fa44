"""`eagle3 synth`: its JSON object, its rows, and one line for bad input."""

import json

import pytest

from tests import command_line

pair, run, refused = command_line.pair, command_line.run, command_line.refused


def test_synth(run, refused, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": 1, "prompt": "def f"}\n{"turns": ["abc", "x"]}\n')
    (tmp_path / "b.jsonl").write_text('{"id": "b", "prompt": "abc def"}\n{"prompt": "DEF f"}\n')
    out = tmp_path / "rows.jsonl"
    words = ("synth", "--prompts", tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--out", out)
    words += ("--max-new-tokens", 4, "--length", 60, "--temperatures", 0, 0.5, "--rows", 2)
    words += ("--drafter", "tiny-kimi")
    status, said, err = run(*words, "--limit", 1, "--json")
    assert (status, err) == (0, "")
    assert json.loads(said)["written"] == 1
    status, said, err = run(*words, "--json")
    assert (status, err) == (0, "")
    found = json.loads(said)
    counts = {"prompts": 4, "duplicates": 1, "too_long": 0, "done_before": 1, "written": 2}
    assert counts.items() <= found.items() and found["out"] == str(out)
    assert {"tokens", "tokens_per_second", "seconds", "prefill_seconds"} < set(found)
    assert found["accept_length"] >= 1
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["source"] for row in rows} == {"a.jsonl", "b.jsonl"}
    assert {"1", "b"} < {row["id"] for row in rows} and len(rows) == 3
    status, said, err = run(*words)
    assert (status, err) == (0, "") and "done_before" in said
    assert "seed was 0, is 3" in refused(*words, "--seed", 3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "needs --prompts FILE"),
        (["--prompts", "a.jsonl", "--max-new-tokens", "0"], "max_new_tokens 0 must be"),
        (["--prompts", "a.jsonl", "--temperatures", "-1"], "temperature -1.0 must be 0"),
        (["--prompts", "a.jsonl", "--rows", "0"], "rows 0 and limit None must be"),
        (["--prompts", "nothing.jsonl"], "prompts nothing.jsonl cannot be read"),
        (["--prompts", "m.jsonl"], "m.jsonl line 1 holds messages, which need a chat template"),
        (["--prompts", "a.jsonl", "--speculation.depth", "2"], "depth was given, but no drafter"),
        (["--prompts", "a.jsonl", "--length", "9999"], "longest text of 4096"),
        (["--prompts", "a.jsonl", "--verifier", "nothing"], "verifier 'nothing' is neither"),
        (["--prompts", "a.jsonl", "--drafter", "nothing"], "drafter 'nothing' is neither"),
    ],
)
def test_bad_input_is_one_line(refused, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n')
    messages = [{"role": role, "content": "x"} for role in ("system", "user")]
    (tmp_path / "m.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    assert said in refused("synth", *words, "--out", "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_an_output_that_cannot_be_written(refused, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n')
    words = ("synth", "--prompts", tmp_path / "a.jsonl", "--out", tmp_path / "no" / "out.jsonl")
    assert "out.jsonl: No such file or directory" in refused(*words)
