"""Rotary embedding: frequencies of every kind, both pair layouts, and what must not change."""

import dataclasses
import math

import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.configs import RopeConfig
from eagle3_jax.verifier.rope import attention_factor, frequencies, rotate, softmax_scale

WIDTH = 16
PLAIN = RopeConfig(theta=10000.0)
YARN = RopeConfig(
    kind="yarn", factor=8.0, original_length=4096, mscale=1.0, mscale_all_dim=0.8, theta=10000.0
)
LLAMA3 = RopeConfig(
    kind="llama3",
    theta=500000.0,
    factor=8.0,
    original_length=512,
    low_frequency_factor=1.0,
    high_frequency_factor=4.0,
)


def heads(rope: RopeConfig, positions, x=None):
    """Random heads [t 2 width] turned to their positions."""
    positions = jnp.asarray(positions, jnp.int32)
    if x is None:
        x = np.random.default_rng(0).standard_normal((1, 2, WIDTH))
    x = jnp.broadcast_to(jnp.asarray(x, jnp.float32), (*positions.shape, 2, WIDTH))
    return np.asarray(rotate(x, positions, rope))


def test_plain_frequencies():
    inverse, factor = frequencies(PLAIN, 8)
    np.testing.assert_allclose(inverse, [1.0, 0.1, 0.01, 0.001], rtol=1e-12)
    assert factor == 1.0


def test_linear_frequencies_are_divided():
    rope = dataclasses.replace(PLAIN, kind="linear", factor=4.0)
    np.testing.assert_allclose(frequencies(rope, 8)[0] * 4, frequencies(PLAIN, 8)[0])


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    inverse, factor = frequencies(LLAMA3, 64)
    plain = frequencies(RopeConfig(theta=LLAMA3.theta), 64)[0]
    wavelength = 2 * math.pi / plain
    short, long = wavelength < 512 / 4, wavelength > 512
    np.testing.assert_allclose(inverse[short], plain[short])
    np.testing.assert_allclose(inverse[long], plain[long] / 8)
    between = ~short & ~long
    assert between.any() and factor == 1.0
    assert (inverse[between] < plain[between]).all()
    assert (inverse[between] > plain[between] / 8).all()
    middle = 512 / 2.5  # halfway between the two limits in turns over the original length
    rope = dataclasses.replace(LLAMA3, theta=(middle / (2 * math.pi)) ** 2)
    np.testing.assert_allclose(frequencies(rope, 4)[0][1], 2 * math.pi / middle * (1 + 1 / 8) / 2)


def test_yarn_ramp():
    """Width 16, 4096 positions: 2 to 6 is the ramp (computed by hand), quarters in between."""
    inverse, factor = frequencies(YARN, WIDTH)
    plain = frequencies(PLAIN, WIDTH)[0]
    ramp = np.clip((np.arange(8) - 2) / 4, 0, 1)
    np.testing.assert_allclose(inverse, plain / 8 * ramp + plain * (1 - ramp))
    assert factor == attention_factor(YARN)
    exact = frequencies(dataclasses.replace(YARN, truncate=False), WIDTH)[0]
    assert np.abs(exact / inverse - 1).max() > 0.01


@pytest.mark.parametrize(
    "theta, factor, beta_fast, low, high, scale",
    [
        pytest.param(10000.0, 40.0, 32.0, 10, 23, 0.1352337789, id="DeepSeek-V3"),
        pytest.param(50000.0, 32.0, 1.0, 19, 20, 0.1308608000, id="Kimi-K2"),
        pytest.param(50000.0, 64.0, 32.0, 8, 20, 0.1446796258, id="Kimi-K2.5"),
    ],
)
def test_yarn_of_the_real_models(theta, factor, beta_fast, low, high, scale):
    """The ends of the ramp and the scale of scores, from the hub's numbers."""
    rope = RopeConfig(
        kind="yarn",
        theta=theta,
        factor=factor,
        original_length=4096,
        beta_fast=beta_fast,
        mscale=1.0,
        mscale_all_dim=1.0,
    )
    inverse, on_both = frequencies(rope, 64)
    plain = frequencies(RopeConfig(theta=theta), 64)[0]
    np.testing.assert_allclose(inverse[: low + 1], plain[: low + 1])
    np.testing.assert_allclose(inverse[high:], plain[high:] / factor)
    between = slice(low + 1, high)
    assert (inverse[between] < plain[between]).all()
    assert (inverse[between] > plain[between] / factor).all()
    assert on_both == 1.0 and softmax_scale(rope, 192) == pytest.approx(scale, rel=1e-9)


def test_yarn_factors():
    def of(**changes):
        return attention_factor(dataclasses.replace(YARN, **changes))

    def scale(mscale):
        return 0.1 * mscale * math.log(8) + 1

    assert of() == pytest.approx(scale(1.0) / scale(0.8))
    assert of(mscale_all_dim=1.0) == 1.0
    assert of(mscale=0.0) == pytest.approx(scale(1.0))
    assert of(mscale_all_dim=0.0) == pytest.approx(scale(1.0))
    assert of(attention_factor=1.25) == 1.25
    assert of(factor=1.0) == 1.0
    assert softmax_scale(YARN, 64) == pytest.approx(scale(0.8) ** 2 / 8)
    assert softmax_scale(PLAIN, 64) == 1 / 8
    assert softmax_scale(dataclasses.replace(YARN, mscale_all_dim=0.0), 64) == 1 / 8


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_by_its_definition(interleaved):
    """Each pair turns by position times frequency; the two layouts differ in what is a pair."""
    rope = dataclasses.replace(YARN, interleaved=interleaved)
    inverse, factor = frequencies(rope, WIDTH)
    x = np.random.default_rng(1).standard_normal((1, 2, WIDTH))
    out = heads(rope, [7], x)
    half = WIDTH // 2
    for i, frequency in enumerate(inverse):
        one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        turned = (x[0, :, one] + 1j * x[0, :, two]) * factor * np.exp(7j * frequency)
        np.testing.assert_allclose(out[0, :, i], turned.real, atol=1e-5)
        np.testing.assert_allclose(out[0, :, i + half], turned.imag, atol=1e-5)


@hypothesis.given(
    rope=st.sampled_from([PLAIN, LLAMA3, dataclasses.replace(PLAIN, interleaved=True)]),
    first=st.integers(0, 2000),
    second=st.integers(0, 2000),
    shift=st.integers(0, 2000),
)
def test_scores_depend_on_the_distance_alone(rope, first, second, shift):
    """And lengths do not change (without a factor)."""
    x = np.random.default_rng(2).standard_normal((1, 2, WIDTH))
    near = heads(rope, [first, second], x)
    far = heads(rope, [first + shift, second + shift], x)
    scores = [np.sum(pair[0] * pair[1], axis=-1) for pair in (near, far)]
    np.testing.assert_allclose(*scores, atol=4e-3)
    np.testing.assert_allclose(
        np.linalg.norm(near, axis=-1), np.linalg.norm(x, axis=-1).repeat(2, 0), rtol=1e-5
    )


def test_position_zero_is_the_identity():
    x = np.random.default_rng(3).standard_normal((1, 2, WIDTH))
    np.testing.assert_allclose(heads(PLAIN, [0], x)[0], x[0], rtol=1e-6)


def test_dtype_is_kept_and_angles_are_float32():
    """At position 5000 bfloat16 angles would be off by whole turns."""
    x = jnp.asarray(np.random.default_rng(4).standard_normal((1, 2, WIDTH)), jnp.bfloat16)
    at = jnp.asarray([5001], jnp.int32)
    out = rotate(x, at, PLAIN)
    assert out.dtype == jnp.bfloat16
    exact = rotate(x.astype(jnp.float32), at, PLAIN)
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, atol=0.02)
