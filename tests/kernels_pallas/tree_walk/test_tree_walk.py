"""Every form of the tree walk against a plain walk; forms subclass one test class."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import MOST_SLOTS, tree_walk

SHAPES = ((1, 1), (3, 9), (1, 64))
"""(rows, slots): a root alone, a small tree, the most a kernel walks."""


@st.composite
def cases(draw):
    """Parents before children, and at most one child of a slot agreed to."""
    b, w = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    stays = draw(st.sampled_from((0.0, 0.5, 0.95)))
    """How often a slot's parent is the slot before it: bushes, mixtures, near chains."""
    parents, agreed = np.zeros((b, w), np.int32), np.zeros((b, w), bool)
    for row in range(b):
        for slot in range(1, w):
            parents[row, slot] = slot - 1 if rng.random() < stays else rng.integers(slot)
        for slot in range(w):
            children = [c for c in range(1, w) if parents[row, c] == slot]
            if children and rng.random() < 0.9:
                agreed[row, rng.choice(children)] = True
        agreed[row, 0] = rng.random() < 0.5  # the root needs none
    return agreed, parents, rng.integers(1000, size=(b, w), dtype=np.int32)


def expected(agreed, parents, best):
    """The definition: [b p] path, [b] count, [b] bonus."""
    b, w = parents.shape
    path, count, bonus = np.zeros((b, w), np.int32), np.zeros((b,), np.int32), []
    for row in range(b):
        at, steps = 0, [0]
        while True:
            after = [c for c in range(1, w) if parents[row, c] == at and agreed[row, c]]
            if not after:
                break
            (at,) = after
            steps.append(at)
        path[row], count[row] = steps + [at] * (w - len(steps)), len(steps)
        bonus.append(best[row, at])
    return path, count, np.array(bonus)


walk = functools.partial(jax.jit, static_argnames=("max_depth", "backend"))(tree_walk)


inherited = hypothesis.settings(
    max_examples=15, suppress_health_check=[hypothesis.HealthCheck.differing_executors]
)


class Walk:
    """What every backend must do."""

    backend = "xla"

    @inherited
    @hypothesis.given(case=cases())
    def test_the_path_is_that_of_a_plain_walk(self, case):
        """Depth w - 1 is the deepest there can be."""
        given = [jnp.asarray(x) for x in case]
        out = walk(*given, max_depth=case[1].shape[1] - 1, backend=self.backend)
        for found, wanted in zip(out, expected(*case), strict=True):
            assert found.dtype == jnp.int32
            np.testing.assert_array_equal(np.asarray(found), wanted)

    def test_a_shallow_bound_is_enough_for_a_shallow_tree(self):
        """p follows max_depth, not the number of slots."""
        agreed = jnp.asarray([[False, False, True, False]])
        parents = jnp.zeros((1, 4), jnp.int32)
        best = jnp.asarray([[5, 6, 7, 8]], jnp.int32)
        path, count, bonus = walk(agreed, parents, best, max_depth=1, backend=self.backend)
        assert (path.tolist(), count.tolist(), bonus.tolist()) == ([[0, 2]], [2], [7])


class TestXla(Walk):
    """The level-by-level form."""


class TestReference(Walk):
    """The naive form."""

    backend = "reference"


class TestMosaicGpu(Walk):
    """The kernel, interpreted: memory nobody wrote is poisoned there."""

    backend = "mosaic_gpu_interpret"


def test_too_many_slots_are_refused():
    """A kernel says what it cannot do; nothing else is run instead."""
    slots = MOST_SLOTS + 1
    zeros = jnp.zeros((1, slots), jnp.int32)
    with pytest.raises(NotImplementedError, match=f"found {slots}; use the backend xla"):
        tree_walk(zeros > 0, zeros, zeros, max_depth=1, backend="mosaic_gpu_interpret")
