"""The store of a run's training state: kept, restored, and the last few only."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.store import Store


def state_of(value: float):
    """A small state of several dtypes."""
    return {
        "weights": jnp.full((3, 2), value),
        "low": jnp.full((2,), value, jnp.bfloat16),
        "step": jnp.asarray(int(value), jnp.int32),
    }


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def test_a_state_and_its_notes_come_back(folder):
    store = Store(folder)
    assert store.latest() is None
    store.save(3, state_of(3.0), {"data": [1, 2], "name": "x"})
    store.close()

    again = Store(folder)
    assert again.latest() == 3
    state, notes = again.restore(3, state_of(0.0))
    again.close()
    assert notes == {"data": [1, 2], "name": "x"}
    for name, value in state_of(3.0).items():
        assert state[name].dtype == value.dtype
        np.testing.assert_array_equal(state[name], value)


def test_the_last_few_are_kept(folder):
    store = Store(folder, keep=2)
    for step in (1, 2, 5):
        store.save(step, state_of(float(step)), {})
    assert store.latest() == 5
    assert sorted(int(p.name) for p in folder.iterdir() if p.name.isdigit()) == [2, 5]
    abstract = jax.eval_shape(lambda: state_of(0.0))
    older, notes = store.restore(2, state_of(0.0))
    store.close()
    assert int(older["step"]) == 2 and notes == {}
    assert jax.tree.map(lambda x: x.shape, older) == jax.tree.map(lambda x: x.shape, abstract)


def test_a_state_of_other_keys_is_refused(folder):
    """And stays restorable. (A refused shape leaves Orbax with reads that nobody awaits.)"""
    store = Store(folder)
    store.save(1, state_of(1.0), {})
    with pytest.raises(ValueError, match="more"):
        store.restore(1, {**state_of(0.0), "more": jnp.zeros((4, 2))})
    assert int(store.restore(1, state_of(0.0))[0]["step"]) == 1
    store.close()
