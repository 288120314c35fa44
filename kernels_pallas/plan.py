"""How the GPU kernels cut a tree's attention into blocks, and what that copies and multiplies.

One `Plan` serves the kernel (grid, clusters, splits, stages) and the count of its bytes.
"""

import dataclasses
import math

TILE = 64
"""Queries a tensor-core instruction multiplies, and context slots a block."""

MULTIPROCESSORS = 132
"""Of an H100 or H200."""

SHARED_BYTES = 225 * 1024
"""Shared memory that tiles may fill: the 227 KiB a block can have, less 2 for barriers."""

CLUSTER = 8
"""Most blocks that share one copy of a context tile."""

STAGES = 4
"""Most context tiles in flight: 64 KiB of heads 64 wide, where an H200's 4.8 TB/s times a
microsecond is 36 KiB a multiprocessor."""

SPLIT_BLOCKS = 2
"""Least blocks a split, and what starting and ending one costs, in blocks."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cut of one call.

    A block of threads (CTA) takes one row, one key head and one split of the context, and `tiles`
    of 64 queries; `cluster` CTAs with other queries share every context tile they copy. `groups`
    is how often the context is copied: more than 1 only past `cluster * tiles` tiles.

    Attributes:
        rows: queries of a key head, w * g.
        heads: rows of the batch times key heads.
        groups: passes over the context.
        cluster: CTAs that share context tiles.
        tiles: tiles of 64 queries a CTA.
        splits: parts of the context.
        stages: context tiles in flight.
        shared: bytes of shared memory.
        parts: bfloat16 parts an operand is multiplied in: 3 for float32, else 1.
        item: bytes of a key's or value's number.
        key_width: hd.
        value_width: hv.
        copied_width: numbers copied a context slot: hd + hv, or hd where the key holds the value.
    """

    rows: int
    heads: int
    groups: int
    cluster: int
    tiles: int
    splits: int
    stages: int
    shared: int
    parts: int
    item: int
    key_width: int
    value_width: int
    copied_width: int

    @property
    def padded(self) -> int:
        """Query rows that the kernel computes."""
        return self.groups * self.cluster * self.tiles * TILE

    @property
    def stored(self) -> int:
        """Query rows of a tile that are written: all, or where there is one tile, those in use."""
        one = self.groups * self.cluster * self.tiles == 1
        return min(TILE, round_up(self.rows, 8)) if one else TILE

    @property
    def written(self) -> int:
        """Query rows of the partial values."""
        return self.padded if self.stored == TILE else self.stored


def round_up(x: int, to: int) -> int:
    """The next multiple of `to`."""
    return -(-x // to) * to


def make_plan(
    *,
    heads: int,
    rows: int,
    tiles: int,
    fixed: int,
    slots: int,
    splits: int | None,
    parts: int,
    item: int,
    key_width: int,
    value_width: int,
    copied_width: int,
) -> Plan:
    """The plan of a call; fewer than 2 stages mean that it does not fit into shared memory.

    Args:
        fixed: bytes of shared memory beside the stages.
        slots: of the cache.
        splits: None for as many as end first.
    """
    stage = TILE * copied_width * item
    stages = min((SHARED_BYTES - fixed) // stage, STAGES)
    ctas = -(-rows // (TILE * tiles))
    cluster = min(CLUSTER, 1 << (ctas - 1).bit_length())
    groups = -(-ctas // cluster)
    plan = Plan(
        heads=heads,
        rows=rows,
        groups=groups,
        cluster=cluster,
        tiles=tiles,
        splits=1,
        stages=stages,
        shared=fixed + max(stages, 0) * stage,
        parts=parts,
        item=item,
        key_width=key_width,
        value_width=value_width,
        copied_width=copied_width,
    )
    return dataclasses.replace(plan, splits=splits or splits_for(plan, slots))


def splits_for(plan: Plan, slots: int) -> int:
    """The number of splits that ends first, by a count of blocks.

    The chip runs as many splits at a time as it has multiprocessors. One costs its blocks,
    `SPLIT_BLOCKS` for its start and end, and its partial values, written and read again.
    """
    p = plan
    blocks = -(-slots // TILE)
    at_once = MULTIPROCESSORS // p.cluster * p.cluster
    ctas = p.heads * p.groups * p.cluster
    partials = 2 * p.tiles * p.stored * p.value_width * 4 / (TILE * p.copied_width * p.item)

    def time(splits: int) -> float:
        waves = -(-ctas * splits // at_once)
        return waves * (-(-blocks // splits) + SPLIT_BLOCKS + partials)

    most = max(1, min(blocks // SPLIT_BLOCKS, 4 * at_once))
    return min(range(1, most + 1), key=lambda n: (time(n), n))


def shared_bytes(*buffers: int) -> int:
    """Of buffers that begin at multiples of 1 KiB."""
    return sum(round_up(buffer, 1024) for buffer in buffers)


def chunk_of(width: int, most: int) -> int:
    """The widest column chunk of at most `most` that divides a width, a multiple of 16."""
    return next(c for c in (128, 64, 32, 16) if c <= most and width % c == 0)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one call, counted from a plan's own copies; bytes unless said otherwise.

    Attributes:
        context: copies of context tiles out of memory.
        queries: copies of queries, own block, limits and bits.
        partials: the splits' values, totals and maxima, written and read again.
        output: the attended values.
        least: the context that some query sees, once, with queries, own block and output.
        least_context: the first of these alone.
        flops: of the tensor cores, padding and all.
    """

    context: int
    queries: int
    partials: int
    output: int
    least: int
    least_context: int
    flops: int

    @property
    def context_ratio(self) -> float:
        """Copies of the context over the least."""
        return self.context / self.least_context

    @property
    def ratio(self) -> float:
        """All bytes over the least, the partials among them (in L2 while they fit)."""
        return (self.context + self.queries + self.partials + self.output) / self.least


def cost(plan: Plan, own: int, lengths: list[tuple[int, int]], key_heads: int) -> Cost:
    """What a plan copies and multiplies.

    Args:
        plan: of the call.
        own: own keys of a row, u.
        lengths: first context slot that some query of a row sees, and one past the last.
        key_heads: k.
    """
    p = plan
    slot = p.copied_width * p.item
    blocks = [-(-hi // TILE) - lo // TILE if hi > lo else 0 for lo, hi in lengths]
    seen = sum(max(hi - lo, 0) for lo, hi in lengths) * key_heads
    context = sum(blocks) * TILE * key_heads * p.groups * slot
    # The own block and a row's queries are copied by the CTAs that use them.
    ctas = p.heads * p.groups * p.cluster
    query = p.key_width * (2 * p.parts if p.parts > 1 else p.item)
    queries = ctas * p.splits * p.tiles * TILE * (query + 4 + 4 * math.ceil(own / 32))
    queries += p.heads * p.groups * TILE * slot
    # Splits without work write no sums, but XLA reads them.
    worked = sum(max(1, -(-n // max(1, -(-n // p.splits)))) for n in blocks) * key_heads
    sums, numbers = p.written * p.value_width * 4, p.heads * p.splits * 2 * p.padded * 4
    partials = (worked + p.heads * p.splits) * sums + 2 * numbers
    output = p.heads * p.rows * p.value_width * p.item
    products = p.parts * (p.parts + 1) // 2
    steps = sum(blocks) * key_heads + p.heads
    flops = 2 * steps * p.padded * TILE * (p.key_width + p.value_width) * products
    once = p.heads * (p.rows * p.key_width * p.item + own * slot)
    return Cost(
        context=context,
        queries=queries,
        partials=partials,
        output=output,
        least=seen * slot + once + output,
        least_context=seen * slot,
        flops=flops,
    )
