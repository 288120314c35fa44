"""What both attention kernels for Hopper are made of: steps, copies, products, masks, softmax.

A block of threads (CTA) has one warpgroup that copies tiles of keys and values into shared memory,
some stages ahead, and one or two that multiply. Its steps are the context blocks of its split; the
first split begins with the row's own block, which is a tile like any other.

Scores are in base 2, scaled by log2(e), so that a weight is one `exp2`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from kernels_pallas.plan import TILE, Plan

LOG2E = math.log2(math.e)

WORD = 32
"""Ancestors a word."""

ROW = plgpu.Layout.WGMMA.reduce(1)
"""Layout of one number for each of a tile's queries."""

GRID = ("row", "head", "group", "split")
"""Axes of the grid."""


class Walk(NamedTuple):
    """The steps of one CTA, from the row's own limits.

    Attributes:
        row: of the batch.
        head: key head.
        split: part of the context.
        own: 1 where the first step is the own block, else 0.
        steps: own block and context blocks.
        first: context slot at which the split begins.
        full: first slot that every query sees.
        end: one past the last slot.
    """

    row: Any
    head: Any
    split: Any
    own: Any
    steps: Any
    first: Any
    full: Any
    end: Any

    def slot(self, step: Any):
        """First context slot of a step after the own block."""
        return self.first + (step - self.own) * TILE

    def kind(self, step: Any):
        """How a step is masked: 2 for the own block, 1 for part of a block, 0 not at all."""
        slot = self.slot(step)
        part = (slot < self.full) | (slot + TILE > self.end)
        return jnp.where(step < self.own, 2, part.astype(jnp.int32))


def make_kernel(
    name: str,
    body: Callable,
    plan: Plan,
    batch: tuple[int, int],
    readers: int,
    totals: int,
    scratch: dict[str, Any],
    interpret: bool,
) -> Callable:
    """A kernel that gives each split's sums, and each query's maximum and parts of its total.

    Exponentials are approximate where the weights are rounded to 16 bits anyway. Sums and maxima
    over a tile's columns stay within a warp, so they need no shared memory.

    Args:
        name: of the kernel.
        body: what a CTA does.
        plan: how the call is cut.
        batch: rows and key heads.
        readers: warpgroups of a CTA that multiply, beside the one that copies.
        totals: parts of a query's total.
        scratch: shared memory and barriers, by their names in the body.
        interpret: step by step on CPU.
    """
    each = *batch, plan.splits
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((*each, plan.written, plan.value_width), jnp.float32),
            jax.ShapeDtypeStruct((*each, 1 + totals, plan.padded), jnp.float32),
        ),
        grid=(*batch, plan.groups, plan.splits),
        grid_names=GRID,
        cluster=(plan.cluster,),
        cluster_names=("cta",),
        num_threads=readers + 1,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=plan.parts == 1, reduction_scratch_bytes=0
        ),
        interpret=plgpu.InterpretGPUParams() if interpret else None,
        kernel_name=name,
    )


def walk(spans, splits: int) -> Walk:
    """The CTA's steps; a split of a short row may have none.

    Args:
        spans: [b 3] in memory: `limits` of each row.
        splits: parts of the context.
    """
    row, head, split = (jax.lax.axis_index(name) for name in ("row", "head", "split"))
    least, full, end = spans[row, 0], spans[row, 1], spans[row, 2]
    block = jax.lax.div(least, TILE)
    count = jnp.maximum(jax.lax.div(end + (TILE - 1), TILE) - block, 0)
    each = jax.lax.div(count + (splits - 1), splits)
    mine = jnp.clip(count - split * each, 0, each)
    own = (split == 0).astype(jnp.int32)
    return Walk(row, head, split, own, mine + own, (block + split * each) * TILE, full, end)


class Pipe(NamedTuple):
    """A stream of tiles through shared memory.

    Attributes:
        cache: [l rows k s width] in memory.
        own: [b k 64 width] in memory.
        tiles: [stages 64 width], shared.
        full: a barrier a stage, passed once its tile has arrived.
        free: a barrier a stage, passed once all that multiply are done with its tile.
    """

    cache: Any
    own: Any
    tiles: Any
    full: Any
    free: Any


def pipe_types(
    plan: Plan, readers: int, width: int, dtype: Any, piece: int
) -> tuple[Any, Any, Any]:
    """Types of a pipe's tiles and barriers.

    Args:
        plan: stages and cluster.
        readers: warpgroups of a CTA that multiply.
        width: of keys or values.
        dtype: of the cache.
        piece: as in `tile`.
    """
    return (
        tile((plan.stages,), width, dtype, piece),
        plgpu.Barrier(num_barriers=plan.stages),
        plgpu.ClusterBarrier(
            collective_axes=("cta",), num_barriers=plan.stages, num_arrivals=readers
        )
        if plan.cluster > 1
        else plgpu.Barrier(num_barriers=plan.stages, num_arrivals=readers),
    )


def tile(leading: tuple[int, ...], width: int, dtype: Any, piece: int) -> Any:
    """Shared memory for tiles [*leading 64 width], laid out as copies and tensor cores want it.

    Args:
        piece: columns that lie together, at most 128 bytes of them; the two operands of a product
            have the same.
    """
    size = jnp.dtype(dtype).itemsize
    piece = min(piece, 128 // size)
    tiled: Any = plgpu.TilingTransform
    swizzled: Any = plgpu.SwizzleTransform
    transforms = tiled((8, piece)), swizzled(piece * size)
    return plgpu.SMEM((*leading, TILE, width), dtype, transforms=transforms)


def copy_tiles(steps: Walk, at, plan: Plan, pipes: Sequence[Pipe]) -> None:
    """What the copying warpgroup does: each step's tiles, `stages` ahead of who multiplies.

    In a cluster every CTA copies its share of a tile to all. The last turns copy nothing: they wait
    until all tiles are free, so that no CTA ends while another still signals it.

    Args:
        steps: of the CTA.
        at: [2] in memory: layer, and the cache row of the batch's first.
        plan: of the kernel.
        pipes: keys first.
    """
    layer, cached = at[0], at[1] + steps.row
    shared = "cta" if plan.cluster > 1 else None

    def copy(source, tile, full):
        plgpu.copy_gmem_to_smem(source, tile, full, collective_axes=shared)

    @pl.loop(0, steps.steps + plan.stages)
    def _(step):
        stage = jax.lax.rem(step, plan.stages)
        for cache, own, tiles, full, free in pipes:

            @pl.when(step >= plan.stages)
            def _(free=free):
                plgpu.barrier_wait(free.at[stage])

            @pl.when(step < steps.own)
            def _(own=own, tiles=tiles, full=full):
                source = own.at[steps.row, steps.head]
                copy(source, tiles.at[stage], full.at[stage])

            @pl.when((step >= steps.own) & (step < steps.steps))
            def _(cache=cache, tiles=tiles, full=full):
                source = cache.at[layer, cached, steps.head, pl.ds(steps.slot(step), TILE)]
                copy(source, tiles.at[stage], full.at[stage])


def split_float32(x: jax.Array) -> list[jax.Array]:
    """Three bfloat16 numbers, of 8 bits each, whose sum is x to float32's 24 bits.

    The six products of parts i and j with i + j <= 2 make one of float32 accuracy; the tensor
    cores' own 32-bit product (tf32) keeps 11 bits. Meant to be right, not fast.
    """
    parts = []
    for _ in range(3):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return parts


def store_parts(tiles, x: jax.Array) -> None:
    """Write x [64 n] to shared memory [parts 64 n], for the tensor cores to read.

    From there, since only as an operand in shared memory does the interpreter take it.
    """
    for i, part in enumerate(split_float32(x) if tiles.shape[0] == 3 else [x.astype(tiles.dtype)]):
        tiles[i] = part
    plgpu.commit_smem()


def multiply_parts(acc, left: Callable, right: Callable) -> None:
    """Add the six products of `left(i)` and `right(j)`, the smallest first, and wait for them."""
    for total in (2, 1, 0):
        for i in range(total + 1):
            plgpu.wgmma(acc, left(i), right(total - i))
    plgpu.wgmma_wait(0)


def dots(queries, keys, part_tile, rows: Any = slice(None)) -> jax.Array:
    """Scores [64 n], not yet scaled.

    Args:
        queries: [parts 64 hd], shared.
        keys: [64 hd], shared.
        part_tile: [3 64 c], shared, where float32 keys are split c columns at a time, else None.
        rows: which n of the keys.
    """

    def product(acc):
        if part_tile is None:
            plgpu.wgmma(acc, queries.at[0], keys.at[rows].transpose((1, 0)))
            return acc[...]
        width = part_tile.shape[-1]
        for c in range(0, keys.shape[-1], width):
            columns = pl.ds(c, width)
            store_parts(part_tile, plgpu.load(keys.at[:, columns], layout=plgpu.Layout.WGMMA))
            multiply_parts(
                acc,
                lambda i, columns=columns: queries.at[i, :, columns],
                lambda i: part_tile.at[i, rows].transpose((1, 0)),
            )
        return acc[...]

    n = TILE if isinstance(rows, slice) else rows.size
    return pl.run_scoped(product, plgpu.ACC((TILE, n), jnp.float32))


def add_weighted(sums, keep, weights, values, first, part_tile) -> tuple[jax.Array, ...]:
    """Rescale the sums, and add the values of a step.

    Args:
        sums: column chunks [64 c] of the weighted values so far.
        keep: factor of each query's sums.
        weights: [n parts 64 64/n], shared: for the n-th part of the values' rows.
        values: [64 *], shared.
        first: column of the values at which the sums begin.
        part_tile: as in `dots`, c columns wide.
    """
    width, (count, _, _, rows) = sums[0].shape[-1], weights.shape

    def product(acc, at):
        part = values.at[:, pl.ds(at, width)]
        if part_tile is not None:
            store_parts(part_tile, plgpu.load(part, layout=plgpu.Layout.WGMMA))
        for n in range(count):
            here = pl.ds(n * rows, rows)
            if part_tile is None:
                plgpu.wgmma(acc, weights.at[n, 0], part.at[here])
            else:
                multiply_parts(
                    acc,
                    lambda i, n=n: weights.at[n, i],
                    lambda i, here=here: part_tile.at[i, here],
                )
        return acc[...]

    return tuple(
        x * jax.lax.broadcast_in_dim(keep, x.shape, [0])
        + pl.run_scoped(
            functools.partial(product, at=first + i * width),
            plgpu.ACC((TILE, width), jnp.float32),
        )
        for i, x in enumerate(sums)
    )


def masked(scores: jax.Array, kind, first, lo, end, bits) -> jax.Array:
    """The scores [64 n] of a step, -inf where a query does not see.

    Args:
        scores: of a tile's queries.
        kind: as `Walk.kind` has it.
        first: context slot, or in the own block the own key, of the first column.
        lo: [64] in memory: first slot each query sees.
        end: one past the last slot.
        bits: [words 64] in memory, as `pack_ancestors` makes them.
    """
    shape = scores.shape

    def column():
        return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA) + first

    def wide(ref):
        numbers = plgpu.load(ref, layout=ROW, optimized=False)
        return jax.lax.broadcast_in_dim(numbers, shape, [0])

    def context(scores):
        slot = column()
        return jnp.where((slot >= wide(lo)) & (slot < end), scores, -jnp.inf)

    def own(scores):
        key = column()
        word = wide(bits.at[0])
        if bits.shape[0] == 2:
            word = jnp.where(key < WORD, word, wide(bits.at[1]))
        bit = jax.lax.shift_right_logical(word, key & (WORD - 1)) & 1
        return jnp.where((bit == 1) & (key < WORD * bits.shape[0]), scores, -jnp.inf)

    return jax.lax.switch(kind, [lambda x: x, context, own], scores)


def constant(x: float, shape: tuple[int, ...]) -> jax.Array:
    """Float32 numbers [64] or [64 n] in registers."""
    layout = ROW if len(shape) == 1 else plgpu.Layout.WGMMA
    return plgpu.layout_cast(jnp.full(shape, x, jnp.float32), layout)


def weigh(scores: jax.Array, top: jax.Array, new_top: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A step's weights [64 n] and the factor [64] of all before it, as the maximum rises."""
    base = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    weights = jnp.exp2(scores - jax.lax.broadcast_in_dim(base, scores.shape, [0]))
    return weights, jnp.exp2(top - base)


def write_sums(sums, out_tile, out, first_row, first_column, plan: Plan) -> None:
    """Copy the sums to memory through shared memory, in column pieces.

    Args:
        sums: column chunks [64 c].
        out_tile: [64 c'], shared, the warpgroup's own; c' divides c.
        out: [rows hv] in memory.
        first_row: of the tile.
        first_column: of the sums.
        plan: which says how many rows of the tile are wanted.
    """
    width = out_tile.shape[-1]
    for i, x in enumerate(sums):
        for c in range(0, x.shape[-1], width):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_tile[...] = x[:, c : c + width]
            plgpu.commit_smem()
            columns = pl.ds(first_column + i * x.shape[-1] + c, width)
            plgpu.copy_smem_to_gmem(
                out_tile.at[pl.ds(0, plan.stored)],
                out.at[pl.ds(first_row, plan.stored), columns],
            )


def write_rows(numbers, stat_tile, out, first_row, first: int = 0) -> None:
    """Copy numbers [64] each to memory [* rows] from its row `first` on, through shared memory."""
    for i, x in enumerate(numbers):
        stat_tile[i] = x
    plgpu.commit_smem()
    for i in range(len(numbers)):
        plgpu.copy_smem_to_gmem(stat_tile.at[i], out.at[first + i, pl.ds(first_row, TILE)])
