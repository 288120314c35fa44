"""Rows: a prompt's reading gone on from where a row has it, and text that may be shown."""

import jax
import numpy as np
import pytest

from eagle3_jax.batch import seat, sure
from eagle3_jax.configs import Sampling, Speculation
from eagle3_jax.forest.processing import plan_of
from eagle3_jax.loop.decode import DecodeStages
from eagle3_jax.testing import tiny_drafter, tiny_verifier

SAMPLING = Sampling(temperature=0.7, repetition_penalty=1.3)
CAPACITY = 256


@pytest.fixture(scope="module")
def stages():
    return DecodeStages(
        verifier=tiny_verifier("llama"),
        drafter=tiny_drafter("llama"),
        speculation=Speculation(depth=2),
        plan=plan_of([SAMPLING]),
    )


@pytest.mark.parametrize(
    ("length", "keep"),
    [(30, 19), (180, 20), (150, 149), (250, 200)],
    ids=["one chunk", "two chunks", "one position", "a chunk that would pass the end"],
)
def test_a_row_that_has_the_beginning_reads_the_rest(stages, length, keep):
    """Against a fresh reading: rows, text, what waits for the drafter, what the penalty sees."""
    rng = np.random.default_rng(length)
    text = rng.integers(2, 40, length).tolist()
    other = text[: keep + 1] + rng.integers(40, 64, 20).tolist()
    fresh = seat(stages, stages.make_state(2, CAPACITY), 1, text, 20, SAMPLING)
    state = seat(stages, stages.make_state(2, CAPACITY), 1, other[:CAPACITY], 0, SAMPLING)
    state = seat(stages, state, 1, text, 20, SAMPLING, keep=keep)
    for name in ("length", "draft_length", "end", "limit", "done", "seen"):
        np.testing.assert_array_equal(getattr(state, name), getattr(fresh, name), err_msg=name)
    np.testing.assert_array_equal(state.tokens[:, : length + 1], fresh.tokens[:, : length + 1])
    assert state.pending is not None and fresh.pending is not None
    np.testing.assert_allclose(state.pending, fresh.pending, atol=2e-5)
    pairs = (state.cache, fresh.cache, length), (state.draft_cache, fresh.draft_cache, length - 1)
    for mine, theirs, n in pairs:
        for x, y in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_allclose(x[..., :n, :], y[..., :n, :], atol=2e-5)


@pytest.mark.parametrize(
    ("text", "stops", "shown"),
    [
        ("", (), ""),
        ("abc", (), "abc"),
        ("ab\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}", (), "ab"),
        ("a\N{REPLACEMENT CHARACTER}b", (), "a\N{REPLACEMENT CHARACTER}b"),
        ("abc", ("cd",), "ab"),
        ("abc", ("cd", "bcd"), "a"),
        ("aaa", ("aab",), "a"),
        ("ab\N{REPLACEMENT CHARACTER}", ("b!",), "a"),
        ("abc", ("d", "ca"), "ab"),
    ],
)
def test_what_may_still_change_is_not_shown(text, stops, shown):
    assert sure(text, stops) == shown
