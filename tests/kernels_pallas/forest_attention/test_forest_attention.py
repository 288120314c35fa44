"""Every form of forest attention against a plain loop in float64; forms subclass one test class."""

import functools
from typing import Any, NamedTuple

import hypothesis
import hypothesis.extra.numpy as arrays_of
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import forest_attention
from kernels_pallas.forest_attention import xla


class Shape(NamedTuple):
    """Sizes of one case; `hv` None is latent attention over the first 8 of the keys."""

    b: int
    r: int
    w: int
    h: int
    k: int
    u: int
    s: int
    hd: int = 8
    hv: int | None = 6
    l: int = 2  # noqa: E741
    rows: int = 3
    sinks: bool = False


# Few shapes, since each compiles; blocks are of 256 slots, and 256 roots are taken at a time.
TREE = Shape(b=2, r=1, w=5, h=4, k=2, u=5, s=600)
CHUNK = Shape(b=1, r=1, w=9, h=2, k=1, u=9, s=512, sinks=True)
LATENT = Shape(b=2, r=1, w=3, h=4, k=1, u=3, s=300, hd=12, hv=None)
LEARNING = Shape(b=2, r=20, w=1, h=4, k=4, u=3, s=21, l=1, rows=2, sinks=True)
LATENT_TEXT = Shape(b=1, r=7, w=2, h=2, k=1, u=4, s=7, hd=12, hv=None, sinks=True)
TEXT = Shape(b=1, r=259, w=1, h=2, k=1, u=2, s=259, rows=1)
GROWTH = Shape(b=3, r=1, w=2, h=2, k=2, u=6, s=256, rows=5)
ONE_SLOT = Shape(b=1, r=2, w=1, h=1, k=1, u=1, s=1, l=1, rows=1)
SHAPES = (TREE, CHUNK, LATENT, LEARNING, LATENT_TEXT, TEXT, GROWTH, ONE_SLOT)

POSITIONAL = ("q", "keys", "values", "layer", "lo", "hi", "own_keys", "own_values", "ancestors")
SCALE = 0.3
LATENT_WIDTH = 8
HUGE = np.float32(1e30)
"""Fills what nobody may see. Not NaN: a masked weight is 0, and 0 * NaN is NaN in any product."""

Case = dict[str, Any]
"""Arguments of `forest_attention` as numpy arrays."""


@st.composite
def cases(draw, shapes=SHAPES) -> Case:
    """Arguments of one of a few shapes: limits at block edges, any pattern of ancestors."""
    c = draw(st.sampled_from(shapes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    edges = sorted(
        {0, 1, c.s // 2, c.s - 1, c.s} | {i for e in (256, 512) for i in (e - 1, e, e + 1)}
    )
    limits = st.sampled_from([e for e in edges if e <= c.s])

    def numbers(shape):
        return draw(arrays_of.arrays(np.int32, shape, elements=limits))

    case = plain_case(c, rng)
    return case | {
        "layer": np.int32(draw(st.integers(0, c.l - 1))),
        "row": np.int32(draw(st.integers(0, c.rows - c.b))),
        "lo": numbers((c.b, c.r, c.w)) if draw(st.booleans()) else case["lo"],
        "hi": numbers((c.b, c.r)),
        "ancestors": draw(arrays_of.arrays(bool, (c.b, c.w, c.u))),
    }


def plain_case(c: Shape, rng: np.random.Generator) -> Case:
    """Everything seen: the whole context and the whole block."""

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    return {
        "q": normal(c.b, c.r, c.w, c.h, c.hd),
        "keys": normal(c.l, c.rows, c.k, c.s, c.hd),
        "values": None if c.hv is None else normal(c.l, c.rows, c.k, c.s, c.hv),
        "layer": np.int32(c.l - 1),
        "lo": np.zeros((c.b, c.r, c.w), np.int32),
        "hi": np.full((c.b, c.r), c.s, np.int32),
        "own_keys": normal(c.b, c.r, c.u, c.k, c.hd),
        "own_values": None if c.hv is None else normal(c.b, c.r, c.u, c.k, c.hv),
        "ancestors": np.ones((c.b, c.w, c.u), bool),
        "row": np.int32(0),
        "sinks": 2 * normal(c.h) if c.sinks else None,
    }


@functools.partial(jax.jit, static_argnames=("scale", "value_width", "differentiable", "backend"))
def attend(arguments, **options):
    """One compiled program for each shape and form."""
    positional = [arguments[name] for name in POSITIONAL]
    return forest_attention(*positional, row=arguments["row"], sinks=arguments["sinks"], **options)


def run(case: Case, **options) -> jax.Array:
    """The op on a case."""
    given = {name: None if x is None else jnp.asarray(x) for name, x in case.items()}
    width = LATENT_WIDTH if case["values"] is None else None
    return attend(given, scale=SCALE, value_width=width, **options)


def expected(case: Case) -> np.ndarray:
    """The definition, one query and head at a time, in float64."""
    q, lo, hi, ancestors = case["q"], case["lo"], case["hi"], case["ancestors"]
    b, r, w, h, _ = q.shape
    cached = slice(case["row"], case["row"] + b)
    keys = case["keys"][case["layer"], cached].astype(np.float64)
    own_keys = case["own_keys"].astype(np.float64)
    if case["values"] is None:
        values, own_values = keys[..., :LATENT_WIDTH], own_keys[..., :LATENT_WIDTH]
    else:
        values = case["values"][case["layer"], cached].astype(np.float64)
        own_values = case["own_values"].astype(np.float64)
    group = h // keys.shape[1]
    out = np.zeros((b, r, w, h, values.shape[-1]))
    for i, j, slot, head in np.ndindex(b, r, w, h):
        one = head // group
        seen = slice(lo[i, j, slot], max(lo[i, j, slot], hi[i, j]))
        own = ancestors[i, slot]
        seen_keys = np.concatenate([keys[i, one, seen], own_keys[i, j, own, one]])
        seen_values = np.concatenate([values[i, one, seen], own_values[i, j, own, one]])
        scores = seen_keys @ q[i, j, slot, head].astype(np.float64) * SCALE
        sink = [] if case["sinks"] is None else [float(case["sinks"][head])]
        if len(scores):
            top = max([*scores, *sink])
            weights = np.exp(scores - top)
            total = weights.sum() + sum(np.exp(s - top) for s in sink)
            out[i, j, slot, head] = weights @ seen_values / total
    return out


def close(out: Any, wanted: np.ndarray) -> None:
    """Equal to what float32 can tell apart."""
    assert out.shape == wanted.shape
    np.testing.assert_allclose(np.asarray(out), wanted, rtol=2e-6, atol=2e-6)


inherited = hypothesis.settings(
    suppress_health_check=[
        hypothesis.HealthCheck.differing_executors,
        hypothesis.HealthCheck.too_slow,
    ]
)


class ForestAttention:
    """What every form has to pass."""

    options: dict[str, Any]

    @inherited
    @hypothesis.given(cases())
    def test_equals_the_definition(self, case):
        close(run(case, **self.options), expected(case))

    @inherited
    @hypothesis.given(cases())
    def test_unseen_slots_do_not_matter(self, case):
        """Other layers, other rows, and slots that no query of the row sees hold huge numbers."""
        b, s = case["q"].shape[0], case["keys"].shape[3]
        slot = np.arange(s)
        seen = (slot >= case["lo"][..., None]) & (slot < case["hi"][:, :, None, None])
        seen = seen.any(axis=(1, 2))
        unseen = np.ones((*case["keys"].shape[:2], s), bool)
        unseen[case["layer"], case["row"] : case["row"] + b] = ~seen
        poisoned = dict(case)
        for name in ("keys", "values"):
            if case[name] is not None:
                poisoned[name] = np.where(unseen[:, :, None, :, None], HUGE, case[name])
        close(run(poisoned, **self.options), expected(case))

    @pytest.mark.parametrize("shape", [TREE, LATENT, CHUNK])
    def test_a_query_that_sees_nothing_gives_zeros(self, shape):
        """Nothing in the context, nothing in the block; its neighbours are not disturbed."""
        case = plain_case(shape, np.random.default_rng(0))
        case["ancestors"][:, 1] = False
        case["lo"][:, :, 1] = shape.s
        out = np.asarray(run(case, **self.options))
        assert not out[:, :, 1].any()
        close(out, expected(case))
        assert np.abs(out[:, :, 0]).max() > 0.01

        case["ancestors"][:, 1, 1] = True
        case["sinks"] = None if case["sinks"] is None else np.full_like(case["sinks"], -HUGE)
        own = np.asarray(run(case, **self.options))[:, :, 1]
        values = case["own_values"]
        if values is None:
            values = case["own_keys"][..., :LATENT_WIDTH]
        group = shape.h // shape.k
        np.testing.assert_allclose(own, np.repeat(values[:, :, 1], group, axis=2), atol=1e-6)

    def test_whole_numbers_for_layer_and_row(self):
        """Layer and row may be Python's own."""
        case = plain_case(TREE, np.random.default_rng(1)) | {"layer": 1, "row": 1}
        given: list[Any] = [case[k] if k == "layer" else jnp.asarray(case[k]) for k in POSITIONAL]
        out = forest_attention(*given, scale=SCALE, row=1, **self.options)
        close(out, expected(case))

    def test_bfloat16(self):
        """The queries' dtype comes out, and the softmax was float32."""
        case = plain_case(TREE, np.random.default_rng(2))
        low = {
            name: jnp.asarray(x, jnp.bfloat16) if name in ("q", "own_keys", "own_values") else x
            for name, x in case.items()
        } | {name: jnp.asarray(case[name], jnp.bfloat16) for name in ("keys", "values")}
        out = run(low, **self.options)
        assert out.dtype == jnp.bfloat16
        rounded = {k: np.asarray(x, np.float32) if k in low else x for k, x in low.items()}
        rounded = case | {k: rounded[k] for k in ("q", "keys", "values", "own_keys", "own_values")}
        error = np.abs(np.asarray(out, np.float32) - expected(rounded)).max()
        assert error < 4e-3


class TestReference(ForestAttention):
    options = {"backend": "reference"}


class TestBlocked(ForestAttention):
    options = {}

    def test_blocks_out_of_use_are_not_read(self):
        """Here NaN is right: a block that is read at all would spoil the result."""
        case = plain_case(TREE, np.random.default_rng(3))
        case["lo"][:] = 256
        case["hi"][:] = 512
        wanted = expected(case)
        for name in ("keys", "values"):
            case[name][..., :256, :] = np.nan
            case[name][..., 512:, :] = np.nan
        close(run(case), wanted)
        case["hi"][:] = 0
        close(run(case), expected(case))

    def test_blocks_are_of_the_size_the_cases_are_made_for(self):
        assert (xla.BLOCK, xla.ROOTS) == (256, 256)


class TestDifferentiable(ForestAttention):
    options = {"differentiable": True}

    @hypothesis.settings(max_examples=8)
    @hypothesis.given(cases((LEARNING, LATENT_TEXT, TEXT, TREE)))
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


FLOATS = ("q", "keys", "values", "own_keys", "own_values", "sinks")


def output_weight(case: Case) -> np.ndarray:
    """A fixed random weight for every output, so that no gradient cancels."""
    hv = LATENT_WIDTH if case["values"] is None else case["values"].shape[-1]
    shape = (*case["q"].shape[:-1], hv)
    return np.random.default_rng(5).standard_normal(shape).astype(np.float32)


@functools.partial(jax.jit, static_argnames=("value_width", "differentiable", "backend"))
def gradient_of(floats, rest, weight, **options):
    """Gradient of the weighted sum of outputs."""
    return jax.grad(
        lambda floats: jnp.sum(attend({**rest, **floats}, scale=SCALE, **options) * weight)
    )(floats)


def gradients(case: Case, **options) -> dict[str, jax.Array]:
    """Gradients of every floating argument there is."""
    floats = {name: jnp.asarray(case[name]) for name in FLOATS if case[name] is not None}
    rest = {name: x if x is None else jnp.asarray(x) for name, x in case.items()}
    width = LATENT_WIDTH if case["values"] is None else None
    return gradient_of(floats, rest, jnp.asarray(output_weight(case)), value_width=width, **options)


def test_values_belong_together():
    case = plain_case(TREE, np.random.default_rng(0))
    positional = [jnp.asarray(case[k]) for k in POSITIONAL]

    def call(change, **options):
        given = list(positional)
        for at, value in change.items():
            given[at] = value
        return forest_attention(*given, scale=SCALE, **options)

    with pytest.raises(ValueError, match="give both, or neither"):
        call({2: None})
    with pytest.raises(ValueError, match="give both, or neither"):
        call({7: None}, value_width=4)
    with pytest.raises(ValueError, match="value_width is needed exactly"):
        call({2: None, 7: None})
    with pytest.raises(ValueError, match="value_width is needed exactly"):
        call({}, value_width=4)
    with pytest.raises(ValueError, match="3 query heads do not divide over 2"):
        call({0: positional[0][:, :, :, :3]})
    assert call({}).shape == (2, 1, 5, 4, 6)
