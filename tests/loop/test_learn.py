"""Learning's own pieces: shifts, cross-entropy, products in another dtype, kept readings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from eagle3_jax.loop import run
from eagle3_jax.loop.learn import (
    Batches,
    LearnStages,
    LearnState,
    ahead,
    behind,
    cross_entropy,
    empty_tally,
    read_text,
)
from eagle3_jax.testing import tiny_drafter, tiny_verifier

STEPS = 3


def test_ahead_and_behind_shift_by_position():
    x = jnp.arange(1, 6)[None]
    assert ahead(x, 2).tolist() == [[3, 4, 5, 0, 0]]
    assert behind(x, 2).tolist() == [[0, 0, 1, 2, 3]]
    assert behind(jnp.ones((1, 3, 2), bool), 1)[0, :, 0].tolist() == [False, True, True]


def test_cross_entropy_and_its_gradient_are_optax_s():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((2, 3, 7)) * 5, jnp.float32)
    target = jax.nn.softmax(jnp.asarray(rng.standard_normal((2, 3, 7)), jnp.float32))
    weight = jnp.asarray(rng.random((2, 3)), jnp.float32)

    def both(loss):
        return jax.value_and_grad(lambda x: jnp.sum(loss(x, target) * weight))(logits)

    for mine, right in zip(both(cross_entropy), both(optax.softmax_cross_entropy), strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-5)


@pytest.fixture(scope="module")
def one():
    """Stages and state of one cycle over two rows of text, which two documents share."""
    verifier, drafter = tiny_verifier("llama"), tiny_drafter("llama")
    tokens = jax.random.randint(jax.random.key(2), (2, 16), 2, 64)
    starts = jnp.where(jnp.arange(16) < 9, 0, 9)[None].astype(jnp.int32).repeat(2, 0)
    still = optax.set_to_zero()
    stages = LearnStages(verifier=verifier, optimiser=still, steps=STEPS, decay=0.8)
    state = LearnState(
        drafter=drafter,
        moments=still.init(nnx.state(drafter, nnx.Param)),
        batches=Batches(tokens=tokens[None], starts=starts[None], learn=jnp.ones((1, 2, 16), bool)),
        cycle=jnp.zeros((), jnp.int32),
        tally=empty_tally(STEPS),
    )
    return stages, state


def verdict_of(stages, state):
    _, forest = stages.draft(state)
    return stages.judge(state, forest, stages.verify(state, forest))


def test_a_kept_reading_gives_the_same_update(one):
    stages, state = one
    batches = state.batches
    reading = read_text(
        stages.verifier, batches.tokens[0], batches.starts[0], state.drafter.spec.boundaries
    )
    kept = dataclasses.replace(batches, reading=jax.tree.map(lambda x: x[None], reading))
    plain = jax.tree.leaves(verdict_of(stages, state))
    other = jax.tree.leaves(verdict_of(stages, dataclasses.replace(state, batches=kept)))
    for a, b in zip(plain, other, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_products_in_bfloat16_leave_the_weights_in_float32(one):
    stages, state = one
    wide = verdict_of(stages, state)
    narrow = verdict_of(dataclasses.replace(stages, dtype=jnp.dtype(jnp.bfloat16)), state)
    np.testing.assert_allclose(narrow.tally.loss, wide.tally.loss, rtol=0.02)
    assert np.any(narrow.tally.loss != wide.tally.loss)
    for a, b in zip(
        jax.tree.leaves(narrow.gradients), jax.tree.leaves(wide.gradients), strict=True
    ):
        assert a.dtype == jnp.float32
        error = jnp.linalg.norm((a - b).ravel()) / jnp.maximum(jnp.linalg.norm(b.ravel()), 1e-6)
        assert float(error) < 0.05
    trained = jax.tree.map(jnp.copy, state)
    stages = dataclasses.replace(stages, dtype=jnp.dtype(jnp.bfloat16))
    trained = run(stages, trained, jnp.asarray(1, jnp.int32))
    assert trained.drafter.dtype == jnp.float32
