"""Calls of the attention operations, drawn, and the definition that every backend must meet."""

from typing import Any, NamedTuple

import hypothesis
import hypothesis.extra.numpy as arrays_of
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np


class Shape(NamedTuple):
    """Sizes of one case; `hv` None is latent attention over the first `width` of the keys."""

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
    width: int = 8


SCALE = 0.3
HUGE = np.float32(1e30)
"""Fills what nobody may see. Not NaN: a masked weight is 0, and 0 * NaN is NaN in any product."""

FLOATS = ("q", "keys", "values", "own_keys", "own_values")

Case = dict[str, Any]
"""Arguments of `forest_attention` as numpy arrays, `width` beside them where values are None."""


@st.composite
def cases(draw, shapes) -> Case:
    """Arguments of one of a few shapes: limits at block edges, any pattern of ancestors."""
    c = draw(st.sampled_from(shapes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    blocks = {i for e in (64, 128, 256, 512) for i in (e - 1, e, e + 1)}
    edges = sorted({0, 1, c.s // 2, c.s - 1, c.s} | blocks)
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
        "width": c.width,
    }


def poisoned(case: Case) -> Case:
    """Other layers, other rows, and slots that no query of the row sees hold huge numbers."""
    b, s = case["q"].shape[0], case["keys"].shape[3]
    slot = np.arange(s)
    seen = (slot >= case["lo"][..., None]) & (slot < case["hi"][:, :, None, None])
    unseen = np.ones((*case["keys"].shape[:2], s), bool)
    unseen[case["layer"], case["row"] : case["row"] + b] = ~seen.any(axis=(1, 2))
    spoiled = {
        name: np.where(unseen[:, :, None, :, None], HUGE, case[name])
        for name in ("keys", "values")
        if case[name] is not None
    }
    return case | spoiled


def rounded(case: Case, dtype) -> tuple[Case, Case]:
    """The case in a dtype, and the same numbers in float32."""
    low = {name: jnp.asarray(case[name], dtype) for name in FLOATS if case[name] is not None}
    return case | low, case | {name: np.asarray(x, np.float32) for name, x in low.items()}


def own_values_of(case: Case) -> np.ndarray:
    """Values of the own block."""
    return case["own_keys"][..., : case["width"]] if case["values"] is None else case["own_values"]


def expected(case: Case) -> np.ndarray:
    """The definition, one query and head at a time, in float64."""
    q, lo, hi, ancestors = case["q"], case["lo"], case["hi"], case["ancestors"]
    b, r, w, h, _ = q.shape
    cached = slice(case["row"], case["row"] + b)
    keys = case["keys"][case["layer"], cached].astype(np.float64)
    own_keys = case["own_keys"].astype(np.float64)
    own_values = own_values_of(case).astype(np.float64)
    if case["values"] is None:
        values = keys[..., : case["width"]]
    else:
        values = case["values"][case["layer"], cached].astype(np.float64)
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
"""For tests of an abstract class."""

few = hypothesis.settings(inherited, max_examples=3)
"""For kernels in the interpreter, which takes some tenths of a second a block of threads."""


class Attention:
    """What every form of either operation has to pass; a form says which shapes it is given."""

    shapes: tuple[Shape, ...]
    block: int
    """Slots of the context that are read at a time."""
    most = 2
    """Shapes that the test of queries that see nothing tries."""

    def run(self, case: Case):
        """The operation on a case."""
        raise NotImplementedError

    @inherited
    @hypothesis.given(st.data())
    def test_equals_the_definition(self, data):
        case = data.draw(cases(self.shapes))
        close(self.run(case), expected(case))

    @inherited
    @hypothesis.given(st.data())
    def test_unseen_slots_do_not_matter(self, data):
        case = data.draw(cases(self.shapes))
        close(self.run(poisoned(case)), expected(case))

    def test_a_query_that_sees_nothing_gives_zeros(self):
        """Nothing in the context, nothing in the block; its neighbours are not disturbed."""
        for shape in self.shapes[: self.most]:
            case = plain_case(shape, np.random.default_rng(0))
            case["ancestors"][:, 1] = False
            case["lo"][:, :, 1] = shape.s
            out = np.asarray(self.run(case))
            assert not out[:, :, 1].any()
            close(out, expected(case))
            assert np.abs(out[:, :, 0]).max() > 0.01

            case["ancestors"][:, 1, 1] = True
            case["sinks"] = None if case["sinks"] is None else np.full_like(case["sinks"], -HUGE)
            own = np.asarray(self.run(case))[:, :, 1]
            group = shape.h // shape.k
            wanted = np.repeat(own_values_of(case)[:, :, 1], group, axis=2)
            np.testing.assert_allclose(own, wanted, atol=1e-6)

    def test_bfloat16(self):
        """The queries' dtype comes out, and the softmax was float32."""
        case, exact = rounded(plain_case(self.shapes[0], np.random.default_rng(2)), jnp.bfloat16)
        out = self.run(case)
        assert out.dtype == jnp.bfloat16
        assert np.abs(np.asarray(out, np.float32) - expected(exact)).max() < 4e-3


class Blocked(Attention):
    """What the forms have to pass that read some of the context."""

    def test_blocks_out_of_use_are_not_read(self):
        """Here NaN is right: a block that is read at all would spoil the result."""
        case = plain_case(self.shapes[0], np.random.default_rng(3))
        case["lo"][:] = self.block
        case["hi"][:] = 2 * self.block
        wanted = expected(case)
        for name in ("keys", "values"):
            if case[name] is not None:
                case[name][..., : self.block, :] = np.nan
                case[name][..., 2 * self.block :, :] = np.nan
        close(self.run(case), wanted)
        case["hi"][:] = 0
        close(self.run(case), expected(case))
