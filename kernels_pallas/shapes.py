"""Named shapes of real models, and what each attention kernel copies for them.

A cycle's verifier pass of one row, one layer, on one device: root and nodes over a context.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh

from kernels_pallas.forest_attention.api import forest_attention
from kernels_pallas.latent_forest_attention.api import latent_forest_attention
from kernels_pallas.plan import MULTIPROCESSORS, Cost, Plan, cost

NODES = (1, 3, 7, 15, 31, 63)
CONTEXTS = (1024, 4096, 32768, 131072)
SPARE = 256
"""Slots of a cache past the context."""

H200 = AbstractDevice("NVIDIA H200", MULTIPROCESSORS, "cuda")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Attention of a model on one device.

    Attributes:
        heads: query heads on the device.
        kv_heads: key heads on the device; 1 for latents, which all heads share.
        key_width: hd.
        value_width: hv.
        window: context tokens a query sees, itself among them; None for all.
        sinks: whether each head has one.
        latent: whether the values are the first columns of the keys.
    """

    heads: int
    kv_heads: int
    key_width: int
    value_width: int
    window: int | None = None
    sinks: bool = False
    latent: bool = False

    def limits(self, context: int) -> tuple[int, int]:
        """First context slot that some query sees, and one past the last."""
        first = 0 if self.window is None else max(0, context - self.window + 1)
        return first, context

    def arguments(self, nodes: int, context: int, dtype: Any = jnp.bfloat16) -> dict:
        """Shapes and dtypes of a call's arrays, by the operation's names for them."""

        def array(*shape, dtype=dtype):
            return jax.ShapeDtypeStruct(shape, dtype)

        w, s, k = nodes + 1, context + SPARE, self.kv_heads
        out = {
            "q": array(1, 1, w, self.heads, self.key_width),
            "layer": array(dtype=jnp.int32),
            "lo": array(1, 1, w, dtype=jnp.int32),
            "hi": array(1, 1, dtype=jnp.int32),
            "ancestors": array(1, w, w, dtype=bool),
        }
        keys, own = array(1, 1, k, s, self.key_width), array(1, 1, w, k, self.key_width)
        if self.latent:
            return out | {"latents": keys, "own": own}
        out |= {"keys": keys, "own_keys": own}
        out |= {"values": array(1, 1, k, s, self.value_width)}
        out |= {"own_values": array(1, 1, w, k, self.value_width)}
        return out | ({"sinks": array(self.heads)} if self.sinks else {})

    def call(self, arguments: dict, **options) -> jax.Array:
        """The operation on arrays of `arguments`' names."""
        scale = self.key_width**-0.5
        if self.latent:
            width = self.value_width
            return latent_forest_attention(**arguments, scale=scale, value_width=width, **options)
        return forest_attention(**arguments, scale=scale, **options)

    def plan(self, nodes: int, context: int) -> Plan:
        """How the kernel cuts it."""
        from kernels_pallas.forest_attention import mosaic_gpu as grouped  # slow to import
        from kernels_pallas.latent_forest_attention import mosaic_gpu as latent

        given = self.arguments(nodes, context)
        if self.latent:
            return latent.plan_of(given["q"], given["latents"], self.value_width)
        return grouped.plan_of(given["q"], given["keys"], given["values"])

    def cost(self, nodes: int, context: int) -> Cost:
        """What the kernel copies and multiplies."""
        plan = self.plan(nodes, context)
        return cost(plan, nodes + 1, [self.limits(context)], self.kv_heads)

    def lower(self, nodes: int, context: int, dtype: Any = jnp.bfloat16) -> str:
        """The kernel's program for an H200, which need not be there.

        Raises:
            Exception: Mosaic's, where it finds no layout, or more shared memory than there is.
        """
        mesh = AbstractMesh((), (), abstract_device=H200)
        call = jax.jit(lambda given: self.call(given, backend="mosaic_gpu"))
        with jax.sharding.use_abstract_mesh(mesh):
            traced = call.trace(self.arguments(nodes, context, dtype))
            return traced.lower(lowering_platforms=("cuda",)).as_text()


SHAPES = {
    "Kimi-K2.5, 8 of 64 heads": Shape(8, 1, 576, 512, latent=True),
    "Llama-3-8B": Shape(32, 8, 128, 128),
    "gpt-oss-120b, all": Shape(64, 8, 64, 64, sinks=True),
    "gpt-oss-120b, window": Shape(64, 8, 64, 64, window=128, sinks=True),
}
"""moonshotai/Kimi-K2.5, meta-llama/Meta-Llama-3-8B and openai/gpt-oss-120b, `config.json` of each;
Kimi on eight devices, the others on one."""
