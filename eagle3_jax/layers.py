"""Small modules that verifier and drafter share: linear map, RMS norm, gated feed-forward."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Float, Int, Key

from eagle3_jax.packed import PackedWeight


def matmul(x: Float[Array, "... a"], kernel: Float[Array, "a z"]) -> Float[Array, "... z"]:
    """`x @ kernel`, at the highest precision in float32; gradients keep bfloat16's speed on CPU."""
    if x.dtype == jnp.float32:
        return jnp.matmul(x, kernel, precision=jax.lax.Precision.HIGHEST)
    if x.size == x.shape[-1] and jax.default_backend() == "cpu":
        # A product of a single row would widen the kernel to float32 first.
        row = x.reshape(1, x.size)
        y = _narrow_matmul(jnp.concatenate([row, row]), kernel)[0]
        return y.reshape(*x.shape[:-1], y.size)
    return _narrow_matmul(x, kernel)


@jax.custom_vjp
def _narrow_matmul(x, kernel):
    return jnp.matmul(x, kernel)


def _narrow_backward(operands, g):
    x, kernel = operands
    rows, z = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])

    def plainly(rows):
        # XLA:CPU multiplies bfloat16 fast only where the left operand lies row by row, and makes a
        # transposition a mere change of layout unless it is told what the layout has to be.
        return with_layout_constraint(rows.T, Layout((0, 1)))

    turned = jax.lax.platform_dependent(rows, cpu=plainly, default=jnp.transpose)
    return jnp.matmul(g, kernel.T), jnp.matmul(turned, z)


_narrow_matmul.defvjp(lambda x, kernel: (jnp.matmul(x, kernel), (x, kernel)), _narrow_backward)


def multiply(
    x: Float[Array, "... a"], kernel: Float[Array, "a z"] | PackedWeight
) -> Float[Array, "... z"]:
    """`x @ kernel`, packed or not."""
    return kernel.matmul(x) if isinstance(kernel, PackedWeight) else matmul(x, kernel)


def random_kernel(key: Key[Array, ""], *shape: int, fan_in: int) -> Float[Array, "..."]:
    """A normal float32 array of standard deviation `fan_in ** -0.5`."""
    return jax.random.normal(key, shape, jnp.float32) * jnp.float32(fan_in**-0.5)


class Linear(nnx.Module):
    """A linear map with its kernel stored [in, out], or packed in its place.

    `eagle3_jax/turned.py` has the other way.
    """

    def __init__(self, key: Key[Array, ""], inputs: int, outputs: int, bias: bool = False):
        self.kernel: nnx.Param | PackedWeight = nnx.Param(
            random_kernel(key, inputs, outputs, fan_in=inputs)
        )
        self.bias = nnx.Param(jnp.zeros((outputs,), jnp.float32)) if bias else None

    def __call__(self, x: Float[Array, "... {self.kernel.shape[0]}"]) -> Float[Array, "... z"]:
        kernel = self.kernel
        y = multiply(x, kernel if isinstance(kernel, PackedWeight) else kernel[...])
        return y if self.bias is None else y + jnp.broadcast_to(self.bias[...], y.shape)

    def columns(self, ids: Int[Array, " dv"]) -> Float[Array, "{self.kernel.shape[0]} dv"]:
        """Some columns of the kernel; of a packed one no others are widened."""
        kernel = self.kernel
        return kernel.columns(ids) if isinstance(kernel, PackedWeight) else kernel[...][:, ids]


class RmsNorm(nnx.Module):
    """Root-mean-square norm with float32 statistics.

    The normed value is cast back before the weight multiplies it, as Llama and DeepSeek do; a
    `wide` norm multiplies in float32 first, as gpt-oss does.
    """

    def __init__(self, width: int, eps: float, wide: bool = False):
        self.weight = nnx.Param(jnp.ones((width,), jnp.float32))
        self.eps = eps
        self.wide = wide

    def __call__(
        self, x: Float[Array, "... {self.weight.shape[0]}"]
    ) -> Float[Array, "... {self.weight.shape[0]}"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + jnp.float32(self.eps))
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + self.weight.shape)
        if self.wide:
            return (y * weight.astype(jnp.float32)).astype(x.dtype)
        return y.astype(x.dtype) * weight.astype(x.dtype)


class Mlp(nnx.Module):
    """SwiGLU feed-forward: `down(silu(gate x) * up x)`, gate and up in one kernel."""

    def __init__(self, key: Key[Array, ""], width: int, inner: int):
        keys = jax.random.split(key)
        self.gate_up = Linear(keys[0], width, 2 * inner)
        self.down = Linear(keys[1], inner, width)

    def __call__(self, x: Float[Array, "... a"]) -> Float[Array, "... a"]:
        return self.down(gate(self.gate_up(x)))


def gate(gate_up: Float[Array, "... z"]) -> Float[Array, "... i"]:
    """`silu(gate) * up` of the two halves of the last axis."""
    gated, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gated) * up


def stacked[M: nnx.Module](make: Callable[..., M], key: Key[Array, ""], count: int) -> M:
    """`count` modules as one whose arrays have a leading layer axis, for `jax.lax.scan`."""
    return jax.vmap(make)(jax.random.split(key, count))
