"""Before and after the Hopper kernels, in XLA: small operands laid out, splits combined."""

import jax
import jax.numpy as jnp

from kernels_pallas.hopper import LOG2E, WORD, split_float32
from kernels_pallas.plan import TILE, Plan


def unsupported(q, keys, own, *others) -> str | None:
    """Why neither kernel can do a call, as far as both want the same; by shapes and dtypes alone.

    Args:
        q: [b r w h hd].
        keys: [l rows k s hd].
        own: [b r u k hd].
        others: arrays of the same dtype.
    """
    dtypes = {str(jnp.dtype(x.dtype)) for x in (q, keys, own, *others)}
    if q.shape[1] != 1:
        return f"one root a row is needed, found r = {q.shape[1]}"
    if max(q.shape[2], own.shape[2]) > TILE:
        found = f"w = {q.shape[2]}, u = {own.shape[2]}"
        return f"at most {TILE} slots and own keys are needed, found {found}"
    if len(dtypes) > 1 or not dtypes <= {"bfloat16", "float16", "float32"}:
        return f"one dtype of bfloat16, float16, float32 is needed, found {sorted(dtypes)}"
    if keys.shape[3] < TILE or keys.shape[3] % 8:
        wanted = f"a cache of a multiple of 8 slots, at least {TILE},"
        return f"{wanted} is needed, found {keys.shape[3]}"
    return None


def of_queries(q, layer, row, lo, hi, ancestors, k: int, plan: Plan) -> tuple[jax.Array, ...]:
    """What both kernels want first: place, limits, first slots and ancestors by query, queries."""
    g = q.shape[3] // k
    return (
        place(layer, row),
        limits(lo, hi),
        by_query(lo[:, 0], g, plan.padded),
        pack_ancestors(ancestors, g, plan.padded),
        arrange_queries(q, k, plan),
    )


def place(layer, row) -> jax.Array:
    """[2]: layer, and the cache row of the batch's first."""
    return jnp.stack([jnp.asarray(layer, jnp.int32), jnp.asarray(row, jnp.int32)])


def limits(lo: jax.Array, hi: jax.Array) -> jax.Array:
    """[b 1 w], [b 1] -> [b 3]: the least and greatest first slot of a row, one past its last."""
    return jnp.stack([lo[:, 0].min(axis=-1), lo[:, 0].max(axis=-1), hi[:, 0]], axis=-1)


def by_query(x: jax.Array, g: int, rows: int) -> jax.Array:
    """[b w ...] -> [b rows ...]: a slot's entry for each of its g queries, zeros past the last."""
    x = jnp.repeat(x, g, axis=1)
    return jnp.pad(x, [(0, 0), (0, rows - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def pack_ancestors(ancestors: jax.Array, g: int, rows: int) -> jax.Array:
    """[b w u] -> int32 [b words rows]: bit i of word j is own key 32 j + i."""
    b, w, u = ancestors.shape
    words = -(-u // WORD)
    bits = jnp.pad(ancestors, [(0, 0), (0, 0), (0, words * WORD - u)])
    bits = bits.reshape(b, w, words, WORD).astype(jnp.uint32)
    packed = jnp.sum(bits << jnp.arange(WORD, dtype=jnp.uint32)[None, None, None], axis=-1)
    packed = jax.lax.bitcast_convert_type(packed.astype(jnp.uint32), jnp.int32)
    return by_query(packed, g, rows).swapaxes(1, 2)


def arrange_queries(q: jax.Array, k: int, plan: Plan) -> jax.Array:
    """[b 1 w h hd] -> [parts b k rows hd]; query w g' of key head k is slot w, head k g + g'."""
    b, _, w, h, hd = q.shape
    x = q.reshape(b, w, k, h // k, hd).swapaxes(1, 2).reshape(b, k, plan.rows, hd)
    x = jnp.pad(x, [(0, 0), (0, 0), (0, plan.padded - plan.rows), (0, 0)])
    return jnp.stack(split_float32(x) if plan.parts == 3 else [x])


def arrange_own(x: jax.Array) -> jax.Array:
    """[b 1 u k width] -> [b k 64 width], zeros past the last."""
    x = x[:, 0].swapaxes(1, 2)
    return jnp.pad(x, [(0, 0), (0, 0), (0, TILE - x.shape[2]), (0, 0)])


def combine(values: jax.Array, stats: jax.Array, plan: Plan, sinks, w: int, dtype) -> jax.Array:
    """The softmax over all splits and the sink, from each split's own.

    Args:
        values: [b k splits rows hv]: weighted sums, not divided by the total; of a split without
            work nobody wrote any.
        stats: [b k splits n rows]: maximum, and n - 1 parts of the total.
        plan: of the kernel.
        sinks: [h] or None.
        w: slots asking.
        dtype: of the result.

    Returns:
        [b 1 w h hv]; zero for a query that sees nothing.
    """
    b, k = values.shape[:2]
    g = plan.rows // w
    values, stats = values[:, :, :, : plan.rows], stats[..., : plan.rows]
    top, total = stats[:, :, :, 0], stats[:, :, :, 1:].sum(axis=3)
    sink = None
    highest = top.max(axis=2)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, k, 1, g) * jnp.float32(LOG2E)
        sink = jnp.broadcast_to(sink, (b, k, w, g)).reshape(b, k, plan.rows)
        highest = jnp.maximum(highest, sink)
    base = jnp.where(highest == -jnp.inf, 0.0, highest)
    keep = jnp.exp2(top - base[:, :, None])
    divisor = (total * keep).sum(axis=2)
    if sink is not None:
        divisor = divisor + jnp.exp2(sink - base)
    out = jnp.where(total[..., None] > 0, values * keep[..., None], 0.0).sum(axis=2)
    out = out / jnp.where(divisor > 0, divisor, 1.0)[..., None]
    hv = out.shape[-1]
    out = out.reshape(b, k, w, g, hv).swapaxes(1, 2)
    return out.reshape(b, 1, w, k * g, hv).astype(dtype)
