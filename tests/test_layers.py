"""The small shared modules against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.layers import Linear, Mlp, RmsNorm, gate, matmul, random_kernel, stacked

KEY = jax.random.key(0)
X = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)


def test_linear_is_inputs_times_kernel_plus_bias():
    linear = Linear(KEY, 8, 5, bias=True)
    assert linear.bias is not None
    linear.bias[...] = jnp.arange(5.0)
    wanted = X.astype(np.float64) @ np.asarray(linear.kernel[...], np.float64) + np.arange(5)
    np.testing.assert_allclose(linear(jnp.asarray(X)), wanted, atol=1e-6)
    assert Linear(KEY, 8, 5).bias is None


def test_matmul_keeps_its_dtype():
    low = jnp.ones((3, 8), jnp.bfloat16)
    assert matmul(low, jnp.ones((8, 2), jnp.bfloat16)).dtype == jnp.bfloat16


def test_gradients_of_bfloat16_products_are_those_of_float32():
    """Their backward pass has a form of its own; here with leading axes, in jit, under vmap."""
    rng = np.random.default_rng(1)
    x, kernel, weight = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((2, 3, 8), (8, 5), (2, 3, 5))
    )

    def loss(x, kernel, weight):
        return jnp.sum(matmul(x, kernel).astype(jnp.float32) * weight.astype(jnp.float32))

    wide = [v.astype(jnp.float32) for v in (x, kernel, weight)]
    wanted = jax.grad(loss, (0, 1))(*wide)
    found = jax.jit(jax.grad(loss, (0, 1)))(x, kernel, weight)
    each = jax.vmap(jax.grad(loss, (0, 1)), (0, None, 0))(x, kernel, weight)
    for mine, many, right in zip(found, (each[0], each[1].sum(0)), wanted, strict=True):
        assert mine.dtype == jnp.bfloat16
        for value in (mine, many):
            np.testing.assert_allclose(value.astype(jnp.float32), right, rtol=2e-2, atol=4e-2)


def test_random_kernels_have_the_width_of_their_inputs():
    kernel = random_kernel(KEY, 64, 100, fan_in=64)
    assert kernel.shape == (64, 100)
    np.testing.assert_allclose(np.std(np.asarray(kernel)), 1 / 8, rtol=0.05)


def test_norm_by_its_formula():
    norm = RmsNorm(8, eps=0.1)
    norm.weight[...] = jnp.arange(8.0)
    wanted = X / np.sqrt((X.astype(np.float64) ** 2).mean(-1, keepdims=True) + 0.1) * np.arange(8)
    np.testing.assert_allclose(norm(jnp.asarray(X)), wanted, atol=1e-6)


def test_norm_has_float32_statistics_and_rounds_before_the_weight():
    """300 squared overflows nothing here, but its mean in bfloat16 would be off by percents."""
    norm = RmsNorm(8, eps=0.0)
    norm.weight[...] = jnp.full((8,), 3.0)
    x = jnp.asarray(300 + X, jnp.bfloat16)
    exact = np.asarray(x, np.float32)
    exact = exact / np.sqrt((exact**2).mean(-1, keepdims=True))
    wanted = jnp.asarray(exact, jnp.bfloat16) * jnp.bfloat16(3)
    out = norm(x)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(wanted, np.float32))


def test_mlp_is_swiglu_with_the_gate_first():
    mlp = Mlp(KEY, 8, 6)
    both = X @ np.asarray(mlp.gate_up.kernel[...])
    gated, up = both[..., :6], both[..., 6:]
    inner = gated / (1 + np.exp(-gated)) * up
    np.testing.assert_allclose(gate(jnp.asarray(both)), inner, atol=1e-6)
    wanted = inner @ np.asarray(mlp.down.kernel[...])
    np.testing.assert_allclose(mlp(jnp.asarray(X)), wanted, atol=1e-5)


def test_stacked_modules_differ_by_layer():
    stack = stacked(lambda key: Linear(key, 8, 8), KEY, 3)
    assert stack.kernel.shape == (3, 8, 8)
    kernels = np.asarray(stack.kernel[...])
    assert np.abs(kernels[0] - kernels[1]).min(axis=-1).max() > 0.01

    out, _ = jax.lax.scan(lambda x, layer: (layer(x), None), jnp.asarray(X), stack)
    np.testing.assert_allclose(out, X @ kernels[0] @ kernels[1] @ kernels[2], atol=1e-4)
