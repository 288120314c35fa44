"""Every form of forest attention against a plain loop in float64; forms subclass one test class."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import forest_attention
from kernels_pallas.forest_attention import xla
from kernels_pallas.forest_attention.api import unsupported
from tests.kernels_pallas.cases import (
    FLOATS,
    SCALE,
    Attention,
    Blocked,
    Case,
    Shape,
    cases,
    close,
    expected,
    few,
    plain_case,
    poisoned,
)

# Few shapes, since each compiles; blocks are of 256 slots, and 256 roots are taken at a time.
TREE = Shape(b=2, r=1, w=5, h=4, k=2, u=5, s=600)
CHUNK = Shape(b=1, r=1, w=9, h=2, k=1, u=9, s=512, sinks=True)
LEARNING = Shape(b=2, r=20, w=1, h=4, k=4, u=3, s=21, l=1, rows=2, sinks=True)
TEXT = Shape(b=1, r=259, w=1, h=2, k=1, u=2, s=259, rows=1)
GROWTH = Shape(b=3, r=1, w=2, h=2, k=2, u=6, s=256, rows=5)
ONE_SLOT = Shape(b=1, r=2, w=1, h=1, k=1, u=1, s=1, l=1, rows=1)
SHAPES = (TREE, CHUNK, LEARNING, TEXT, GROWTH, ONE_SLOT)

# Of the kernel: two rows and splits; two tiles of queries with sinks and a second ancestor word; a
# cluster of two CTAs.
SMALL = Shape(b=2, r=1, w=5, h=2, k=1, u=5, s=200, hd=16, hv=32)
WIDE = Shape(b=1, r=1, w=40, h=4, k=2, u=40, s=72, hd=32, hv=16, sinks=True)
CLUSTER = Shape(b=1, r=1, w=64, h=4, k=1, u=64, s=136, hd=16, hv=16)

POSITIONAL = ("q", "keys", "values", "layer", "lo", "hi", "own_keys", "own_values", "ancestors")


@functools.partial(jax.jit, static_argnames=("scale", "differentiable", "backend", "splits"))
def attend(arguments, **options):
    """One compiled program for each shape and form."""
    positional = [arguments[name] for name in POSITIONAL]
    return forest_attention(*positional, row=arguments["row"], sinks=arguments["sinks"], **options)


def run(case: Case, **options) -> jax.Array:
    """The op on a case."""
    given = {name: None if x is None else jnp.asarray(x) for name, x in case.items()}
    return attend(given, scale=SCALE, **options)


class ForestAttention(Attention):
    """What every form of this operation has to pass."""

    options: dict[str, Any]
    shapes = SHAPES

    def run(self, case: Case) -> jax.Array:
        return run(case, **self.options)

    def test_whole_numbers_for_layer_and_row(self):
        """Layer and row may be Python's own."""
        case = plain_case(self.shapes[0], np.random.default_rng(1)) | {"layer": 1, "row": 1}
        given: list[Any] = [case[k] if k == "layer" else jnp.asarray(case[k]) for k in POSITIONAL]
        out = forest_attention(*given, scale=SCALE, row=1, **self.options)
        close(out, expected(case))


class TestReference(ForestAttention):
    options = {"backend": "reference"}


class TestBlocked(ForestAttention, Blocked):
    options = {}
    block = 256

    def test_blocks_are_of_the_size_the_cases_are_made_for(self):
        assert (xla.BLOCK, xla.ROOTS) == (256, 256)


class TestDifferentiable(ForestAttention):
    options = {"differentiable": True}

    @hypothesis.settings(max_examples=8)
    @hypothesis.given(cases((LEARNING, TEXT, TREE)))
    def test_gradients_equal_those_of_the_reference(self, case):
        """Queries, context, own block and sinks; finite where a query sees nothing, too."""
        mine = gradients(case, differentiable=True)
        wanted = gradients(case, backend="reference")
        for name, gradient in mine.items():
            np.testing.assert_allclose(gradient, wanted[name], rtol=1e-5, atol=1e-5, err_msg=name)

    def test_gradients_by_differences(self):
        """The reference's own gradient, along a random direction, in the oracle's float64."""
        rng = np.random.default_rng(4)
        case = plain_case(LEARNING, rng)
        case["hi"][:] = 5
        case["ancestors"][:, :, 1] = False
        weight = output_weight(case)
        for name, gradient in gradients(case, backend="reference").items():
            step = 1e-3 * rng.standard_normal(case[name].shape)
            there, back = (
                (
                    expected(case | {name: case[name].astype(np.float64) + sign * step}) * weight
                ).sum()
                for sign in (1, -1)
            )
            slope = (np.asarray(gradient, np.float64) * step).sum()
            np.testing.assert_allclose(slope, (there - back) / 2, rtol=1e-3, atol=1e-6)


class TestMosaicGpu(ForestAttention, Blocked):
    """The kernel, interpreted: memory nobody wrote is NaN there."""

    options = {"backend": "mosaic_gpu_interpret", "splits": 2}
    shapes = (SMALL, WIDE)
    block, most = 64, 1

    @few
    @hypothesis.given(st.data())
    def test_equals_the_definition(self, data):
        case = data.draw(cases(self.shapes))
        close(self.run(case), expected(case))

    @few
    @hypothesis.given(st.data())
    def test_unseen_slots_do_not_matter(self, data):
        case = data.draw(cases(self.shapes))
        close(self.run(poisoned(case)), expected(case))

    def test_more_blocks_than_stages(self):
        """Places of tiles are used again; the last split ends within a block."""
        case = plain_case(SMALL._replace(b=1, s=800), np.random.default_rng(5))
        case["hi"][:] = 780
        close(self.run(case), expected(case))

    def test_a_cluster_shares_its_copies(self):
        """Four tiles of queries in two CTAs, and windows."""
        rng = np.random.default_rng(6)
        case = plain_case(CLUSTER, rng)
        case["lo"] = rng.integers(60, 130, case["lo"].shape).astype(np.int32)
        case["ancestors"] = rng.random(case["ancestors"].shape) < 0.5
        close(self.run(case), expected(case))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"r": 2}, "one root a row is needed, found r = 2"),
        ({"w": 65}, "at most 64 slots and own keys are needed, found w = 65, u = 5"),
        ({"u": 65}, "at most 64 slots and own keys are needed, found w = 5, u = 65"),
        ({"hd": 24}, "multiples of 16 are needed, found 24 and 32"),
        ({"s": 60}, "a multiple of 8 slots, at least 64, is needed, found 60"),
        ({"s": 100}, "a multiple of 8 slots, at least 64, is needed, found 100"),
        ({"hd": 256, "hv": 256}, "256 and 256 in float32 do not fit into shared memory"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(change, why):
    """With the reason, from the shapes; nothing else is run instead."""
    case = plain_case(SMALL._replace(**change), np.random.default_rng(0))
    given = [jnp.asarray(case[name]) for name in POSITIONAL]
    reason = unsupported(*(jnp.asarray(case[name]) for name in FLOATS))
    assert reason is not None and why in reason
    with pytest.raises(NotImplementedError, match="on mosaic_gpu: .*; use xla"):
        forest_attention(*given, scale=SCALE, backend="mosaic_gpu")


def test_the_kernel_has_no_gradients_and_one_dtype():
    case = plain_case(SMALL, np.random.default_rng(0))
    with pytest.raises(NotImplementedError, match="has no gradients; use the backend xla"):
        run(case, backend="mosaic_gpu", differentiable=True)
    floats = [jnp.asarray(case[name]) for name in FLOATS]
    assert unsupported(*floats) is None
    floats[0] = floats[0].astype(jnp.bfloat16)
    assert "found ['bfloat16', 'float32']" in (unsupported(*floats) or "")


def output_weight(case: Case) -> np.ndarray:
    """A fixed random weight for every output, so that no gradient cancels."""
    shape = (*case["q"].shape[:-1], case["values"].shape[-1])
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("differentiable", "backend"))
def gradient_of(floats, rest, weight, **options):
    """Gradient of the weighted sum of outputs."""
    return jax.grad(
        lambda floats: jnp.sum(attend({**rest, **floats}, scale=SCALE, **options) * weight)
    )(floats)


def gradients(case: Case, **options) -> dict[str, jax.Array]:
    """Gradients of every floating argument there is."""
    floats = {n: jnp.asarray(case[n]) for n in (*FLOATS, "sinks") if case[n] is not None}
    rest = {name: x if x is None else jnp.asarray(x) for name, x in case.items()}
    return gradient_of(floats, rest, jnp.asarray(output_weight(case)), **options)


def test_heads_that_do_not_divide_are_refused():
    case = plain_case(TREE, np.random.default_rng(0))
    given = [jnp.asarray(case[name]) for name in POSITIONAL]
    given[0] = given[0][:, :, :, :3]
    with pytest.raises(ValueError, match="3 query heads do not divide over 2"):
        forest_attention(*given, scale=SCALE)
