"""The naive form: every slot compared with every slot of its path. Always right."""

import jax
import jax.numpy as jnp


def walk(agreed, parents, best, max_depth):
    """`tree_walk` by ancestors: a slot is accepted where all on its path are agreed to."""
    b, w = parents.shape
    slot = jnp.arange(w, dtype=jnp.int32)
    agreed = agreed | (slot == 0)[None]

    def up(_, state):
        at, accepted, depth = state
        accepted = accepted & jnp.take_along_axis(agreed, at, axis=1)
        depth = depth + (at > 0).astype(jnp.int32)
        return jnp.take_along_axis(parents, at, axis=1), accepted, depth

    start = jnp.broadcast_to(slot[None], (b, w)), jnp.ones((b, w), bool), jnp.zeros_like(parents)
    _, accepted, depth = jax.lax.fori_loop(0, w, up, start)
    # At most one accepted slot a depth, since at most one child of a slot is agreed to.
    level = jnp.arange(max_depth + 1, dtype=jnp.int32)[None, :, None]
    at_level = accepted[:, None] & (depth[:, None] == level)
    count = jnp.sum(jnp.any(at_level, axis=-1), axis=-1, dtype=jnp.int32)
    slots = jnp.argmax(at_level, axis=-1).astype(jnp.int32)
    last = jnp.take_along_axis(slots, count[:, None] - 1, axis=1)
    path = jnp.where(level[..., 0] < count[:, None], slots, last)
    return path, count, jnp.take_along_axis(best, last, axis=1)[:, 0]
