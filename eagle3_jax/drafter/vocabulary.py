"""The draft vocabulary: which verifier tokens a drafter can propose."""

import numpy as np
from jaxtyping import Int

from eagle3_jax.contracts import ContractError


def choose_vocabulary(counts: Int[np.ndarray, " v"], size: int) -> Int[np.ndarray, " dv"]:
    """Verifier ids of the draft vocabulary, ascending: the most frequent tokens.

    Args:
        counts: how often each verifier token was learned from (loss-masked tokens only).
        size: dv. Where fewer distinct tokens occur, the lowest unused ids fill up.
    """
    order = np.lexsort((np.arange(len(counts)), -counts))
    return np.sort(order[:size]).astype(np.int32)


def check_vocabulary(ids: Int[np.ndarray, " dv"], vocab_size: int) -> None:
    """Refuse a map that cannot be one.

    Raises:
        ContractError: not strictly ascending, or ids outside the verifier's vocabulary.
    """
    ids = np.asarray(ids)
    if ids[0] < 0 or ids[-1] >= vocab_size or np.any(np.diff(ids) <= 0):
        raise ContractError(
            f"the draft vocabulary map must be strictly ascending ids below {vocab_size}; found "
            f"{len(ids)} ids from {ids[0]} to {ids[-1]}; a map of offsets was read as ids, or it "
            "belongs to another tokenizer"
        )


def to_offsets(ids: Int[np.ndarray, " dv"]) -> Int[np.ndarray, " dv"]:
    """The `d2t` of other projects: verifier id minus draft id."""
    return ids - np.arange(len(ids), dtype=ids.dtype)


def from_offsets(d2t: Int[np.ndarray, " dv"]) -> Int[np.ndarray, " dv"]:
    """Verifier ids from another project's `d2t`."""
    return (d2t + np.arange(len(d2t), dtype=d2t.dtype)).astype(np.int32)
