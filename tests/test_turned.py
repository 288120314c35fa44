"""Layers taken apart and kernels turned: the same numbers, other arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import eagle3_jax as e3
from eagle3_jax import testing
from eagle3_jax.contracts import UnsupportedError
from eagle3_jax.layers import Linear
from eagle3_jax.loop import forms
from eagle3_jax.turned import Turned, linears, turned
from eagle3_jax.verifier import Verifier

PROMPTS = [[5, 9, 2, 40, 7], [11, 3]]


@pytest.mark.parametrize("rows", [1, 2, 5, 40])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_turned_map_multiplies_the_same(rows, dtype):
    """In both dtypes, for a single row too, with its bias."""
    linear = Linear(jax.random.key(0), 12, 20, bias=True)
    linear.bias = nnx.Param(jnp.arange(20, dtype=jnp.float32))
    linear = jax.tree.map(lambda x: x.astype(dtype), linear)
    x = jax.random.normal(jax.random.key(1), (1, rows, 12)).astype(dtype)
    found = Turned(linear)(x)
    assert found.shape == (1, rows, 20) and found.dtype == dtype
    tolerance = 1e-5 if dtype == jnp.float32 else 0.1
    exact = np.asarray(x, np.float64) @ np.asarray(linear.kernel[...], np.float64)
    np.testing.assert_allclose(np.asarray(found, np.float64), exact + np.arange(20), atol=tolerance)


def test_only_kernels_are_copied():
    """Norms, embedding and vocabulary are the same arrays; the original keeps its kernels."""
    drafter = testing.tiny_drafter("llama")
    copy = turned(drafter)
    assert isinstance(copy.head, Turned) and isinstance(drafter.head, Linear)
    assert copy.head.kernel.shape == drafter.head.kernel.shape[::-1]
    assert copy.norm.weight[...] is drafter.norm.weight[...]
    assert copy.dtype == drafter.dtype
    verifier = testing.tiny_verifier("llama")
    apart = verifier.apart()
    assert apart.embedding[...] is verifier.embedding[...]
    assert len(linears(verifier)) == 5 and not linears(apart)


def test_decoding_by_a_reader_gives_the_same_tokens(monkeypatch):
    """Plain and speculative, several rows; made once a verifier, and anew for other arrays."""
    config = dataclasses.replace(
        testing.LLAMA, attention_bias=True, window=8, windowed=(0, 2), qk_norm=True
    )
    verifier = Verifier(config, jax.random.key(3))
    drafter = testing.tiny_drafter("llama")

    def tokens(used):
        speculation = e3.Speculation(depth=2 if used else 0)
        return e3.generate(
            verifier, used, PROMPTS, max_new_tokens=20, rows=2, speculation=speculation
        ).tokens

    wanted = tokens(None)
    assert forms.decoding_forms(verifier, drafter) == (None, drafter)
    monkeypatch.setattr(forms, "SMALLEST", 0)
    reader, _ = forms.decoding_forms(verifier, None)
    assert reader is not None and forms.decoding_forms(verifier, None)[0] is reader
    assert tokens(None) == wanted and tokens(drafter) == wanted
    verifier.head.kernel = nnx.Param(-verifier.head.kernel[...])
    assert forms.decoding_forms(verifier, None)[0] is not reader


def test_what_cannot_be_taken_apart():
    """Latent attention and experts are refused, and decode as they are."""
    verifier = jax.eval_shape(lambda: Verifier(testing.DEEPSEEK, jax.random.key(0)))
    with pytest.raises(UnsupportedError, match="layers apart: expected grouped-query"):
        verifier.apart()
    assert not forms.apart_pays(verifier)
