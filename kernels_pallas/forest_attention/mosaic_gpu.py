"""Grouped-query attention of a tree on Hopper (sm_90a), by Mosaic GPU.

A CTA takes a row, a key head and a split of the context; each warpgroup that multiplies has one
tile of 64 queries, of all heads of the group. Where they are more than two tiles, the CTAs of a
cluster share the copies of the context, so that it crosses memory once.
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from kernels_pallas import hopper, operands
from kernels_pallas.plan import TILE, Plan, chunk_of, make_plan, shared_bytes


def unsupported(q, keys, values, own_keys, own_values) -> str | None:
    """Why the kernel cannot do it, None where it can: `forest_attention`'s arrays or their shapes.

    Not of a device: it needs a Hopper GPU, or the interpreter.
    """
    hd, hv = keys.shape[-1], values.shape[-1]
    reason = operands.unsupported(q, keys, own_keys, values, own_values)
    if reason is not None:
        return reason
    if hd % 16 or hv % 16:
        return f"head widths that are multiples of 16 are needed, found {hd} and {hv}"
    if plan_of(q, keys, values).stages < 2:
        return f"head widths {hd} and {hv} in {q.dtype} do not fit into shared memory"
    return None


def plan_of(q, keys, values, splits: int | None = None) -> Plan:
    """How a call is cut; arrays or their shapes."""
    (b, _, w, h, hd), (k, s), hv = q.shape, keys.shape[2:4], values.shape[-1]
    item = jnp.dtype(keys.dtype).itemsize
    rows = w * h // k
    parts, two = (3, 2) if item == 4 else (1, item)
    for tiles in (1,) if parts == 3 or rows <= TILE else (2, 1):
        fixed = shared_bytes(
            tiles * parts * TILE * hd * two,
            tiles * parts * TILE * TILE * two,
            tiles * TILE * _part(hd, hv) * 4,
            tiles * 2 * TILE * 4,
            3 * TILE * _part(hd, hv) * two if parts == 3 else 0,
        )
        plan = make_plan(
            heads=b * k,
            rows=rows,
            tiles=tiles,
            fixed=fixed,
            slots=s,
            splits=splits,
            parts=parts,
            item=item,
            key_width=hd,
            value_width=hv,
            copied_width=hd + hv,
        )
        if plan.stages >= 2:
            break
    return plan


def _part(hd: int, hv: int) -> int:
    """Columns that are written at a time, and that float32 tiles are split at a time."""
    return chunk_of(math.gcd(hd, hv), 64)


def attend(
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
    splits,
    interpret,
):
    """`forest_attention` for one root a row, forward only; see the api for shapes.

    Args:
        splits: parts of the context, None for as many as fill an H200.
        interpret: step by step on CPU.

    Raises:
        NotImplementedError: what `unsupported` says.
    """
    reason = unsupported(q, keys, values, own_keys, own_values)
    if reason is not None:
        raise NotImplementedError(f"forest_attention on mosaic_gpu: {reason}; use xla")
    b, w, k = q.shape[0], q.shape[2], keys.shape[2]
    plan = plan_of(q, keys, values, splits)
    kernel = hopper.make_kernel(
        "forest_attention",
        functools.partial(_body, plan=plan, scale=scale),
        plan,
        batch=(b, k),
        readers=plan.tiles,
        totals=1,
        scratch=_scratch(plan, keys.dtype),
        interpret=interpret,
    )
    sums, stats = kernel(
        *operands.of_queries(q, layer, row, lo, hi, ancestors, k, plan),
        keys,
        values,
        operands.arrange_own(own_keys),
        operands.arrange_own(own_values),
    )
    return operands.combine(sums, stats, plan, sinks, w, q.dtype)


def _scratch(plan: Plan, dtype) -> dict:
    """Shared memory and barriers of a CTA."""
    p = plan
    low = jnp.bfloat16 if p.parts == 3 else dtype
    piece = math.gcd(TILE, p.key_width, p.value_width)
    part = _part(p.key_width, p.value_width)
    k_tiles, k_full, k_free = hopper.pipe_types(p, p.tiles, p.key_width, dtype, piece)
    v_tiles, v_full, v_free = hopper.pipe_types(p, p.tiles, p.value_width, dtype, piece)
    split = {"part_tile": hopper.tile((3,), part, low, piece)}
    return (split if p.parts == 3 else {}) | {
        "q_tiles": hopper.tile((p.tiles, p.parts), p.key_width, low, piece),
        "k_tiles": k_tiles,
        "v_tiles": v_tiles,
        "weight_tiles": hopper.tile((p.tiles, 1, p.parts), TILE, low, piece),
        "out_tiles": hopper.tile((p.tiles,), part, jnp.float32, part),
        "stat_tiles": plgpu.SMEM((p.tiles, 2, TILE), jnp.float32),
        "q_full": plgpu.Barrier(num_barriers=p.tiles, num_arrivals=p.parts),
        "k_full": k_full,
        "v_full": v_full,
        "k_free": k_free,
        "v_free": v_free,
    }


def _body(
    at,
    spans,
    lo,
    bits,
    q,
    keys,
    values,
    own_keys,
    own_values,
    out,
    stats,
    *,
    q_tiles,
    k_tiles,
    v_tiles,
    weight_tiles,
    out_tiles,
    stat_tiles,
    q_full,
    k_full,
    v_full,
    k_free,
    v_free,
    part_tile=None,
    plan: Plan,
    scale: float,
):
    """One CTA; the last warpgroup copies, the others multiply."""
    p = plan
    wg = jax.lax.axis_index("wg")
    steps = hopper.walk(spans, p.splits)

    @pl.when(wg == p.tiles)
    def _():
        if p.tiles == 2:
            plgpu.set_max_registers(40, action="decrease")
        pipes = (
            hopper.Pipe(keys, own_keys, k_tiles, k_full, k_free),
            hopper.Pipe(values, own_values, v_tiles, v_full, v_free),
        )
        hopper.copy_tiles(steps, at, p, pipes)

    @pl.when(wg < p.tiles)
    def _():
        if p.tiles == 2:
            plgpu.set_max_registers(232, action="increase")
        cta = jax.lax.axis_index("group") * p.cluster + jax.lax.axis_index("cta")
        first_row = (cta * p.tiles + wg) * TILE
        mine = pl.ds(first_row, TILE)
        for i in range(p.parts):
            source = q.at[i, steps.row, steps.head, mine]
            plgpu.copy_gmem_to_smem(source, q_tiles.at[wg, i], q_full.at[wg])
        plgpu.barrier_wait(q_full.at[wg])

        def step(i, state):
            top, total, sums = state
            stage = jax.lax.rem(i, p.stages)
            plgpu.barrier_wait(k_full.at[stage])
            scores = hopper.dots(q_tiles.at[wg], k_tiles.at[stage], part_tile)
            plgpu.barrier_arrive(k_free.at[stage])
            scores = hopper.masked(
                scores * (scale * hopper.LOG2E),
                steps.kind(i),
                jnp.where(i < steps.own, 0, steps.slot(i)),
                lo.at[steps.row, mine],
                steps.end,
                bits.at[steps.row, :, mine],
            )
            new_top = jnp.maximum(top, scores.max(axis=1))
            weights, keep = hopper.weigh(scores, top, new_top)
            total = total * keep + weights.sum(axis=1)
            hopper.store_parts(weight_tiles.at[wg, 0], weights)
            plgpu.barrier_wait(v_full.at[stage])
            sums = hopper.add_weighted(
                sums, keep, weight_tiles.at[wg], v_tiles.at[stage], 0, part_tile
            )
            plgpu.barrier_arrive(v_free.at[stage])
            return new_top, total, sums

        chunk = chunk_of(p.value_width, 128) if part_tile is None else part_tile.shape[-1]
        zeros = tuple(hopper.constant(0.0, (TILE, chunk)) for _ in range(p.value_width // chunk))
        state = hopper.constant(-jnp.inf, (TILE,)), hopper.constant(0.0, (TILE,)), zeros
        top, total, sums = jax.lax.fori_loop(0, steps.steps, step, state)
        where = steps.row, steps.head, steps.split
        hopper.write_rows((top, total), stat_tiles.at[wg], stats.at[where], first_row)

        @pl.when(steps.steps > 0)
        def _():
            hopper.write_sums(sums, out_tiles.at[wg], out.at[where], first_row, 0, p)

        plgpu.wait_smem_to_gmem(0)
