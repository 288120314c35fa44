"""Parity with transformers: logits, every boundary, greedy tokens, and the passes with a cache.

The golden files say what transformers computes; see tests/golden/README.md.
"""

import dataclasses
import functools
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints.families import config_from_hub
from eagle3_jax.caches import block_scope, causal, text_scope, write_rows
from eagle3_jax.contracts import (
    ContractError,
    Convention,
    UnsupportedError,
    boundaries_from_ids,
)
from eagle3_jax.generation import generate
from eagle3_jax.layers import RmsNorm
from eagle3_jax.load import load_verifier
from eagle3_jax.verifier import Verifier

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = runpy.run_path(str(GOLDEN / "tiny_models.py"))
NAMES = sorted(path.stem for path in (GOLDEN / "verifiers").glob("*.npz"))


def golden(name: str) -> dict[str, np.ndarray]:
    """What transformers computed."""
    with np.load(GOLDEN / "verifiers" / f"{name}.npz") as file:
        return dict(file)


@pytest.fixture(scope="session")
def verifier(tmp_path_factory):
    """A tiny verifier by name, loaded from a folder written as the hub lays it out."""

    @functools.cache
    def load(name: str) -> Verifier:
        folder = MODELS["write_folder"](name, tmp_path_factory.mktemp(name))
        return load_verifier(folder, dtype="float32")

    return load


def test_every_configuration_has_a_golden_file():
    assert sorted(MODELS["CONFIGS"]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_boundaries_equal_those_of_transformers(verifier, name):
    model, wanted = verifier(name), golden(name)
    np.testing.assert_array_equal(wanted["tokens"], MODELS["tokens"](name))
    every = range(model.config.num_layers + 1)
    boundaries = tuple(wanted.get("kept_boundaries", np.asarray(every)).tolist())
    scores = model.score(jnp.asarray(wanted["tokens"]), boundaries)
    np.testing.assert_allclose(scores.logits, wanted["logits"], rtol=0, atol=2e-5)
    found = np.split(np.asarray(scores.features.array), len(boundaries), axis=-1)
    for boundary, mine, theirs in zip(boundaries, found, wanted["boundaries"], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-5, err_msg=f"{boundary}")


def test_one_list_of_layers_means_two_things(verifier):
    """[2, 30, 58] of 61 layers: inputs of these layers, or their outputs, by convention.

    The golden file has both from hooks on transformers' layers 2, 30 and 58.
    """
    model, wanted = verifier("micro_61"), golden("micro_61")
    assert model.config.num_layers == 61 and wanted["hooked_layers"].tolist() == [2, 30, 58]
    cases: list[tuple[Convention, tuple[int, ...], str]] = [
        ("boundary", (2, 30, 58), "layer_inputs"),
        ("layer-output", (3, 31, 59), "layer_outputs"),
    ]
    for convention, boundaries, hooked in cases:
        assert boundaries_from_ids((2, 30, 58), convention, 61) == boundaries
        features = model.score(jnp.asarray(wanted["tokens"]), boundaries).features
        assert features.spec.boundaries == boundaries
        found = np.split(np.asarray(features.array), 3, axis=-1)
        np.testing.assert_allclose(np.stack(found), wanted[hooked], rtol=0, atol=2e-5)
    assert boundaries_from_ids((1, 29, 57), "layer-output", 61) == (2, 30, 58)
    assert model.spec().boundaries == (2, 30, 58)
    with pytest.raises(ContractError, match="pass convention="):
        boundaries_from_ids((2, 30, 58), None, 61)


@functools.partial(jax.jit, static_argnames="boundaries")
def step(model, tokens, cache, length, boundaries):
    """Read one block a row into the cache: the block's logits, its features, the cache."""
    b, n = tokens.shape
    depth = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None], (b, n))
    scope = block_scope(length, depth, causal(b, n))
    hidden, features, rows = model.forward(tokens[:, None], scope, cache, boundaries)
    return model.read_out(hidden[:, 0]), features, write_rows(cache, rows, length)


# The absorbed form of latent attention is another program than `score`; windows, sinks and experts
# by few tokens. All configurations are in checks/parity.py.
@pytest.mark.parametrize("name", ["deepseek_a_no_q_lora", "qwen3_window", "gpt_oss"])
def test_chunks_and_single_tokens_equal_the_whole_pass(verifier, name):
    """Prefill in chunks, then token by token, in a cache whose other slots hold noise.

    The features reach some ten; sums in another order differ by a few units in the last place.
    """
    model, tokens = verifier(name), jnp.asarray(golden(name)["tokens"])
    boundaries = (0, 2, model.config.num_layers)
    whole = model.score(tokens, boundaries)
    noise = np.random.default_rng(0)
    cache = jax.tree.map(
        lambda x: jnp.asarray(noise.standard_normal(x.shape), x.dtype), model.make_cache(2, 64)
    )
    logits, features, at = [], [], 0
    for size in (16, 16, *[1] * (tokens.shape[1] - 32)):
        length = jnp.full((2,), at, jnp.int32)
        out = step(model, tokens[:, at : at + size], cache, length, boundaries)
        logits.append(out[0])
        features.append(out[1])
        cache, at = out[2], at + size
    logits, features = (jnp.concatenate(parts, axis=1) for parts in (logits, features))
    np.testing.assert_allclose(logits, whole.logits, rtol=0, atol=1e-5)
    np.testing.assert_allclose(features, whole.features.array, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "name", ["deepseek_a", "kimi_k25", "llama3", "qwen3", "qwen3_moe", "gpt_oss"]
)
def test_greedy_tokens_equal_those_of_transformers(verifier, name):
    """The golden continuations run on past end tokens, so none is named here."""
    wanted = golden(name)
    model = verifier(name)
    plain = jax.tree.map(lambda x: x, model)
    plain.config = dataclasses.replace(model.config, eos_tokens=())
    prompts = wanted["tokens"][:, : int(wanted["prompt_length"])].tolist()
    out = generate(plain, None, prompts, max_new_tokens=wanted["greedy"].shape[1])
    assert out.tokens == wanted["greedy"].tolist()
    assert model.config.eos_tokens == (1,)


@pytest.mark.parametrize("name", ["deepseek_a", "llama_plain", "qwen3"])
def test_every_norm_has_the_epsilon_it_should(name):
    """The config's, but 1e-6 for latent norms. After a few layers no logit shows it."""
    config = dataclasses.replace(config_from_hub(MODELS["CONFIGS"][name]), norm_eps=3e-4)
    made = jax.eval_shape(lambda: Verifier(config, jax.random.key(0)))
    found = {}
    for path, module in nnx.iter_modules(made):
        if isinstance(module, RmsNorm):
            found[".".join(map(str, path))] = module.eps
    assert "norm" in found and "dense_layers.attention_norm" in found
    for at, eps in found.items():
        latent = config.latent is not None and at.endswith((".q_norm", ".kv_norm"))
        assert eps == (1e-6 if latent else 3e-4), at


@pytest.mark.parametrize("name", ["llama_plain", "gpt_oss"])
def test_bfloat16_norms_round_where_transformers_does(verifier, name):
    """Before the weight multiplies, or after it (gpt-oss); in float32 the two are the same."""
    norm = verifier(name).norm
    x = jnp.asarray(np.random.default_rng(0).standard_normal((20, 64)), jnp.bfloat16)
    weight, exact = np.asarray(norm.weight[...]), np.asarray(x, np.float32)
    exact = exact / np.sqrt((exact**2).mean(axis=-1, keepdims=True) + np.float32(1e-5))
    early = jnp.asarray(exact, jnp.bfloat16) * jnp.asarray(weight, jnp.bfloat16)[None]
    late = jnp.asarray(exact * weight, jnp.bfloat16)
    wanted, other = (late, early) if name == "gpt_oss" else (early, late)
    np.testing.assert_array_equal(np.asarray(norm(x)), np.asarray(wanted))
    assert (np.asarray(other) != np.asarray(wanted)).mean() > 0.1


LEFT_OUT = {
    "deepseek_a": ["attention_bias", "norm_topk_prob", "rope_interleave"],
    "deepseek_a_no_rope_scaling": ["rope_scaling", "rope_theta", "tie_word_embeddings"],
    "llama3": ["attention_bias", "head_dim", "tie_word_embeddings"],
    "qwen3": ["attention_bias", "rope_scaling", "use_sliding_window"],
    "qwen3_moe": ["decoder_sparse_step"],
    "qwen3_moe_no_norm": ["norm_topk_prob"],
    "gpt_oss": ["attention_bias", "layer_types", "rope_scaling", "rope_theta"],
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_keys_left_out_mean_what_transformers_takes_them_for(name):
    """Defaults of transformers' configuration classes, which hub files rely on."""
    config = MODELS["CONFIGS"][name]
    rest = {key: value for key, value in config.items() if key not in LEFT_OUT[name]}
    assert config_from_hub(rest) == config_from_hub(config)


def test_windows_stay_within_their_document(verifier):
    """Two documents in one row score as each does alone."""
    model, wanted = verifier("qwen3_window"), golden("qwen3_window")
    tokens, first = jnp.asarray(wanted["tokens"]), 17

    @jax.jit
    def packed(model):
        starts = jnp.where(jnp.arange(40) < first, 0, first)
        scope = text_scope(jnp.broadcast_to(starts[None], (2, 40)))
        return model.read_out(model.forward(tokens[..., None], scope, None)[0][:, :, 0])

    logits, second = packed(model), model.score(tokens[:, first:], (1,)).logits
    np.testing.assert_allclose(logits[:, :first], wanted["logits"][:, :first], rtol=0, atol=2e-5)
    np.testing.assert_allclose(logits[:, first:], second, rtol=0, atol=2e-5)


def test_dynamic_rope_is_plain_up_to_its_length_and_refused_past_it(tmp_path):
    """So it is in transformers, whose frequencies change with the text from there on."""
    wanted, name = golden("llama_plain"), "llama_plain"
    rope = {"rope_type": "dynamic", "factor": 4.0}
    config = {**MODELS["CONFIGS"][name], "max_position_embeddings": 40, "rope_scaling": rope}
    MODELS["write_files"](config, MODELS["hub_tensors"](name), tmp_path)
    model, tokens = load_verifier(tmp_path, dtype="float32"), jnp.asarray(wanted["tokens"])
    logits = model.score(tokens, (1,)).logits
    np.testing.assert_allclose(logits, wanted["logits"], rtol=0, atol=2e-5)
    with pytest.raises(UnsupportedError, match="41 tokens needs dynamic rope.* up to 40 tokens"):
        model.score(jnp.concatenate([tokens, tokens[:, :1]], axis=1), (1,))
