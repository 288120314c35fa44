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
        logits: the drafter's, over the draft vocabulary, that each drafted node came from; None
            where nothing was drafted.
    """

    tokens: Int[Array, "b w"] = nnx.data()
    parents: Int[Array, "b w"] = nnx.data()
    depth: Int[Array, "b w"] = nnx.data()
    ancestors: Bool[Array, "b w w"] = nnx.data()
    logits: Float[Array, "b n dv"] | None = nnx.data()


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
    )
