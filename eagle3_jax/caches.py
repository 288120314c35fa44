"""Caches, their rows, and where the queries of a pass stand.

A cache is read-only during a pass; the pass returns its new rows beside it, and `write_rows` puts
the accepted ones in afterwards. That order is what lets XLA update a donated cache in place.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from kernels_pallas import Backend

UNROLLED_ROWS = 8
"""Up to this many rows are written without a loop, whose turns cost more than the copy."""


@nnx.dataclass
class Rows(nnx.Pytree):
    """New cache rows of one pass.

    Attributes:
        keys: one key (or compressed latent and rotated key) a position and cache head.
        values: None for latent attention.
    """

    keys: Float[Array, "l b k n hd"] = nnx.data()
    values: Float[Array, "l b k n hv"] | None = nnx.data()


@nnx.dataclass
class Cache(nnx.Pytree):
    """Keys and values of every layer, row and slot; slot = position.

    Attributes:
        keys: as `Rows.keys`, with s slots.
        values: None for latent attention.
    """

    keys: Float[Array, "l b k s hd"] = nnx.data()
    values: Float[Array, "l b k s hv"] | None = nnx.data()

    @property
    def capacity(self) -> int:
        """Slots a row."""
        return self.keys.shape[3]


@nnx.dataclass
class Scope(nnx.Pytree):
    """Where the queries of a pass stand and what they see.

    Attributes:
        positions: rope position of each query, in tokens.
        lo: first context slot seen.
        hi: one past the last context slot seen, by root.
        ancestors: which slots of its block a query sees, itself among them.
        row: first cache row the queries belong to.
        backend: which form of attention the pass takes; static.
    """

    positions: Int[Array, "b r w"] = nnx.data()
    lo: Int[Array, "b r w"] = nnx.data()
    hi: Int[Array, "b r"] = nnx.data()
    ancestors: Bool[Array, "b w u"] = nnx.data()
    row: Int[Array, ""] = nnx.data()
    backend: Backend = nnx.static(default="xla")


def text_scope(starts: Int[Array, "b t"]) -> Scope:
    """One pass without a cache over whole texts: every position a root that sees what precedes it.

    Args:
        starts: the position at which each position's document starts (0 for a single document).
    """
    b, t = starts.shape
    index = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32)[None], (b, t))
    return Scope(
        positions=(index - starts)[..., None],
        lo=starts[..., None],
        hi=index,
        ancestors=jnp.ones((b, 1, 1), bool),
        row=jnp.zeros((), jnp.int32),
    )


def block_scope(
    lengths: Int[Array, " b"],
    depth: Int[Array, "b w"],
    ancestors: Bool[Array, "b w u"],
    row: Int[Array, ""] | int = 0,
    backend: Backend = "xla",
) -> Scope:
    """One block a row on top of `lengths` committed slots: a prefill chunk, a verify, a refresh."""
    b, w = depth.shape
    return Scope(
        positions=(lengths[:, None] + depth)[:, None],
        lo=jnp.zeros((b, 1, w), jnp.int32),
        hi=lengths[:, None],
        ancestors=ancestors,
        row=jnp.asarray(row, jnp.int32),
        backend=backend,
    )


def within(scope: Scope, window: Int[Array, ""]) -> Scope:
    """The scope in which a query sees its `window` last tokens, itself among them.

    A context slot holds the position that many past its document's start, and the block's own keys
    are the queries' (u = w): a node's distance to its ancestor is their difference in depth.
    """
    own = scope.lo + scope.positions
    position = scope.positions[:, 0]
    apart = position[:, :, None] - position[:, None]
    return dataclasses.replace(
        scope,
        lo=jnp.maximum(scope.lo, own - window + 1),
        ancestors=scope.ancestors & (apart < window),
    )


def causal(b: int, w: int) -> Bool[Array, "b w w"]:
    """Ancestors of a chain: every slot sees itself and all before it."""
    slot = jnp.arange(w)
    return jnp.broadcast_to((slot[:, None] >= slot[None])[None], (b, w, w))


def write_rows(
    cache: Cache,
    rows: Rows,
    start: Int[Array, " b"],
    row: Int[Array, ""] | int = 0,
    *,
    after: Float[Array, "..."] | None = None,
) -> Cache:
    """Write new rows at each row's own slot, in place where the cache is donated.

    Args:
        cache: written to.
        rows: all n of them are written; those past the accepted ones land on slots nobody reads.
        start: first slot by row; `start + n` must not pass the capacity.
        row: first cache row that `rows` belong to.
        after: what the pass that read the old cache came to. Inside a compiled loop, without that
            dependency, XLA may order the write before a read, and then copies the whole cache.
    """
    rows, _ = jax.lax.optimization_barrier((rows, after))
    count = rows.keys.shape[1]

    def write(whole, new):
        def put(i, whole):
            one = jax.lax.dynamic_slice_in_dim(new, i, 1, axis=1)
            at = (0, row + i, 0, start[i], 0)
            return jax.lax.dynamic_update_slice(whole, one.astype(whole.dtype), at)

        if count <= UNROLLED_ROWS:
            for i in range(count):
                whole = put(i, whole)
            return whole
        return jax.lax.fori_loop(0, count, put, whole)

    values = None if cache.values is None else write(cache.values, rows.values)
    return Cache(keys=write(cache.keys, rows.keys), values=values)


def take_path(rows: Rows, path: Int[Array, "b p"]) -> Rows:
    """The rows of each row's path, in order: [l b k n hd] -> [l b k p hd]."""

    def take(x):
        return jnp.take_along_axis(x, path[None, :, None, :, None], axis=3)

    return Rows(keys=take(rows.keys), values=None if rows.values is None else take(rows.values))
