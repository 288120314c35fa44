"""The forms that CPU and GPUs without a kernel run: blocked forward, and differentiable."""

import jax
import jax.numpy as jnp

BLOCK = 256
"""Context slots read at a time; a cache's capacity should be a multiple."""

UNROLLED_HEADS = 8
"""Up to this many key heads are multiplied one by one on CPU."""

ROOTS = 256
"""Roots attended at a time by the differentiable form."""


def attend_blocked(
    q,
    keys,
    values,
    layer,
    lo,
    hi,
    own_keys,
    own_values,
    ancestors,
    *,
    scale,
    sinks,
    row,
    value_width=None,
):
    """Forward only: an online softmax over the blocks of the cache that are in use.

    The cache is read by `dynamic_slice` at (layer, block) and never copied as a whole. Where
    `values` is None, they are the first `value_width` columns of the keys (latent attention).
    """
    b, r, w, h, hd = q.shape
    k, s = keys.shape[2:4]
    g = h // k
    size = min(BLOCK, s)
    hv = value_width if values is None else values.shape[-1]
    precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    f32 = jnp.float32

    # [b r w h hd] -> [b k r w g hd]: one product a key head, its queries side by side.
    queries = q.reshape(b, r, w, k, g, hd).transpose(0, 3, 1, 2, 4, 5)

    def product(equation, left, right):
        """An einsum of [b k ...] operands; on CPU head by head, since batched products are slow."""
        if not (jax.default_backend() == "cpu" and 1 < k <= UNROLLED_HEADS):
            return jnp.einsum(
                equation, left, right, precision=precision, preferred_element_type=f32
            )
        one = equation.replace("k", "")
        return jnp.stack(
            [
                jnp.einsum(
                    one, left[:, i], right[:, i], precision=precision, preferred_element_type=f32
                )
                for i in range(k)
            ],
            axis=1,
        )

    def step(state, key, value, seen, block):
        """Fold keys and values into (running maximum, total, weighted values) of [b k r w g].

        Args:
            block: their axes in the einsum, "bkx" for a context block, "bkrx" for own blocks.
        """
        top, total, out = state
        scores = product(f"bkrwgd,{block}d->bkrwgx", queries, key) * jnp.float32(scale)
        scores = jnp.where(seen[:, None, :, :, None], scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        keep = jnp.exp(top - base)
        weights = jnp.exp(scores - base[..., None])
        total = total * keep + jnp.sum(weights, axis=-1)
        more = product(f"bkrwgx,{block}d->bkrwgd", weights.astype(value.dtype), value)
        return new_top, total, out * keep[..., None] + more

    # [b r u k hd] -> [b k r u hd]
    own_k = own_keys.transpose(0, 3, 1, 2, 4)
    own_v = own_k[..., :hv] if own_values is None else own_values.transpose(0, 3, 1, 2, 4)
    shape = (b, k, r, w, g)
    state = (
        jnp.full(shape, -jnp.inf, f32),
        jnp.zeros(shape, f32),
        jnp.zeros((*shape, hv), f32),
    )
    state = step(state, own_k, own_v, ancestors[:, None], "bkrx")

    def fold(index, state):
        start = jnp.minimum(index * size, s - size)
        slot = (start + jnp.arange(size))[None, None, None]
        inside = (slot >= lo[..., None]) & (slot < hi[..., None, None]) & (slot >= index * size)

        def block_of(cache):
            at = (layer, row, 0, start, 0)
            return jax.lax.dynamic_slice(cache, at, (1, b, k, size, cache.shape[-1]))[0]

        key_block = block_of(keys)
        value_block = key_block[..., :hv] if values is None else block_of(values)
        return step(state, key_block, value_block, inside, "bkx")

    first = jnp.min(lo) // size
    last = (jnp.max(hi) + size - 1) // size
    top, total, out = jax.lax.fori_loop(first, last, fold, state)
    if sinks is not None:
        sink = sinks.astype(f32).reshape(1, k, 1, 1, g)
        new_top = jnp.maximum(top, sink)
        keep = jnp.exp(top - new_top)
        total, out = total * keep + jnp.exp(sink - new_top), out * keep[..., None]
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    return out.transpose(0, 2, 3, 1, 4, 5).reshape(b, r, w, h, hv).astype(q.dtype)


def attend_differentiable(
    q, keys, values, layer, lo, hi, own_keys, own_values, ancestors, *, scale, sinks, row, **_
):
    """With gradients: all scores of some hundred roots at a time, recomputed backward.

    Context and own block keep their own scores and share maximum and total; nothing is joined.
    """
    b, r, w, h, hd = q.shape
    k = keys.shape[2]
    g = h // k
    f32 = jnp.float32
    precision = jax.lax.Precision.HIGHEST

    def context(cache):
        at = (layer, row, 0, 0, 0)
        return jax.lax.dynamic_slice(cache, at, (1, b, *cache.shape[2:]))[0].astype(f32)

    context_keys, context_values = context(keys), context(values)
    s, hv = context_values.shape[-2:]
    slot = jnp.arange(s, dtype=jnp.int32)[None, None, None]

    def product(left, right):
        """[b k m c] @ [b k c z]; on CPU one by one, since batched products are slow."""
        if jax.default_backend() != "cpu":
            return jnp.matmul(left, right, precision=precision)
        flat = (x.reshape(b * k, *x.shape[2:]) for x in (left, right))
        out = jax.lax.map(lambda pair: jnp.matmul(*pair, precision=precision), tuple(flat))
        return out.reshape(b, k, *out.shape[1:])

    def some(q, lo, hi, own_keys, own_values):
        """Roots [b r ...] of one part; scores are [b k g r w s], in the block [b k g r w u]."""
        r = q.shape[1]
        queries = q.astype(f32).reshape(b, r, w, k, g, hd) * f32(scale)
        queries = queries.transpose(0, 3, 4, 1, 2, 5)
        # Own blocks are tiny and differ by root: products and sums, not matrix products.
        block_keys = own_keys.astype(f32).transpose(0, 3, 1, 2, 4)[:, :, None, :, None]
        block_values = own_values.astype(f32).transpose(0, 3, 1, 2, 4)[:, :, None, :, None]
        far = product(queries.reshape(b, k, -1, hd), context_keys.swapaxes(-1, -2))
        far = far.reshape(b, k, g, r, w, s)
        near = jnp.sum(queries[..., None, :] * block_keys, axis=-1)
        seen = (slot >= lo[..., None]) & (slot < hi[..., None, None])
        far = jnp.where(seen[:, None, None], far, -jnp.inf)
        near = jnp.where(ancestors[:, None, None, None], near, -jnp.inf)
        top = jnp.maximum(jnp.max(far, axis=-1), jnp.max(near, axis=-1))
        sink = None
        if sinks is not None:
            sink = sinks.astype(f32).reshape(1, k, g, 1, 1)
            top = jnp.maximum(top, sink)
        top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0.0))[..., None]
        far, near = jnp.exp(far - top), jnp.exp(near - top)
        total = jnp.sum(far, axis=-1, keepdims=True) + jnp.sum(near, axis=-1, keepdims=True)
        if sink is not None:
            total = total + jnp.exp(sink[..., None] - top)
        out = product(far.reshape(b, k, -1, s), context_values).reshape(b, k, g, r, w, hv)
        out = out + jnp.sum(near[..., None] * block_values, axis=-2)
        out = out / jnp.where(total > 0, total, 1.0)
        return out.transpose(0, 3, 4, 1, 2, 5).reshape(b, r, w, h, hv).astype(q.dtype)

    parts = -(-r // ROOTS)
    if parts == 1:
        return some(q, lo, hi, own_keys, own_values)

    def split(x):
        pad = [(0, 0), (0, parts * ROOTS - r)] + [(0, 0)] * (x.ndim - 2)
        return jnp.moveaxis(jnp.pad(x, pad).reshape(b, parts, ROOTS, *x.shape[2:]), 1, 0)

    out = jax.lax.map(
        lambda part: jax.checkpoint(some)(*part),
        tuple(split(x) for x in (q, lo, hi, own_keys, own_values)),
    )
    return jnp.moveaxis(out, 0, 1).reshape(b, parts * ROOTS, *out.shape[3:])[:, :r]
