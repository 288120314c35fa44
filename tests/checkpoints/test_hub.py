"""Hub folders: names both ways, fused experts, and faults listed in one message."""

import dataclasses
import functools
import runpy
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from checkpoints import families, hub
from checkpoints.sources import Held
from eagle3_jax.contracts import LoadError
from eagle3_jax.verifier import Verifier

MODELS = runpy.run_path(str(Path(__file__).parents[1] / "golden" / "tiny_models.py"))
CONFIGS = MODELS["CONFIGS"]
NAMES = ("deepseek_a", "deepseek_a_no_q_lora", "deepseek_a_bias", "kimi_k", "llama3", "llama_tied")
NAMES += ("qwen3", "qwen3_moe")


@functools.cache
def hub_tensors(name):
    """The tensors of a tiny model; copied by whoever changes them."""
    return MODELS["hub_tensors"](name)


def config_of(name):
    """Its configuration, as read."""
    return families.config_from_hub(CONFIGS[name])


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back(name):
    """Hub to ours to hub is the identity, and so is ours to hub to ours."""
    config, tensors = config_of(name), hub_tensors(name)
    arrays = hub.from_hub(config, tensors)
    back = hub.to_hub(config, arrays)
    assert set(back) == set(tensors)
    for key, value in tensors.items():
        np.testing.assert_array_equal(back[key], value, err_msg=key)
    again = hub.from_hub(config, back)
    assert set(again) == set(arrays)
    for key, value in arrays.items():
        np.testing.assert_array_equal(again[key], value, err_msg=key)


@pytest.mark.parametrize("name", [*NAMES, "gpt_oss", "kimi_k25", "qwen3_moe_sparse"])
def test_every_array_of_the_verifier_has_a_slot(name):
    """By name and shape, as an abstract verifier has them."""
    config = config_of(name)
    made = jax.eval_shape(lambda: Verifier(config, jax.random.key(0)))
    wanted = {".".join(map(str, path)): v.shape for path, v in nnx.to_flat_state(nnx.state(made))}
    arrays = hub.from_hub(config, hub_tensors(name))
    assert {k: v.shape for k, v in arrays.items()} == wanted


def fused(tensors):
    """The spelling with all experts of a layer in two tensors."""
    out = {k: v for k, v in tensors.items() if ".mlp.experts." not in k}
    for layer in range(1, 5):
        at = f"model.layers.{layer}.mlp.experts"

        def stack(kind, at=at):
            return np.stack([tensors[f"{at}.{e}.{kind}_proj.weight"] for e in range(16)])

        out[f"{at}.gate_up_proj"] = np.concatenate([stack("gate"), stack("up")], axis=1)
        out[f"{at}.down_proj"] = stack("down")
    return out


def test_fused_experts_are_the_same_model():
    config, tensors = config_of("deepseek_a"), hub_tensors("deepseek_a")
    one, other = hub.from_hub(config, tensors), hub.from_hub(config, fused(tensors))
    for name, value in one.items():
        np.testing.assert_array_equal(other[name], value, err_msg=name)


@pytest.mark.parametrize("name", ["llama3", "deepseek_a"])
def test_all_faults_are_in_one_message(name):
    tensors = dict(hub_tensors(name))
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:-1]
    tensors["model.layers.0.extra"] = np.zeros(3)
    with pytest.raises(LoadError) as refusal:
        hub.from_hub(config_of(name), tensors)
    text = str(refusal.value)
    v = CONFIGS[name]["vocab_size"]
    assert "1 missing: model.norm.weight" in text
    assert f"1 misshapen: lm_head.weight [{v - 1}, 64] (expected [{v}, 64])" in text
    assert "1 unexpected: model.layers.0.extra" in text
    assert "\n" not in text


def test_a_missing_expert_and_a_misshapen_fusion_are_named():
    config, tensors = config_of("deepseek_a"), dict(hub_tensors("deepseek_a"))
    gone = "model.layers.2.mlp.experts.7.up_proj.weight"
    del tensors[gone]
    with pytest.raises(LoadError, match=f"1 missing: {gone}"):
        hub.from_hub(config, tensors)
    tensors = fused(hub_tensors("deepseek_a"))
    name = "model.layers.3.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name][:, :-1]
    with pytest.raises(LoadError, match=r"gate_up_proj \[16, 47, 64\] \(expected \[16, 48, 64\]\)"):
        hub.from_hub(config, tensors)


def test_a_second_matrix_of_a_joined_kernel_is_checked_too():
    """Query, key and value become one kernel; a key of the wrong height is not hidden by it."""
    tensors = dict(hub_tensors("llama3"))
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name][:-4]
    with pytest.raises(LoadError, match="k_proj.weight"):
        hub.from_hub(config_of("llama3"), tensors)


def test_known_leftovers_are_skipped():
    """The layer for multi-token prediction, rotary tables, a tied head's copy; nothing else."""
    tensors = dict(hub_tensors("deepseek_a"))
    tensors["model.layers.5.eh_proj.weight"] = np.zeros((4, 8), np.float32)
    tensors["model.layers.5.mlp.experts.0.down_proj.weight"] = np.zeros((4, 8), np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    config = dataclasses.replace(config_of("deepseek_a"), extra_layers=1)
    found = hub.from_hub(config, tensors)
    assert set(found) == set(hub.from_hub(config, hub_tensors("deepseek_a")))
    with pytest.raises(LoadError, match="2 unexpected: model.layers.5.eh_proj.weight, "):
        hub.from_hub(config_of("deepseek_a"), tensors)

    tied = {**hub_tensors("llama_tied"), "lm_head.weight": np.zeros((101, 64), np.float32)}
    head = hub.from_hub(config_of("llama_tied"), tied)["head.kernel"]
    np.testing.assert_array_equal(head, tied["model.embed_tokens.weight"].T)

    beyond = {**hub_tensors("llama3"), "model.layers.4.input_layernorm.weight": np.zeros(64)}
    with pytest.raises(LoadError, match="1 unexpected: model.layers.4.input_layernorm.weight"):
        hub.from_hub(config_of("llama3"), beyond)


def test_the_text_part_of_kimi_k25_alone_is_read():
    """Vision and projector are left out knowingly; text tensors without the prefix are not."""
    config, tensors = config_of("kimi_k25"), hub_tensors("kimi_k25")
    skipped = {name for name in tensors if name.startswith(("vision_tower.", "mm_projector."))}
    assert skipped and all(n.startswith("language_model.") for n in set(tensors) - skipped)
    head = hub.from_hub(config, tensors)["head.kernel"]
    np.testing.assert_array_equal(head, tensors["language_model.lm_head.weight"].T)
    renamed = {**tensors, "lm_head.weight": tensors["language_model.lm_head.weight"]}
    with pytest.raises(LoadError, match="1 unexpected: lm_head.weight"):
        hub.from_hub(config, renamed)
    del renamed["language_model.lm_head.weight"]
    with pytest.raises(LoadError, match="1 missing: language_model.lm_head.weight; 1 unexpected"):
        hub.from_hub(config, renamed)


def test_gates_of_gpt_oss_are_told_from_ups():
    """They alternate on the hub, and stand side by side here."""
    config, tensors = config_of("gpt_oss"), hub_tensors("gpt_oss")
    found = hub.from_hub(config, tensors)
    for kind in ("", "_bias"):
        stored = tensors[f"model.layers.2.mlp.experts.gate_up_proj{kind}"]
        width = stored.shape[-1] // 2
        ours = found[f"experts.gate_up{kind}"][2]
        np.testing.assert_array_equal(ours[..., :width], stored[..., 0::2])
        np.testing.assert_array_equal(ours[..., width:], stored[..., 1::2])
    np.testing.assert_array_equal(
        found["moe_layers.router.kernel"][1], tensors["model.layers.1.mlp.router.weight"].T
    )
    with pytest.raises(LoadError, match="writing gpt_oss checkpoints is not supported"):
        hub.to_hub(config, found)


@pytest.mark.parametrize("kind", [np.int64, np.float64, ml_dtypes.float8_e4m3fn, np.bool_])
def test_other_dtypes_are_named(kind):
    tensors = dict(hub_tensors("llama3"))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(kind)
    with pytest.raises(LoadError, match=f"or bfloat16: model.norm.weight {np.dtype(kind)}"):
        hub.from_hub(config_of("llama3"), tensors)


def test_parts_of_two_dtypes_are_joined_in_float32():
    tensors = dict(hub_tensors("llama3"))
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    found = hub.from_hub(config_of("llama3"), tensors)["dense_layers.attention.qkv.kernel"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[1][:, 64:96], tensors[name].astype(np.float32).T)


def test_nothing_is_read_before_everything_fits():
    """And then one array's tensors at a time."""
    tensors, read = dict(hub_tensors("llama3")), []

    class Watched(Held):
        def read(self, name):
            read.append(name)
            return super().read(name)

    arrays = hub.from_hub(config_of("llama3"), Watched(tensors))
    # The type check that these tests run under looks at one item of a mapping.
    assert len(read) <= 1
    read.clear()
    assert "norm.weight" in arrays and not read
    arrays["norm.weight"]
    assert read == ["model.norm.weight"]
    del tensors["lm_head.weight"]
    with pytest.raises(LoadError):
        hub.from_hub(config_of("llama3"), Watched(tensors))
    assert len(read) == 1


@pytest.mark.parametrize("name", ["llama3", "deepseek_a"])
def test_absurd_numbers_end_soon(name):
    """A config that asks for billions of tensors is refused as soon as enough are missing."""
    config = dataclasses.replace(config_of(name), num_layers=9_999)
    if config.experts is not None:
        experts = dataclasses.replace(config.experts, count=2**40, groups=1, chosen_groups=1)
        config = dataclasses.replace(config, experts=experts)
    with pytest.raises(LoadError, match="100[0-9] missing: .* and 99[0-9] more"):
        hub.from_hub(config, hub_tensors(name))
