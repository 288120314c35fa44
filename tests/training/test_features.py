"""Kept readings: read once, the same from disk, refused where they are another's."""

import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.contracts import RequestError
from eagle3_jax.loop.learn import read_text
from eagle3_jax.testing import tiny_verifier
from eagle3_jax.training import features
from eagle3_jax.training.data import Document, Packed
from eagle3_jax.training.features import Readings

BOUNDARIES = (1, 2, 4)


@pytest.fixture(scope="module")
def packed():
    rng = np.random.default_rng(0)
    documents = [
        Document(str(i), rng.integers(2, 64, n).astype(np.int32), np.ones(n, bool))
        for i, n in enumerate((30, 21, 40, 9))
    ]
    return Packed(documents, 16, 0)


def test_rows_are_read_once_and_kept(packed, tmp_path, monkeypatch):
    verifier = tiny_verifier("llama")
    numbers = np.array([[0, 3], [5, 0]])
    asked = []
    read = features._read
    monkeypatch.setattr(
        features, "_read", lambda v, t, *rest: (asked.append(len(t)), read(v, t, *rest))[1]
    )
    taken = Readings(tmp_path, verifier, packed, BOUNDARIES).take(numbers)
    assert asked == [2, 2]  # three rows, two at a time, one shape
    for n in range(2):
        rows = numbers[n]
        wanted = read_text(
            verifier, jnp.asarray(packed.tokens[rows]), jnp.asarray(packed.starts[rows]), BOUNDARIES
        )
        np.testing.assert_allclose(taken.features[n], wanted.features, atol=1e-5)
        np.testing.assert_allclose(taken.hidden[n], wanted.hidden, atol=1e-5)
        assert np.array_equal(taken.best[n], wanted.best)
    again = Readings(tmp_path, verifier, packed, BOUNDARIES).take(numbers)
    assert len(asked) == 2
    assert np.array_equal(again.features, taken.features)
    assert again.features.dtype == verifier.dtype


def test_a_row_that_was_not_wholly_written_is_read_again(packed, tmp_path, monkeypatch):
    verifier = tiny_verifier("llama")
    readings = Readings(tmp_path, verifier, packed, BOUNDARIES)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(features, "_read", killed)
        with pytest.raises(KeyboardInterrupt):
            readings.take(np.array([[1]]))
    taken = Readings(tmp_path, verifier, packed, BOUNDARIES).take(np.array([[1]]))
    assert float(jnp.abs(taken.hidden).sum()) > 0


def test_another_s_readings_are_refused(packed, tmp_path):
    Readings(tmp_path, tiny_verifier("llama"), packed, BOUNDARIES)
    with pytest.raises(RequestError, match="features was .*name another folder"):
        Readings(tmp_path, tiny_verifier("llama"), packed, (1, 2, 3))
    other = Packed([Document("a", np.arange(2, 60, dtype=np.int32), np.ones(58, bool))], 16, 0)
    with pytest.raises(RequestError, match="tokens was"):
        Readings(tmp_path, tiny_verifier("llama"), other, BOUNDARIES)
