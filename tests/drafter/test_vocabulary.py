"""The draft vocabulary: its choice, its check, and the offsets of other projects."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from eagle3_jax.contracts import ContractError
from eagle3_jax.drafter.vocabulary import (
    check_vocabulary,
    choose_vocabulary,
    from_offsets,
    to_offsets,
)


@hypothesis.given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=30), data=st.data())
def test_the_most_frequent_tokens_are_chosen(counts, data):
    """No token left out is more frequent than one taken in; among equals the lower id is taken."""
    size = data.draw(st.integers(1, len(counts)))
    chosen = choose_vocabulary(np.array(counts), size)
    assert chosen.dtype == np.int32 and len(set(chosen.tolist())) == size
    wanted = sorted(sorted(range(len(counts)), key=lambda i: (-counts[i], i))[:size])
    assert chosen.tolist() == wanted
    check_vocabulary(chosen, len(counts))


def test_unused_ids_fill_up():
    assert choose_vocabulary(np.array([0, 0, 5, 0, 1, 0]), 4).tolist() == [0, 1, 2, 4]


@hypothesis.given(st.sets(st.integers(0, 60), min_size=1))
def test_offsets_go_both_ways(ids):
    ids = np.array(sorted(ids), np.int32)
    offsets = to_offsets(ids)
    np.testing.assert_array_equal(offsets + np.arange(len(ids)), ids)
    np.testing.assert_array_equal(from_offsets(offsets), ids)
    assert from_offsets(offsets.astype(np.int64)).dtype == np.int32


@pytest.mark.parametrize("ids", [[0, 2, 2], [3, 1], [-1, 0], [0, 10], [0, 0, 1, 1]])
def test_what_cannot_be_a_map_is_refused(ids):
    with pytest.raises(ContractError, match="strictly ascending ids below 10"):
        check_vocabulary(np.array(ids), 10)


def test_offsets_read_as_ids_are_named():
    with pytest.raises(ContractError, match="offsets was read as ids"):
        check_vocabulary(to_offsets(np.array([0, 1, 5, 6, 9])), 10)
    check_vocabulary(np.array([0, 9]), 10)
