"""Judging a forest: which drafted nodes the verifier agrees with."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from eagle3_jax.forest.topology import Forest
from kernels_pallas import Backend, tree_walk


@nnx.dataclass
class Verdict(nnx.Pytree):
    """The accepted path of each row.

    Attributes:
        path: block slots from the root down; past `count` the last one is repeated.
        count: slots on the path, the root among them: accepted nodes + 1.
        bonus: the token that the verifier itself yields at the path's end.
    """

    path: Int[Array, "b p"] = nnx.data()
    count: Int[Array, " b"] = nnx.data()
    bonus: Int[Array, " b"] = nnx.data()


def likeliest(logits: Float[Array, "*lead v"]) -> Int[Array, "*lead"]:
    """The lowest id of the greatest logit, as `argmax`, whose own reduction is five times slower.

    A row that holds a NaN gives the last id.
    """
    v = logits.shape[-1]
    ids = jnp.arange(v, dtype=jnp.int32).reshape((1,) * (logits.ndim - 1) + (v,))
    best = logits == jnp.max(logits, axis=-1, keepdims=True)
    return jnp.min(jnp.where(best, ids, v - 1), axis=-1)


def agree(proposed: Int[Array, "*n"], best: Int[Array, "*n"]) -> Bool[Array, "*n"]:
    """Node by node: is the proposed token the verifier's own greedy choice at the node's parent?

    Decoding accepts by it, learning counts by it.
    """
    return proposed == best


def judge_greedily(
    forest: Forest,
    logits: Float[Array, "b w v"],
    max_depth: int,
    backend: Backend = "xla",
) -> Verdict:
    """The longest path on which every node is the verifier's greedy choice at its parent.

    Args:
        forest: root and drafted nodes; siblings have different tokens.
        logits: the verifier's, at every slot.
        max_depth: of the deepest node; p = max_depth + 1.
        backend: of the walk.
    """
    best = likeliest(logits)
    wanted = jnp.take_along_axis(best, forest.parents, axis=1)
    path, count, bonus = tree_walk(
        agree(forest.tokens, wanted), forest.parents, best, max_depth=max_depth, backend=backend
    )
    return Verdict(path=path, count=count, bonus=bonus)
