"""Packed weights: kernels that stay in codes of 4 or 8 bits in memory, widened where they are used.

| codes | a weight is | made by |
|---|---|---|
| int8 | code x scale, of an output or of a group of inputs | `eagle3_jax/int8.py`; GGUF Q8_0 |
| uint8, two | (code - 8) x scale, rounded to the scale's dtype | `checkpoints/int4.py`; GGUF Q4_0 |
| uint8, two | code x scale + minimum | GGUF Q4_1 |

Codes lie [out, in], as checkpoints have them. jax's own int4 is left alone: XLA:CPU widens such an
array in memory before anything reads it.
"""

from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int, Integer

PARTS = ("codes", "scales", "minima")
"""A packed weight's arrays by name; the last one only where there are minima."""

FEW_ROWS, FEW_OUTPUTS = 32, 16
"""On CPU, up to so many rows are multiplied with so many outputs at a time: those, widened, stay in
the first-level cache, and the whole loop is compiled as one piece."""

TILE_BYTES = 2**26
"""Otherwise, about so many bytes of a kernel are widened at a time."""


@nnx.dataclass
class PackedWeight(nnx.Pytree):
    """A kernel [... a z] in codes and scales; `weight[...]` is all of it, widened.

    Shapes follow from the arrays, so that a layer's slice and a device's part are packed weights
    too. Groups divide the inputs evenly.

    Attributes:
        codes: of neighbouring inputs; int8 one a byte, uint8 two, the even input in the low bits.
        scales: of neighbouring groups of inputs.
        minima: likewise; None where codes are symmetric.
        dtype: of what it is widened to; static.
        table: it is an embedding [z a], with a row for each output; static.
    """

    codes: Integer[Array, "*lead z bytes"] = nnx.data()
    scales: Float[Array, "*lead z groups"] = nnx.data()
    minima: Float[Array, "*lead z groups"] | None = nnx.data(default=None)
    dtype: Any = nnx.static(default=np.dtype(np.float32))
    table: bool = nnx.static(default=False)

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self.codes.dtype == jnp.uint8 else 8

    @property
    def inputs(self) -> int:
        """a."""
        return self.codes.shape[-1] * 8 // self.bits

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the widened kernel."""
        *lead, outputs, _ = self.codes.shape
        return (*lead, outputs, self.inputs) if self.table else (*lead, self.inputs, outputs)

    @property
    def ndim(self) -> int:
        """Axes of the widened kernel."""
        return self.codes.ndim

    def __getitem__(self, index: EllipsisType) -> Float[Array, "..."]:
        """The widened kernel, as an `nnx.Param` gives its array."""
        return self.widened(self.dtype)

    def widened(self, dtype: Any) -> Float[Array, "..."]:
        """The same in another dtype."""
        parts = _weights(self)
        wide = parts[0] if len(parts) == 1 else jnp.stack(parts, axis=-1)
        wide = wide.reshape(*self.codes.shape[:-1], self.inputs).astype(dtype)
        return wide if self.table else wide.swapaxes(-1, -2)

    def columns(self, ids: Int[Array, " dv"]) -> Float[Array, "{self.inputs} dv"]:
        """Some columns of a single kernel, widened."""
        return jax.tree.map(lambda part: part[ids], self).widened(self.dtype)

    def matmul(self, x: Float[Array, "... {self.inputs}"]) -> Float[Array, "... z"]:
        """`x @ kernel` for a single kernel; gradients go to `x` alone."""
        stack = jax.tree.map(lambda v: v[None], self)
        return multiply_layer(x, stack, jnp.zeros((), jnp.int32))

    @property
    def kernel(self) -> "PackedWeight":
        """A table as the kernel [a z] of a tied head, in the same memory."""
        return PackedWeight(
            codes=self.codes, scales=self.scales, minima=self.minima, dtype=self.dtype
        )


def multiply_layer(
    x: Float[Array, "... a"], stack: PackedWeight, layer: Int[Array, ""]
) -> Float[Array, "... z"]:
    """`x @ kernel` for one layer of a stack [l a z], of which nothing is copied."""
    rows = x.reshape(-1, x.shape[-1])
    return _matmul(rows, stack, layer).reshape(*x.shape[:-1], -1)


def _weights(weight: PackedWeight) -> list[Array]:
    """The weights themselves in float32, [... z a]; of two codes a byte those of even inputs, then
    those of odd ones, [... z a/2]."""
    codes, scales = weight.codes, weight.scales
    halves = [codes] if weight.bits == 8 else [codes & 15, codes >> 4]
    out = []
    for half in halves:
        wide = half.astype(jnp.float32).reshape(*scales.shape, -1)
        if weight.bits == 4 and weight.minima is None:
            wide = wide - 8
        wide = wide * scales.astype(jnp.float32)[..., None]
        if weight.minima is not None:
            wide = wide + weight.minima.astype(jnp.float32)[..., None]
        if scales.dtype == jnp.bfloat16:
            # A conversion there and back again is one that XLA may leave out.
            wide = jax.lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=7)
        out.append(wide.reshape(codes.shape))
    return out


def _split(rows, weight: PackedWeight) -> list[Array]:
    """Columns of rows [n a] as `_weights` has them."""
    return [rows] if weight.bits == 8 else [rows[:, 0::2], rows[:, 1::2]]


def _join(parts: list[Array]) -> Array:
    """The columns back in their order."""
    return parts[0] if len(parts) == 1 else jnp.stack(parts, axis=-1).reshape(len(parts[0]), -1)


def _tiling(stack: PackedWeight, rows: int) -> tuple[int, int, bool]:
    """How many tiles of how many outputs a kernel is widened in, and whether rows are few."""
    outputs = stack.codes.shape[1]
    few = jax.default_backend() == "cpu" and rows <= FEW_ROWS
    most = FEW_OUTPUTS if few else max(TILE_BYTES // (4 * stack.inputs), 1)
    size = next(n for n in range(min(most, outputs), 0, -1) if outputs % n == 0)
    return outputs // size, size, few


def _tile(stack: PackedWeight, layer, first, size: int) -> PackedWeight:
    """So many outputs of a layer."""

    def slice_of(x):
        return jax.lax.dynamic_slice(x, (layer, first, 0), (1, size, x.shape[2]))[0]

    return jax.tree.map(slice_of, stack)


def _dot(x, y, axis: int):
    """[n k] times [z k] or [k z], over the axis of `y`; a float32 result, exact in float32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((1,), (axis,)), ((), ()))
    return jax.lax.dot_general(
        x, y, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


@jax.custom_vjp
def _matmul(rows, stack: PackedWeight, layer):
    """[n a] by a layer of [l a z] -> [n z]."""
    count, size, few = _tiling(stack, rows.shape[0])
    dtype = jnp.float32 if few else rows.dtype
    split = [part.astype(dtype) for part in _split(rows, stack)]
    # A scale an output is left for the product.
    single = stack.bits == 8 and stack.minima is None and stack.scales.shape[-1] == 1

    def product(first):
        tile = _tile(stack, layer, first, size)
        weights = [tile.codes] if single else _weights(tile)
        parts = [_dot(x, w.astype(dtype), 1) for x, w in zip(split, weights, strict=True)]
        y = sum(parts[1:], parts[0])
        return y * tile.scales[:, 0].astype(jnp.float32)[None] if single else y

    if count == 1:
        return product(0).astype(rows.dtype)

    def turn(j, y):
        return jax.lax.dynamic_update_slice(y, product(j * size), (0, j * size))

    y = jnp.zeros((rows.shape[0], count * size), jnp.float32)
    return jax.lax.fori_loop(0, count, turn, y).astype(rows.dtype)


def _matmul_forward(rows, stack, layer):
    return _matmul(rows, stack, layer), (stack, layer)


def _matmul_backward(saved, g):
    """Of the rows; the weights are frozen."""
    stack, layer = saved
    count, size, _ = _tiling(stack, g.shape[0])

    def turn(j, totals):
        weights = _weights(_tile(stack, layer, j * size, size))
        own = jax.lax.dynamic_slice(g, (0, j * size), (g.shape[0], size))
        return [t + _dot(own, w.astype(g.dtype), 0) for t, w in zip(totals, weights, strict=True)]

    zeros = [jnp.zeros((g.shape[0], stack.codes.shape[2]), jnp.float32)] * (8 // stack.bits)
    totals = jax.lax.fori_loop(0, count, turn, zeros)
    return _join(totals).astype(g.dtype), None, None


_matmul.defvjp(_matmul_forward, _matmul_backward)
