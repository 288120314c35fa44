"""`decode --compare-plain` and `eval`: each side in its own dtype, several settings, no clock."""

import dataclasses
import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from checkpoints import hub
from checkpoints.drafters import Manifest, write_drafter
from checkpoints.tensors import write_json, write_tensors
from eagle3_jax import load, testing
from eagle3_jax.configs import Speculation
from eagle3_jax.console import eval_table
from eagle3_jax.contracts import LoadError, RequestError
from eagle3_jax.states import arrays_of
from eagle3_jax.training.evaluation import first_difference, not_chosen
from eagle3_jax.verbs import decode
from eagle3_jax.verbs.common import SpeculationFlags, load_plain, shape_of
from eagle3_jax.verbs.eval import fastest
from tests import command_line

RECOMMENDED = {"speculation": {"depth": 2}, "dtype": "bfloat16", "plain_dtype": "float32"}

c = testing.LLAMA
HUB = {
    "model_type": "llama",
    "vocab_size": c.vocab_size,
    "hidden_size": c.width,
    "num_hidden_layers": c.num_layers,
    "num_attention_heads": c.num_heads,
    "num_key_value_heads": c.num_kv_heads,
    "intermediate_size": c.mlp_width,
    "max_position_embeddings": c.max_length,
    "rms_norm_eps": c.norm_eps,
    "rope_theta": c.rope.theta,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The folder, named `both`, of a verifier with the tiny tokenizer and of its drafter."""
    folder = tmp_path_factory.mktemp("models") / "both"
    verifier = testing.tiny_verifier("llama")
    inner = folder / "verifier"
    inner.mkdir(parents=True)
    arrays = {name: np.asarray(value) for name, value in arrays_of(verifier).items()}
    write_tensors(inner / "model.safetensors", hub.to_hub(verifier.config, arrays))
    write_json(inner / "config.json", HUB)
    (inner / "tokenizer.json").write_text(testing.tiny_tokenizer()._backend.to_str())
    return folder


@pytest.fixture(autouse=True)
def bundle(pair, monkeypatch):
    monkeypatch.setattr(load, "BUNDLED", pair.parent)
    put_drafter(pair, RECOMMENDED)


def put_drafter(pair, recommended) -> None:
    drafter = testing.tiny_drafter("llama")
    arrays = {name: np.asarray(value) for name, value in arrays_of(drafter).items()}
    spec = dataclasses.replace(drafter.spec, verifier=None)
    manifest = Manifest(drafter.config, spec, recommended=recommended)
    write_drafter(pair / "drafter", manifest, arrays)


run = command_line.run

DECODE = ("decode", "--verifier", "both", "def f", "--max-new-tokens", 12)


def test_plain_decoding_has_the_dtype_its_manifest_recommends(run):
    status, out, err = run(*DECODE, "--compare-plain", "--json")
    assert (status, err) == (0, "")
    (row,) = json.loads(out)["rows"]
    assert (row["dtype"], row["plain"]["dtype"]) == ("bfloat16", "float32")
    verifier = load.load_verifier("both")
    prompt = testing.tiny_tokenizer().encode("def f")
    wrong = not_chosen(verifier, prompt, row["tokens"])
    assert row["differing_tokens"] == wrong / len(row["tokens"])  # type: ignore
    assert row["first_difference"] == first_difference(row["tokens"], row["plain"]["tokens"])
    status, out, _ = run(*DECODE, "--compare-plain")
    assert status == 0 and "plain decoding in float32, reading the same text" in out


def test_nothing_differs_where_both_are_float32(run):
    status, out, _ = run(*DECODE, "--dtype", "float32", "--compare-plain", "--json")
    (row,) = json.loads(out)["rows"]
    assert status == 0 and row["same_tokens"]
    assert row["differing_tokens"] == 0.0 and row["first_difference"] is None


def test_the_lines_of_a_comparison():
    row = {"tokens": [1, 2, 3, 4], "same_tokens": False, "plain": {"dtype": "float32"}}
    rows = [{**row, "differing_tokens": 0.25}, {**row, "differing_tokens": 0.5}]
    _, differing, slower = decode.comparison({"speedup": 0.9, "rows": rows})
    assert "in float32, reading the same text" in differing
    assert differing.endswith("other tokens at 3 of 8 places (37.5%)")
    assert slower == "plain decoding is faster here, and the better setting"
    rows[0]["differing_tokens"] = None
    assert len(decode.comparison({"speedup": 1.1, "rows": rows})) == 1


def test_plain_decoding_is_recommended(run, pair):
    plain = {"speculation": {"depth": 0}, "measured_on": "two cores"}
    put_drafter(pair, plain)
    line = "plain decoding is recommended for this pair on two cores; --speculation.depth N"
    status, out, _ = run(*DECODE)
    assert status == 0 and line in out and "speculation" not in out.replace(line, "")
    status, out, _ = run(*DECODE, "--compare-plain")
    assert status == 0 and line in out and "speculation (depth 0)" in out


def test_a_drafter_beside_a_verifier_from_elsewhere(pair):
    """As smollm2's, whose verifier is not in the folder of bundled models."""
    whole = pair / "drafter"
    alone = pair.parent / "alone" / "drafter"
    alone.parent.mkdir()
    whole.rename(alone)
    try:
        assert load.find_drafter("alone") == alone and load.bundled() == ["alone", "both"]
        with pytest.raises(LoadError, match="verifier 'alone' is neither .*; bundled: both, smoll"):
            load.load_verifier("alone")
        with pytest.raises(LoadError, match="drafter 'both' is neither .*; bundled: alone$"):
            load.find_drafter("both")
        with pytest.raises(LoadError, match="did you mean alone"):
            load.find_drafter("alonee")
    finally:
        alone.rename(whole)
        alone.parent.rmdir()


def test_a_plain_dtype_that_is_none(run, pair):
    put_drafter(pair, {**RECOMMENDED, "plain_dtype": "int8"})
    status, _, err = run(*DECODE, "--compare-plain")
    assert status == 2 and "recommends plain_dtype 'int8'; expected float32 or bfloat16" in err


@pytest.fixture
def files(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text('{"turns": ["def f", "abc"]}\n{"prompt": "x"}\n')
    return ("--prompts", tmp_path / "one.jsonl", tmp_path / "two.jsonl", "--max-new-tokens", 5)


def test_eval_with_several_settings(run, files):
    shapes = ("--settings", "depth=2", "--settings", "depth=1,topk=2,nodes=2")
    words = ("eval", "--verifier", "both", *files, "--limit", 1, "--dtype", "float32")
    status, out, err = run(*words, *shapes, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)["drafters"]
    assert set(found) == {"both depth 2", "both depth 1, topk 2, nodes 2"}
    for each in found.values():
        for figures in each["sets"].values():
            ratio = figures["accept_length"] / figures["break_even_accept_length"]
            assert ratio == pytest.approx(figures["speedup"])
    status, out, _ = run(*words)
    assert status == 0 and "break-even" in out and "in one dtype" not in out
    assert "drafter both\n" in out and ("fastest: both" in out or "best setting" in out)


def test_eval_without_a_clock(run, files):
    words = ("eval", "--verifier", "both", *files, "--no-speed", "--rows", 3)
    words += ("--dtype", "float32", "--limit", 1)
    status, out, err = run(*words, "--settings", "depth=2", "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    for figures in (found["mean"], *found["sets"].values()):
        assert set(figures) == {"accept_length", "acceptance_by_depth", "new_tokens"}
    status, out, _ = run(*words)
    assert status == 0 and "accept length" in out and "speedup" not in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows", "4"], "one row at a time; --rows is for --no-speed"),
        (["--no-speed", "--rows", "0"], "rows 0 must be at least 1"),
        (["--no-speed", "--plain-dtype", "float32"], "leave out --plain-dtype"),
        (["--settings", "depth=2", "--settings", "depth=2,topk=1"], "depth 2 are given twice"),
        (["--settings", "depth=2,width=3"], "'depth=2,width=3' hold 'width=3'; expected a list"),
        (["--settings", "depth=two"], "hold 'depth=two'"),
        (["--settings", "depth=2,topk=3"], "depth 2 and topk 3 needs nodes"),
        (["--settings", "depth=2", "--speculation.depth", "3"], "leave out --speculation.depth"),
    ],
)
def test_settings_that_eval_refuses(run, files, words, said):
    status, out, err = run("eval", "--verifier", "both", *files, *words)
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert said in err


def test_settings_and_what_they_are_called():
    flags = SpeculationFlags(sampled=True)
    assert flags.whole("depth=3") == Speculation(depth=3, sampled=True)
    assert SpeculationFlags().whole("depth=3, no-block, sampled") == Speculation(
        depth=3, sampled=True, block=False
    )
    tree = SpeculationFlags().whole("depth=4,topk=4,nodes=15,sampled")
    assert shape_of(tree) == "depth 4, topk 4, nodes 15, sampled"
    assert shape_of(flags.whole("depth=3,no-block")) == "depth 3, sampled, no block"
    with pytest.raises(RequestError, match="hold ''"):
        flags.whole("")


def test_plain_decoding_is_loaded_in_the_dtype_asked_for():
    verifier = load.load_verifier("both")
    drafters = {"both": load.load_drafter("both", verifier)}
    assert load_plain("both", verifier, drafters, None) is verifier  # the manifest's
    assert load_plain("both", verifier, drafters, "bfloat16").dtype == jnp.bfloat16
    low = load.load_verifier("both", "bfloat16")
    assert load_plain("both", low, drafters, None).dtype == jnp.float32
    assert load_plain("both", low, {}, None) is low
    table = io.StringIO()
    figures = {"accept_length": 1.5, "acceptance_by_depth": [0.5], "same_dtype_speedup": 1.25}
    found = {"both": {"sets": {"one": figures}, "mean": figures}}
    Console(file=table, width=100).print(eval_table(found, ["a line"]))
    assert "in one dtype" in table.getvalue() and "1.25" in table.getvalue()
    assert table.getvalue().endswith("a line\n")


def test_the_fastest_setting_may_be_plain_decoding():
    sets = {"a": {"mean": {"speedup": 0.5}}, "b": {"mean": {"speedup": 0.9}}}
    assert fastest(sets).endswith("speedup 0.90; plain decoding is the best setting")
    best = {**sets, "c": {"mean": {"speedup": 1.2}}}
    assert fastest(best) == "fastest: c, speedup 1.20 over plain decoding"
