"""What all verbs share: one line for every bad input, help, exit statuses."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from checkpoints.tensors import read_json, read_tensors, write_json, write_tensors
from eagle3_jax.console import progress
from eagle3_jax.verbs import info
from tests import command_line

pair, run, refused = command_line.pair, command_line.run, command_line.refused


def copy(pair: Path, to: Path) -> Path:
    return Path(shutil.copytree(pair, to / "broken"))


@pytest.mark.parametrize(
    ("part", "field", "value", "said"),
    [
        ("features", "width", 16, "features of width 16, the verifier tiny-kimi has width 32"),
        ("features", "num_layers", 5, "a verifier of 5 layers, the verifier tiny-kimi has 4"),
        ("features", "boundaries", [1, 2, 9], "[1, 2, 9] do not fit a verifier of 4 layers"),
        ("features", "boundaries", [1, 2], "its manifest names boundaries"),
        ("config", "vocab_size", 70, "vocabulary of 70 tokens, the verifier tiny-kimi has 64"),
    ],
)
def test_a_drafter_for_another_model_is_refused(refused, pair, tmp_path, part, field, value, said):
    other = copy(pair, tmp_path)
    path = other / "drafter" / "manifest.json"
    manifest = read_json(path)
    manifest[part][field] = value
    write_json(path, manifest)
    assert said in refused("decode", "x", "--drafter", other)


@pytest.mark.parametrize("part", ["verifier", "drafter"])
def test_damaged_weights_are_refused(refused, pair, tmp_path, part):
    broken = copy(pair, tmp_path)
    path = broken / part / "model.safetensors"
    words = ("decode", "x", "--verifier", broken)
    if part == "drafter":
        words = ("decode", "x", "--drafter", broken)
    tensors = read_tensors(path)
    name = sorted(key for key in tensors if "norm" in key)[0]
    tensors[name] = np.full_like(tensors[name], np.nan)
    write_tensors(path, tensors)
    error = refused(*words)
    assert "NaN" in error and name in error
    path.write_bytes(path.read_bytes()[:-100])
    assert "truncated" in refused(*words)
    path.unlink()
    assert "model.safetensors is missing" in refused(*words)


def test_unknown_names(refused, pair, tmp_path):
    unknown = refused("decode", "x", "--verifier", "tiny-kimmi")
    assert unknown.startswith("verifier 'tiny-kimmi'") and "did you mean tiny-kimi?" in unknown
    unknown = refused("decode", "x", "--drafter", "tiny-kimmi")
    assert unknown.startswith("drafter 'tiny-kimmi'") and "did you mean tiny-kimi?" in unknown
    alone = refused("decode", "x", "--verifier", pair / "verifier")
    assert "no drafter comes with the verifier" in alone
    assert "holds no config.json" in refused("decode", "x", "--verifier", tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["decode", ""], "the prompt is empty"),
        (["decode", "--prompt-file", "empty.txt"], "empty.txt is empty"),
        (["decode", "--prompt-file", "nothing.txt"], "nothing.txt cannot be read: No such file"),
        (["decode", "abc", "--capacity", "100"], "need a capacity of 256 slots"),
        (["decode", "abc", "--max-new-tokens", "5000"], "longest text of 4096 tokens"),
        (["decode", "abc", "--max-new-tokens", "0"], "max_new_tokens 0"),
        (["decode", "abc", "--max-new-tokens", "x"], "--max-new-tokens: invalid literal"),
        (["decode", "abc", "--max-new-tokns", "3"], "did you mean --max-new-tokens?"),
        (["decode", "abc", "--speculation.dept", "3"], "did you mean --speculation.depth?"),
        (["decode", "abc", "--dtype", "int8"], "invalid choice 'int8'"),
        (["decode", "abc", "--speculation.depth", "99"], "depth 99 is outside 0 to 16"),
        (["decode", "abc", "--speculation.topk", "2"], "depth 3 and topk 2 needs nodes"),
        (["decode", "abc", "--speculation.topk", "17"], "topk 17 is outside 1 to 16"),
        (["decode", "abc", "--speculation.nodes", "5"], "a chain (topk 1) of depth 3 has 3 nodes"),
        (
            ["decode", "abc", "--speculation.topk", "2", "--speculation.nodes", "11"],
            "a tree of depth 3 and topk 2 keeps 3 to 10 nodes",
        ),
        (["decode", "abc", "--no-drafter", "--speculation.sampled"], "but no drafter"),
        (["decode", "abc", "--sampling.temperature", "-1"], "temperature -1.0 must be 0"),
        (["decode", "abc", "--sampling.temperature", "nan"], "temperature nan must be 0"),
        (["decode", "abc", "--sampling.top-p", "0"], "top_p 0.0 must be above 0 and at most 1"),
        (["decode", "abc", "--sampling.top-p", "2"], "top_p 2.0 must be above 0 and at most 1"),
        (["decode", "abc", "--sampling.min-p", "2"], "min_p 2.0 must be between 0 and 1"),
        (["decode", "abc", "--sampling.top-k", "-1"], "top_k -1 must be 0 (off) or more"),
        (["decode", "abc", "--sampling.stop", ""], "must be texts that are not empty"),
        (["decode", "abc", "--sampling.stop-tokens", "64"], "[64] outside the vocabulary of 64"),
        (["decode", "abc", "--sampling.logit-bias", "-1", "2"], "[-1] outside the vocabulary"),
        (["decode", "abc", "--sampling.logit-bias", "1"], "--sampling.logit-bias"),
        (
            ["decode", "abc", "--sampling.min-new-tokens", "9", "--max-new-tokens", "8"],
            "max_new_tokens 8 is below sampling min_new_tokens 9",
        ),
        (["eval", "--prompts", "a.jsonl", "--sampling.top-p", "2"], "top_p 2.0 must be above 0"),
        (["eval", "--prompts", "a.jsonl", "--sampling.stop-tokens", "64"], "[64] outside the voca"),
        (["decode", "abc", "--no-drafter", "--compare-plain"], "leave out --compare-plain"),
        (["decode", "abc", "--no-drafter", "--drafter", "x"], "leave out --drafter"),
        (["decode", "abc", "--no-drafter", "--speculation.depth", "2"], "but no drafter"),
        (["decode", "abc", "--plain-dtype", "bfloat16"], "--compare-plain; give both"),
        (["dekode"], "there is no verb 'dekode'; did you mean decode?"),
        (["xyz"], "expected one of decode, train, synth, eval, info"),
        ([], "no verb was given; expected one of decode, train, synth, eval, info"),
        (["eval"], "needs --prompts FILE"),
        (["eval", "--prompts", "nothing.jsonl"], "nothing.jsonl cannot be read"),
        (["eval", "--prompts", "empty.txt"], "holds no row"),
        (["eval", "--prompts", "a.jsonl", "a.jsonl"], "two prompt files are called a"),
        (["train", "--run", "r"], "train: --data must be given"),
        (["train", "--data", "nothing.jsonl", "--run", "r"], "nothing.jsonl"),
        (["train", "--data", "a.jsonl", "--run", "r", "--train.steps", "0"], "steps 0 must be"),
        (
            ["train", "--data", "a.jsonl", "--run", "r", "--start", "x", "--drafter.width", "8"],
            "--start takes sizes",
        ),
        (["info", "--drafter", "nothing"], "drafter 'nothing' is neither"),
    ],
)
def test_bad_input_is_one_line(refused, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("")
    Path("a.jsonl").write_text('{"prompt": "x"}\n')
    assert said in refused(*words)
    assert not Path("r").exists()


def test_interrupt_files_and_warnings(run, monkeypatch):
    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(info.Info, "execute", stop)
    assert run("info") == (130, "", "eagle3: error: interrupted\n")

    def forbid(_):
        raise PermissionError(13, "Permission denied", "weights")

    monkeypatch.setattr(info.Info, "execute", forbid)
    assert run("info") == (2, "", "eagle3: error: weights: Permission denied\n")

    def warn(_):
        warnings.simplefilter("always")
        warnings.warn("acceptance may\nbe lower", stacklevel=1)
        print("stray")
        return {"a": 1}, "shown"

    monkeypatch.setattr(info.Info, "execute", warn)
    status, out, err = run("info", "--json")
    assert (status, json.loads(out)) == (0, {"a": 1})
    assert err == "eagle3: warning: acceptance may be lower\nstray\n"


def test_help_and_a_foreign_package(run, refused, monkeypatch):
    status, out, _ = run("--help")
    assert status == 0 and all(verb in out for verb in ("decode", "train", "synth", "eval"))
    status, out, _ = run("decode", "--help")
    assert status == 0 and "--speculation.depth" in out and "--no-drafter" in out
    monkeypatch.setattr(sys.modules["sharding"], "EAGLE3_JAX_MARK", "eagle3-jax 0.0.0")
    assert "comes first on the path" in refused("info")


def test_progress_is_silent_where_there_is_no_terminal(capsys):
    with progress("working") as show:
        show(1, 2)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--verifier", "no-such-model"], "verifier 'no-such-model' is neither"),
        (["--max-new-tokns", "3"], "Unrecognized options: --max-new-tokns, 3; did you mean "),
    ],
)
def test_the_process_exits_with_the_status(words, said, encoding):
    done = subprocess.run(
        [sys.executable, "-m", "eagle3_jax", "decode", "x", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"eagle3: error: {said}")
    assert done.stderr.count("\n") == 1
