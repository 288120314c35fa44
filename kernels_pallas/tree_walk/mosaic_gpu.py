"""The Mosaic GPU kernel: a CTA a row, one pass over its slots, all in one launch."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from kernels_pallas.backends import MOST_SLOTS


def unsupported(slots: int) -> str | None:
    """Why the kernel cannot walk this many slots; None where it can."""
    if slots > MOST_SLOTS:
        return f"tree_walk on mosaic_gpu walks up to {MOST_SLOTS} slots, found {slots}"
    return None


def walk(agreed, parents, best, max_depth, interpret):
    """`tree_walk` in one launch.

    Parents come before children and at most one child of a slot is agreed to, so that one pass over
    the slots in order meets the path in order. It is straight-line code, so that loads overlap.
    """
    b, w = parents.shape
    reason = unsupported(w)
    if reason is not None:
        raise NotImplementedError(f"{reason}; use the backend xla")
    # One word a slot: its parent where it was agreed to, else -1, which is nobody.
    parent_of_agreed = jnp.where(agreed, parents, -1)

    def body(parent_ref, best_ref, path_ref, count_ref, bonus_ref):
        row = jax.lax.axis_index("row")
        after = [parent_ref[row, slot] for slot in range(1, w)]
        last, count = jnp.int32(0), jnp.int32(1)
        path_ref[row, 0] = last
        for slot, parent in enumerate(after, 1):
            found = parent == last

            @pl.when(found)
            def _(count=count, slot=slot):
                path_ref[row, count] = jnp.int32(slot)

            last = jnp.where(found, jnp.int32(slot), last)
            count = jnp.where(found, count + 1, count)

        def repeat(at, _):
            path_ref[row, at] = last

        jax.lax.fori_loop(count, jnp.int32(max_depth + 1), repeat, None)
        count_ref[row] = count
        bonus_ref[row] = best_ref[row, last]

    def out(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    return plgpu.kernel(
        body,
        out_type=(out(b, max_depth + 1), out(b), out(b)),
        grid=(b,),
        grid_names=("row",),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )(parent_of_agreed, best)
