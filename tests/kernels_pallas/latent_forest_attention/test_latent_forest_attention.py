"""Every form of latent attention against a plain loop in float64; forms subclass one class."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import latent_forest_attention
from kernels_pallas.latent_forest_attention.api import unsupported
from tests.kernels_pallas.cases import (
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

TREE = Shape(b=2, r=1, w=3, h=4, k=1, u=3, s=600, hd=12, hv=None)
CHUNK = Shape(b=1, r=1, w=9, h=2, k=1, u=9, s=300, hd=12, hv=None)

# Of the kernel: two rows and splits; a cluster of two CTAs and a second ancestor word.
SMALL = Shape(b=2, r=1, w=3, h=2, k=1, u=3, s=200, hd=48, hv=None, width=32)
CLUSTER = Shape(b=1, r=1, w=40, h=3, k=1, u=40, s=72, hd=96, hv=None, width=64)

POSITIONAL = ("q", "keys", "layer", "lo", "hi", "own_keys", "ancestors")


@functools.partial(jax.jit, static_argnames=("width", "backend", "splits"))
def attend(arguments, width, **options):
    """One compiled program for each shape and form."""
    positional = [arguments[name] for name in POSITIONAL]
    row = arguments["row"]
    return latent_forest_attention(*positional, scale=SCALE, value_width=width, row=row, **options)


class LatentForestAttention(Attention):
    """What every form of this operation has to pass."""

    options: dict[str, Any]
    shapes = (TREE, CHUNK)

    def run(self, case: Case) -> jax.Array:
        given = {name: jnp.asarray(case[name]) for name in (*POSITIONAL, "row")}
        return attend(given, case["width"], **self.options)


class TestReference(LatentForestAttention):
    options = {"backend": "reference"}


class TestBlocked(LatentForestAttention, Blocked):
    options = {}
    block = 256


class TestMosaicGpu(LatentForestAttention, Blocked):
    """The kernel, interpreted: memory nobody wrote is NaN there."""

    options = {"backend": "mosaic_gpu_interpret", "splits": 2}
    shapes = (SMALL,)
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
        """Two tiles of queries in two CTAs, and windows."""
        rng = np.random.default_rng(6)
        case = plain_case(CLUSTER, rng)
        case["lo"] = rng.integers(60, 70, case["lo"].shape).astype(np.int32)
        case["ancestors"] = rng.random(case["ancestors"].shape) < 0.5
        close(self.run(case), expected(case))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"r": 2}, "one root a row is needed, found r = 2"),
        ({"w": 65}, "at most 64 slots and own keys are needed, found w = 65, u = 3"),
        ({"u": 65}, "at most 64 slots and own keys are needed, found w = 3, u = 65"),
        ({"hd": 40}, "are needed, found 40 and 32"),
        ({"width": 16}, "are needed, found 48 and 16"),
        ({"s": 100}, "a multiple of 8 slots, at least 64, is needed, found 100"),
        ({"hd": 576, "width": 512}, "latents 576 wide in float32 do not fit into shared memory"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(change, why):
    """With the reason, from the shapes; nothing else is run instead."""
    case = plain_case(SMALL._replace(**change), np.random.default_rng(0))
    q, latents, own = (jnp.asarray(case[name]) for name in ("q", "keys", "own_keys"))
    reason = unsupported(q, latents, own, case["width"])
    assert reason is not None and why in reason
    given = [jnp.asarray(case[name]) for name in POSITIONAL]
    with pytest.raises(NotImplementedError, match="on mosaic_gpu: .*; use xla"):
        latent_forest_attention(
            *given, scale=SCALE, value_width=case["width"], backend="mosaic_gpu"
        )


def test_values_wider_than_the_latents_are_refused():
    case = plain_case(TREE, np.random.default_rng(0))
    given = [jnp.asarray(case[name]) for name in POSITIONAL]
    with pytest.raises(ValueError, match="value_width 13 of latents that are 12 wide"):
        latent_forest_attention(*given, scale=SCALE, value_width=13)
