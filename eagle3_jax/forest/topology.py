"""The shape of a forest: who is whose ancestor, and how deep."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int


@nnx.dataclass
class Forest(nnx.Pytree):
    """One block a row: a root and its drafted nodes, parents before children.

    Attributes:
        tokens: verifier ids; slot 0 is the root.
        parents: block slot of each slot's parent; the root is its own.
        depth: 0 for the root.
        ancestors: which slots lie on the path from the root to each slot, itself among them.
        logits: the drafter's, over the draft vocabulary, after each slot that was expanded; None
            where judging needs none.
        expansion: which of these logits a slot's children came from; None likewise.
    """

    tokens: Int[Array, "b w"] = nnx.data()
    parents: Int[Array, "b w"] = nnx.data()
    depth: Int[Array, "b w"] = nnx.data()
    ancestors: Bool[Array, "b w w"] = nnx.data()
    logits: Float[Array, "b g dv"] | None = nnx.data(default=None)
    expansion: Int[Array, "b w"] | None = nnx.data(default=None)


def chain(
    root: Int[Array, " b"],
    drafted: Int[Array, "b n"],
    logits: Float[Array, "b n dv"] | None,
) -> Forest:
    """A chain: each node the parent of the next."""
    b, n = drafted.shape
    slot = jnp.arange(n + 1, dtype=jnp.int32)

    def by_row(x):
        return jnp.broadcast_to(x[None], (b, *x.shape))

    return Forest(
        tokens=jnp.concatenate([root[:, None], drafted], axis=1),
        parents=by_row(jnp.maximum(slot - 1, 0)),
        depth=by_row(slot),
        ancestors=by_row(slot[:, None] >= slot[None]),
        logits=logits,
        expansion=None if logits is None else by_row(jnp.minimum(slot, max(n - 1, 0))),
    )


def tree(
    root: Int[Array, " b"],
    drafted: Int[Array, "b n"],
    parents: Int[Array, "b n"],
    depth: Int[Array, "b n"],
    max_depth: int,
) -> Forest:
    """Any tree: drafted nodes with parents before children.

    Args:
        root: its token.
        drafted: the nodes' tokens.
        parents: block slot of each node's parent; 0 is the root, node j has slot j + 1.
        depth: of each node; the root's children have 1.
        max_depth: of the deepest node that there may be.
    """
    b, n = drafted.shape
    zero = jnp.zeros((b, 1), jnp.int32)
    parents = jnp.concatenate([zero, parents], axis=1)
    slot = jnp.arange(n + 1, dtype=jnp.int32)
    at = jnp.broadcast_to(slot[None], (b, n + 1))
    ancestors = jnp.zeros((b, n + 1, n + 1), bool)
    for _ in range(max_depth + 1):
        ancestors = ancestors | (at[..., None] == slot[None, None])
        at = jnp.take_along_axis(parents, at, axis=1)
    return Forest(
        tokens=jnp.concatenate([root[:, None], drafted], axis=1),
        parents=parents,
        depth=jnp.concatenate([zero, depth], axis=1),
        ancestors=ancestors,
    )


def links(parents: Int[Array, "b w"]) -> tuple[Int[Array, "b w"], Int[Array, "b w"]]:
    """First child and next sibling of every slot, -1 where there is none.

    Children of a slot are in order of their own slots.
    """
    w = parents.shape[1]
    slot = jnp.arange(w, dtype=jnp.int32)
    drafted = slot > 0
    # [b w w]: the second is a child of the first; a later child of the same parent.
    child = (parents[:, None] == slot[None, :, None]) & drafted[None, None]
    later = (parents[:, None] == parents[..., None]) & (slot[:, None] < slot[None])[None]
    later = later & drafted[None, :, None]

    def first(found):
        low = jnp.min(jnp.where(found, slot[None, None], w), axis=-1)
        return jnp.where(low < w, low, -1)

    return first(child), first(later)
