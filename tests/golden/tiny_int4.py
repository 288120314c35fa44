"""A tiny verifier's routed experts in int4, as compressed-tensors lays them out (pack-quantized).

Needs numpy and ml_dtypes alone; the script that makes the golden file and the tests both run it.
"""

import runpy
from pathlib import Path

import ml_dtypes
import numpy as np

MODELS = runpy.run_path(str(Path(__file__).with_name("tiny_models.py")))

GROUP = 32

QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "dynamic": False,
                "group_size": GROUP,
                "num_bits": 4,
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}
"""As Kimi-K2.5's config.json has it."""


def config(name: str) -> dict:
    """A tiny model's configuration with its experts in int4."""
    return {**MODELS["CONFIGS"][name], "quantization_config": QUANTIZATION}


def quantise(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes -8 to 7 [out, in], int8, and a bfloat16 scale for each 32 inputs."""
    out, inputs = weight.shape
    groups = weight.reshape(out, inputs // GROUP, GROUP)
    scale = (np.abs(groups).max(axis=-1) / 7.5).astype(ml_dtypes.bfloat16)
    codes = np.clip(np.rint(groups / scale.astype(np.float32)[..., None]), -8, 7)
    return codes.reshape(out, inputs).astype(np.int8), scale


def pack(codes: np.ndarray) -> np.ndarray:
    """Words of eight neighbouring inputs, the first in the lowest bits, each as its code plus 8."""
    nibbles = (codes.astype(np.int64) + 8).reshape(len(codes), -1, 8)
    words = (nibbles << (4 * np.arange(8))).sum(axis=-1)
    return words.astype(np.uint32).view(np.int32)


def widened(codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The weights themselves: each product rounded to bfloat16, here in float32."""
    exact = codes.astype(np.float32) * np.repeat(scale.astype(np.float32), GROUP, axis=1)
    return exact.astype(ml_dtypes.bfloat16).astype(np.float32)


def tensors(name: str, packed: bool = True) -> dict[str, np.ndarray]:
    """A tiny model's tensors under their hub names, its experts in int4.

    Args:
        name: of the model.
        packed: as three tensors each; else the same weights, widened.
    """
    out = {}
    for tensor, value in MODELS["hub_tensors"](name).items():
        if ".experts." not in tensor:
            out[tensor] = value
            continue
        codes, scale = quantise(value)
        if packed:
            out[f"{tensor}_packed"] = pack(codes)
            out[f"{tensor}_scale"] = scale
            out[f"{tensor}_shape"] = np.asarray(codes.shape, np.int32)
        else:
            out[tensor] = widened(codes, scale)
    return out
