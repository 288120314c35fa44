"""Tiny drafters for parity tests: weights, features and a text, drawn the same everywhere.

Needs numpy alone, so that the environment which makes the golden files and the one which tests
against them can both import it, or run it by its path. The dimensions differ from each other
wherever speculators lets them (it has one width for verifier and drafter).
"""

import zlib

import numpy as np

WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, MLP_WIDTH = 20, 4, 2, 6, 28
VOCABULARY, DRAFT_VOCABULARY = 44, 26
NORM_EPS, ROPE_THETA = 1e-5, 10000.0
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 200,  # of the 3 frequencies 1 is kept, 1 blended
}

# A text of two documents; steps of training-time test; tokens read before a greedy chain.
DOCUMENTS, STEPS, PROMPT_LENGTH = (21, 15), 3, 16

# Scales of the features, lowest boundary first: unlike, so that norms one by one and all together
# differ. Like the other small scales, the first lets a norm's eps show.
FEATURE_SCALES = (0.05, 1.0, 8.0)
SMALL = 0.05

# Flags that are on; beside them `llama3` (rope), `full` (vocabulary), `two` (features).
CONFIGS: dict[str, tuple[str, ...]] = {
    "eagle3": (),
    "fc_norm": ("fc_norm",),
    "norm_before_fc": ("norm_before_fc",),
    "norm_before_residual": ("norm_before_residual",),
    "norm_output": ("norm_output",),
    "qk_norm": ("qk_norm",),
    "eagle31": ("fc_norm", "norm_output"),
    "gpt_oss": ("norm_before_fc", "norm_before_residual"),
    "all_fc_norm": ("fc_norm", "norm_before_residual", "norm_output", "qk_norm"),
    "all_norm_before_fc": ("norm_before_fc", "norm_before_residual", "norm_output", "qk_norm"),
    "eagle3_llama3": ("llama3",),
    "eagle31_two": ("fc_norm", "norm_output", "full", "two"),
}
NOT_FLAGS = ("llama3", "full", "two")

# A suffix changes every draw of a drafter; used where a choice came out too close to a tie.
SEED_SUFFIX: dict[str, str] = {"eagle31_two": "#1"}


def flags(name: str) -> dict[str, bool]:
    """The flags that are on, as keyword arguments."""
    return {flag: True for flag in CONFIGS[name] if flag not in NOT_FLAGS}


def num_features(name: str) -> int:
    """Boundaries that a drafter is fed."""
    return 2 if "two" in CONFIGS[name] else 3


def draft_vocabulary(name: str) -> int:
    """Tokens that a drafter can say."""
    return VOCABULARY if "full" in CONFIGS[name] else DRAFT_VOCABULARY


def _random(name: str, what: str) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(f"{name}{SEED_SUFFIX.get(name, '')}/{what}".encode()))


def shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor, by speculators' name; linear weights are [out, in]."""
    on, n = CONFIGS[name], num_features(name)
    at, d = "layers.0", WIDTH
    found: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCABULARY, d),
        "fc.weight": (d, n * d),
        f"{at}.input_layernorm.weight": (d,),
        f"{at}.hidden_norm.weight": (d,),
        f"{at}.self_attn.q_proj.weight": (HEADS * HEAD_WIDTH, 2 * d),
        f"{at}.self_attn.k_proj.weight": (KV_HEADS * HEAD_WIDTH, 2 * d),
        f"{at}.self_attn.v_proj.weight": (KV_HEADS * HEAD_WIDTH, 2 * d),
        f"{at}.self_attn.o_proj.weight": (d, HEADS * HEAD_WIDTH),
        f"{at}.post_attention_layernorm.weight": (d,),
        f"{at}.mlp.gate_proj.weight": (MLP_WIDTH, d),
        f"{at}.mlp.up_proj.weight": (MLP_WIDTH, d),
        f"{at}.mlp.down_proj.weight": (d, MLP_WIDTH),
        "norm.weight": (d,),
        "lm_head.weight": (draft_vocabulary(name), d),
    }
    if "qk_norm" in on:
        found |= {f"{at}.self_attn.{x}_norm.weight": (HEAD_WIDTH,) for x in "qk"}
    if "norm_before_fc" in on:
        found["input_norm.weight"] = (n * d,)
    if "fc_norm" in on:
        found |= {f"fc_norm.{i}.weight": (d,) for i in range(n)}
    return found


def _draw(name: str, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    x = _random(name, tensor).standard_normal(shape)
    if len(shape) == 1:
        x = 1.0 + 0.2 * x
    elif tensor == "embed_tokens.weight":
        x = SMALL * x
    else:
        x = x / np.sqrt(shape[-1])
        if "qk_norm" in CONFIGS[name] and tensor.endswith(("q_proj.weight", "k_proj.weight")):
            x = SMALL * x
    return x.astype(np.float32)


def tensors(name: str) -> dict[str, np.ndarray]:
    """Every tensor of a drafter, by speculators' name; `d2t` and `t2d` for a reduced vocabulary."""
    found = {tensor: _draw(name, tensor, shape) for tensor, shape in shapes(name).items()}
    if draft_vocabulary(name) < VOCABULARY:
        ids = vocabulary(name)
        found["d2t"] = ids - np.arange(len(ids))
        found["t2d"] = np.isin(np.arange(VOCABULARY), ids)
    return found


def vocabulary(name: str) -> np.ndarray:
    """Verifier ids of the draft vocabulary, ascending; int64."""
    ids = _random(name, "vocabulary").permutation(VOCABULARY)[: draft_vocabulary(name)]
    return np.sort(ids).astype(np.int64)


def text(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [t], which document each belongs to [t], features [t f]: of a text of two documents.

    The features are random, no verifier's, with one scale a boundary.
    """
    length = sum(DOCUMENTS)
    tokens = _random(name, "tokens").randint(0, VOCABULARY, length).astype(np.int32)
    scales = np.repeat(FEATURE_SCALES[: num_features(name)], WIDTH)
    features = scales * _random(name, "features").standard_normal((length, len(scales)))
    documents = np.repeat(np.arange(len(DOCUMENTS), dtype=np.int32), DOCUMENTS)
    return tokens, documents, features.astype(np.float32)


def checksum(name: str) -> int:
    """CRC-32 over the drawn tensors and the text: name, then bytes, of each in order of name."""
    tokens, documents, features = text(name)
    drawn = {**tensors(name), "tokens": tokens, "documents": documents, "features": features}
    found = 0
    for tensor, value in sorted(drawn.items()):
        found = zlib.crc32(value.tobytes(), zlib.crc32(tensor.encode(), found))
    return found
