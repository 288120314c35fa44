"""The three dispatches of a mixture of experts against the dense reference, and the router."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eagle3_jax import testing
from eagle3_jax.configs import ExpertsConfig
from eagle3_jax.int8 import pack
from eagle3_jax.packed import PackedWeight
from eagle3_jax.verifier import experts
from eagle3_jax.verifier.experts import (
    FEW,
    TILE,
    Experts,
    Kernels,
    Router,
    experts_by_tile,
    experts_in_use,
    experts_ragged,
)

LAYERS, COUNT, CHOSEN, WIDTH, INNER = 2, 6, 2, 10, 7
FORMS = {
    "in use": jax.jit(experts_in_use),
    "by tile": jax.jit(experts_by_tile),
    "ragged": jax.jit(experts_ragged),
}


def dense(x, chosen, weights, kernels, layer):
    """Every expert on every token, then the chosen ones' weights."""
    k, hi = kernels, jax.lax.Precision.HIGHEST
    both = jnp.einsum("nd,edz->nez", x, k.gate_up[layer], precision=hi)
    if k.gate_up_bias is not None:
        both = both + k.gate_up_bias[layer][None]
    gated, up = both[..., :INNER], both[..., INNER:]
    if k.limit is None:
        inner = jax.nn.silu(gated) * up
    else:
        gated, up = jnp.minimum(gated, k.limit), jnp.clip(up, -k.limit, k.limit)
        inner = gated / (1 + jnp.exp(-1.702 * gated)) * (up + 1)
    y = jnp.einsum("nei,eid->ned", inner, k.down[layer], precision=hi)
    if k.down_bias is not None:
        y = y + k.down_bias[layer][None]
    onehot = jax.nn.one_hot(chosen, COUNT, dtype=jnp.float32)
    return jnp.einsum("nxe,nx,ned->nd", onehot, weights, y, precision=hi)


def arguments(tokens: int, load: str = "random", layer: int = 1, kind: str = "plain"):
    """Random arguments.

    Args:
        tokens: how many.
        load: of the experts: random, all on the same two, or all but the last.
        layer: of the two.
        kind: `plain`, or `clamped` activation with biases.
    """
    rng = np.random.default_rng(tokens)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    if load == "random":
        chosen = np.stack([rng.permutation(COUNT)[:CHOSEN] for _ in range(tokens)])
    elif load == "same":
        chosen = np.tile([[COUNT - 1, 2]], (tokens, 1))
    else:
        chosen = np.stack([rng.permutation(COUNT - 1)[:CHOSEN] for _ in range(tokens)])
    return (
        normal(tokens, WIDTH),
        jnp.asarray(chosen, jnp.int32),
        jnp.abs(normal(tokens, CHOSEN)),
        Kernels(
            gate_up=normal(LAYERS, COUNT, WIDTH, 2 * INNER),
            down=normal(LAYERS, COUNT, INNER, WIDTH),
            gate_up_bias=normal(LAYERS, COUNT, 2 * INNER) if kind == "clamped" else None,
            down_bias=normal(LAYERS, COUNT, WIDTH) if kind == "clamped" else None,
            limit=1.0 if kind == "clamped" else None,
        ),
        jnp.asarray(layer, jnp.int32),
    )


each_kind = pytest.mark.parametrize("kind", ["plain", "clamped"])


# Around a tile's end for one expert (all tokens on the same two), and for many.
@pytest.mark.parametrize("load", ["random", "same", "last idle"])
@pytest.mark.parametrize("tokens", [1, TILE - 1, TILE, TILE + 1, 70])
@each_kind
def test_every_dispatch_equals_the_dense_reference(tokens, load, kind):
    given = arguments(tokens, load, kind=kind)
    wanted = dense(*given)
    for name, form in FORMS.items():
        np.testing.assert_allclose(form(*given), wanted, rtol=1e-5, atol=2e-5, err_msg=name)


def packed_arguments(tokens: int, kind: str):
    """Arguments with packed kernels, and the same with those kernels widened."""
    rng, width = np.random.default_rng(7), 64
    lead = (LAYERS, COUNT)

    def stack(inputs, outputs):
        if kind == "int8":
            parts = pack(rng.standard_normal((*lead, inputs, outputs)).astype(np.float32))
        else:
            parts = {
                "codes": rng.integers(0, 256, (*lead, outputs, inputs // 2)).astype(np.uint8),
                "scales": jnp.asarray(rng.uniform(0.1, 0.2, (*lead, outputs, 2)), jnp.bfloat16),
            }
        codes, scales = (jnp.asarray(parts[name]) for name in ("codes", "scales"))
        return PackedWeight(codes=codes, scales=scales)

    def biases(outputs):
        made = rng.standard_normal((*lead, outputs))
        return jnp.asarray(made, jnp.float32) if kind == "int8" else None

    kernels = Kernels(
        gate_up=stack(width, 2 * width),
        down=stack(width, width),
        gate_up_bias=biases(2 * width),
        down_bias=biases(width),
        limit=1.0 if kind == "int8" else None,
    )
    wide = dataclasses.replace(kernels, gate_up=kernels.gate_up[...], down=kernels.down[...])
    _, chosen, weights, _, layer = arguments(tokens)
    x = jnp.asarray(rng.standard_normal((tokens, width)) / 8, jnp.float32)
    return (x, chosen, weights, kernels, layer), (x, chosen, weights, wide, layer)


@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("tokens", [1, TILE + 1])
def test_every_dispatch_takes_packed_kernels(tokens, kind, monkeypatch):
    """As it takes the widened ones; off the CPU in two turns of three experts."""
    monkeypatch.setattr(experts, "FEW_BYTES", 4 * 3 * 64 * 128)
    given, plain = packed_arguments(tokens, kind)
    wanted = np.asarray(FORMS["in use"](*plain))
    for name, form in FORMS.items():
        np.testing.assert_allclose(
            form(*given), wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max(), err_msg=name
        )


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_gradients_through_packed_kernels(kind):
    """Of tokens and their weights; the kernels are frozen."""
    given, plain = packed_arguments(TILE + 1, kind)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(form, given):
        def loss(x, weights):
            return jnp.sum(jnp.sin(form(x, given[1], weights, *given[3:])))

        return jax.grad(loss, argnums=(0, 1))(given[0], given[2])

    found, wanted = (gradients(experts_by_tile, one) for one in (given, plain))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(np.asarray(b)).max())


def test_the_layer_is_the_one_asked_for():
    for name, form in FORMS.items():
        first, second = (form(*arguments(5, layer=layer)) for layer in (0, 1))
        np.testing.assert_allclose(first, dense(*arguments(5, layer=0)), atol=2e-5, err_msg=name)
        assert np.abs(np.asarray(first - second)).max() > 0.1


@functools.partial(jax.jit, static_argnums=0)
def gradients(form, given, direction):
    """Gradients of the tokens, the weights, and the kernels."""
    x, chosen, weights, kernels, layer = given

    def loss(x, weights, kernels):
        return jnp.sum(form(x, chosen, weights, kernels, layer) * direction)

    return jax.grad(loss, argnums=(0, 1, 2))(x, weights, kernels)


@pytest.mark.parametrize("load", ["random", "same", "last idle"])
@pytest.mark.parametrize("tokens", [5, TILE + 1, 70])
@each_kind
def test_gradients_by_tile_equal_those_of_the_reference(tokens, load, kind):
    """Of weights too, and exactly zero for experts (and layers) that nobody chose."""
    given = arguments(tokens, load, kind=kind)
    direction = jnp.asarray(np.random.default_rng(1).standard_normal((tokens, WIDTH)), jnp.float32)
    mine = gradients(experts_by_tile, given, direction)
    wanted = gradients(dense, given, direction)
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-4)
    idle = sorted(set(range(COUNT)) - set(np.unique(given[1])))
    for kernel in jax.tree.leaves(mine[2]):
        assert not np.asarray(kernel[0]).any()
        assert not np.asarray(kernel[1, idle]).any()


def test_few_and_many_tokens_take_different_forms():
    """On a CPU; one program each side of the limit, told apart by what they loop over."""
    routed = testing.tiny_verifier("deepseek").experts
    assert isinstance(routed, Experts)
    config = testing.DEEPSEEK.experts
    assert config is not None

    def text(tokens, differentiable):
        x = jnp.zeros((tokens, testing.DEEPSEEK.width))
        chosen = jnp.zeros((tokens, config.chosen), jnp.int32)
        weights = jnp.zeros((tokens, config.chosen))
        layer = jnp.zeros((), jnp.int32)
        return str(
            jax.make_jaxpr(routed, static_argnums=4)(x, chosen, weights, layer, differentiable)
        )

    by_tile = "custom_vjp"
    assert by_tile not in text(FEW, False)
    assert by_tile in text(FEW + 1, False)
    assert by_tile in text(1, True)


CONFIG = ExpertsConfig(
    count=12, chosen=3, width=4, groups=4, chosen_groups=2, scaling=2.5, correction=True
)


def correction_of(made: Router) -> nnx.Param:
    """A router's correction, which is there."""
    assert made.correction is not None
    return made.correction


def router(config: ExpertsConfig, spread: float = 0.3, seed: int = 0) -> Router:
    """A random router; its correction is negative on average: masking with 0 would then show."""
    made = Router(jax.random.key(seed), WIDTH, config)
    rng = np.random.default_rng(seed)
    correction = -1.0 + spread * rng.standard_normal(config.count)
    correction_of(made)[...] = jnp.asarray(correction, jnp.float32)
    return made


def tokens_for(count: int = 40):
    """Random tokens."""
    return jnp.asarray(np.random.default_rng(2).standard_normal((count, WIDTH)), jnp.float32)


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        dataclasses.replace(CONFIG, groups=1, chosen_groups=1),
        dataclasses.replace(CONFIG, normalise=False),
        dataclasses.replace(CONFIG, groups=3, chosen_groups=1, scaling=1.0),
    ],
)
def test_router_follows_its_definition(config):
    """Token by token, in plain numpy."""
    made, x = router(config), tokens_for()
    chosen, weights, scores = (np.asarray(y) for y in made(x))
    kernel = np.asarray(made.kernel[...], np.float64)
    bias = np.asarray(correction_of(made)[...], np.float64)
    plain = 1 / (1 + np.exp(-(np.asarray(x, np.float64) @ kernel)))
    np.testing.assert_allclose(scores, plain, atol=1e-6)
    for token, score in enumerate(plain):
        groups = (score + bias).reshape(config.groups, -1)
        best = np.sort(groups, axis=-1)[:, -2:].sum(axis=-1)
        kept = np.argsort(-best)[: config.chosen_groups]
        allowed = np.full(groups.shape, -np.inf)
        allowed[kept] = groups[kept]
        wanted = np.argsort(-allowed.ravel())[: config.chosen]
        assert sorted(chosen[token]) == sorted(wanted)
        unbiased = score[chosen[token]]
        if config.normalise:
            unbiased = unbiased / unbiased.sum()
        np.testing.assert_allclose(weights[token], unbiased * config.scaling, rtol=1e-5)
    if config.normalise:
        np.testing.assert_allclose(weights.sum(axis=-1), config.scaling, rtol=1e-5)


def test_the_correction_moves_the_choice_and_not_the_weights():
    config = dataclasses.replace(CONFIG, groups=1, chosen_groups=1, normalise=False, scaling=1.0)
    made, x = router(config, spread=0.0), tokens_for()
    before = np.asarray(made(x)[0])
    moved = correction_of(made)
    moved[...] = moved[...].at[5].set(3.0)
    chosen, weights, scores = (np.asarray(y) for y in made(x))
    assert (chosen == 5).any(axis=-1).all() and not (before == 5).any(axis=-1).all()
    np.testing.assert_array_equal(weights, np.take_along_axis(scores, chosen, axis=-1))
    assert weights.max() < 1


def test_the_gradient_of_the_correction_is_the_load_above_the_even_share():
    """And nothing reaches the weights through it."""
    made, x = router(CONFIG), tokens_for()
    chosen = np.asarray(made(x)[0])
    share = np.bincount(chosen.ravel(), minlength=CONFIG.count) / chosen.size

    def loss(made):
        return jnp.sum(made(x)[1] ** 2)

    gradient = jax.grad(loss)(made)
    np.testing.assert_allclose(gradient.correction[...], share - 1 / CONFIG.count, atol=1e-6)
    assert np.abs(np.asarray(gradient.kernel[...])).max() > 1e-3


@pytest.mark.parametrize("score", ["softmax", "softmax of chosen"])
@pytest.mark.parametrize("normalise", [True, False])
def test_softmax_routers_follow_their_definition(score, normalise):
    """Over all experts, renormalised or not (Qwen3-MoE); over the chosen ones (gpt-oss)."""
    config = ExpertsConfig(
        count=12, chosen=3, width=4, score=score, normalise=normalise, bias=score != "softmax"
    )
    made, x = Router(jax.random.key(3), WIDTH, config), tokens_for()
    logits = np.asarray(x, np.float64) @ np.asarray(made.kernel[...], np.float64)
    if made.bias is not None:
        bias = np.random.default_rng(4).standard_normal(12)
        made.bias[...] = jnp.asarray(bias, jnp.float32)
        logits = logits + bias
    chosen, weights, _ = (np.asarray(y) for y in made(x))
    np.testing.assert_array_equal(np.sort(chosen), np.sort(np.argsort(-logits)[:, :3]))
    share = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    share = np.take_along_axis(share, chosen, axis=-1)
    if normalise or score != "softmax":
        share = share / share.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(weights, share, rtol=1e-5)


def test_router_is_float32_for_bfloat16_tokens():
    made, x = router(CONFIG), tokens_for().astype(jnp.bfloat16)
    _, weights, scores = made(x)
    assert weights.dtype == scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, made(x.astype(jnp.float32))[2], atol=1e-6)
