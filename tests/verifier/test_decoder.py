"""The decoder: scores and their boundaries, both forms of the pass, gradients, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax import testing
from eagle3_jax.caches import text_scope
from eagle3_jax.contracts import ContractError, RequestError
from eagle3_jax.verifier import Verifier
from eagle3_jax.verifier.decoder import check_tokens

FAMILIES = ("llama", "deepseek")
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 9)), jnp.int32)


@functools.cache
def scores_of(family, boundaries):
    """Scores of the common text."""
    return testing.tiny_verifier(family).score(TOKENS, boundaries)


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_the_boundaries_in_the_order_asked_for(family):
    """Any of them, in any order; 0 is the embedding and L what the head reads."""
    verifier = testing.tiny_verifier(family)
    everything = scores_of(family, (0, 1, 2, 3, 4))
    parts = np.split(np.asarray(everything.features.array), 5, axis=-1)
    picked = scores_of(family, (4, 0, 2))
    assert picked.features.spec.boundaries == (4, 0, 2)
    np.testing.assert_allclose(
        picked.features.array, np.concatenate([parts[i] for i in (4, 0, 2)], axis=-1), atol=1e-5
    )
    np.testing.assert_array_equal(parts[0], verifier.embed(TOKENS))
    np.testing.assert_allclose(
        verifier.read_out(jnp.asarray(parts[4])), everything.logits, atol=1e-5
    )
    assert everything.logits.dtype == jnp.float32 and everything.logits.shape == (2, 9, 64)
    for one, two in zip(parts[:-1], parts[1:], strict=True):
        assert np.abs(one - two).max() > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_later_reaches_a_position(family):
    """Changing a token leaves everything before it as it was."""
    changed = TOKENS.at[:, 5].set((TOKENS[:, 5] + 1) % 64)
    other = testing.tiny_verifier(family).score(changed, (4, 0, 2))
    same = scores_of(family, (4, 0, 2))
    np.testing.assert_allclose(other.logits[:, :5], same.logits[:, :5], atol=1e-5)
    assert np.abs(np.asarray(other.logits - same.logits)[:, 5:]).max(axis=(0, 2)).min() > 1e-3


@functools.partial(jax.jit, static_argnames="differentiable")
def pass_over(verifier, starts, differentiable=False):
    """Logits and features of the common text in documents."""
    hidden, features, rows = verifier.forward(
        TOKENS[..., None], text_scope(starts), None, (1, 3), differentiable
    )
    assert rows is None
    return verifier.read_out(hidden[:, :, 0]), features


@pytest.mark.parametrize("family", FAMILIES)
def test_differentiable_and_frozen_passes_agree(family):
    verifier, starts = testing.tiny_verifier(family), jnp.zeros_like(TOKENS)
    for mine, wanted in zip(
        pass_over(verifier, starts, differentiable=True), pass_over(verifier, starts), strict=True
    ):
        np.testing.assert_allclose(mine, wanted, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_document_does_not_see_the_one_before(family):
    """Two documents in one row are scored as if each stood alone, from position 0."""
    starts = jnp.asarray(np.where(np.arange(9) < 4, 0, 4)[None].repeat(2, 0), jnp.int32)
    verifier = testing.tiny_verifier(family)
    packed = pass_over(verifier, starts)[0]
    alone = verifier.score(TOKENS[:, 4:], (1,)).logits
    np.testing.assert_allclose(packed[:, 4:], alone, atol=1e-5)
    np.testing.assert_allclose(packed[:, :4], scores_of(family, (4, 0, 2)).logits[:, :4], atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_finite_and_reach_every_weight(family):
    """Every array has a gradient; experts through the router's choice included."""
    verifier = testing.tiny_verifier(family)

    @jax.jit
    @jax.grad
    def gradient(verifier):
        logits, _ = pass_over(verifier, jnp.zeros_like(TOKENS), differentiable=True)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), TOKENS[:, 1:, None], -1)
        return -jnp.mean(chosen)

    for path, leaf in jax.tree_util.tree_flatten_with_path(gradient(verifier))[0]:
        name = jax.tree_util.keystr(path)
        assert np.isfinite(np.asarray(leaf)).all(), name
        assert np.abs(np.asarray(leaf)).max() > 0, name


def test_bfloat16_weights_give_bfloat16_features_and_float32_logits():
    verifier = testing.tiny_verifier("deepseek")
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), verifier)
    scores = low.score(TOKENS, (1, 3))
    assert low.dtype == jnp.bfloat16 and scores.features.array.dtype == jnp.bfloat16
    assert scores.logits.dtype == jnp.float32
    assert np.isfinite(np.asarray(scores.logits)).all()


def test_caches_hold_what_each_attention_needs():
    llama = testing.tiny_verifier("llama").make_cache(3, 16)
    assert llama.keys.shape == (4, 3, 2, 16, 8)
    assert llama.values is not None and llama.values.shape == (4, 3, 2, 16, 8)
    latent = testing.tiny_verifier("deepseek").make_cache(3, 16)
    assert latent.keys.shape == (4, 3, 1, 16, 12 + 8) and latent.values is None
    assert latent.capacity == 16


def test_the_spec_names_verifier_and_tokenizer():
    tokenizer = testing.tiny_tokenizer()
    verifier = Verifier(testing.LLAMA, jax.random.key(0), "tiny", tokenizer)
    spec = verifier.spec((1, 2))
    assert (spec.verifier, spec.tokenizer) == ("tiny", tokenizer.fingerprint)
    assert (spec.width, spec.num_layers, spec.fused_width) == (32, 4, 64)
    assert testing.tiny_verifier("llama").spec((1,)).tokenizer is None


def test_boundaries_are_checked_before_anything_runs():
    verifier = testing.tiny_verifier("llama")
    with pytest.raises(ContractError, match="between 0 .* and 4"):
        verifier.score(TOKENS, (1, 5))
    with pytest.raises(ContractError, match="too shallow for the default"):
        verifier.score(TOKENS)


def test_tokens_are_checked_before_anything_runs():
    verifier = testing.tiny_verifier("llama")
    with pytest.raises(RequestError, match="token 64 is outside .* of 64"):
        verifier.score(TOKENS.at[1, 3].set(64), (1,))
    with pytest.raises(RequestError, match="token -2 "):
        verifier.score(TOKENS.at[0, 0].set(-2), (1,))
    with pytest.raises(RequestError, match="empty"):
        verifier.score(TOKENS[:, :0], (1,))
    check_tokens([0, 63], 64)
