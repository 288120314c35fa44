"""Mixture of experts: the router, and the three ways to send tokens to experts.

| tokens | form | what it reads |
|---|---|---|
| few (decode, verify) | `experts_in_use` | each expert in use once, all tokens against it |
| many (prefill, score) | `experts_by_tile` | tokens sorted by expert, in tiles of one expert |
| with gradients | `experts_by_tile` | the same, with a backward pass of its own |
| any, off the CPU | `experts_ragged` | `jax.lax.ragged_dot`: no loop whose length is data |

All equal the dense reference (every expert on every token), which lives in the tests. The stacked
weights [l e ...] are closed over and sliced at (layer, expert), never copied a layer at a time;
bfloat16 weights computed in float32 stay bfloat16 in memory, and only what is in use is widened.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float, Int, Key

from eagle3_jax.configs import ExpertsConfig
from eagle3_jax.layers import gate, matmul, random_kernel

FEW = 32
"""Up to this many tokens the experts in use are walked one by one."""

TILE = 32
"""Rows of one tile where tokens are many."""


class Router(nnx.Module):
    """Sigmoid router with group limits; float32 throughout.

    The correction bias moves the choice only; weights are the unbiased scores of the chosen.
    Groups that were not kept are masked with -inf. The choice has no gradient, so the bias is
    given one of its own: an expert's share of the load above the even share. A trainer that
    descends along it balances the experts without an auxiliary loss; a frozen verifier never sees
    it.

    Source: DeepSeek-V3, arXiv 2412.19437; deepseek-ai/DeepSeek-V3 `inference/model.py`.
    """

    def __init__(self, key: Key[Array, ""], width: int, config: ExpertsConfig):
        self.kernel = nnx.Param(random_kernel(key, width, config.count, fan_in=width))
        self.bias = nnx.Param(jnp.zeros((config.count,), jnp.float32))
        self.config = config

    def __call__(
        self, x: Float[Array, "n d"]
    ) -> tuple[Int[Array, "n x"], Float[Array, "n x"], Float[Array, "n e"]]:
        """Experts chosen for each token, their weights, and all scores."""
        c = self.config
        f32 = jnp.float32
        scores = jax.nn.sigmoid(matmul(x.astype(f32), self.kernel[...].astype(f32)))
        biased = scores + self.bias[...].astype(f32)[None]
        if c.chosen_groups < c.groups:
            grouped = biased.reshape(-1, c.groups, c.count // c.groups)
            best = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
            kept = jax.lax.top_k(best, c.chosen_groups)[1]
            allowed = jnp.any(kept[..., None] == jnp.arange(c.groups)[None, None], axis=-2)
            biased = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(biased.shape)
        chosen = jax.lax.top_k(biased, c.chosen)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if c.normalise:
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + f32(1e-20))
        weights = _balance(weights, self.bias[...].astype(f32), chosen)
        return chosen, weights * f32(c.scaling), scores


@jax.custom_vjp
def _balance(weights, bias, chosen):
    """`weights` unchanged; the gradient of `bias` is each expert's load above the even share."""
    return weights


def _balance_forward(weights, bias, chosen):
    onehot = chosen[..., None] == jnp.arange(bias.shape[0])[None, None]
    return weights, jnp.mean(onehot, axis=(0, 1), dtype=jnp.float32) - 1.0 / bias.shape[0]


def _balance_backward(excess, d_weights):
    return d_weights, excess, None


_balance.defvjp(_balance_forward, _balance_backward)


class Experts(nnx.Module):
    """The routed experts of all layers: SwiGLU kernels stacked by layer and expert."""

    def __init__(self, key: Key[Array, ""], layers: int, width: int, config: ExpertsConfig):
        keys = jax.random.split(key)
        shape = (layers, config.count)
        self.gate_up = nnx.Param(
            random_kernel(keys[0], *shape, width, 2 * config.width, fan_in=width)
        )
        self.down = nnx.Param(
            random_kernel(keys[1], *shape, config.width, width, fan_in=config.width)
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
        return form(x, chosen, weights, self.gate_up[...], self.down[...], layer)


def _expert(stack: Float[Array, "l e a z"], layer, expert, dtype) -> Float[Array, "a z"]:
    """One expert's kernel, widened where the stack is stored narrower than it is computed in."""
    one = jax.lax.dynamic_slice(stack, (layer, expert, 0, 0), (1, 1, *stack.shape[2:]))
    return one[0, 0].astype(dtype)


def experts_in_use(
    x: Float[Array, "n d"],
    chosen: Int[Array, "n x"],
    weights: Float[Array, "n x"],
    gate_up: Float[Array, "l e d z"],
    down: Float[Array, "l e i d"],
    layer: Int[Array, ""],
) -> Float[Array, "n d"]:
    """Few tokens: walk the experts that any token chose, once each. Forward only."""
    count = gate_up.shape[1]
    onehot = chosen[..., None] == jnp.arange(count)[None, None]
    per_expert = jnp.sum(jnp.where(onehot, weights[..., None], 0.0), axis=1).T
    used = jnp.any(onehot, axis=(0, 1))
    order = jnp.argsort(jnp.logical_not(used), stable=True)

    def add(j, total):
        expert = order[j]
        inner = gate(matmul(x, _expert(gate_up, layer, expert, x.dtype)))
        y = matmul(inner, _expert(down, layer, expert, x.dtype))
        return total + y.astype(jnp.float32) * per_expert[expert][:, None]

    total = jax.lax.fori_loop(0, jnp.sum(used), add, jnp.zeros(x.shape, jnp.float32))
    return total.astype(x.dtype)


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
    gate_up: Float[Array, "l e d z"],
    down: Float[Array, "l e i d"],
    layer: Int[Array, ""],
) -> Float[Array, "n d"]:
    """Tokens sorted by expert, one `jax.lax.ragged_dot` a kernel; for accelerators."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.sum(flat[:, None] == jnp.arange(gate_up.shape[1])[None], axis=0, dtype=jnp.int32)
    rows = x[order // chosen.shape[1]]
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    inner = gate(
        jax.lax.ragged_dot(rows, gate_up[layer].astype(x.dtype), sizes, precision=precision)
    )
    y = jax.lax.ragged_dot(inner, down[layer].astype(x.dtype), sizes, precision=precision)
    return _combine(y, order, weights, x.dtype)


def experts_by_tile(
    x: Float[Array, "n d"],
    chosen: Int[Array, "n x"],
    weights: Float[Array, "n x"],
    gate_up: Float[Array, "l e d z"],
    down: Float[Array, "l e i d"],
    layer: Int[Array, ""],
) -> Float[Array, "n d"]:
    """Many tokens: sorted by expert and cut into tiles of one expert each. Differentiable."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.sum(flat[:, None] == jnp.arange(gate_up.shape[1])[None], axis=0, dtype=jnp.int32)
    y = _tiles(x[order // chosen.shape[1]], sizes, gate_up, down, layer)
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


@functools.partial(jax.custom_vjp, nondiff_argnums=())
def _tiles(rows, sizes, gate_up, down, layer):
    """SwiGLU of each row by its expert; rows are sorted by expert, `sizes` of each.

    A tile may run past its expert's rows. What it computes there is overwritten by the next
    expert's first tile, or cut off at the end.
    """
    count, width = rows.shape
    total, locate = _plan(sizes, TILE)
    padded = jnp.pad(rows, ((0, TILE), (0, 0)))

    def one(j, out):
        expert, start, _ = locate(j)
        x = jax.lax.dynamic_slice(padded, (start, 0), (TILE, width))
        inner = gate(matmul(x, _expert(gate_up, layer, expert, x.dtype)))
        y = matmul(inner, _expert(down, layer, expert, x.dtype))
        return jax.lax.dynamic_update_slice(out, y, (start, 0))

    return jax.lax.fori_loop(0, total, one, jnp.zeros_like(padded))[:count]


def _tiles_forward(rows, sizes, gate_up, down, layer):
    return _tiles(rows, sizes, gate_up, down, layer), (rows, sizes, gate_up, down, layer)


def _tiles_backward(saved, d_out):
    """Recompute each tile and add its weight gradients to its expert's, in place."""
    rows, sizes, gate_up, down, layer = saved
    count, width = rows.shape
    total, locate = _plan(sizes, TILE)
    padded = jnp.pad(rows, ((0, TILE), (0, 0)))
    d_padded = jnp.pad(d_out, ((0, TILE), (0, 0)))

    def accumulate(stack, expert, new):
        at = (layer, expert, 0, 0)
        old = jax.lax.dynamic_slice(stack, at, (1, 1, *new.shape))
        return jax.lax.dynamic_update_slice(stack, old + new[None, None], at)

    def one(j, carry):
        d_rows, d_gate_up, d_down = carry
        expert, start, left = locate(j)
        up_kernel = _expert(gate_up, layer, expert, rows.dtype)
        down_kernel = _expert(down, layer, expert, rows.dtype)
        own = (jnp.arange(TILE) < left)[:, None]
        x = jax.lax.dynamic_slice(padded, (start, 0), (TILE, width))
        dy = jnp.where(own, jax.lax.dynamic_slice(d_padded, (start, 0), (TILE, width)), 0)
        inner, pull = jax.vjp(lambda x, kernel: gate(matmul(x, kernel)), x, up_kernel)
        d_x, d_up_kernel = pull(matmul(dy, down_kernel.T))
        return (
            jax.lax.dynamic_update_slice(d_rows, d_x, (start, 0)),
            accumulate(d_gate_up, expert, d_up_kernel),
            accumulate(d_down, expert, matmul(inner.T, dy)),
        )

    start = jnp.zeros_like(padded), jnp.zeros_like(gate_up), jnp.zeros_like(down)
    d_rows, d_gate_up, d_down = jax.lax.fori_loop(0, total, one, start)
    return d_rows[:count], None, d_gate_up, d_down, None


_tiles.defvjp(_tiles_forward, _tiles_backward)
