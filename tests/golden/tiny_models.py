"""Tiny verifiers for parity tests: configurations, weights and tokens, drawn the same everywhere.

Needs numpy alone (and safetensors to write a folder), so that the environment which makes the
golden files and the one which tests against them can both import it.
"""

import json
import zlib
from pathlib import Path

import numpy as np

# Scale of the rows that feed the two latent norms: small, so that the norms' eps (1e-6, whatever
# `rms_norm_eps` says) shows in the logits.
LATENT_SCALE = 0.05

# A suffix changes every draw of a model; used where a draw came out too close to a tie.
SEED_SUFFIX: dict[str, str] = {"deepseek_a_bias": "#1"}

_DEEPSEEK_A = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "kv_lora_rank": 24,
    "max_position_embeddings": 32768,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 24,
    "moe_layer_freq": 1,
    "n_group": 4,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 8,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "torch_dtype": "float32",
    "use_cache": True,
    "v_head_dim": 12,
    "vocab_size": 97,
}

_LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 512,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 101,
}


def _yarn(**changes) -> dict:
    return {**_DEEPSEEK_A["rope_scaling"], **changes}


CONFIGS: dict[str, dict] = {
    "deepseek_a": _DEEPSEEK_A,
    "deepseek_a_no_q_lora": {**_DEEPSEEK_A, "q_lora_rank": None},
    "deepseek_a_half_rope": {**_DEEPSEEK_A, "rope_interleave": False},
    "deepseek_a_bias": {**_DEEPSEEK_A, "attention_bias": True},
    "deepseek_a_one_group": {**_DEEPSEEK_A, "n_group": 1, "topk_group": 1},
    "deepseek_a_no_norm_topk": {
        **_DEEPSEEK_A,
        "norm_topk_prob": False,
        "routed_scaling_factor": 0.9,  # un-normed weights sum to about 3: keeps the stream small
    },
    "deepseek_a_no_rope_scaling": {**_DEEPSEEK_A, "rope_scaling": None},
    "deepseek_a_ramp1": {
        **_DEEPSEEK_A,
        "max_position_embeddings": 262144,
        "rope_scaling": _yarn(beta_fast=1, factor=64),
    },
    "kimi_k": {
        **_DEEPSEEK_A,
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "n_shared_experts": 1,
        "rope_scaling": _yarn(factor=64, mscale=1.0, mscale_all_dim=1.0),
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "topk_group": 1,
    },
    "llama3": _LLAMA3,
    "llama_tied": {**_LLAMA3, "tie_word_embeddings": True},
    "llama_plain": {**_LLAMA3, "rope_scaling": None},
}


def _swiglu_shapes(prefix: str, width: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, width),
        f"{prefix}.up_proj.weight": (inner, width),
        f"{prefix}.down_proj.weight": (width, inner),
    }


def _latent_attention_shapes(c: dict, at: str) -> dict[str, tuple[int, ...]]:
    d, h, r = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    rope, nope, v = c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"]
    q = c["q_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {}
    if q is None:
        shapes[f"{at}.q_proj.weight"] = (h * (nope + rope), d)
    else:
        shapes[f"{at}.q_a_proj.weight"] = (q, d)
        shapes[f"{at}.q_a_layernorm.weight"] = (q,)
        shapes[f"{at}.q_b_proj.weight"] = (h * (nope + rope), q)
    shapes[f"{at}.kv_a_proj_with_mqa.weight"] = (r + rope, d)
    shapes[f"{at}.kv_a_layernorm.weight"] = (r,)
    shapes[f"{at}.kv_b_proj.weight"] = (h * (nope + v), r)
    shapes[f"{at}.o_proj.weight"] = (d, h * v)
    if c["attention_bias"]:
        if q is not None:
            shapes[f"{at}.q_a_proj.bias"] = (q,)
        shapes[f"{at}.kv_a_proj_with_mqa.bias"] = (r + rope,)
        shapes[f"{at}.o_proj.bias"] = (d,)
    return shapes


def _grouped_attention_shapes(c: dict, at: str) -> dict[str, tuple[int, ...]]:
    d, hd = c["hidden_size"], c["head_dim"]
    h, k = c["num_attention_heads"], c["num_key_value_heads"]
    return {
        f"{at}.q_proj.weight": (h * hd, d),
        f"{at}.k_proj.weight": (k * hd, d),
        f"{at}.v_proj.weight": (k * hd, d),
        f"{at}.o_proj.weight": (d, h * hd),
    }


def _experts_shapes(c: dict, at: str) -> dict[str, tuple[int, ...]]:
    d, inner, e = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}.gate.weight": (e, d),
        f"{at}.gate.e_score_correction_bias": (e,),
    }
    for i in range(e):
        shapes |= _swiglu_shapes(f"{at}.experts.{i}", d, inner)
    return shapes | _swiglu_shapes(f"{at}.shared_experts", d, inner * c["n_shared_experts"])


def hub_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by its name on the hub; linear weights are [out, in]."""
    c = CONFIGS[name]
    d, latent = c["hidden_size"], c["model_type"] == "deepseek_v3"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c["vocab_size"], d)}
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        shapes[f"{at}.input_layernorm.weight"] = (d,)
        attention = _latent_attention_shapes if latent else _grouped_attention_shapes
        shapes |= attention(c, f"{at}.self_attn")
        shapes[f"{at}.post_attention_layernorm.weight"] = (d,)
        if latent and i >= c["first_k_dense_replace"]:
            shapes |= _experts_shapes(c, f"{at}.mlp")
        else:
            shapes |= _swiglu_shapes(f"{at}.mlp", d, c["intermediate_size"])
    shapes["model.norm.weight"] = (d,)
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], d)
    return shapes


def _random(name: str, what: str) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(f"{name}{SEED_SUFFIX.get(name, '')}/{what}".encode()))


def _draw(name: str, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    c = CONFIGS[name]
    x = _random(name, tensor).standard_normal(shape)
    if tensor.endswith("norm.weight"):
        x = 1.0 + 0.2 * x
    elif tensor.endswith("embed_tokens.weight"):
        if c["tie_word_embeddings"]:  # the same array is the output layer
            x = x / np.sqrt(c["hidden_size"])
    elif tensor.endswith("mlp.gate.weight"):
        x = 0.3 * x
    elif tensor.endswith("e_score_correction_bias"):
        # Negative on average: only then does masking by zero differ from masking by -inf.
        x = -1.0 + 0.3 * x
    elif tensor.endswith(".bias"):
        x = 0.2 * x
    else:
        x = x / np.sqrt(shape[-1])
    if ".q_a_proj." in tensor:
        x = LATENT_SCALE * x
    elif ".kv_a_proj_with_mqa." in tensor:
        x[: c["kv_lora_rank"]] *= LATENT_SCALE
    return x.astype(np.float32)


def hub_tensors(name: str) -> dict[str, np.ndarray]:
    """Every tensor of a model in float32, by its name on the hub, one 2-D array an expert."""
    return {tensor: _draw(name, tensor, shape) for tensor, shape in hub_shapes(name).items()}


def tokens(name: str) -> np.ndarray:
    """Two rows of token ids, int32: [2, 41] for the DeepSeek family, [2, 40] for Llama."""
    c = CONFIGS[name]
    width = 41 if c["model_type"] == "deepseek_v3" else 40
    return _random(name, "tokens").randint(0, c["vocab_size"], (2, width)).astype(np.int32)


def write_folder(name: str, folder: str | Path) -> Path:
    """Write `config.json` and `model.safetensors` as the hub lays them out; returns the folder."""
    from safetensors.numpy import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name], indent=2) + "\n")
    save_file(hub_tensors(name), folder / "model.safetensors", metadata={"format": "pt"})
    return folder
