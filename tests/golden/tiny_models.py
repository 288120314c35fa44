"""Tiny verifiers for parity tests: weights and tokens, drawn the same everywhere.

Needs numpy alone (and safetensors to write a folder), so that the environment which makes the
golden files and the one which tests against them can both import it, or run it by its path.
"""

import json
import runpy
import zlib
from pathlib import Path

import numpy as np

CONFIGS: dict[str, dict] = runpy.run_path(str(Path(__file__).with_name("tiny_configs.py")))[
    "CONFIGS"
]

# Scale of what feeds an inner norm (latent, or of queries and keys): small, so that the norm's
# eps shows in the logits. The two latent norms have 1e-6, whatever `rms_norm_eps` says.
INNER_SCALE = 0.05

# Scale of what the layers add to the residual stream, where it would grow much beyond ten: the
# rounding of float32 grows with it.
ADDED_SCALE: dict[str, float] = {"kimi_k25": 0.6, "micro_61": 0.2}

# A suffix changes every draw of a model; used where a draw came out too close to a tie.
SEED_SUFFIX: dict[str, str] = {
    "deepseek_a_bias": "#1",
    "micro_61": "#3",
    "qwen3": "#1",
    "qwen3_moe": "#2",
    "qwen3_moe_no_norm": "#2",
}

Shapes = dict[str, tuple[int, ...]]


def text_config(name: str) -> dict:
    """The configuration of the language model, which Kimi-K2.5 nests."""
    return CONFIGS[name].get("text_config", CONFIGS[name])


def text_prefix(name: str) -> str:
    """What precedes the name of every tensor of the language model."""
    return "language_model." if "text_config" in CONFIGS[name] else ""


def _is_latent(c: dict) -> bool:
    return c["model_type"] in ("deepseek_v3", "kimi_k2")


def _swiglu_shapes(prefix: str, width: int, inner: int) -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (inner, width),
        f"{prefix}.up_proj.weight": (inner, width),
        f"{prefix}.down_proj.weight": (width, inner),
    }


def _latent_attention_shapes(c: dict, at: str) -> Shapes:
    d, h, r = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    rope, nope, v = c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"]
    q = c["q_lora_rank"]
    shapes: Shapes = {}
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


def _grouped_attention_shapes(c: dict, at: str) -> Shapes:
    d, hd = c["hidden_size"], c["head_dim"]
    h, k = c["num_attention_heads"], c["num_key_value_heads"]
    shapes: Shapes = {
        f"{at}.q_proj.weight": (h * hd, d),
        f"{at}.k_proj.weight": (k * hd, d),
        f"{at}.v_proj.weight": (k * hd, d),
        f"{at}.o_proj.weight": (d, h * hd),
    }
    if c["attention_bias"]:
        shapes |= {name[: -len("weight")] + "bias": s[:1] for name, s in shapes.items()}
    if c["model_type"].startswith("qwen3"):
        shapes |= {f"{at}.q_norm.weight": (hd,), f"{at}.k_norm.weight": (hd,)}
    if c["model_type"] == "gpt_oss":
        shapes[f"{at}.sinks"] = (h,)
    return shapes


def _expert_list_shapes(c: dict, at: str, count: int) -> Shapes:
    shapes: Shapes = {f"{at}.gate.weight": (count, c["hidden_size"])}
    for i in range(count):
        shapes |= _swiglu_shapes(f"{at}.experts.{i}", c["hidden_size"], c["moe_intermediate_size"])
    return shapes


def _feed_forward_shapes(c: dict, layer: int, at: str) -> Shapes:
    d, kind = c["hidden_size"], c["model_type"]
    if kind == "gpt_oss":  # experts as parameters of their layer, [e, in, out]
        e, inner = c["num_local_experts"], c["intermediate_size"]
        return {
            f"{at}.router.weight": (e, d),
            f"{at}.router.bias": (e,),
            f"{at}.experts.gate_up_proj": (e, d, 2 * inner),
            f"{at}.experts.gate_up_proj_bias": (e, 2 * inner),
            f"{at}.experts.down_proj": (e, inner, d),
            f"{at}.experts.down_proj_bias": (e, d),
        }
    if _is_latent(c) and layer >= c["first_k_dense_replace"]:
        e, shared = c["n_routed_experts"], c["moe_intermediate_size"] * c["n_shared_experts"]
        shapes = _expert_list_shapes(c, at, e)
        shapes[f"{at}.gate.e_score_correction_bias"] = (e,)
        return shapes | _swiglu_shapes(f"{at}.shared_experts", d, shared)
    if (
        kind == "qwen3_moe"
        and layer not in c["mlp_only_layers"]
        and (layer + 1) % c["decoder_sparse_step"] == 0
    ):
        return _expert_list_shapes(c, at, c["num_experts"])
    return _swiglu_shapes(at, d, c["intermediate_size"])


def _text_shapes(c: dict) -> Shapes:
    d = c["hidden_size"]
    shapes: Shapes = {"model.embed_tokens.weight": (c["vocab_size"], d)}
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        shapes[f"{at}.input_layernorm.weight"] = (d,)
        attention = _latent_attention_shapes if _is_latent(c) else _grouped_attention_shapes
        shapes |= attention(c, f"{at}.self_attn")
        shapes[f"{at}.post_attention_layernorm.weight"] = (d,)
        shapes |= _feed_forward_shapes(c, i, f"{at}.mlp")
    shapes["model.norm.weight"] = (d,)
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], d)
    return shapes


def _vision_shapes(c: dict, text_width: int) -> Shapes:
    """Kimi-K2.5's image encoder, which a language model's loader leaves out."""
    d, inner, patch = c["hidden_size"], c["intermediate_size"], c["patch_size"]
    merged = d * c["merge_kernel_size"][0] * c["merge_kernel_size"][1]
    linear: Shapes = {"vision_tower.patch_embed.proj": (d, 3, patch, patch)}
    norms = ["vision_tower.encoder.final_layernorm", "mm_projector.pre_norm"]
    for i in range(c["num_hidden_layers"]):
        at = f"vision_tower.encoder.blocks.{i}"
        norms += [f"{at}.norm0", f"{at}.norm1"]
        linear |= {f"{at}.wqkv": (3 * d, d), f"{at}.wo": (d, d)}
        linear |= {f"{at}.mlp.fc0": (inner, d), f"{at}.mlp.fc1": (d, inner)}
    linear |= {"mm_projector.proj.0": (merged, merged), "mm_projector.proj.2": (text_width, merged)}
    shapes: Shapes = {
        "vision_tower.patch_embed.pos_emb.weight": (c["pos_emb_height"], c["pos_emb_width"], d)
    }
    for name, shape in (linear | {norm: (d,) for norm in norms}).items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes


def hub_shapes(name: str) -> Shapes:
    """The shape of every tensor, by its name on the hub; linear weights are [out, in]."""
    config, text = CONFIGS[name], text_config(name)
    shapes = {text_prefix(name) + tensor: shape for tensor, shape in _text_shapes(text).items()}
    if "vision_config" in config:
        shapes |= _vision_shapes(config["vision_config"], text["hidden_size"])
    return shapes


def _random(name: str, what: str) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(f"{name}{SEED_SUFFIX.get(name, '')}/{what}".encode()))


def _draw(name: str, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    c = text_config(name)
    x = _random(name, tensor).standard_normal(shape)
    if tensor.endswith("norm.weight"):
        x = 1.0 + 0.2 * x
    elif tensor.endswith("embed_tokens.weight"):
        if c["tie_word_embeddings"]:  # the same array is the output layer
            x = x / np.sqrt(c["hidden_size"])
    elif tensor.endswith(("mlp.gate.weight", "mlp.router.weight")):
        x = 0.3 * x
    elif tensor.endswith("e_score_correction_bias"):
        # Negative on average: only then does masking by zero differ from masking by -inf.
        x = -1.0 + 0.3 * x
    elif tensor.endswith((".bias", "_bias", ".sinks")):
        x = (0.3 if c["model_type"] == "gpt_oss" else 0.2) * x
    else:
        x = x / np.sqrt(shape[-2] if tensor.endswith(("gate_up_proj", "down_proj")) else shape[-1])
    if ".q_a_proj." in tensor:
        x = INNER_SCALE * x
    elif ".kv_a_proj_with_mqa." in tensor:
        x[: c["kv_lora_rank"]] *= INNER_SCALE
    elif c["model_type"].startswith("qwen3") and (".q_proj." in tensor or ".k_proj." in tensor):
        x = INNER_SCALE * x
    elif ".o_proj." in tensor or ".down_proj." in tensor:
        x = ADDED_SCALE.get(name, 1.0) * x
    return x.astype(np.float32)


def hub_tensors(name: str) -> dict[str, np.ndarray]:
    """Every tensor of a model in float32, by its name on the hub, as the hub divides them."""
    return {tensor: _draw(name, tensor, shape) for tensor, shape in hub_shapes(name).items()}


def tokens(name: str) -> np.ndarray:
    """Two rows of token ids, int32: [2, 41] with latent attention, [2, 40] otherwise.

    Never the id that stands for an image, where a model has one.
    """
    c = text_config(name)
    bound = CONFIGS[name].get("media_placeholder_token_id", c["vocab_size"])
    return _random(name, "tokens").randint(0, bound, (2, 41 if _is_latent(c) else 40)).astype("i4")


def write_folder(name: str, folder: str | Path) -> Path:
    """Write `config.json` and `model.safetensors` as the hub lays them out; returns the folder."""
    return write_files(CONFIGS[name], hub_tensors(name), folder)


def write_files(config: dict, tensors: dict[str, np.ndarray], folder: str | Path) -> Path:
    """The same of any configuration and tensors."""
    from safetensors.numpy import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
