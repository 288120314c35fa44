"""Greedy judgement of a tree, and the choice of its backend."""

from jax import Array
from jaxtyping import Bool, Int

from kernels_pallas.backends import Backend, interpreted
from kernels_pallas.tree_walk import reference, xla


def tree_walk(
    agreed: Bool[Array, "b w"],
    parents: Int[Array, "b w"],
    best: Int[Array, "b w"],
    *,
    max_depth: int,
    backend: Backend = "xla",
) -> tuple[Int[Array, "b p"], Int[Array, " b"], Int[Array, " b"]]:
    """The path from the root on which every slot was agreed to, and the token after it.

    Args:
        agreed: whether the verifier's choice at a slot's parent is the slot's token; at most one
            child of a slot is. Slot 0, the root, needs no agreement.
        parents: slot of each slot's parent, parents before children; the root is its own.
        best: the verifier's choice after each slot.
        max_depth: of the deepest slot there may be; p = max_depth + 1.
        backend: which form computes it.

    Returns:
        The path's slots (past its end the last one is repeated), how many they are, and `best` at
        the last one; all int32.

    Raises:
        NotImplementedError: the backend cannot; the message says why.
    """
    interpret = interpreted(backend)
    if interpret is not None:
        from kernels_pallas.tree_walk import mosaic_gpu  # a second to import, so only where used

        return mosaic_gpu.walk(agreed, parents, best, max_depth, interpret)
    return (xla if backend == "xla" else reference).walk(agreed, parents, best, max_depth)
