"""The naive form: every score at once, one softmax. Always right, differentiable, never fast."""

import jax
import jax.numpy as jnp


def attend(
    q, keys, values, layer, lo, hi, own_keys, own_values, ancestors, *, scale, sinks, row, **_
):
    """`forest_attention` with all scores materialised, in float32; see the api for shapes."""
    b, r, w, h, hd = q.shape
    k, s = keys.shape[2:4]
    u, hv = own_keys.shape[2], values.shape[-1]
    precision = jax.lax.Precision.HIGHEST

    def context(cache):
        part = jax.lax.dynamic_slice(cache, (layer, row, 0, 0, 0), (1, b, *cache.shape[2:]))
        return part[0].astype(jnp.float32)

    queries = q.astype(jnp.float32).reshape(b, r, w, k, h // k, hd) * scale
    far = jnp.einsum("brwkgd,bksd->bkgrws", queries, context(keys), precision=precision)
    near = jnp.einsum(
        "brwkgd,brukd->bkgrwu", queries, own_keys.astype(jnp.float32), precision=precision
    )
    slot = jnp.arange(s)[None, None, None]
    seen = (slot >= lo[..., None]) & (slot < hi[..., None, None])
    seen = jnp.concatenate([seen, jnp.broadcast_to(ancestors[:, None], (b, r, w, u))], axis=-1)[
        :, None, None
    ]
    scores = jnp.where(seen, jnp.concatenate([far, near], axis=-1), -jnp.inf)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, k, h // k, 1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))], axis=-1)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    out = jnp.einsum(
        "bkgrws,bksd->brwkgd", weights[..., :s], context(values), precision=precision
    ) + jnp.einsum(
        "bkgrwu,brukd->brwkgd",
        weights[..., s : s + u],
        own_values.astype(jnp.float32),
        precision=precision,
    )
    return out.reshape(b, r, w, h, hv).astype(q.dtype)
