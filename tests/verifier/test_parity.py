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

from eagle3_jax.caches import block_scope, causal, write_rows
from eagle3_jax.generation import generate
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
    boundaries = tuple(range(model.config.num_layers + 1))
    scores = model.score(jnp.asarray(wanted["tokens"]), boundaries)
    np.testing.assert_allclose(scores.logits, wanted["logits"], rtol=0, atol=2e-5)
    found = np.split(np.asarray(scores.features.array), len(boundaries), axis=-1)
    for boundary, (mine, theirs) in enumerate(zip(found, wanted["boundaries"], strict=True)):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=2e-5, err_msg=f"{boundary}")


@functools.partial(jax.jit, static_argnames="boundaries")
def step(model, tokens, cache, length, boundaries):
    """Read one block a row into the cache: the block's logits, its features, the cache."""
    b, n = tokens.shape
    depth = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None], (b, n))
    scope = block_scope(length, depth, causal(b, n))
    hidden, features, rows = model.forward(tokens[:, None], scope, cache, boundaries)
    return model.read_out(hidden[:, 0]), features, write_rows(cache, rows, length)


# One of each attention; for the latent ones the absorbed form is another program than `score`.
@pytest.mark.parametrize("name", ["deepseek_a_bias", "deepseek_a_no_q_lora", "llama3"])
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


@pytest.mark.parametrize("name", ["deepseek_a", "kimi_k", "llama3"])
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
