"""config.json of every family: what is read, and what is refused by name."""

import dataclasses
import runpy
from pathlib import Path

import pytest

from checkpoints import families
from eagle3_jax.configs import LatentConfig, VerifierConfig
from eagle3_jax.contracts import LoadError, UnsupportedError

MODELS = runpy.run_path(str(Path(__file__).parents[1] / "golden" / "tiny_models.py"))
CONFIGS = MODELS["CONFIGS"]


def config_of(name: str, **changes) -> VerifierConfig:
    """The configuration of a tiny model, with changes to its config.json."""
    return families.config_from_hub({**CONFIGS[name], **changes})


def test_the_config_is_read():
    """The numbers of a configuration, one by one."""
    c = config_of("deepseek_a")
    assert (c.vocab_size, c.width, c.num_layers, c.num_heads, c.mlp_width) == (97, 64, 5, 4, 96)
    assert c.norm_eps == 1e-5 and c.eos_tokens == (1,) and c.dense == (0,)
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


def test_what_each_family_is():
    """What sets the families apart, read from their configs."""
    qwen = config_of("qwen3")
    assert qwen.qk_norm and qwen.head_width == 24 and qwen.experts is None and not qwen.windowed
    assert config_of("qwen3_window").windowed == (2, 3)
    assert config_of("qwen3_window").window == 8
    listed = ["sliding_attention", "full_attention"] * 2
    assert config_of("qwen3_window", layer_types=listed).windowed == (0, 2)
    moe = config_of("qwen3_moe")
    assert moe.qk_norm and moe.dense == (1,) and moe.moe_layers == (0, 2, 3)
    assert moe.experts is not None and (moe.experts.score, moe.experts.shared) == ("softmax", 0)
    assert moe.experts.normalise and not moe.experts.correction
    assert config_of("qwen3_moe_sparse").dense == (0, 2)
    assert config_of("qwen3_moe", use_sliding_window=True, sliding_window=8).windowed == (
        *(0, 1, 2, 3),
    )
    oss = config_of("gpt_oss")
    assert oss.sinks and oss.wide_norms and oss.attention_bias and oss.windowed == (0, 2)
    assert oss.experts is not None and oss.experts.bias and oss.experts.limit == 1.0
    assert oss.experts.score == "softmax of chosen" and not oss.rope.truncate
    kimi = config_of("kimi_k25")
    assert kimi.family == "kimi_k25" and kimi.image_tokens == (96,) and kimi.latent is not None
    assert config_of("deepseek_a", num_nextn_predict_layers=2).extra_layers == 2


def test_gpt_oss_without_rope_keys_means_its_own_yarn():
    bare = {k: v for k, v in CONFIGS["gpt_oss"].items() if not k.startswith("rope_")}
    rope = families.config_from_hub(bare).rope
    assert (rope.kind, rope.theta, rope.factor, rope.truncate) == ("yarn", 150000.0, 32.0, False)


def test_dynamic_rope_ends_at_the_original_length():
    changed = config_of("llama3", rope_scaling={"type": "dynamic", "factor": 4.0})
    assert changed.rope.kind == "dynamic" and changed.max_length == 4096
    shorter = {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 512}
    assert config_of("llama3", rope_scaling=shorter).max_length == 512


def test_end_tokens_of_generation_config_win():
    config = CONFIGS["llama3"]
    assert families.config_from_hub(config, {"eos_token_id": [3, 4]}).eos_tokens == (3, 4)
    assert families.config_from_hub(config, {"top_p": 0.9}).eos_tokens == (1,)
    words = "generation_config.json cannot be read: eos_token_id is 'end'; expected whole numbers"
    with pytest.raises(LoadError, match=words):
        families.config_from_hub(config, {"eos_token_id": "end"})


def test_new_spelling_of_rope():
    """`rope_parameters` holds what `rope_scaling` and `rope_theta` held."""
    old = CONFIGS["llama3"]
    new = {k: v for k, v in old.items() if not k.startswith("rope_")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": old["rope_theta"]}
    assert families.config_from_hub(new) == families.config_from_hub(old)


def test_several_end_tokens():
    for value, wanted in (([1, 7], (1, 7)), (3, (3,)), (None, ())):
        config = families.config_from_hub({**CONFIGS["llama3"], "eos_token_id": value})
        assert config.eos_tokens == wanted


def test_written_config_reads_back():
    plain = dataclasses.replace(config_of("deepseek_a_no_rope_scaling"), eos_tokens=(1, 5))
    assert families.config_from_hub(families.config_to_hub(plain)) == plain
    with pytest.raises(LoadError, match="yarn rope is not supported"):
        families.config_to_hub(config_of("deepseek_a"))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model_type": "mamba"}, "model_type 'mamba'; supported: deepseek_v3, gpt_oss, kimi_k2"),
        ({"model_type": None}, "model_type None"),
        ({"hidden_size": ...}, "deepseek_v3 model lacks the key 'hidden_size'"),
        ({"n_routed_experts": ...}, "lacks the key 'n_routed_experts'"),
        ({"vocab_size": "many"}, "cannot be read: vocab_size is 'many'; expected a whole number"),
        ({"vocab_size": True}, "vocab_size is True; expected a whole number"),
        ({"vocab_size": 97.5}, "vocab_size is 97.5"),
        ({"hidden_size": -64}, "width -64 must be above 0"),
        ({"hidden_size": 0}, "width 0 must be above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; expected a number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; expected a number"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; expected true or false"),
        ({"eos_token_id": [1, "x"]}, "expected whole numbers"),
        ({"eos_token_id": 97}, "end tokens .97. are outside the vocabulary of 97"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; expected 1 to 10000"),
        ({"num_experts_per_tok": 17}, "17 of 16 experts cannot be chosen"),
        ({"n_group": 5}, "16 experts do not divide into 5 groups"),
        ({"n_group": 16}, "4 experts cannot be chosen from 2 groups of 1"),
        ({"qk_rope_head_dim": 15}, "a width of 15 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; deepseek_v3 loading expects 'silu'"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; expected an object"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "must be above 0"),
        ({"rope_scaling": {"full_attention": {}, "factor": 2}}, "rope by kind of layer"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not 1"),
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
        families.config_from_hub(config)
    assert "\n" not in str(refusal.value)


def test_feed_forward_biases_are_refused():
    with pytest.raises(LoadError, match="mlp_bias"):
        families.config_from_hub({**CONFIGS["llama3"], "mlp_bias": True})


def test_kimi_k2_is_the_same_family():
    kimi = families.config_from_hub({**CONFIGS["kimi_k"], "model_type": "kimi_k2"})
    assert dataclasses.replace(kimi, family="deepseek_v3") == config_of("kimi_k")


@pytest.mark.parametrize("name", ["deepseek_a", "kimi_k25"])
def test_quantised_weights_are_refused(name):
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    changed = {**CONFIGS[name], **quantised}
    if name == "kimi_k25":
        changed = {**CONFIGS[name], "text_config": CONFIGS[name]["text_config"] | quantised}
    with pytest.raises(UnsupportedError, match="quantised .'fp8'.; read is int4 of"):
        families.config_from_hub(changed)


def test_layers_of_another_kind_are_refused():
    words = "layer_types is .'chunked.*; expected 4 of full_attention and sliding_attention"
    with pytest.raises(LoadError, match=words):
        config_of("gpt_oss", layer_types=["chunked_attention"] * 4)
    with pytest.raises(LoadError, match="sliding window of 0 tokens sees nothing"):
        config_of("gpt_oss", sliding_window=0)
    with pytest.raises(LoadError, match="text_config is None; expected an object"):
        config_of("kimi_k25", text_config=None)
