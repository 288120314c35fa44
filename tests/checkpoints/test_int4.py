"""int4 of compressed-tensors: bits against its own, what is refused, and faults by name."""

import copy
import functools
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from checkpoints import families, hub, int4
from eagle3_jax.contracts import LoadError, UnsupportedError
from eagle3_jax.packed import PackedWeight

GOLDEN = Path(__file__).parents[1] / "golden"
TINY = runpy.run_path(str(GOLDEN / "tiny_int4.py"))
NAME = "kimi_k"
CONFIG = families.config_from_hub(TINY["config"](NAME))
PREFIX = "model.layers.2.mlp.experts.3"


@functools.cache
def tensors():
    """The tiny model's; copied by whoever changes them."""
    return TINY["tensors"](NAME)


def weight_of(words, scales, dtype=jnp.float32) -> PackedWeight:
    """A packed weight as loading makes it."""
    codes = jnp.asarray(int4.codes_of(np.asarray(words)))
    return PackedWeight(codes=codes, scales=jnp.asarray(scales), dtype=np.dtype(dtype))


def test_the_worked_example():
    """The first input in the lowest bits, codes as their value plus 8."""
    row = [0, 1, 2, 3, -1, -2, -8, 7]
    words = np.array([[0xF067BA98] * 4], np.uint32).view(np.int32)
    np.testing.assert_array_equal(words, TINY["pack"](np.array([row * 4])))
    scales = np.array([[3.0]], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(weight_of(words, scales)[...], 3.0 * np.array([row * 4]).T)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_are_those_of_compressed_tensors_bit_for_bit(dtype):
    """In both dtypes, compiled or not: products are rounded to the scale's bfloat16."""
    golden = np.load(GOLDEN / "int4.npz")
    scales = golden["scale"].view(ml_dtypes.bfloat16)
    wanted = golden["widened"].view(ml_dtypes.bfloat16).T
    assert tuple(golden["shape"]) == wanted.shape[::-1]
    weight = weight_of(golden["packed"], scales, dtype)
    for found in (weight[...], jax.jit(lambda w: w[...])(weight)):
        assert found.dtype == dtype and found.shape == weight.shape
        np.testing.assert_array_equal(np.asarray(found, np.float32), wanted.astype(np.float32))


def test_words_are_read_where_they_lie():
    words = np.arange(6, dtype=np.int32).reshape(2, 3)
    codes = int4.codes_of(words)
    assert codes.shape == (2, 12) and np.shares_memory(codes, words)


def test_experts_come_as_codes_and_scales():
    """Stacked by layer and expert, [out, in], gate above up; all else as ever."""
    arrays, plain = hub.from_hub(CONFIG, tensors()), hub.from_hub(CONFIG, tensors_widened())
    kinds = {"experts.gate_up", "experts.down"}
    assert set(arrays) == set(plain) - kinds | {f"{k}.{p}" for k in kinds for p in PARTS}
    for kind in kinds:
        weight = PackedWeight(
            codes=jnp.asarray(arrays[f"{kind}.codes"]),
            scales=jnp.asarray(arrays[f"{kind}.scales"]),
        )
        np.testing.assert_array_equal(weight[...], plain[kind])
    np.testing.assert_array_equal(arrays["embedding"], plain["embedding"])


PARTS = ("codes", "scales")


@functools.cache
def tensors_widened():
    """The same weights, not packed."""
    return TINY["tensors"](NAME, packed=False)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"up_proj.weight_packed": None}, f"1 missing: {PREFIX}.up_proj.weight_packed"),
        ({"down_proj.weight_scale": None}, f"1 missing: {PREFIX}.down_proj.weight_scale"),
        ({"down_proj.weight_scale": (64, 2)}, r"down_proj.weight_scale \[64, 2\] .*\[64, 1\]"),
        ({"up_proj.weight_packed": (32, 4)}, r"up_proj.weight_packed \[32, 4\] .*\[32, 8\]"),
        ({"up_proj.weight_zero_point": (4, 2)}, "1 unexpected: .*up_proj.weight_zero_point"),
        ({"up_proj.weight_scale": np.float16}, "packed in another dtype .*weight_scale float16"),
        ({"up_proj.weight_packed": np.int64}, "packed in another dtype .*weight_packed int64"),
    ],
)
def test_faults_are_named(change, words):
    changed = dict(tensors())
    for name, to in change.items():
        name = f"{PREFIX}.{name}"
        if to is None:
            del changed[name]
        elif isinstance(to, tuple):
            kind = tensors().get(name, np.zeros(0, np.int32)).dtype
            changed[name] = np.zeros(to, kind)
        else:
            changed[name] = changed[name].astype(to)
    with pytest.raises(LoadError, match=words) as refusal:
        hub.from_hub(CONFIG, changed)
    assert "\n" not in str(refusal.value)


def test_packed_weights_are_not_written():
    arrays = hub.from_hub(CONFIG, tensors())
    with pytest.raises(LoadError, match="experts.gate_up is packed; write an unpacked verifier"):
        hub.to_hub(CONFIG, arrays)


@pytest.mark.parametrize(
    "where, value, words",
    [
        ("quant_method", "fp8", "quantised .'fp8'."),
        ("quant_method", "mxfp4", "quantised .'mxfp4'."),
        ("format", "float-quantized", "format 'float-quantized'"),
        ("kv_cache_scheme", {"num_bits": 8}, "with a kv_cache_scheme"),
        ("config_groups", {}, "without config_groups"),
        ("num_bits", 8, "num_bits 8"),
        ("group_size", 128, "group_size 128"),
        ("symmetric", False, "symmetric False"),
        ("strategy", "channel", "strategy 'channel'"),
        ("actorder", "weight", "actorder 'weight'"),
        ("input_activations", {"num_bits": 8}, "config_groups.group_0 with input_activations"),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_other_quantisation_is_refused_by_name(where, value, words, nested):
    """At the top of config.json, or in its text_config, as Kimi-K2.5 has both."""
    found = copy.deepcopy(TINY["QUANTIZATION"])
    group = found["config_groups"]["group_0"]
    place = next((p for p in (found, group, group["weights"]) if where in p), found)
    place[where] = value
    config = {**TINY["MODELS"]["CONFIGS"]["kimi_k25"]}
    if nested:
        config["text_config"] = {**config["text_config"], "quantization_config": found}
    else:
        config["quantization_config"] = found
    with pytest.raises(UnsupportedError, match=words) as refusal:
        families.config_from_hub(config)
    assert "\n" not in str(refusal.value) and "int4 of compressed-tensors" in str(refusal.value)


@pytest.mark.parametrize("found", ["fp8", 4, {"quant_method": "compressed-tensors"}])
def test_an_odd_quantisation_is_refused_too(found):
    with pytest.raises(UnsupportedError, match="the weights are quantised"):
        int4.check_quantization(found)
