"""Mixture of experts: the router, and the three ways to send tokens to experts.

| tokens | form | what it reads |
|---|---|---|
| few (decode, verify) | `experts_in_use` | each expert in use once, all tokens against it |
| many (prefill, score) | `experts_by_tile` | tokens sorted by expert, in tiles of one expert |
| with gradients | `experts_by_tile` | the same, with a backward pass of its own |
| any, off the CPU | `experts_ragged` | `jax.lax.ragged_dot`: no loop whose length is data |

All equal the dense reference (every expert on every token), which lives in the tests. The stacked
weights [l e ...] are closed over and sliced at (layer, expert), never copied a layer at a time;
packed weights, and bfloat16 weights computed in float32, stay as they are in memory, and only what
is in use is widened. Packed kernels have no gradient, nor have the biases beside them.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int, Key

from eagle3_jax.configs import ExpertsConfig
from eagle3_jax.layers import gate, matmul, multiply, random_kernel
from eagle3_jax.packed import PackedWeight

FEW = 32
"""Up to this many tokens the experts in use are walked one by one."""

TILE = 32
"""Rows of one tile where tokens are many."""

FEW_BYTES = 2**28
"""About so many bytes of packed experts are widened at a time off the CPU."""


class Router(nnx.Module):
    """Which experts a token is sent to, and with what weights; float32 throughout.

    `sigmoid` (DeepSeek-V3): the correction moves the choice only, weights are the unbiased scores
    of the chosen, and groups that were not kept are masked with -inf. `softmax` (Qwen3-MoE): over
    all experts. `softmax of chosen` (gpt-oss): the choice is by logit, the softmax over the chosen.

    The choice has no gradient, so the correction is given one of its own: an expert's share of the
    load above the even share. A trainer that descends along it balances the experts without an
    auxiliary loss; a frozen verifier never sees it.

    Source: DeepSeek-V3, arXiv 2412.19437; deepseek-ai/DeepSeek-V3 `inference/model.py`;
    transformers `modeling_qwen3_moe.py`, `modeling_gpt_oss.py`.
    """

    def __init__(self, key: Key[Array, ""], width: int, config: ExpertsConfig):
        def zeros():
            return nnx.Param(jnp.zeros((config.count,), jnp.float32))

        self.kernel = nnx.Param(random_kernel(key, width, config.count, fan_in=width))
        self.bias = zeros() if config.bias else None
        self.correction = zeros() if config.correction else None
        self.config = config

    def __call__(
        self, x: Float[Array, "n d"]
    ) -> tuple[Int[Array, "n x"], Float[Array, "n x"], Float[Array, "n e"]]:
        """Experts chosen for each token, their weights, and all scores."""
        c = self.config
        f32 = jnp.float32
        logits = matmul(x.astype(f32), self.kernel[...].astype(f32))
        if self.bias is not None:
            logits = logits + self.bias[...].astype(f32)[None]
        if c.score == "softmax of chosen":
            best, chosen = jax.lax.top_k(logits, c.chosen)
            return chosen, jax.nn.softmax(best, axis=-1) * f32(c.scaling), logits
        scores = jax.nn.sigmoid(logits) if c.score == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        ranked = scores
        if self.correction is not None:
            ranked = scores + self.correction[...].astype(f32)[None]
        if c.chosen_groups < c.groups:
            grouped = ranked.reshape(-1, c.groups, c.count // c.groups)
            best = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
            kept = jax.lax.top_k(best, c.chosen_groups)[1]
            allowed = jnp.any(kept[..., None] == jnp.arange(c.groups)[None, None], axis=-2)
            ranked = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(ranked.shape)
        chosen = jax.lax.top_k(ranked, c.chosen)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if c.normalise:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + f32(1e-20))
        if self.correction is not None:
            weights = _balance(weights, self.correction[...].astype(f32), chosen)
        return chosen, weights * f32(c.scaling), scores


@jax.custom_vjp
def _balance(weights, correction, chosen):
    """`weights` unchanged; the gradient of `correction` is the load above the even share."""
    return weights


def _balance_forward(weights, correction, chosen):
    count = correction.shape[0]
    onehot = chosen[..., None] == jnp.arange(count)[None, None]
    return weights, jnp.mean(onehot, axis=(0, 1), dtype=jnp.float32) - 1.0 / count


def _balance_backward(excess, d_weights):
    return d_weights, excess, None


_balance.defvjp(_balance_forward, _balance_backward)


@nnx.dataclass
class Kernels(nnx.Pytree):
    """The routed experts' weights, stacked by layer and expert.

    Attributes:
        gate_up: gate and up side by side.
        down: back to the verifier's width.
        gate_up_bias: None in most families.
        down_bias: likewise.
        limit: where the activation is clamped (`ExpertsConfig.limit`).
    """

    gate_up: Float[Array, "l e d z"] | PackedWeight = nnx.data()
    down: Float[Array, "l e i d"] | PackedWeight = nnx.data()
    gate_up_bias: Float[Array, "l e z"] | None = nnx.data(default=None)
    down_bias: Float[Array, "l e d"] | None = nnx.data(default=None)
    limit: float | None = nnx.static(default=None)

    @property
    def count(self) -> int:
        """Experts of a layer, e."""
        return self.gate_up.shape[1]


class Experts(nnx.Module):
    """The routed experts of all layers."""

    def __init__(self, key: Key[Array, ""], layers: int, width: int, config: ExpertsConfig):
        keys = jax.random.split(key)
        shape = (layers, config.count)
        inner = 2 * config.width
        self.limit = config.limit
        self.gate_up = nnx.Param(random_kernel(keys[0], *shape, width, inner, fan_in=width))
        self.down = nnx.Param(
            random_kernel(keys[1], *shape, config.width, width, fan_in=config.width)
        )

        def zeros(size):
            return nnx.Param(jnp.zeros((*shape, size), jnp.float32)) if config.bias else None

        self.gate_up_bias, self.down_bias = zeros(inner), zeros(width)

    @property
    def kernels(self) -> Kernels:
        """The weights alone."""
        gate_up, down = self.gate_up, self.down
        bias, down_bias = self.gate_up_bias, self.down_bias
        return Kernels(
            gate_up=gate_up if isinstance(gate_up, PackedWeight) else gate_up[...],
            down=down if isinstance(down, PackedWeight) else down[...],
            gate_up_bias=None if bias is None else bias[...],
            down_bias=None if down_bias is None else down_bias[...],
            limit=self.limit,
        )

    def __call__(
        self,
        x: Float[Array, "n d"],
        chosen: Int[Array, "n x"],
        weights: Float[Array, "n x"],
        layer: Int[Array, ""],
        differentiable: bool = False,
    ) -> Float[Array, "n d"]:
        """Weighted sum of the chosen experts' outputs."""
        if jax.default_backend() != "cpu":
            form = experts_ragged
        elif differentiable or x.shape[0] > FEW:
            form = experts_by_tile
        else:
            form = experts_in_use
        return form(x, chosen, weights, self.kernels, layer)


def activate(gate_up: Float[Array, "... z"], limit: float | None) -> Float[Array, "... i"]:
    """SwiGLU, or gpt-oss's clamped form of it.

    Source: transformers `modeling_gpt_oss.py`: the gate is clamped from above, up from both sides,
    and the result is `(up + 1) * gate * sigmoid(1.702 * gate)`.
    """
    if limit is None:
        return gate(gate_up)
    gated, up = jnp.split(gate_up, 2, axis=-1)
    gated, up = jnp.minimum(gated, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gated * jax.nn.sigmoid(1.702 * gated)


def _some(stack, layer, first, count: int):
    """So many experts of a layer, [count ...], from a stack [l e ...], packed or not."""

    def slice_of(x):
        at = (layer, first, *(0,) * (x.ndim - 2))
        return jax.lax.dynamic_slice(x, at, (1, count, *x.shape[2:]))[0]

    return jax.tree.map(slice_of, stack)


def _expert(kernels: Kernels, layer, expert, dtype) -> tuple:
    """One expert's (gate_up, down, gate_up_bias, down_bias).

    Widened where the stack is stored narrower than it is computed in; packed kernels stay packed.
    """

    def one(stack):
        if stack is None:
            return None
        own = jax.tree.map(lambda x: x[0], _some(stack, layer, expert, 1))
        return own if isinstance(own, PackedWeight) else own.astype(dtype)

    k = kernels
    return one(k.gate_up), one(k.down), one(k.gate_up_bias), one(k.down_bias)


def _feed_forward(x: Float[Array, "n d"], own: tuple, limit: float | None) -> Float[Array, "n d"]:
    """One expert's output."""
    gate_up, down, gate_up_bias, down_bias = own
    inner = multiply(x, gate_up)
    if gate_up_bias is not None:
        inner = inner + gate_up_bias[None]
    y = multiply(activate(inner, limit), down)
    return y if down_bias is None else y + down_bias[None]


def experts_in_use(
    x: Float[Array, "n d"],
    chosen: Int[Array, "n x"],
    weights: Float[Array, "n x"],
    kernels: Kernels,
    layer: Int[Array, ""],
) -> Float[Array, "n d"]:
    """Few tokens: walk the experts that any token chose, once each. Forward only."""
    onehot = chosen[..., None] == jnp.arange(kernels.count)[None, None]
    per_expert = jnp.sum(jnp.where(onehot, weights[..., None], 0.0), axis=1).T
    used = jnp.any(onehot, axis=(0, 1))
    order = jnp.argsort(jnp.logical_not(used), stable=True)

    def add(j, total):
        expert = order[j]
        y = _feed_forward(x, _expert(kernels, layer, expert, x.dtype), kernels.limit)
        return total + y.astype(jnp.float32) * per_expert[expert][:, None]

    total = jax.lax.fori_loop(0, jnp.sum(used), add, jnp.zeros(x.shape, jnp.float32))
    return total.astype(x.dtype)


def _sorted(chosen: Int[Array, "n x"], count: int):
    """The order of (token, choice) pairs by expert [n * x], and how many each expert has [e]."""
    flat = chosen.reshape(-1)
    sizes = jnp.sum(flat[:, None] == jnp.arange(count)[None], axis=0, dtype=jnp.int32)
    return jnp.argsort(flat, stable=True), sizes


def _combine(y: Float[Array, "q d"], order: Int[Array, " q"], weights, dtype):
    """Undo the sort by expert and sum a token's weighted outputs: [q d] -> [n d], q = n * x."""
    n, x = weights.shape
    back = jnp.zeros_like(order).at[order].set(jnp.arange(n * x, dtype=order.dtype))
    y = y[back].reshape(n, x, y.shape[-1]).astype(jnp.float32)
    return jnp.sum(y * weights[..., None], axis=1).astype(dtype)


def experts_ragged(
    x: Float[Array, "n d"],
    chosen: Int[Array, "n x"],
    weights: Float[Array, "n x"],
    kernels: Kernels,
    layer: Int[Array, ""],
) -> Float[Array, "n d"]:
    """Tokens sorted by expert, one `jax.lax.ragged_dot` a kernel; for accelerators.

    Packed kernels are widened a few experts at a time, a product for each few.
    """
    order, sizes = _sorted(chosen, kernels.count)
    expert = chosen.reshape(-1)[order]
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def product(rows, stack, bias):
        if isinstance(stack, PackedWeight):
            y = _ragged_by_few(rows, stack, sizes, layer, precision)
        else:
            y = jax.lax.ragged_dot(rows, stack[layer].astype(x.dtype), sizes, precision=precision)
        return y if bias is None else y + bias[layer].astype(x.dtype)[expert]

    inner = product(x[order // chosen.shape[1]], kernels.gate_up, kernels.gate_up_bias)
    y = product(activate(inner, kernels.limit), kernels.down, kernels.down_bias)
    # Rows past all groups belong to experts of other devices, and may hold anything.
    y = jnp.where((expert < kernels.count)[:, None], y, 0)
    return _combine(y, order, weights, x.dtype)


def _ragged_by_few(rows, stack: PackedWeight, sizes, layer, precision):
    """A ragged product over packed kernels; as many turns whatever was chosen.

    Each turn widens the next few experts and brings their rows to the front.
    """
    count, size = stack.shape[1], math.prod(stack.shape[2:]) * rows.dtype.itemsize
    few = next(n for n in range(max(min(FEW_BYTES // size, count), 1), 0, -1) if count % n == 0)
    first_row = jnp.cumsum(sizes) - sizes

    def turn(j, total):
        own = _some(stack, layer, j * few, few)
        start = first_row[j * few]
        mine = jax.lax.dynamic_slice_in_dim(sizes, j * few, few)
        front = jnp.roll(rows, -start, axis=0)
        wide = own.widened(rows.dtype)
        y = jax.lax.ragged_dot(front, wide, mine, precision=precision)
        y = jnp.where((jnp.arange(len(y)) < jnp.sum(mine))[:, None], y, 0)
        return total + jnp.roll(y, start, axis=0)

    zero = jnp.zeros((rows.shape[0], stack.shape[-1]), rows.dtype)
    return jax.lax.fori_loop(0, count // few, turn, zero)


def experts_by_tile(
    x: Float[Array, "n d"],
    chosen: Int[Array, "n x"],
    weights: Float[Array, "n x"],
    kernels: Kernels,
    layer: Int[Array, ""],
) -> Float[Array, "n d"]:
    """Many tokens: sorted by expert and cut into tiles of one expert each. Differentiable."""
    order, sizes = _sorted(chosen, kernels.count)
    y = _tiles(x[order // chosen.shape[1]], sizes, kernels, layer)
    return _combine(y, order, weights, x.dtype)


def _plan(sizes: Int[Array, " e"], tile: int):
    """How many tiles there are in all, and a function from a tile to (expert, first row, rows)."""
    per_expert = (sizes + tile - 1) // tile
    last_tile = jnp.cumsum(per_expert)
    first_row = jnp.cumsum(sizes) - sizes

    def locate(j):
        expert = jnp.sum(last_tile <= j).astype(jnp.int32)
        offset = (j - (last_tile[expert] - per_expert[expert])) * tile
        return expert, first_row[expert] + offset, sizes[expert] - offset

    return last_tile[-1], locate


@jax.custom_vjp
def _tiles(rows, sizes, kernels: Kernels, layer):
    """Each row through its expert; rows are sorted by expert, `sizes` of each.

    A tile may run past its expert's rows. What it computes there is overwritten by the next
    expert's first tile, or cut off at the end.
    """
    count, width = rows.shape
    total, locate = _plan(sizes, TILE)
    padded = jnp.pad(rows, ((0, TILE), (0, 0)))

    def one(j, out):
        expert, start, _ = locate(j)
        x = jax.lax.dynamic_slice(padded, (start, 0), (TILE, width))
        y = _feed_forward(x, _expert(kernels, layer, expert, x.dtype), kernels.limit)
        return jax.lax.dynamic_update_slice(out, y, (start, 0))

    return jax.lax.fori_loop(0, total, one, jnp.zeros_like(padded))[:count]


def _tiles_forward(rows, sizes, kernels, layer):
    return _tiles(rows, sizes, kernels, layer), (rows, sizes, kernels, layer)


def _tiles_backward(saved, d_out):
    """Recompute each tile and add its weight gradients to its expert's, in place.

    Where kernels are packed, rows alone have gradients.
    """
    rows, sizes, kernels, layer = saved
    count, width = rows.shape
    total, locate = _plan(sizes, TILE)
    padded = jnp.pad(rows, ((0, TILE), (0, 0)))
    d_padded = jnp.pad(d_out, ((0, TILE), (0, 0)))

    packed = isinstance(kernels.gate_up, PackedWeight)

    def accumulate(stack, new, expert):
        at = (layer, expert, *(0,) * new.ndim)
        old = jax.lax.dynamic_slice(stack, at, (1, 1, *new.shape))
        return jax.lax.dynamic_update_slice(stack, old + new[None, None].astype(stack.dtype), at)

    def one(j, carry):
        d_rows, d_kernels = carry
        expert, start, left = locate(j)
        own = (jnp.arange(TILE) < left)[:, None]
        x = jax.lax.dynamic_slice(padded, (start, 0), (TILE, width))
        dy = jnp.where(own, jax.lax.dynamic_slice(d_padded, (start, 0), (TILE, width)), 0)
        forward = functools.partial(_feed_forward, limit=kernels.limit)
        weights = _expert(kernels, layer, expert, x.dtype)
        if packed:
            (d_x,) = jax.vjp(lambda x: forward(x, weights), x)[1](dy)
            return jax.lax.dynamic_update_slice(d_rows, d_x, (start, 0)), None
        d_x, d_own = jax.vjp(forward, x, weights)[1](dy)
        d_rows = jax.lax.dynamic_update_slice(d_rows, d_x, (start, 0))
        names = ("gate_up", "down", "gate_up_bias", "down_bias")
        changed = {
            name: accumulate(getattr(d_kernels, name), new, expert)
            for name, new in zip(names, d_own, strict=True)
            if new is not None
        }
        return d_rows, dataclasses.replace(d_kernels, **changed)

    start = jnp.zeros_like(padded), None if packed else jax.tree.map(jnp.zeros_like, kernels)
    d_rows, d_kernels = jax.lax.fori_loop(0, total, one, start)
    return d_rows[:count], None, d_kernels, None


_tiles.defvjp(_tiles_forward, _tiles_backward)
