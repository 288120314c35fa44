"""The form without a kernel: one step a depth, all rows and slots at once."""

import jax.numpy as jnp


def walk(agreed, parents, best, max_depth):
    """`tree_walk` level by level."""
    b, w = parents.shape
    slot = jnp.arange(w, dtype=jnp.int32)[None]
    child = agreed & (slot > 0)
    last, count = jnp.zeros((b,), jnp.int32), jnp.ones((b,), jnp.int32)
    path = [last]
    for _ in range(max_depth):
        after = child & (parents == last[:, None])
        found = jnp.any(after, axis=1)
        last = jnp.where(found, jnp.max(jnp.where(after, slot, 0), axis=1), last)
        count = count + found.astype(jnp.int32)
        path.append(last)
    return jnp.stack(path, axis=1), count, jnp.take_along_axis(best, last[:, None], axis=1)[:, 0]
