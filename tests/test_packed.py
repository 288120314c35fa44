"""Packed weights: values, products and their gradients, by tile and by the few rows of decoding."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from eagle3_jax import packed
from eagle3_jax.layers import Linear, multiply
from eagle3_jax.packed import PackedWeight, multiply_layer

RNG = np.random.default_rng(0)
BF16 = np.dtype(ml_dtypes.bfloat16)


def random_weight(kind: str, inputs: int, outputs: int, *lead: int) -> PackedWeight:
    """Random codes and scales of a kind; weights are of the order of a trained kernel's.

    Scales and minima are float16's numbers, as a GGUF's are: code times scale is exact then.
    """

    def numbers(low, high):
        drawn = RNG.uniform(low, high, (*lead, outputs, 1 if kind == "int8" else inputs // 32))
        return drawn.astype(np.float16).astype(np.float32)

    scales = numbers(0.01, 0.02)
    if kind.startswith("int8"):
        codes = RNG.integers(-127, 128, (*lead, outputs, inputs)).astype(np.int8)
        return PackedWeight(codes=jnp.asarray(codes), scales=jnp.asarray(scales / 16))
    codes = jnp.asarray(RNG.integers(0, 256, (*lead, outputs, inputs // 2)).astype(np.uint8))
    if kind == "int4":
        return PackedWeight(codes=codes, scales=jnp.asarray(scales.astype(BF16)))
    minima = jnp.asarray(numbers(-0.2, -0.1))
    return PackedWeight(codes=codes, scales=jnp.asarray(scales), minima=minima)


KINDS = ("int8", "int8 in groups", "int4", "with minima")
each_kind = pytest.mark.parametrize("kind", KINDS)


def value(weight: PackedWeight) -> np.ndarray:
    """The widened kernel [... a z], in plain numpy."""
    codes = np.asarray(weight.codes)
    if codes.dtype == np.uint8:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
        codes = codes.astype(np.float32) - (8 if weight.minima is None else 0)
    scales = np.asarray(weight.scales)
    repeat = codes.shape[-1] // scales.shape[-1]
    wide = codes.astype(np.float32) * np.repeat(scales.astype(np.float32), repeat, axis=-1)
    if weight.minima is not None:
        wide = wide + np.repeat(np.asarray(weight.minima), repeat, axis=-1)
    return wide.astype(scales.dtype).astype(np.float32).swapaxes(-1, -2)


@each_kind
def test_values_and_shapes(kind):
    """Bit for bit, of a stack too, and of a layer of it."""
    weight = random_weight(kind, 64, 6, 3)
    assert weight.shape == (3, 64, 6) and weight.inputs == 64 and weight.ndim == 3
    assert weight.bits == (8 if kind.startswith("int8") else 4)
    for made in (weight[...], jax.jit(lambda w: w[...])(weight)):
        np.testing.assert_array_equal(made, value(weight))
    one = jax.tree.map(lambda x: x[1], weight)
    assert isinstance(one, PackedWeight) and one.shape == (64, 6)
    np.testing.assert_array_equal(one[...], value(weight)[1])
    low = weight.widened(jnp.bfloat16)
    np.testing.assert_array_equal(low, value(weight).astype(BF16))


def test_a_table_is_a_kernel_in_the_same_memory():
    kernel = random_weight("int8", 32, 5)
    table = PackedWeight(codes=kernel.codes, scales=kernel.scales, table=True)
    assert table.shape == (5, 32) and table.kernel.shape == (32, 5)
    assert table.kernel.codes is table.codes
    np.testing.assert_array_equal(table[...], table.kernel[...].T)


@jax.jit
def product(x, weight):
    """The product and its gradient."""
    y, pull = jax.vjp(weight.matmul, x)
    return y, pull(jnp.sin(y))[0]


# A row, a few, more than a few; 22 outputs are two tiles of eleven.
@each_kind
@pytest.mark.parametrize("rows", [1, 5, packed.FEW_ROWS + 1])
def test_products_equal_those_of_widened_weights(kind, rows, monkeypatch):
    """Within 1e-5 of float32, over several tiles, with gradients of the rows."""
    monkeypatch.setattr(packed, "TILE_BYTES", 4 * 64 * 11)
    weight = random_weight(kind, 64, 22)
    x = jnp.asarray(RNG.standard_normal((rows, 64)), jnp.float32)
    wide = value(weight).astype(np.float64)
    y, dx = product(x, weight)
    exact = np.asarray(x, np.float64) @ wide
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, np.sin(exact) @ wide.T, rtol=1e-5, atol=2e-5)
    assert y.dtype == dx.dtype == jnp.float32


@pytest.mark.parametrize("rows", [1, 3, packed.FEW_ROWS + 1])
def test_bfloat16_products(rows):
    """Rounded once, at the end, where rows are few; to bfloat16 weights where they are many."""
    weight = random_weight("int4", 64, 32)
    x = jnp.asarray(RNG.standard_normal((2, rows, 64)), jnp.bfloat16)
    y = jax.jit(lambda x, w: w.matmul(x))(x, weight)
    assert y.shape == (2, rows, 32) and y.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float32) @ value(weight)
    np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=2**-7, atol=1e-2)


@each_kind
def test_a_layer_of_a_stack(kind):
    """What is read where it lies is what a slice would be."""
    stack = random_weight(kind, 32, 16, 3)
    x = jnp.asarray(RNG.standard_normal((2, 2, 32)), jnp.float32)
    y = jax.jit(multiply_layer)(x, stack, jnp.asarray(2, jnp.int32))
    np.testing.assert_allclose(y, np.asarray(x) @ value(stack)[2], atol=1e-5)


def test_a_linear_map_takes_a_packed_kernel():
    linear = Linear(jax.random.key(0), 32, 5, bias=True)
    linear.bias = nnx.Param(jnp.arange(5.0))
    linear.kernel = random_weight("int8", 32, 5)
    x = jnp.ones((3, 32))
    wanted = np.asarray(x) @ value(linear.kernel) + np.arange(5)
    np.testing.assert_allclose(linear(x), wanted, atol=1e-5)
    np.testing.assert_allclose(multiply(x, linear.kernel[...]), wanted - np.arange(5), atol=1e-5)


def test_no_kernel_is_widened_whole():
    """The compiled product's temporaries hold a tile, not the kernel (128 MB in float32)."""
    a, z = 1024, 2**15
    weight = jax.eval_shape(
        lambda: PackedWeight(
            codes=jnp.zeros((z, a // 2), jnp.uint8), scales=jnp.zeros((z, a // 32), jnp.bfloat16)
        )
    )
    for rows, most in ((4, 2**20), (256, 1.5 * packed.TILE_BYTES)):
        x = jax.ShapeDtypeStruct((rows, a), jnp.float32)
        compiled = jax.jit(lambda x, w: w.matmul(x)).lower(x, weight).compile()
        account = compiled.memory_analysis()
        assert account is not None and account.temp_size_in_bytes < most


@each_kind
def test_some_columns_are_the_widened_kernel_s(kind):
    linear = Linear(jax.random.key(0), 64, 12)
    linear.kernel = weight = random_weight(kind, 64, 12)
    found = linear.columns(jnp.asarray([7, 0, 7, 11]))
    np.testing.assert_array_equal(found, value(weight)[:, [7, 0, 7, 11]])
