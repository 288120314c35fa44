"""Hub folders: names both ways, fused experts, and faults listed in one message."""

import dataclasses
import functools
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from checkpoints import hub
from eagle3_jax.configs import LatentConfig
from eagle3_jax.contracts import LoadError
from eagle3_jax.verifier import Verifier

MODELS = runpy.run_path(str(Path(__file__).parents[1] / "golden" / "tiny_models.py"))
CONFIGS = MODELS["CONFIGS"]
NAMES = ("deepseek_a", "deepseek_a_no_q_lora", "deepseek_a_bias", "kimi_k", "llama3", "llama_tied")


@functools.cache
def hub_tensors(name):
    """The tensors of a tiny model; copied by whoever changes them."""
    return MODELS["hub_tensors"](name)


def config_of(name):
    """Its configuration, as read."""
    return hub.config_from_hub(CONFIGS[name])


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


@pytest.mark.parametrize("name", NAMES)
def test_every_array_of_the_verifier_has_a_slot(name):
    """By name and shape, as an abstract verifier has them."""
    config = config_of(name)
    made = jax.eval_shape(lambda: Verifier(config, jax.random.key(0)))
    wanted = {".".join(map(str, path)): v.shape for path, v in nnx.to_flat_state(nnx.state(made))}
    arrays = hub.from_hub(config, hub_tensors(name))
    assert {k: v.shape for k, v in arrays.items()} == wanted


def test_the_config_is_read():
    """The numbers of a configuration, one by one."""
    c = config_of("deepseek_a")
    assert (c.vocab_size, c.width, c.num_layers, c.num_heads, c.mlp_width) == (97, 64, 5, 4, 96)
    assert c.norm_eps == 1e-5 and c.eos_tokens == (1,) and c.first_dense == 1
    assert c.latent == LatentConfig(24, 20, nope_width=16, rope_width=16, value_width=12)
    e = c.experts
    assert e is not None
    assert (e.count, e.chosen, e.width, e.shared, e.groups, e.chosen_groups) == (16, 4, 24, 2, 4, 2)
    assert e.normalise and e.scaling == 2.5
    r = c.rope
    assert (r.kind, r.factor, r.original_length, r.mscale_all_dim) == ("yarn", 8.0, 4096, 0.8)
    assert r.interleaved and not config_of("deepseek_a_half_rope").rope.interleaved
    assert config_of("deepseek_a_no_rope_scaling").rope.kind == "default"
    llama = config_of("llama3")
    assert (llama.num_kv_heads, llama.head_width, llama.rope.kind) == (2, 16, "llama3")
    assert config_of("llama_tied").tied_head and not llama.tied_head


def test_new_spelling_of_rope():
    """`rope_parameters` holds what `rope_scaling` and `rope_theta` held."""
    old = CONFIGS["llama3"]
    new = {k: v for k, v in old.items() if not k.startswith("rope_")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": old["rope_theta"]}
    assert hub.config_from_hub(new) == hub.config_from_hub(old)


def test_several_end_tokens():
    for value, wanted in (([1, 7], (1, 7)), (3, (3,)), (None, ())):
        config = hub.config_from_hub({**CONFIGS["llama3"], "eos_token_id": value})
        assert config.eos_tokens == wanted


def test_written_config_reads_back():
    plain = dataclasses.replace(config_of("deepseek_a_no_rope_scaling"), eos_tokens=(1, 5))
    assert hub.config_from_hub(hub.config_to_hub(plain)) == plain
    with pytest.raises(LoadError, match="yarn rope is not supported"):
        hub.config_to_hub(config_of("deepseek_a"))


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
    found = hub.from_hub(config_of("deepseek_a"), tensors)
    assert set(found) == set(hub.from_hub(config_of("deepseek_a"), hub_tensors("deepseek_a")))

    tied = {**hub_tensors("llama_tied"), "lm_head.weight": np.zeros((101, 64), np.float32)}
    head = hub.from_hub(config_of("llama_tied"), tied)["head.kernel"]
    np.testing.assert_array_equal(head, tied["model.embed_tokens.weight"].T)

    beyond = {**hub_tensors("llama3"), "model.layers.4.input_layernorm.weight": np.zeros(64)}
    with pytest.raises(LoadError, match="1 unexpected: model.layers.4.input_layernorm.weight"):
        hub.from_hub(config_of("llama3"), beyond)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "mamba"}, "model_type 'mamba'; supported: deepseek_v3, kimi_k2, llama"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": ...}, "deepseek_v3 model lacks the key 'hidden_size'"),
        ({"n_routed_experts": ...}, "lacks the key 'n_routed_experts'"),
        ({"vocab_size": "many"}, "cannot be read"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2}}, "rope type 'longrope'"),
        ({"rope_scaling": {"type": "yarn"}}, "lacks the key 'factor'"),
    ],
)
def test_bad_configurations_are_named(change, words):
    config = {**CONFIGS["deepseek_a"], **change}
    config = {k: v for k, v in config.items() if v is not ...}
    with pytest.raises(LoadError, match=words) as refusal:
        hub.config_from_hub(config)
    assert "\n" not in str(refusal.value)


def test_feed_forward_biases_are_refused():
    with pytest.raises(LoadError, match="mlp_bias"):
        hub.config_from_hub({**CONFIGS["llama3"], "mlp_bias": True})


def test_kimi_k2_is_the_same_family():
    kimi = hub.config_from_hub({**CONFIGS["kimi_k"], "model_type": "kimi_k2"})
    assert kimi == config_of("kimi_k")
