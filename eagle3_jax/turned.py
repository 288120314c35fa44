"""Linear maps as CPU likes them for a few rows: an array a layer, stored the other way around.

XLA:CPU multiplies two rows or more through YNNPACK, which packs the right operand anew for every
product: with a few rows on the left that is the kernel, and takes far longer than the product. So
the kernel is the left operand of few rows here, stored [out, in] as that wants it. And a scan over
stacked layers copies each layer's kernels out of the stack before it reads them.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from eagle3_jax.layers import Linear
from eagle3_jax.packed import PackedWeight, multiply_layer

FEW = 32
"""Up to so many rows a product is faster with the kernel on the left."""

Kernels = list[Array] | PackedWeight
"""Of all layers: an array [out, in] each, or a packed stack."""


def turned_matmul(x: Float[Array, "... a"], kernel: Float[Array, "z a"]) -> Float[Array, "... z"]:
    """`x @ kernel.T`, at the highest precision in float32."""
    rows = x.reshape(-1, x.shape[-1])
    count = rows.shape[0]
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    both = (((1,), (1,)), ((), ()))
    if count > FEW or (count == 1 and x.dtype == jnp.float32):
        y = jax.lax.dot_general(rows, kernel, both, precision=precision)
    else:
        if count == 1:
            # A product of a single row would widen the kernel to float32 first.
            rows = jnp.concatenate([rows, rows])
        y = jax.lax.dot_general(kernel, rows, both, precision=precision)
        # XLA would make one product of this and the transposition, with the kernel on the right.
        y = jax.lax.optimization_barrier(y).T
    return y[:count].reshape(*x.shape[:-1], y.shape[-1])


class Turned(nnx.Module):
    """A linear map whose kernel is stored [out, in]."""

    def __init__(self, linear: Linear):
        self.kernel = nnx.Param(linear.kernel[...].T)
        self.bias = linear.bias

    def __call__(self, x: Float[Array, "... {self.kernel.shape[1]}"]) -> Float[Array, "... z"]:
        y = turned_matmul(x, self.kernel[...])
        return y if self.bias is None else y + jnp.broadcast_to(self.bias[...], y.shape)


class Apart(nnx.Module):
    """A layer's linear map whose kernel is one of many arrays [out, in], which `bind` gives it.

    Attributes:
        inputs: of the map; static.
        place: of its kernels among those of the layer's linear maps; static.
        kernels: one a layer; packed ones are their stack, which is read where it lies.
        layer: which layer this is.
    """

    def __init__(self, linear: Linear, place: int):
        self.bias = linear.bias
        self.inputs = linear.kernel.shape[-2]
        self.place = place
        self.kernels: Kernels = nnx.data([])
        self.layer: Array | None = nnx.data(None)

    def __call__(self, x: Float[Array, "... {self.inputs}"]) -> Float[Array, "... z"]:
        assert self.layer is not None
        if isinstance(self.kernels, PackedWeight):
            y = multiply_layer(x, self.kernels, self.layer)
        else:
            # A branch a layer, of one product each: all else that a layer does compiles once for
            # all, and XLA hands a branch its kernel without copying it.
            each = [functools.partial(_apply, kernel=kernel) for kernel in self.kernels]
            y = jax.lax.switch(self.layer, each, x)
        return y if self.bias is None else y + jnp.broadcast_to(self.bias[...], y.shape)


@jax.jit
def _apply(x, kernel):
    return turned_matmul(x, kernel)


def linears(module: nnx.Module) -> list[tuple[nnx.Module, str, Linear]]:
    """Every `Linear` in a module: its owner, its name there, itself."""
    return [
        (part, name, value)
        for _, part in list(nnx.iter_modules(module))
        for name, value in vars(part).items()
        if isinstance(value, Linear)
    ]


def turned[M: nnx.Module](module: M) -> M:
    """The module with a `Turned` in place of every `Linear` in it; other arrays are shared.

    A `Linear` with a packed kernel stays.
    """
    copy = jax.tree.map(lambda x: x, module)
    for owner, name, linear in linears(copy):
        if not isinstance(linear.kernel, PackedWeight):
            setattr(owner, name, Turned(linear))
    return copy


def take_apart(stack: nnx.Module) -> list[Kernels]:
    """Put an `Apart` in place of every `Linear` of stacked layers, and return their kernels.

    Returns:
        For each of them, in their order, one kernel [out, in] a layer, or the packed stack.
    """
    kernels = []
    for place, (owner, name, linear) in enumerate(linears(stack)):
        if isinstance(linear.kernel, PackedWeight):
            kernels.append(linear.kernel)
        else:
            # By numpy: as many small programs would take longer to compile than to run.
            each = np.asarray(linear.kernel[...]).swapaxes(1, 2)
            kernels.append([jnp.asarray(np.ascontiguousarray(kernel)) for kernel in each])
        setattr(owner, name, Apart(linear, place))
    return kernels


def bind(layer: nnx.Module, kernels: list[Kernels], number: Int[Array, ""]) -> None:
    """Give one of the layers that were taken apart its kernels."""
    for _, part in list(nnx.iter_modules(layer)):
        if isinstance(part, Apart):
            part.kernels, part.layer = nnx.data(kernels[part.place]), number


def weight_bytes(module: nnx.Module) -> int:
    """Bytes of a module's arrays."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(module))
