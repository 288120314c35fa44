"""Hugging Face folders of verifiers: config.json to `VerifierConfig`, tensor names both ways.

A family is an entry of `FAMILIES`: how its config reads, and its table of slots. A slot says which
hub tensors make one of our arrays. The same table loads and saves.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import ml_dtypes
import numpy as np

from checkpoints.tensors import Tensors, some
from eagle3_jax.configs import ExpertsConfig, LatentConfig, RopeConfig, VerifierConfig
from eagle3_jax.contracts import LoadError

Layout = Literal["as is", "transposed", "experts"]


@dataclasses.dataclass(frozen=True)
class Slot:
    """One array of ours and the hub tensors it is made of.

    Attributes:
        path: our dotted path in the verifier's state.
        names: hub names, `{l}` standing for the layer and `{e}` for the expert; several are joined
            along their output axis.
        sizes: length of each name's output axis.
        layers: the layers stacked in front, None for an array without a layer axis.
        layout: hub kernels are [out, in], ours [in, out]; expert kernels stack experts as well.
        inputs: length of the input axis, None for vectors.
        fused: hub name of all experts in one tensor [e, out, in], where that spelling exists.
        experts: number of experts (`experts` layout).
    """

    path: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    layers: range | None = None
    layout: Layout = "as is"
    inputs: int | None = None
    fused: str | None = None
    experts: int = 0


def _rope(config: dict[str, Any], interleaved: bool) -> RopeConfig:
    """Rope from the old keys (`rope_scaling`, `rope_theta`) or the new (`rope_parameters`)."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta=theta, interleaved=interleaved)
    if kind not in ("linear", "llama3", "yarn"):
        raise LoadError(
            f"rope type {kind!r} is not supported; known: default, linear, llama3, yarn"
        )
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=float(scaling["factor"]),
        original_length=int(
            scaling.get("original_max_position_embeddings")
            or config.get("max_position_embeddings", 0)
        ),
        low_frequency_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_frequency_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        mscale=float(scaling.get("mscale") or 0.0),
        mscale_all_dim=float(scaling.get("mscale_all_dim") or 0.0),
        attention_factor=scaling.get("attention_factor"),
        truncate=bool(scaling.get("truncate", True)),
        interleaved=interleaved,
    )


def _ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(int(i) for i in (value if isinstance(value, list) else [value]))


def _common(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": int(config["vocab_size"]),
        "width": int(config["hidden_size"]),
        "num_layers": int(config["num_hidden_layers"]),
        "num_heads": int(config["num_attention_heads"]),
        "mlp_width": int(config["intermediate_size"]),
        "norm_eps": float(config["rms_norm_eps"]),
        "attention_bias": bool(config.get("attention_bias", False)),
        "tied_head": bool(config.get("tie_word_embeddings", False)),
        "eos_tokens": _ids(config.get("eos_token_id")),
        "max_length": int(config.get("max_position_embeddings", 4096)),
    }


def _llama(config: dict[str, Any]) -> VerifierConfig:
    common = _common(config)
    if config.get("mlp_bias"):
        raise LoadError("mlp_bias is true; Llama feed-forwards with biases are not supported")
    heads = common["num_heads"]
    return VerifierConfig(
        **common,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_width=int(config.get("head_dim") or common["width"] // heads),
        rope=_rope(config, interleaved=False),
        family="llama",
    )


def _deepseek(config: dict[str, Any]) -> VerifierConfig:
    common = _common(config)
    expected = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise LoadError(f"{key} is {config[key]!r}; DeepSeek-V3 loading expects {value!r}")
    q_rank = config.get("q_lora_rank")
    latent = LatentConfig(
        kv_rank=int(config["kv_lora_rank"]),
        q_rank=None if q_rank is None else int(q_rank),
        nope_width=int(config["qk_nope_head_dim"]),
        rope_width=int(config["qk_rope_head_dim"]),
        value_width=int(config["v_head_dim"]),
    )
    experts = ExpertsConfig(
        count=int(config["n_routed_experts"]),
        chosen=int(config["num_experts_per_tok"]),
        width=int(config["moe_intermediate_size"]),
        shared=int(config.get("n_shared_experts") or 0),
        groups=int(config.get("n_group") or 1),
        chosen_groups=int(config.get("topk_group") or 1),
        normalise=bool(config.get("norm_topk_prob", True)),
        scaling=float(config.get("routed_scaling_factor", 1.0)),
    )
    return VerifierConfig(
        **common,
        num_kv_heads=common["num_heads"],
        head_width=latent.nope_width + latent.rope_width,
        rope=_rope(config, interleaved=bool(config.get("rope_interleave", True))),
        latent=latent,
        experts=experts,
        first_dense=int(config.get("first_k_dense_replace", 0)),
        family="deepseek",
    )


FAMILIES: dict[str, Callable[[dict[str, Any]], VerifierConfig]] = {
    "llama": _llama,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
}
"""Hub `model_type` to how its config reads."""


def config_from_hub(config: dict[str, Any]) -> VerifierConfig:
    """The configuration that a hub config.json describes.

    Raises:
        LoadError: an unknown `model_type`, a missing key, or a setting that is not supported.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise LoadError(
            f"config.json has model_type {kind!r}; supported: {', '.join(sorted(FAMILIES))}"
        )
    try:
        return FAMILIES[kind](config)
    except KeyError as error:
        raise LoadError(f"config.json of a {kind} model lacks the key {error}") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, LoadError):
            raise
        raise LoadError(f"config.json of a {kind} model cannot be read: {error}") from None


def slots(config: VerifierConfig) -> Iterator[Slot]:
    """Every array of the verifier's state and the hub tensors it comes from."""
    c = config
    d = c.width
    yield Slot("embedding", ("model.embed_tokens.weight",), (c.vocab_size,), inputs=d)
    yield Slot("norm.weight", ("model.norm.weight",), (d,))
    head = "model.embed_tokens.weight" if c.tied_head else "lm_head.weight"
    yield Slot("head.kernel", (head,), (c.vocab_size,), layout="transposed", inputs=d)
    dense = range(c.num_dense)
    for part, layers in (("dense_layers", dense), ("moe_layers", range(c.num_dense, c.num_layers))):
        if layers:
            yield from _layer_slots(c, part, layers)


def _layer_slots(c: VerifierConfig, part: str, layers: range) -> Iterator[Slot]:
    d = c.width

    def vector(path, name, size):
        return Slot(f"{part}.{path}", (f"model.layers.{{l}}.{name}",), (size,), layers)

    def kernel(path, names, sizes, inputs, bias=False):
        full = tuple(f"model.layers.{{l}}.{name}" for name in names)
        weights = tuple(f"{name}.weight" for name in full)
        yield Slot(f"{part}.{path}.kernel", weights, sizes, layers, "transposed", inputs)
        if bias:
            yield Slot(f"{part}.{path}.bias", tuple(f"{name}.bias" for name in full), sizes, layers)

    yield vector("attention_norm.weight", "input_layernorm.weight", d)
    yield vector("mlp_norm.weight", "post_attention_layernorm.weight", d)
    bias = c.attention_bias
    if c.latent:
        a = c.latent
        q_width = c.num_heads * (a.nope_width + a.rope_width)
        if a.q_rank is None:
            yield from kernel("attention.q_up", ["self_attn.q_proj"], (q_width,), d)
        else:
            yield from kernel("attention.q_down", ["self_attn.q_a_proj"], (a.q_rank,), d, bias)
            yield vector("attention.q_norm.weight", "self_attn.q_a_layernorm.weight", a.q_rank)
            yield from kernel("attention.q_up", ["self_attn.q_b_proj"], (q_width,), a.q_rank)
        kv = a.kv_rank + a.rope_width
        yield from kernel("attention.kv_down", ["self_attn.kv_a_proj_with_mqa"], (kv,), d, bias)
        yield vector("attention.kv_norm.weight", "self_attn.kv_a_layernorm.weight", a.kv_rank)
        up = c.num_heads * (a.nope_width + a.value_width)
        yield from kernel("attention.kv_up", ["self_attn.kv_b_proj"], (up,), a.kv_rank)
        inner = c.num_heads * a.value_width
    else:
        inner = c.num_heads * c.head_width
        names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        sizes = (inner, *(2 * (c.num_kv_heads * c.head_width,)))
        yield from kernel("attention.qkv", names, sizes, d, bias)
    yield from kernel("attention.o", ["self_attn.o_proj"], (d,), inner, bias)

    prefix, wide = "mlp", c.mlp_width
    if part == "moe_layers":
        e = c.experts
        assert e is not None
        yield Slot(
            f"{part}.router.kernel",
            ("model.layers.{l}.mlp.gate.weight",),
            (e.count,),
            layers,
            "transposed",
            d,
        )
        yield vector("router.bias", "mlp.gate.e_score_correction_bias", e.count)
        one = "model.layers.{l}.mlp.experts."
        yield Slot(
            "experts.gate_up",
            (one + "{e}.gate_proj.weight", one + "{e}.up_proj.weight"),
            (e.width, e.width),
            layers,
            "experts",
            d,
            one + "gate_up_proj",
            e.count,
        )
        yield Slot(
            "experts.down",
            (one + "{e}.down_proj.weight",),
            (d,),
            layers,
            "experts",
            e.width,
            one + "down_proj",
            e.count,
        )
        prefix, wide = "mlp.shared_experts", e.width * e.shared
    if wide:
        names = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
        yield from kernel("mlp.gate_up", names, (wide, wide), d)
        yield from kernel("mlp.down", [f"{prefix}.down_proj"], (d,), wide)


def from_hub(config: VerifierConfig, tensors: Tensors) -> Tensors:
    """Our arrays, by dotted path, from hub tensors.

    Raises:
        LoadError: tensors are missing, unexpected or misshapen; all are listed in one message.
    """
    missing, misshapen, used = [], [], set()

    def take(name: str, shape: tuple[int, ...]) -> np.ndarray:
        used.add(name)
        value = tensors.get(name)
        if value is None:
            missing.append(name)
        elif value.shape != shape:
            misshapen.append(f"{name} {list(value.shape)} (expected {list(shape)})")
        else:
            return value
        return np.zeros(shape, ml_dtypes.bfloat16)

    def kernel(slot: Slot, **at) -> np.ndarray:
        tail = () if slot.inputs is None else (slot.inputs,)
        parts = [
            take(name.format(**at), (size, *tail))
            for name, size in zip(slot.names, slot.sizes, strict=True)
        ]
        joined = np.concatenate(parts) if len(parts) > 1 else parts[0]
        return joined if slot.layout == "as is" else joined.swapaxes(-1, -2)

    def layer_of(slot: Slot, layer: int) -> np.ndarray:
        if slot.layout != "experts":
            return kernel(slot, l=layer)
        fused = (slot.fused or "").format(l=layer)
        if fused in tensors:
            assert slot.inputs is not None
            return take(fused, (slot.experts, sum(slot.sizes), slot.inputs)).swapaxes(-1, -2)
        return np.stack([kernel(slot, l=layer, e=e) for e in range(slot.experts)])

    out = {}
    for slot in slots(config):
        if slot.layers is None:
            out[slot.path] = kernel(slot)
        else:
            out[slot.path] = np.stack([layer_of(slot, layer) for layer in slot.layers])
    unexpected = [name for name in tensors if name not in used and not _skipped(name, config)]
    faults = [
        f"{len(names)} {what}: {some(names)}"
        for what, names in (
            ("missing", missing),
            ("misshapen", misshapen),
            ("unexpected", unexpected),
        )
        if names
    ]
    if faults:
        raise LoadError(f"tensors do not fit the {config.family} config: " + "; ".join(faults))
    return out


def _skipped(name: str, config: VerifierConfig) -> bool:
    """Tensors left out knowingly: rotary tables, a tied head's copy, multi-token prediction."""
    if "rotary_emb.inv_freq" in name or (config.tied_head and name == "lm_head.weight"):
        return True
    parts = name.split(".")
    beyond = len(parts) > 2 and parts[:2] == ["model", "layers"] and parts[2].isdigit()
    return config.family == "deepseek" and beyond and int(parts[2]) >= config.num_layers


def to_hub(config: VerifierConfig, arrays: Tensors) -> Tensors:
    """Hub tensors, one matrix an expert, from our arrays by dotted path."""
    out: Tensors = {}

    def put(slot: Slot, value: np.ndarray, **at) -> None:
        value = value if slot.layout == "as is" else value.swapaxes(-1, -2)
        ends = np.cumsum(slot.sizes)
        for name, size, end in zip(slot.names, slot.sizes, ends, strict=True):
            out[name.format(**at)] = value[end - size : end]

    for slot in slots(config):
        value = arrays[slot.path]
        if slot.layers is None:
            if not (slot.path == "head.kernel" and config.tied_head):
                put(slot, value)
            continue
        for index, layer in enumerate(slot.layers):
            if slot.layout == "experts":
                for expert in range(slot.experts):
                    put(slot, value[index, expert], l=layer, e=expert)
            else:
                put(slot, value[index], l=layer)
    return out


def config_to_hub(config: VerifierConfig) -> dict[str, Any]:
    """A DeepSeek-V3 config.json that reads back to the same configuration.

    Raises:
        LoadError: another family, or a rope this writer does not know.
    """
    c = config
    if c.latent is None or c.experts is None or c.rope.kind != "default":
        raise LoadError(f"writing a {c.family} config with {c.rope.kind} rope is not supported")
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": c.vocab_size,
        "hidden_size": c.width,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_heads,
        "intermediate_size": c.mlp_width,
        "rms_norm_eps": c.norm_eps,
        "attention_bias": c.attention_bias,
        "tie_word_embeddings": c.tied_head,
        "eos_token_id": list(c.eos_tokens),
        "max_position_embeddings": c.max_length,
        "rope_theta": c.rope.theta,
        "rope_scaling": None,
        "rope_interleave": c.rope.interleaved,
        "kv_lora_rank": c.latent.kv_rank,
        "q_lora_rank": c.latent.q_rank,
        "qk_nope_head_dim": c.latent.nope_width,
        "qk_rope_head_dim": c.latent.rope_width,
        "v_head_dim": c.latent.value_width,
        "n_routed_experts": c.experts.count,
        "num_experts_per_tok": c.experts.chosen,
        "moe_intermediate_size": c.experts.width,
        "n_shared_experts": c.experts.shared,
        "n_group": c.experts.groups,
        "topk_group": c.experts.chosen_groups,
        "norm_topk_prob": c.experts.normalise,
        "routed_scaling_factor": c.experts.scaling,
        "first_k_dense_replace": c.first_dense,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "num_nextn_predict_layers": 0,
    }
