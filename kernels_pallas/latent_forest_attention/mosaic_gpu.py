"""Latent attention of a tree on Hopper (sm_90a), by Mosaic GPU.

A CTA takes 64 queries of a row (of any of its heads, which share one key) and a split of the
context. A tile of latents is copied once and is keys and values both. Two warpgroups divide the
work: each scores half of a tile's latents for all queries, tells the other its maxima and weights,
and sums half of the value columns, since 64 queries' sums of 512 columns fill the registers of two.
The CTAs of a cluster have other queries and share the copies.
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from kernels_pallas import hopper, operands
from kernels_pallas.plan import TILE, Plan, chunk_of, make_plan, shared_bytes

READERS = 2
"""Warpgroups that multiply."""

HALF = TILE // READERS


def unsupported(q, latents, own, value_width: int) -> str | None:
    """Why the kernel cannot do it, None where it can: `latent_forest_attention`'s arrays or shapes.

    Not of a device: it needs a Hopper GPU, or the interpreter.
    """
    hd = latents.shape[-1]
    reason = operands.unsupported(q, latents, own)
    if reason is not None:
        return reason
    if hd % 16 or value_width % 32 or value_width > 512:
        wanted = "latents a multiple of 16 wide and values of 32, at most 512,"
        return f"{wanted} are needed, found {hd} and {value_width}"
    if plan_of(q, latents, value_width).stages < 2:
        return f"latents {hd} wide in {q.dtype} do not fit into shared memory"
    return None


def plan_of(q, latents, value_width: int, splits: int | None = None) -> Plan:
    """How a call is cut; arrays or their shapes."""
    (b, _, w, h, hd), s = q.shape, latents.shape[3]
    item = jnp.dtype(latents.dtype).itemsize
    parts = 3 if item == 4 else 1
    two = 2 if parts == 3 else item
    fixed = shared_bytes(
        max(parts * TILE * hd * two, READERS * TILE * _part(hd, value_width) * 4),
        parts * TILE * TILE * two,
        READERS * 2 * TILE * 4,
        READERS * 3 * TILE * _part(hd, value_width) * two if parts == 3 else 0,
    )
    return make_plan(
        heads=b,
        rows=w * h,
        tiles=1,
        fixed=fixed,
        slots=s,
        splits=splits,
        parts=parts,
        item=item,
        key_width=hd,
        value_width=value_width,
        copied_width=hd,
    )


def _part(hd: int, value_width: int) -> int:
    """Columns that are written at a time, and that float32 tiles are split at a time."""
    return chunk_of(math.gcd(hd, value_width // READERS), 64)


def attend(
    q, latents, layer, lo, hi, own, ancestors, *, scale, value_width, row, splits, interpret
):
    """`latent_forest_attention` for one root a row; see the api for shapes.

    Args:
        splits: parts of the context, None for as many as fill an H200.
        interpret: step by step on CPU.

    Raises:
        NotImplementedError: what `unsupported` says.
    """
    reason = unsupported(q, latents, own, value_width)
    if reason is not None:
        raise NotImplementedError(f"latent_forest_attention on mosaic_gpu: {reason}; use xla")
    b, w = q.shape[0], q.shape[2]
    plan = plan_of(q, latents, value_width, splits)
    kernel = hopper.make_kernel(
        "latent_forest_attention",
        functools.partial(_body, plan=plan, scale=scale),
        plan,
        batch=(b, 1),
        readers=READERS,
        totals=READERS,
        scratch=_scratch(plan, latents.dtype),
        interpret=interpret,
    )
    sums, stats = kernel(
        *operands.of_queries(q, layer, row, lo, hi, ancestors, 1, plan),
        latents,
        operands.arrange_own(own),
    )
    return operands.combine(sums, stats, plan, None, w, q.dtype)


def _scratch(plan: Plan, dtype) -> dict:
    """Shared memory and barriers of a CTA; the sums leave through where the queries were."""
    p = plan
    low = jnp.bfloat16 if p.parts == 3 else dtype
    piece = math.gcd(HALF, p.key_width, p.value_width // READERS)
    tiles, full, free = hopper.pipe_types(p, READERS, p.key_width, dtype, piece)
    part = _part(p.key_width, p.value_width)
    split = {"part_tiles": hopper.tile((READERS, 3), part, low, piece)}
    return (split if p.parts == 3 else {}) | {
        "q_or_out": plgpu.RefUnion(
            hopper.tile((p.parts,), p.key_width, low, piece),
            hopper.tile((READERS,), part, jnp.float32, part),
        ),
        "tiles": tiles,
        "weight_tiles": hopper.tile((READERS, p.parts), HALF, low, piece),
        "stat_tiles": plgpu.SMEM((READERS, 2, TILE), jnp.float32),
        "q_full": plgpu.Barrier(num_arrivals=p.parts),
        "full": full,
        "free": free,
        "met": plgpu.Barrier(num_barriers=2, num_arrivals=READERS),
    }


def _body(
    at,
    spans,
    lo,
    bits,
    q,
    latents,
    own,
    out,
    stats,
    *,
    q_or_out,
    tiles,
    weight_tiles,
    stat_tiles,
    q_full,
    full,
    free,
    met,
    part_tiles=None,
    plan: Plan,
    scale: float,
):
    """One CTA; the last warpgroup copies, the others multiply."""
    p = plan
    q_tile, out_tiles = q_or_out
    wg = jax.lax.axis_index("wg")
    steps = hopper.walk(spans, p.splits)
    cta = jax.lax.axis_index("group") * p.cluster + jax.lax.axis_index("cta")
    first_row = cta * TILE
    mine = pl.ds(first_row, TILE)

    @pl.when(wg == READERS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        for i in range(p.parts):
            plgpu.copy_gmem_to_smem(q.at[i, steps.row, 0, mine], q_tile.at[i], q_full)
        hopper.copy_tiles(steps, at, p, [hopper.Pipe(latents, own, tiles, full, free)])

    @pl.when(wg < READERS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        plgpu.barrier_wait(q_full)
        part_tile = None if part_tiles is None else part_tiles.at[wg]
        half = pl.ds(wg * HALF, HALF)
        columns = wg * (p.value_width // READERS)

        def meet(which):
            plgpu.barrier_arrive(met.at[which])
            plgpu.barrier_wait(met.at[which])

        def step(i, state):
            top, total, sums = state
            stage = jax.lax.rem(i, p.stages)
            plgpu.barrier_wait(full.at[stage])
            scores = hopper.masked(
                hopper.dots(q_tile, tiles.at[stage], part_tile, half) * (scale * hopper.LOG2E),
                steps.kind(i),
                jnp.where(i < steps.own, 0, steps.slot(i)) + wg * HALF,
                lo.at[steps.row, mine],
                steps.end,
                bits.at[steps.row, :, mine],
            )
            stat_tiles[wg, 0] = jnp.maximum(top, scores.max(axis=1))
            meet(0)
            ours, theirs = (
                plgpu.load(stat_tiles.at[n, 0], layout=hopper.ROW) for n in range(READERS)
            )
            new_top = jnp.maximum(ours, theirs)
            weights, keep = hopper.weigh(scores, top, new_top)
            total = total * keep + weights.sum(axis=1)
            hopper.store_parts(weight_tiles.at[wg], weights)
            meet(1)
            sums = hopper.add_weighted(
                sums, keep, weight_tiles, tiles.at[stage], columns, part_tile
            )
            plgpu.barrier_arrive(free.at[stage])
            return new_top, total, sums

        width = p.value_width // READERS
        chunk = chunk_of(width, 128) if part_tile is None else part_tile.shape[-1]
        zeros = tuple(hopper.constant(0.0, (TILE, chunk)) for _ in range(width // chunk))
        state = hopper.constant(-jnp.inf, (TILE,)), hopper.constant(0.0, (TILE,)), zeros
        top, total, sums = jax.lax.fori_loop(0, steps.steps, step, state)
        where = steps.row, steps.head, steps.split

        @pl.when(wg == 0)
        def _():
            hopper.write_rows((top, total), stat_tiles.at[0], stats.at[where], first_row, 0)

        @pl.when(wg == 1)
        def _():
            hopper.write_rows((total,), stat_tiles.at[1], stats.at[where], first_row, 2)

        @pl.when(steps.steps > 0)
        def _():
            hopper.write_sums(sums, out_tiles.at[wg], out.at[where], first_row, columns, p)

        plgpu.wait_smem_to_gmem(0)
