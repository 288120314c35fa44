"""Cache rows: written where they belong and nowhere else; scopes of the two kinds of pass."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.caches import (
    Cache,
    Rows,
    block_scope,
    causal,
    take_path,
    text_scope,
    write_rows,
)

LAYERS, HEADS, SLOTS, WIDTH = 2, 3, 10, 4


def numbers(shape, dtype=jnp.float32, start=0.0):
    """Distinct numbers."""
    return jnp.asarray(start + np.arange(np.prod(shape)).reshape(shape), dtype)


def cache_of(rows: int, latent: bool, dtype=jnp.float32) -> Cache:
    """A cache of minus ones."""
    shape = (LAYERS, rows, HEADS, SLOTS)
    keys = jnp.full((*shape, WIDTH), -1.0, dtype)
    return Cache(keys=keys, values=None if latent else jnp.full((*shape, WIDTH + 1), -1.0, dtype))


def rows_of(count: int, n: int, latent: bool) -> Rows:
    """Numbered rows."""
    shape = (LAYERS, count, HEADS, n)
    values = None if latent else numbers((*shape, WIDTH + 1), start=1000.0)
    return Rows(keys=numbers((*shape, WIDTH)), values=values)


write = jax.jit(write_rows)


@hypothesis.given(data=st.data(), latent=st.booleans(), whole=st.booleans())
def test_rows_land_at_their_own_slots_and_nowhere_else(data, latent, whole):
    """Each row at its own start; with a row offset the rows before and after stay."""
    count, total, n = (4, 4, 3) if whole else (2, 4, 3)
    row = data.draw(st.integers(0, total - count))
    start = np.array(data.draw(st.lists(st.integers(0, SLOTS - n), min_size=count, max_size=count)))
    cache, rows = cache_of(total, latent), rows_of(count, n, latent)
    out = write(cache, rows, jnp.asarray(start, jnp.int32), jnp.asarray(row, jnp.int32))
    for name in ("keys", "values"):
        new = getattr(rows, name)
        if new is None:
            assert getattr(out, name) is None
            continue
        wanted = np.full(getattr(cache, name).shape, -1.0, np.float32)
        for i in range(count):
            wanted[:, row + i, :, start[i] : start[i] + n] = np.asarray(new)[:, i]
        np.testing.assert_array_equal(getattr(out, name), wanted)


def test_rows_take_the_dtype_of_the_cache():
    cache = cache_of(2, latent=True, dtype=jnp.bfloat16)
    out = write(cache, rows_of(2, 1, latent=True), jnp.zeros((2,), jnp.int32))
    assert out.keys.dtype == jnp.bfloat16


@pytest.mark.filterwarnings("error:Some donated buffers were not usable")
def test_a_donated_cache_is_written_in_place():
    cache = cache_of(2, latent=False)
    donated = jax.jit(write_rows, donate_argnums=0)
    place = cache.keys.unsafe_buffer_pointer()
    out = donated(cache, rows_of(2, 3, latent=False), jnp.zeros((2,), jnp.int32))
    assert out.keys.unsafe_buffer_pointer() == place
    assert cache.keys.is_deleted()


@pytest.mark.parametrize("latent", [False, True])
def test_a_path_is_taken_in_order(latent):
    """Repeats included: what lies past the accepted ones repeats the last."""
    rows = rows_of(2, 5, latent)
    path = np.array([[0, 3, 3], [4, 1, 2]])
    out = take_path(rows, jnp.asarray(path, jnp.int32))
    for name in ("keys", "values"):
        value = getattr(rows, name)
        if value is None:
            assert getattr(out, name) is None
            continue
        wanted = np.stack([np.asarray(value)[:, i][:, :, path[i]] for i in range(2)], axis=1)
        np.testing.assert_array_equal(getattr(out, name), wanted)


def test_causal_ancestors():
    np.testing.assert_array_equal(causal(2, 4), np.tril(np.ones((4, 4), bool))[None].repeat(2, 0))


def test_a_block_stands_on_top_of_what_is_committed():
    lengths, depth = jnp.asarray([5, 0], jnp.int32), jnp.asarray([[0, 1, 1], [0, 1, 2]], jnp.int32)
    scope = block_scope(lengths, depth, causal(2, 3), 7)
    np.testing.assert_array_equal(scope.positions[:, 0], [[5, 6, 6], [0, 1, 2]])
    np.testing.assert_array_equal(scope.hi, [[5], [0]])
    assert not np.asarray(scope.lo).any() and int(scope.row) == 7


def test_a_text_is_a_root_a_position():
    """Each sees what precedes it in its document; positions start at 0 in each."""
    starts = jnp.asarray([[0, 0, 2, 2, 2]], jnp.int32)
    scope = text_scope(starts)
    np.testing.assert_array_equal(scope.positions[0, :, 0], [0, 1, 0, 1, 2])
    np.testing.assert_array_equal(scope.lo[0, :, 0], [0, 0, 2, 2, 2])
    np.testing.assert_array_equal(scope.hi[0], [0, 1, 2, 3, 4])
    assert scope.ancestors.shape == (1, 1, 1) and bool(scope.ancestors.all())


def test_capacity():
    assert cache_of(1, latent=True).capacity == SLOTS
