"""Families of verifiers: how each one's config.json reads, and what its tensors are called.

A family is an entry of `FAMILIES`; all end in one `VerifierConfig`. What a config asks for and the
library does not do is refused by name, never passed over.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from checkpoints.int4 import check_quantization
from eagle3_jax.configs import ExpertsConfig, LatentConfig, RopeConfig, VerifierConfig
from eagle3_jax.contracts import Eagle3Error, LoadError, UnsupportedError

Raw = Mapping[str, Any]

MOST_LAYERS = 10_000
"""A config that asks for more is damaged."""


@dataclasses.dataclass(frozen=True)
class Family:
    """How a family's folder reads.

    Attributes:
        read: its fields, from config.json (from `text` in it where that is set).
        expects: keys that must have this value where they are present, since the code means it.
        text: the key that holds the text model's config; None where it is the whole.
        prefix: what its tensors' names begin with.
        skipped: beginnings of names that belong to parts which are knowingly not loaded.
        names: hub names that are its own, by the usual name (`checkpoints/hub.py`).
        in_out: experts are stored [e, in, out], gate and up in alternate columns (gpt-oss).
    """

    read: Callable[[Raw], dict[str, Any]]
    expects: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    text: str | None = None
    prefix: str = ""
    skipped: tuple[str, ...] = ()
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    in_out: bool = False


def whole(config: Raw, key: str, default: int | None = None) -> int:
    """A whole number of a config; a missing or null one is the default, where there is one.

    Raises:
        KeyError: it is missing and has no default.
        TypeError: it is something else.
    """
    value = config[key] if default is None else config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{key} is {_said(value)}; expected a whole number")
    return value


def number(config: Raw, key: str, default: float | None = None) -> float:
    """A finite number of a config; a missing or null one is the default, where there is one.

    Raises:
        KeyError: it is missing and has no default.
        TypeError: it is something else.
    """
    value = config[key] if default is None else config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError(f"{key} is {_said(value)}; expected a number")
    return float(value)


def switch(config: Raw, key: str, default: bool = False) -> bool:
    """A switch of a config; a missing or null one is the default.

    Raises:
        TypeError: it is something else.
    """
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise TypeError(f"{key} is {_said(value)}; expected true or false")
    return value


def ids(config: Raw, key: str) -> tuple[int, ...]:
    """One number or a list of them; empty where there is none.

    Raises:
        TypeError: it is something else.
    """
    value = config.get(key)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
        raise TypeError(f"{key} is {_said(value)}; expected whole numbers")
    return tuple(listed)


def _said(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def rope(config: Raw, interleaved: bool = False) -> RopeConfig:
    """Rope from the old keys (`rope_scaling`, `rope_theta`) or the new (`rope_parameters`).

    Raises:
        LoadError: a kind that is not supported.
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise TypeError(f"rope_scaling is {_said(scaling)}; expected an object")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise LoadError("rope by kind of layer is not supported; expected one for all layers")
    theta = number(scaling, "rope_theta", number(config, "rope_theta", 10000.0))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    partial = number(config, "partial_rotary_factor", 1.0)
    if number(scaling, "partial_rotary_factor", partial) != 1.0:
        raise LoadError("partial_rotary_factor is not 1; heads turned in part are not supported")
    if kind == "default":
        return RopeConfig(theta=theta, interleaved=interleaved)
    if kind not in ("linear", "dynamic", "llama3", "yarn"):
        raise LoadError(
            f"rope type {_said(kind)} is not supported; known: default, linear, dynamic, llama3, "
            "yarn"
        )
    factor = number(scaling, "factor")
    if factor <= 0 or theta <= 0:
        raise LoadError(f"rope factor {factor} and theta {theta} must be above 0")
    longest = whole(config, "max_position_embeddings")
    original = whole(scaling, "original_max_position_embeddings", longest)
    override = number(scaling, "attention_factor", -1.0)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_length=original,
        low_frequency_factor=number(scaling, "low_freq_factor", 1.0),
        high_frequency_factor=number(scaling, "high_freq_factor", 4.0),
        beta_fast=number(scaling, "beta_fast", 32.0),
        beta_slow=number(scaling, "beta_slow", 1.0),
        mscale=number(scaling, "mscale", 0.0),
        mscale_all_dim=number(scaling, "mscale_all_dim", 0.0),
        attention_factor=None if override < 0 else override,
        truncate=switch(scaling, "truncate", True),
        interleaved=interleaved,
    )


def common(config: Raw) -> dict[str, Any]:
    """The fields that every family has under the same keys."""
    layers = whole(config, "num_hidden_layers")
    if not 0 < layers <= MOST_LAYERS:
        raise TypeError(f"num_hidden_layers is {layers}; expected 1 to {MOST_LAYERS}")
    return {
        "vocab_size": whole(config, "vocab_size"),
        "width": whole(config, "hidden_size"),
        "num_layers": layers,
        "num_heads": whole(config, "num_attention_heads"),
        "mlp_width": whole(config, "intermediate_size"),
        "norm_eps": number(config, "rms_norm_eps"),
        "attention_bias": switch(config, "attention_bias"),
        "tied_head": switch(config, "tie_word_embeddings"),
        "max_length": whole(config, "max_position_embeddings"),
    }


def grouped(config: Raw) -> dict[str, Any]:
    """`common`, and grouped-query attention with rope in halves."""
    fields = common(config)
    heads, turned = fields["num_heads"], rope(config)
    if turned.kind == "dynamic":
        fields["max_length"] = min(fields["max_length"], turned.original_length)
    return fields | {
        "num_kv_heads": whole(config, "num_key_value_heads", heads),
        "head_width": whole(config, "head_dim", fields["width"] // max(heads, 1)),
        "rope": turned,
    }


def windows(config: Raw, kinds: list[str]) -> dict[str, Any]:
    """Sliding windows by layer.

    Args:
        config: `layer_types` in it wins.
        kinds: each layer's kind where it says nothing.
    """
    listed = config.get("layer_types") or kinds
    known = ("full_attention", "sliding_attention")
    if not isinstance(listed, list) or len(listed) != len(kinds) or not set(listed) <= set(known):
        raise TypeError(
            f"layer_types is {_said(listed)}; expected {len(kinds)} of {' and '.join(known)}"
        )
    layers = tuple(i for i, kind in enumerate(listed) if kind == known[1])
    return {"windowed": layers, "window": whole(config, "sliding_window") if layers else 0}


def _llama(config: Raw) -> dict[str, Any]:
    return grouped(config)


def _qwen3(config: Raw) -> dict[str, Any]:
    fields = grouped({"head_dim": 128, **config}) | {"qk_norm": True}
    if not switch(config, "use_sliding_window"):
        return fields
    full = whole(config, "max_window_layers", 28)
    kinds = [
        "full_attention" if i < full else "sliding_attention" for i in range(fields["num_layers"])
    ]
    return fields | windows(config, kinds)


def _qwen3_moe(config: Raw) -> dict[str, Any]:
    fields = grouped(config) | {"qk_norm": True}
    layers = range(fields["num_layers"])
    every = whole(config, "decoder_sparse_step", 1)
    if every < 1:
        raise TypeError(f"decoder_sparse_step is {every}; expected 1 or more")
    plain = set(ids(config, "mlp_only_layers"))
    fields["dense"] = tuple(i for i in layers if i in plain or (i + 1) % every)
    fields["experts"] = ExpertsConfig(
        count=whole(config, "num_experts", whole(config, "num_local_experts", 128)),
        chosen=whole(config, "num_experts_per_tok", 8),
        width=whole(config, "moe_intermediate_size"),
        score="softmax",
        normalise=switch(config, "norm_topk_prob"),
    )
    if switch(config, "use_sliding_window"):
        fields["windowed"] = tuple(layers)
        fields["window"] = whole(config, "sliding_window")
    return fields


GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""What gpt-oss means where its config says nothing of rope."""


def _gpt_oss(config: Raw) -> dict[str, Any]:
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config = {"rope_theta": 150000.0, **config, "rope_scaling": GPT_OSS_ROPE}
    fields = grouped({"head_dim": 64, **config})
    turns = ("sliding_attention", "full_attention")
    fields["attention_bias"] = switch(config, "attention_bias", True)
    fields["experts"] = ExpertsConfig(
        count=whole(config, "num_local_experts", whole(config, "num_experts", 128)),
        chosen=whole(config, "num_experts_per_tok", whole(config, "experts_per_token", 4)),
        width=fields["mlp_width"],
        score="softmax of chosen",
        bias=True,
        limit=number(config, "swiglu_limit", 7.0),
    )
    kinds = [turns[i % 2] for i in range(fields["num_layers"])]
    return fields | {"sinks": True, "wide_norms": True} | windows(config, kinds)


def _deepseek(config: Raw) -> dict[str, Any]:
    fields = common(config)
    q_rank = config.get("q_lora_rank")
    latent = LatentConfig(
        kv_rank=whole(config, "kv_lora_rank"),
        q_rank=None if q_rank is None else whole(config, "q_lora_rank"),
        nope_width=whole(config, "qk_nope_head_dim"),
        rope_width=whole(config, "qk_rope_head_dim"),
        value_width=whole(config, "v_head_dim"),
    )
    experts = ExpertsConfig(
        count=whole(config, "n_routed_experts"),
        chosen=whole(config, "num_experts_per_tok"),
        width=whole(config, "moe_intermediate_size"),
        shared=whole(config, "n_shared_experts"),
        groups=whole(config, "n_group"),
        chosen_groups=whole(config, "topk_group"),
        normalise=switch(config, "norm_topk_prob", True),
        scaling=number(config, "routed_scaling_factor"),
        correction=True,
    )
    turned = rope(config, interleaved=switch(config, "rope_interleave", True))
    if turned.kind == "dynamic":
        fields["max_length"] = min(fields["max_length"], turned.original_length)
    leading = min(max(whole(config, "first_k_dense_replace"), 0), fields["num_layers"])
    return fields | {
        "num_kv_heads": fields["num_heads"],
        "head_width": latent.nope_width + latent.rope_width,
        "rope": turned,
        "latent": latent,
        "experts": experts,
        "dense": tuple(range(leading)),
        "extra_layers": whole(config, "num_nextn_predict_layers", 0),
    }


SILU = {"hidden_act": "silu"}
DEEPSEEK = SILU | {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}

FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, SILU | {"mlp_bias": False}),
    "qwen3": Family(_qwen3, SILU),
    "qwen3_moe": Family(_qwen3_moe, SILU),
    "deepseek_v3": Family(_deepseek, DEEPSEEK),
    "kimi_k2": Family(_deepseek, DEEPSEEK),
    "kimi_k25": Family(
        _deepseek,
        DEEPSEEK,
        text="text_config",
        prefix="language_model.",
        skipped=("vision_tower.", "mm_projector."),
    ),
    "gpt_oss": Family(
        _gpt_oss,
        SILU | {"swiglu_alpha": 1.702},
        names={"mlp.gate": "mlp.router"},
        in_out=True,
    ),
}
"""By the hub's `model_type`."""


def family_of(config: VerifierConfig) -> Family:
    """The entry that made a configuration."""
    return FAMILIES[config.family]


def config_from_hub(config: Raw, generation: Raw | None = None) -> VerifierConfig:
    """The configuration that a hub config.json describes.

    Args:
        config: its content.
        generation: of generation_config.json; its end tokens win, as in transformers.

    Raises:
        LoadError: an unknown `model_type`, a missing key, or a value that cannot be.
        UnsupportedError: weights quantised in another way than int4 (`checkpoints/int4.py`).
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise LoadError(
            f"config.json has model_type {_said(kind)}; supported: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[kind]
    try:
        text = config if family.text is None else config[family.text]
        if not isinstance(text, dict):
            raise TypeError(f"{family.text} is {_said(text)}; expected an object")
        _check_weights(config, text)
        for key, value in family.expects.items():
            if text.get(key) not in (None, value):
                raise LoadError(
                    f"{key} is {_said(text[key])}; {kind} loading expects {_said(value)}"
                )
        ends = ids(text, "eos_token_id") or ids(config, "eos_token_id")
        return VerifierConfig(
            **family.read(text),
            eos_tokens=_generation_ends(generation or {}) or ends,
            image_tokens=ids(config, "media_placeholder_token_id"),
            family=kind,
        )
    except KeyError as error:
        raise LoadError(f"config.json of a {kind} model lacks the key {error}") from None
    except (Eagle3Error, TypeError, ValueError, OverflowError) as error:
        if isinstance(error, LoadError | UnsupportedError):
            raise
        raise LoadError(f"config.json of a {kind} model cannot be read: {error}") from None


def _generation_ends(generation: Raw) -> tuple[int, ...]:
    try:
        return ids(generation, "eos_token_id")
    except TypeError as error:
        raise LoadError(f"generation_config.json cannot be read: {error}") from None


def _check_weights(*configs: Raw) -> None:
    """Refuse quantised weights that are not read.

    Raises:
        UnsupportedError: says which kind was found.
    """
    for config in configs:
        if config.get("quantization_config"):
            check_quantization(config["quantization_config"])


def config_to_hub(config: VerifierConfig) -> dict[str, Any]:
    """A DeepSeek-V3 config.json that reads back to the same configuration.

    Raises:
        LoadError: another family, or a rope this writer does not know.
    """
    c = config
    leading = c.dense == tuple(range(len(c.dense)))
    if c.latent is None or c.experts is None or c.rope.kind != "default" or not leading:
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
        "first_k_dense_replace": len(c.dense),
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
        "num_nextn_predict_layers": 0,
    }
