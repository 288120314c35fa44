"""Training rows: read, split and packed."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_jax.contracts import RequestError
from eagle3_jax.training.data import Document, Packed, read_documents, split


def written(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_rows_are_read_with_their_loss_spans(tmp_path):
    row = {"id": "a", "tokens": [5, 6, 7, 8], "loss": [[1, 2], [3, 4]], "temperature": 0.7}
    (document,) = read_documents(written(tmp_path / "d.jsonl", row, ""), 10)
    assert document.tokens.tolist() == [5, 6, 7, 8]
    assert document.learn.tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 1"),
        ({"id": "a", "loss": []}, "line 1: the key 'tokens' is missing"),
        ({"id": "a", "tokens": [1], "loss": [[0, 2]]}, r"loss span \[0, 2\] outside 0 to 1"),
        ({"id": "a", "tokens": [99], "loss": []}, "outside the verifier's vocabulary of 10"),
        ({"id": "a", "tokens": [], "loss": []}, "tokens must be a list"),
        ("", "holds no rows"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, message):
    with pytest.raises(RequestError, match=message):
        read_documents(written(tmp_path / "d.jsonl", row), 10)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(RequestError, match="cannot be read"):
        read_documents(tmp_path / "none.jsonl", 10)


def documents_of(sizes):
    """Documents whose tokens tell document and position: 1000 * document + position."""
    return [
        Document(str(i), np.arange(n, dtype=np.int32) + 1000 * i, np.ones(n, bool))
        for i, n in enumerate(sizes)
    ]


def test_the_split_goes_by_id_and_stays_as_data_grows():
    documents = documents_of([3] * 300)
    learned, held = split(documents[:200], 0.2)
    more_learned, more_held = split(documents, 0.2)
    assert 20 < len(held) < 60 and len(learned) + len(held) == 200
    assert {d.id for d in learned} <= {d.id for d in more_learned}
    assert {d.id for d in held} <= {d.id for d in more_held}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(4, 30), st.integers(0, 5))
def test_packing_keeps_every_document_contiguous(sizes, length, seed):
    documents = documents_of(sizes)
    if sum(sizes) < length:
        with pytest.raises(RequestError, match="too few"):
            Packed(documents, length, seed)
        return
    packed = Packed(documents, length, seed)
    seen = []
    for tokens, starts, learn in zip(packed.tokens, packed.starts, packed.learn, strict=True):
        assert learn.all() and len(tokens) == length
        for t in range(length):
            # From its start on, a document's tokens follow one another.
            assert tokens[t] - tokens[starts[t]] == t - starts[t]
            if starts[t] > 0:
                assert tokens[starts[t]] % 1000 == 0
        seen += tokens.tolist()
    assert len(set(seen)) == len(seen) == packed.rows * length


@given(st.integers(4, 200), st.integers(0, 5), st.none() | st.integers(1, 9))
def test_every_epoch_has_every_row_once_in_an_order_that_is_repeated(size, seed, limit):
    packed, again = (Packed(documents_of([size]), 4, seed, limit) for _ in range(2))
    assert packed.rows == min(size // 4, limit or size)
    epochs = [[packed.number(e * packed.rows + k) for k in range(packed.rows)] for e in range(3)]
    assert all(sorted(epoch) == list(range(packed.rows)) for epoch in epochs)
    late = packed.rows * 3 + 1
    assert again.number(late) == packed.number(late)
    tokens, starts, learn = again.batches(late, 2, 3)
    numbers = packed.numbers(late, 2, 3)
    assert numbers.ravel().tolist() == [packed.number(late * 3 + k) for k in range(6)]
    assert np.array_equal(tokens, packed.tokens[numbers])
    assert tokens.shape == starts.shape == learn.shape == (2, 3, 4)


def test_a_share_of_the_rows_is_part_of_all_of_them():
    few, all_of_them = (Packed(documents_of([50, 30]), 8, 0, limit) for limit in (3, None))
    assert few.rows == 3 and np.array_equal(few.tokens, all_of_them.tokens)
