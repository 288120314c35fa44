"""compressed-tensors' int4 (`pack-quantized`): what of it is read, and how its tensors lie.

A linear map's X.weight [out, in] is three tensors there: X.weight_packed, int32 [out, in / 8],
whose words hold eight neighbouring inputs each, the first in the lowest bits, as the code plus 8;
X.weight_scale [out, in / 32], one for each 32 inputs; X.weight_shape, which says [out, in] again.

A word is read as four bytes of two codes, so nothing is reordered or copied. A weight is its code
times its scale, rounded to the scale's dtype.

Source: compressed-tensors `compressors/pack_quantized` (vllm-project/compressed-tensors@ac8e2ba).
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Int

from eagle3_jax.contracts import UnsupportedError

GROUP = 32
"""Neighbouring inputs that share a scale."""

PACKED, SCALE, SHAPE = "weight_packed", "weight_scale", "weight_shape"
"""What stands in the place of `weight` in the tensors' names."""

MINIMUM = "weight_minimum"
"""What a GGUF's formats have beside, to whose tensors `checkpoints/gguf.py` gives such names."""

PER_ITEM = {np.dtype(np.int32): 8, np.dtype(np.uint8): 2, np.dtype(np.int8): 1}
"""Codes of an item of a packed tensor; words are compressed-tensors', bytes are a GGUF's."""

SCALES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16))
"""Their dtypes; products with float16 scales would round differently below 6e-5."""

METHOD = "compressed-tensors"
EXPECTED = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": GROUP,
    "actorder": None,
    "dynamic": False,
}
"""Of a group's weights; a key may be missing where that means the same."""


def check_quantization(found: Any) -> None:
    """Refuse a `quantization_config` other than int4 weights in groups of 32.

    Raises:
        UnsupportedError: says what was found, and what is read.
    """
    said = _unlike(found)
    if said is not None:
        raise UnsupportedError(
            f"the weights are quantised ({said}); read is int4 of {METHOD}, symmetric, in groups "
            f"of {GROUP}: load such a copy or an unquantised (bfloat16) one"
        )


def _unlike(found: Any) -> str | None:
    """The first thing in which a configuration differs from what is read; None where nothing."""
    if not isinstance(found, Mapping):
        return repr(found)[:60]
    if found.get("quant_method") != METHOD:
        return repr(found.get("quant_method"))[:60]
    if found.get("format") != "pack-quantized":
        return f"format {found.get('format')!r}"[:80]
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if found.get(key):
            return f"with a {key}"
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "without config_groups"
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):
            return f"config_groups.{name} without weights"[:80]
        for key in ("input_activations", "output_activations"):
            if group.get(key):
                return f"config_groups.{name} with {key}"[:80]
        for key, wanted in EXPECTED.items():
            value = weights.get(key, None if key in ("actorder", "dynamic") else wanted)
            if (value or None) != (wanted or None):
                return f"{key} {value!r}"[:80]
    return None


def codes_of(words: Int[np.ndarray, "..."]) -> np.ndarray:
    """Words [..., in / 8] as bytes [..., in / 2], in the same memory.

    An even input's code is in the low bits, as `eagle3_jax/packed.py` has them.
    """
    return words.view(np.uint8)
