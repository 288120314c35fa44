"""Rotary position embedding: plain, linear, llama3 and YaRN frequencies, both pair layouts."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from eagle3_jax.configs import RopeConfig


def frequencies(rope: RopeConfig, width: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies [width / 2] in radians a position, and the factor on cosine and sine.

    Source: YaRN, arXiv 2309.00071, as transformers `modeling_rope_utils.py` states it; llama3:
    meta-llama/llama-models `apply_scaling`.
    """
    base = rope.theta ** (np.arange(0, width, 2, dtype=np.float64) / width)
    inverse = 1.0 / base
    if rope.kind in ("default", "dynamic"):
        return inverse, 1.0
    if rope.kind == "linear":
        return inverse / rope.factor, 1.0
    if rope.kind == "llama3":
        wavelength = 2 * math.pi / inverse
        low, high = rope.low_frequency_factor, rope.high_frequency_factor
        smooth = np.clip((rope.original_length / wavelength - low) / (high - low), 0.0, 1.0)
        return (1 - smooth) * inverse / rope.factor + smooth * inverse, 1.0

    def rotations(count: float) -> float:
        """The dimension that turns `count` times over the original length."""
        turns = rope.original_length / (count * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(rope.theta))

    low, high = rotations(rope.beta_fast), rotations(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(width // 2) - low) / (high - low), 0.0, 1.0)
    return inverse / rope.factor * ramp + inverse * (1 - ramp), attention_factor(rope)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def attention_factor(rope: RopeConfig) -> float:
    """YaRN's factor on cosine and sine."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def softmax_scale(rope: RopeConfig, width: int) -> float:
    """Scale of latent attention's scores: `width ** -0.5`, times YaRN's mscale squared."""
    scale = width**-0.5
    if rope.kind != "default" and rope.mscale_all_dim:
        scale *= _mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def rotate(
    x: Float[Array, "*lead h hd"], positions: Int[Array, "*lead"], rope: RopeConfig
) -> Float[Array, "*lead h hd"]:
    """Rotate heads by their positions, in float32.

    Args:
        x: heads.
        positions: absolute positions, in tokens.
        rope: frequencies and pair layout. The interleaved layout comes out with all first members
            of the pairs before all second ones; scores do not depend on it.
    """
    width = x.shape[-1]
    inverse, factor = frequencies(rope, width)
    angle = positions.astype(jnp.float32)[..., None, None] * jnp.asarray(
        inverse, jnp.float32
    ).reshape((1,) * (x.ndim - 1) + (width // 2,))
    cos, sin = jnp.cos(angle) * jnp.float32(factor), jnp.sin(angle) * jnp.float32(factor)
    y = x.astype(jnp.float32)
    if rope.interleaved:
        first, second = y[..., 0::2], y[..., 1::2]
    else:
        first, second = jnp.split(y, 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
