"""Grouped-query attention and multi-head latent attention over one forest pass."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int, Key

from eagle3_jax.caches import Cache, Scope
from eagle3_jax.configs import VerifierConfig
from eagle3_jax.layers import Linear, RmsNorm
from eagle3_jax.verifier.rope import rotate, softmax_scale
from kernels_pallas import forest_attention, latent_forest_attention

LATENT_NORM_EPS = 1e-6
"""DeepSeek-V3 builds its two latent norms with this, whatever `rms_norm_eps` says."""

LayerRows = tuple[Float[Array, "b k n hd"], Float[Array, "b k n hv"] | None]
"""One layer's new cache rows."""


def attend_and_keep(
    q: Float[Array, "b r w h hd"],
    key: Float[Array, "b r w k hd"],
    value: Float[Array, "b r w k hv"] | None,
    scope: Scope,
    cache: Cache | None,
    layer: Int[Array, ""],
    *,
    scale: float,
    sinks: Float[Array, " h"] | None = None,
    value_width: int | None = None,
    differentiable: bool = False,
) -> tuple[Float[Array, "b r w h hv_out"], LayerRows]:
    """Attend with the pass's own keys as each root's block, and return them as cache rows.

    Without a cache the pass's own keys are the context too: every root is one position of a text.
    """

    def flat(x):
        """[b r w k hd] -> [b k n hd], n = r * w."""
        b, r, w, k, width = x.shape
        return x.reshape(b, r * w, k, width).swapaxes(1, 2)

    rows = flat(key), None if value is None else flat(value)
    if cache is None:
        keys = rows[0][None]
        values = None if rows[1] is None else rows[1][None]
        layer = jnp.zeros((), jnp.int32)
    else:
        keys, values = cache.keys, cache.values
    limits = layer, scope.lo, scope.hi
    if values is None or value is None:
        assert value_width is not None
        out = latent_forest_attention(
            q,
            keys,
            *limits,
            key,
            scope.ancestors,
            scale=scale,
            value_width=value_width,
            row=scope.row,
            backend=scope.backend,
        )
        return out, rows
    out = forest_attention(
        q,
        keys,
        values,
        *limits,
        key,
        value,
        scope.ancestors,
        scale=scale,
        sinks=sinks,
        row=scope.row,
        differentiable=differentiable,
        backend=scope.backend,
    )
    return out, rows


class GroupedQueryAttention(nnx.Module):
    """Attention of Llama, Qwen3 (normed heads) and gpt-oss (sinks)."""

    def __init__(self, key: Key[Array, ""], config: VerifierConfig):
        c = config
        keys = jax.random.split(key)
        self.shape = (c.num_heads, c.num_kv_heads, c.head_width)
        self.rope = c.rope
        inner = (c.num_heads + 2 * c.num_kv_heads) * c.head_width
        self.qkv = Linear(keys[0], c.width, inner, c.attention_bias)
        self.o = Linear(keys[1], c.num_heads * c.head_width, c.width, c.attention_bias)
        norm = c.head_width, c.norm_eps, c.wide_norms
        self.q_norm = RmsNorm(*norm) if c.qk_norm else None
        self.k_norm = RmsNorm(*norm) if c.qk_norm else None
        self.sinks = nnx.Param(jnp.zeros((c.num_heads,), jnp.float32)) if c.sinks else None

    def __call__(
        self,
        x: Float[Array, "b r w d"],
        scope: Scope,
        cache: Cache | None,
        layer: Int[Array, ""],
        differentiable: bool = False,
    ) -> tuple[Float[Array, "b r w d"], LayerRows]:
        h, k, width = self.shape
        lead = x.shape[:3]
        q, key, value = jnp.split(self.qkv(x), [h * width, (h + k) * width], axis=-1)
        q, key = q.reshape(*lead, h, width), key.reshape(*lead, k, width)
        if self.q_norm is not None and self.k_norm is not None:
            q, key = self.q_norm(q), self.k_norm(key)
        out, rows = attend_and_keep(
            rotate(q, scope.positions, self.rope),
            rotate(key, scope.positions, self.rope),
            value.reshape(*lead, k, width),
            scope,
            cache,
            layer,
            scale=width**-0.5,
            sinks=None if self.sinks is None else self.sinks[...],
            differentiable=differentiable,
        )
        return self.o(out.reshape(*lead, h * width)), rows


class LatentAttention(nnx.Module):
    """Multi-head latent attention of DeepSeek-V3 and Kimi-K2.

    The cache keeps the normed latent and the rotated shared key. With a cache the up-projections
    are absorbed into query and output, so that attention runs over the latent itself; without one
    (learning, scoring) keys and values are expanded, which costs fewer operations.

    Source: DeepSeek-V2, arXiv 2405.04434; deepseek-ai/DeepSeek-V3 `inference/model.py`.
    """

    def __init__(self, key: Key[Array, ""], config: VerifierConfig):
        c, a = config, config.latent
        assert a is not None
        keys = jax.random.split(key, 5)
        self.heads = c.num_heads
        self.latent = a
        self.rope = c.rope
        q_width = c.num_heads * (a.nope_width + a.rope_width)
        if a.q_rank is None:
            self.q_down = self.q_norm = None
            self.q_up = Linear(keys[1], c.width, q_width)
        else:
            self.q_down = Linear(keys[0], c.width, a.q_rank, c.attention_bias)
            self.q_norm = RmsNorm(a.q_rank, LATENT_NORM_EPS)
            self.q_up = Linear(keys[1], a.q_rank, q_width)
        self.kv_down = Linear(keys[2], c.width, a.kv_rank + a.rope_width, c.attention_bias)
        self.kv_norm = RmsNorm(a.kv_rank, LATENT_NORM_EPS)
        # Columns by head: [nope key | value].
        self.kv_up = Linear(keys[3], a.kv_rank, c.num_heads * (a.nope_width + a.value_width))
        self.o = Linear(keys[4], c.num_heads * a.value_width, c.width, c.attention_bias)

    def __call__(
        self,
        x: Float[Array, "b r w d"],
        scope: Scope,
        cache: Cache | None,
        layer: Int[Array, ""],
        differentiable: bool = False,
    ) -> tuple[Float[Array, "b r w d"], LayerRows]:
        a, h = self.latent, self.heads
        lead = x.shape[:3]
        q = x
        if self.q_down is not None and self.q_norm is not None:
            q = self.q_norm(self.q_down(x))
        q = self.q_up(q).reshape(*lead, h, a.nope_width + a.rope_width)
        q_nope, q_rope = jnp.split(q, [a.nope_width], axis=-1)
        q_rope = rotate(q_rope, scope.positions, self.rope)
        latent, k_rope = jnp.split(self.kv_down(x), [a.kv_rank], axis=-1)
        latent = self.kv_norm(latent)
        k_rope = rotate(k_rope[..., None, :], scope.positions, self.rope)

        up = self.kv_up.kernel[...].reshape(a.kv_rank, h, a.nope_width + a.value_width)
        up_key, up_value = jnp.split(up, [a.nope_width], axis=-1)
        scale = softmax_scale(self.rope, a.nope_width + a.rope_width)
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

        if cache is None:
            key = jnp.einsum("brwc,chn->brwhn", latent, up_key, precision=precision)
            value = jnp.einsum("brwc,chv->brwhv", latent, up_value, precision=precision)
            shared = jnp.broadcast_to(k_rope, (*lead, h, a.rope_width))
            out, rows = attend_and_keep(
                jnp.concatenate([q_nope, q_rope], axis=-1),
                jnp.concatenate([key, shared], axis=-1),
                value,
                scope,
                None,
                layer,
                scale=scale,
                differentiable=differentiable,
            )
        else:
            q_latent = jnp.einsum("brwhn,chn->brwhc", q_nope, up_key, precision=precision)
            out, rows = attend_and_keep(
                jnp.concatenate([q_latent, q_rope], axis=-1),
                jnp.concatenate([latent[..., None, :], k_rope], axis=-1),
                None,
                scope,
                cache,
                layer,
                scale=scale,
                value_width=a.kv_rank,
            )
            out = jnp.einsum("brwhc,chv->brwhv", out, up_value, precision=precision)
        return self.o(out.reshape(*lead, h * a.value_width)), rows
