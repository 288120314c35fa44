"""The command line: what it prints, and one line for every bad input."""

import dataclasses
import functools
import io
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers
from flax import nnx
from rich.console import Console

from checkpoints import families, hub
from checkpoints.drafters import Manifest, write_drafter
from checkpoints.tensors import read_json, read_tensors, write_json, write_tensors
from eagle3_jax import load, testing
from eagle3_jax.cli import main
from eagle3_jax.configs import DrafterConfig, RopeConfig, Speculation
from eagle3_jax.console import Answer, pieces, progress
from eagle3_jax.contracts import FeatureSpec, RequestError
from eagle3_jax.drafter import Drafter
from eagle3_jax.generation import Row, generate
from eagle3_jax.tokenizer import Tokenizer
from eagle3_jax.verbs import decode, info
from eagle3_jax.verbs.common import SpeculationFlags, shape_of
from eagle3_jax.verbs.decode import default_prompt
from eagle3_jax.verbs.eval import slower
from eagle3_jax.verifier import Verifier

CONFIG = dataclasses.replace(testing.DEEPSEEK, rope=RopeConfig(interleaved=True))
DRAFTER = DrafterConfig(
    width=24,
    verifier_width=CONFIG.width,
    num_features=3,
    num_heads=4,
    num_kv_heads=2,
    head_width=6,
    mlp_width=40,
    vocab_size=CONFIG.vocab_size,
    draft_vocab_size=64,
)


def random_arrays(make) -> dict[str, np.ndarray]:
    """Arrays for the module that `make` would make, drawn without compiling anything."""
    rng = np.random.default_rng(0)
    state = nnx.to_flat_state(nnx.state(jax.eval_shape(make)))
    arrays = {".".join(str(part) for part in path): value for path, value in state}
    return {
        name: np.ones(value.shape, np.float32)
        if "norm" in name
        else rng.normal(size=value.shape, scale=value.shape[-1] ** -0.5).astype(np.float32)
        for name, value in arrays.items()
    }


def put_verifier(folder: Path) -> Verifier:
    """Write a random verifier with the tiny tokenizer, and load it."""
    folder.mkdir(parents=True)
    arrays = random_arrays(functools.partial(Verifier, CONFIG, jax.random.key(0)))
    write_tensors(folder / "model.safetensors", hub.to_hub(CONFIG, arrays))
    write_json(folder / "config.json", families.config_to_hub(CONFIG))
    (folder / "tokenizer.json").write_text(testing.tiny_tokenizer()._backend.to_str())
    return load.load_verifier(folder.parent)


def put_drafter(folder: Path, verifier: Verifier, boundaries=(1, 2, 3)) -> None:
    """Write a random drafter for a verifier, over its whole vocabulary."""
    spec = verifier.spec(boundaries)
    arrays = random_arrays(functools.partial(Drafter, DRAFTER, spec, jax.random.key(1)))
    arrays["vocabulary"] = np.arange(64, dtype=np.int32)
    manifest = Manifest(
        DRAFTER,
        spec,
        recommended={"speculation": {"depth": 3}, "dtype": "float32"},
        training={"updates": 7},
    )
    write_drafter(folder, manifest, arrays)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """A folder named tiny-kimi of a verifier and its drafter."""
    folder = tmp_path_factory.mktemp("models") / "tiny-kimi"
    put_drafter(folder / "drafter", put_verifier(folder / "verifier"))
    return folder


@pytest.fixture(autouse=True)
def bundle(pair, monkeypatch):
    monkeypatch.setattr(load, "BUNDLED", pair.parent)


@pytest.fixture
def run(capsys):
    """Run a command; its exit status, standard output, standard error."""

    def run(*words):
        status = main([str(word) for word in words])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def refused(run):
    """Run a command that is to fail; its one line."""

    def refused(*words) -> str:
        status, out, err = run(*words)
        assert status == 2, (out, err)
        assert out == ""
        assert err.startswith("eagle3: error: ") and err.count("\n") == 1, err
        return err.removeprefix("eagle3: error: ").strip()

    return refused


def test_decode_json(run):
    words = ("decode", "def f", "abc def", "--max-new-tokens", 12, "--rows", 1)
    status, out, err = run(*words, "--compare-plain", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert set(found) == {"rows", "speedup"} and len(found["rows"]) == 2
    for row in found["rows"]:
        assert set(row) == {"tokens", "text", "stats", "dtype", "plain", "same_tokens"}
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


def test_info(run):
    status, out, err = run("info", "--verifier", "tiny-kimi", "--drafter", "tiny-kimi", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert found["versions"]["jax"] == jax.__version__ and found["bundled"] == ["tiny-kimi"]
    assert found["backends"]["forest_attention"] == "xla"
    verifier, drafter = found["verifier"], found["drafter"]
    assert verifier["family"] == "deepseek_v3"
    assert verifier["cache_bytes_per_token"] == 4 * 4 * (12 + 8)
    assert verifier["attention"].startswith("latent, 4 heads, rank 12; rope theta 10000")
    assert verifier["experts"].endswith(" layers; sigmoid, 2 of 4 groups")
    assert sum(verifier["parameters"].values()) == 2 * verifier["parameters"]["total"]
    assert drafter["boundaries"] == [1, 2, 3] and drafter["draft_vocabulary"] == 64
    assert drafter["recommended"]["dtype"] == "float32" and drafter["training"] == {"updates": 7}
    assert "vocabulary" not in drafter["parameters"]
    status, out, _ = run("info")
    assert status == 0 and "versions.jax" in out


def test_train(run, tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {"id": str(i), "tokens": rng.integers(2, 64, 30).tolist(), "loss": [[5, 30]]}
        for i in range(8)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("train", "--data", data, "--run", tmp_path / "run", "--boundaries", 1, 2, 3)
    small = {"updates": 2, "batch": 1, "length": 16, "steps": 2, "save-every": 2, "held-out": 0}
    flags = [word for key, value in small.items() for word in (f"--train.{key}", value)]
    status, out, err = run(*words, *flags, "--drafter.width", 24, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert set(found) == {
        *("run", "checkpoint", "tokens", "accept_length", "loss"),
        *("accuracy_by_step", "tokens_per_second"),
    }
    manifest = read_json(Path(found["checkpoint"]) / "manifest.json")
    assert manifest["config"]["width"] == 24 and manifest["features"]["boundaries"] == [1, 2, 3]


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
        (["xyz"], "expected one of decode, train, eval, info"),
        ([], "no verb was given; expected one of decode, train, eval, info"),
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
    assert status == 0 and all(verb in out for verb in ("decode", "train", "eval", "info"))
    status, out, _ = run("decode", "--help")
    assert status == 0 and "--speculation.depth" in out and "--no-drafter" in out
    monkeypatch.setattr(sys.modules["sharding"], "EAGLE3_JAX_MARK", "eagle3-jax 0.0.0")
    assert "comes first on the path" in refused("info")


def test_settings_go_over_the_recommended():
    recommended = (("speculation", (("depth", 5), ("nodes", 5))),)
    spec = FeatureSpec((1, 2, 3), CONFIG.width, CONFIG.num_layers)
    drafter = jax.eval_shape(
        functools.partial(Drafter, DRAFTER, spec, jax.random.key(0), recommended)
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
