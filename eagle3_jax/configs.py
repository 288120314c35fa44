"""Frozen configuration dataclasses: static, hashable, and the command line's flags."""

import dataclasses
import math
from typing import Any, Literal

from eagle3_jax.contracts import RequestError


def _positive(config: Any, *names: str) -> None:
    """Refuse sizes that are not above zero.

    Raises:
        RequestError: says which.
    """
    for name in names:
        if not getattr(config, name) > 0:
            raise RequestError(f"{name} {getattr(config, name)} must be above 0")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of one attention.

    Attributes:
        theta: base of the frequencies.
        kind: `default`, `linear`, `dynamic`, `llama3` or `yarn`. Up to its original length,
            `dynamic` is `default`; beyond it frequencies would depend on a text's length, and
            rows already cached would be wrong: longer texts are refused.
        factor: context extension factor (all kinds but `default`).
        original_length: context length before extension (`dynamic`, `llama3`, `yarn`).
        low_frequency_factor: `llama3` only.
        high_frequency_factor: `llama3` only.
        beta_fast: `yarn` only; start of the ramp, in rotations over the original length.
        beta_slow: `yarn` only; end of the ramp.
        mscale: `yarn` only; numerator of the attention factor (0 where absent).
        mscale_all_dim: `yarn` only; its denominator, and the softmax scale of latent attention.
        attention_factor: `yarn` only; overrides the factor on cosine and sine.
        truncate: `yarn` only; whether the ramp's ends are rounded outward.
        interleaved: pairs are (0, 1), (2, 3), ... and not (0, hd/2), (1, hd/2 + 1), ...
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_length: int = 0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True
    interleaved: bool = False


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (MLA) of DeepSeek-V3 and Kimi-K2.

    Attributes:
        kv_rank: width of the compressed latent kept in the cache.
        q_rank: width of the compressed query; None for one plain projection.
        nope_width: part of a query head without rotary embedding.
        rope_width: part with rotary embedding; its key is shared by all heads.
        value_width: head width of values.
    """

    kv_rank: int
    q_rank: int | None
    nope_width: int
    rope_width: int
    value_width: int

    def __post_init__(self):
        _positive(self, "kv_rank", "nope_width", "rope_width", "value_width")
        if self.q_rank is not None:
            _positive(self, "q_rank")


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Mixture of experts: the router, routed experts, shared experts.

    Attributes:
        count: routed experts, e.
        chosen: experts a token is sent to.
        width: feed-forward width of one expert.
        shared: shared experts, computed as one feed-forward of `shared * width`.
        score: what a token's weights are made from. `sigmoid`: of each logit (DeepSeek-V3);
            `softmax`: over all experts (Qwen3-MoE); `softmax of chosen`: over the chosen ones only
            (gpt-oss).
        groups: contiguous groups the experts are divided into (`sigmoid`).
        chosen_groups: groups kept for a token.
        normalise: whether the chosen weights are normalised to sum to one.
        scaling: factor on the weights.
        correction: whether a bias moves the choice, and not the weights (DeepSeek-V3).
        bias: biases on the router and on the experts' kernels (gpt-oss).
        limit: where an expert's activation is clamped (gpt-oss); None is plain SwiGLU.
    """

    count: int
    chosen: int
    width: int
    shared: int = 0
    score: Literal["sigmoid", "softmax", "softmax of chosen"] = "sigmoid"
    groups: int = 1
    chosen_groups: int = 1
    normalise: bool = True
    scaling: float = 1.0
    correction: bool = False
    bias: bool = False
    limit: float | None = None

    def __post_init__(self):
        _positive(self, "count", "chosen", "width", "groups", "chosen_groups", "scaling")
        if self.chosen > self.count:
            raise RequestError(f"{self.chosen} of {self.count} experts cannot be chosen")
        if self.chosen_groups > self.groups:
            raise RequestError(f"{self.chosen_groups} of {self.groups} groups cannot be kept")
        if self.count % self.groups:
            raise RequestError(f"{self.count} experts do not divide into {self.groups} groups")
        size = self.count // self.groups
        if self.chosen_groups < self.groups and (
            size < 2 or self.chosen > self.chosen_groups * size
        ):
            raise RequestError(
                f"{self.chosen} experts cannot be chosen from {self.chosen_groups} groups of "
                f"{size}; a group needs two experts, and the kept ones as many as are chosen"
            )


@dataclasses.dataclass(frozen=True)
class VerifierConfig:
    """One configuration type for all families; what differs between them is data.

    Attributes:
        vocab_size: v.
        width: residual stream width, d.
        num_layers: decoder layers, L.
        num_heads: query heads.
        num_kv_heads: key/value heads (equal to `num_heads` for latent attention).
        head_width: width of a query and key head.
        mlp_width: feed-forward width of dense layers.
        rope: rotary embedding.
        norm_eps: epsilon of the residual norms.
        latent: latent attention where the model has it.
        experts: mixture of experts where the model has it.
        dense: layers with a dense feed-forward in a model with experts, ascending.
        attention_bias: biases on the attention projections (latent attention: q_a, kv_a, o only).
        qk_norm: queries and keys are normed over each head's width, before rope (Qwen3).
        sinks: a learned logit a head joins every softmax and carries no value (gpt-oss).
        window: tokens that a layer with a sliding window sees, the query's own among them.
        windowed: layers with a sliding window, ascending.
        wide_norms: norms multiply by their weight in float32 before the cast (gpt-oss).
        tied_head: logits use the embedding matrix.
        eos_tokens: ids that end a sequence.
        image_tokens: ids that stand for an image; this library reads text only and refuses them.
        max_length: longest sequence the model was made for.
        extra_layers: layers for multi-token prediction in the checkpoint, which are not loaded.
        family: the name of the loading table that made this configuration.
    """

    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    mlp_width: int
    rope: RopeConfig = RopeConfig()
    norm_eps: float = 1e-6
    latent: LatentConfig | None = None
    experts: ExpertsConfig | None = None
    dense: tuple[int, ...] = ()
    attention_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    window: int = 0
    windowed: tuple[int, ...] = ()
    wide_norms: bool = False
    tied_head: bool = False
    eos_tokens: tuple[int, ...] = ()
    image_tokens: tuple[int, ...] = ()
    max_length: int = 4096
    extra_layers: int = 0
    family: str = "llama"

    def __post_init__(self):
        _positive(self, "vocab_size", "width", "num_layers", "num_heads", "num_kv_heads")
        _positive(self, "head_width", "mlp_width", "norm_eps", "max_length")
        if self.num_heads % self.num_kv_heads:
            raise RequestError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        rotated = self.latent.rope_width if self.latent else self.head_width
        if rotated % 2:
            raise RequestError(f"rope turns pairs, and a width of {rotated} is odd")
        if self.windowed and self.window < 1:
            raise RequestError(f"a sliding window of {self.window} tokens sees nothing")
        unknown = [i for i in self.eos_tokens if not 0 <= i < self.vocab_size]
        if unknown:
            raise RequestError(
                f"end tokens {unknown} are outside the vocabulary of {self.vocab_size}"
            )
        outside = [i for i in (*self.dense, *self.windowed) if not 0 <= i < self.num_layers]
        if outside:
            raise RequestError(f"layers {outside} are outside the {self.num_layers} there are")

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers with a dense feed-forward, ascending; all of them in a model without experts."""
        return tuple(range(self.num_layers)) if self.experts is None else self.dense

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts, ascending."""
        dense = set(self.dense_layers)
        return tuple(layer for layer in range(self.num_layers) if layer not in dense)

    @property
    def cache_heads(self) -> int:
        """Heads k of the cache: one shared latent, or the key/value heads."""
        return 1 if self.latent else self.num_kv_heads

    @property
    def cache_width(self) -> int:
        """Width of a cached key: latent and rotated key together, or one head."""
        if self.latent:
            return self.latent.kv_rank + self.latent.rope_width
        return self.head_width


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """A one-layer EAGLE-3 drafter.

    Attributes:
        width: drafter width, m.
        verifier_width: width of the verifier's features and embeddings, d.
        num_features: boundaries it is fed, so that f = num_features * verifier_width.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_width: width of a head.
        mlp_width: feed-forward width.
        vocab_size: the verifier's vocabulary, v.
        draft_vocab_size: the drafter's own, dv <= v.
        rope: rotary embedding, the drafter's own.
        norm_eps: epsilon of its norms.
        fc_norm: a norm for each feature before fusion (EAGLE-3.1).
        norm_before_fc: one norm over all features together before fusion (drafters of gpt-oss).
        norm_before_residual: the residual stream starts at the normed hidden state.
        norm_output: the hidden state fed back is the one after the final norm (EAGLE-3.1).
        qk_norm: queries and keys are normed head by head before rope (Qwen3).

    All flags are off in EAGLE-3 itself. Source: vllm-project/speculators `models/eagle3`, whose
    names these are (`qk_norm` is its `qwen3` architecture); EAGLE-3.1: arXiv 2605.09992.
    """

    width: int
    verifier_width: int
    num_features: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    mlp_width: int
    vocab_size: int
    draft_vocab_size: int
    rope: RopeConfig = RopeConfig()
    norm_eps: float = 1e-6
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    qk_norm: bool = False

    def __post_init__(self):
        if self.fc_norm and self.norm_before_fc:
            raise RequestError(
                "fc_norm and norm_before_fc exclude each other: features are normed one by one or "
                "all together; leave one out"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise RequestError(
                f"draft_vocab_size {self.draft_vocab_size} must be between 1 and the verifier's "
                f"vocabulary of {self.vocab_size}"
            )
        if self.num_heads % self.num_kv_heads:
            raise RequestError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )


@dataclasses.dataclass(frozen=True)
class Speculation:
    """How many tokens are drafted in a cycle.

    Attributes:
        depth: tokens along one path (SGLang: steps; vLLM: num_speculative_tokens). 0 is plain
            decoding.
        topk: children a node gets; 1 is a chain.
        nodes: drafted nodes kept, the root not counted; None is `depth` for a chain. A tree keeps
            the best of `topk + (depth - 1) * topk ** 2` candidates.
        sampled: candidates are drawn from the drafter's distribution, without replacement, and not
            its likeliest; greedy rows take the likeliest all the same.
        block: a chain of sampled candidates is judged as a whole, which accepts more.
    """

    depth: int = 4
    topk: int = 1
    nodes: int | None = None
    sampled: bool = False
    block: bool = True

    def __post_init__(self):
        if not 0 <= self.depth <= 16:
            raise RequestError(f"speculation depth {self.depth} is outside 0 to 16")
        if not 1 <= self.topk <= 16:
            raise RequestError(f"speculation topk {self.topk} is outside 1 to 16")
        if self.topk == 1:
            if self.nodes is not None and self.nodes != self.depth:
                raise RequestError(
                    f"speculation nodes {self.nodes}: a chain (topk 1) of depth {self.depth} has "
                    f"{self.depth} nodes; leave nodes out, or give a tree a topk above 1"
                )
            return
        shape = f"a tree of depth {self.depth} and topk {self.topk}"
        if self.depth == 0:
            raise RequestError(
                f"{shape} drafts nothing; give a depth, or topk 1 for plain decoding"
            )
        if self.nodes is None:
            raise RequestError(f"{shape} needs nodes: how many of its candidates are kept")
        most = min(self.candidates, 128)
        if not self.depth <= self.nodes <= most:
            raise RequestError(
                f"speculation nodes {self.nodes}: {shape} keeps {self.depth} to {most} nodes"
            )

    @property
    def candidates(self) -> int:
        """Nodes that are drafted in a cycle, kept or not."""
        return self.topk + max(self.depth - 1, 0) * self.topk**2


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from the verifier's distribution, and when a text stops.

    Settings apply in transformers' order: logit bias, repetition penalty, minimum of new tokens;
    then temperature, top-k, top-p, min-p.

    Attributes:
        temperature: 0 is greedy.
        seed: of the draws.
        top_k: only so many likeliest tokens are drawn from; 0 is off.
        top_p: only the likeliest tokens that together reach this probability are; 1 is off.
        min_p: only tokens at least this share as likely as the likeliest are; 0 is off.
        repetition_penalty: scores of tokens in the text so far are divided by it, or multiplied
            where they are negative; 1 is off. Source: CTRL, arXiv 1909.05858.
        logit_bias: pairs of a token id and what is added to its score.
        min_new_tokens: no end or stop token comes before so many; a stop text may.
        max_new_tokens: of this text; None is the request's.
        stop_tokens: ids that end a text beside the model's own.
        stop: texts that end a text; they are not part of it.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0
    max_new_tokens: int | None = None
    stop_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        def refuse(name: str, expected: str):
            raise RequestError(f"sampling {name} {getattr(self, name)!r} must be {expected}")

        # Scores divided by less than this would pass float32.
        if not (self.temperature == 0 or 1e-6 <= self.temperature < math.inf):
            refuse("temperature", "0 (greedy) or at least 1e-6, and finite")
        if self.top_k < 0:
            refuse("top_k", "0 (off) or more")
        if not 0 < self.top_p <= 1:
            refuse("top_p", "above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            refuse("min_p", "between 0 and 1")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            refuse("repetition_penalty", "above 0")
        if self.min_new_tokens < 0:
            refuse("min_new_tokens", "0 or more")
        if self.max_new_tokens is not None and self.max_new_tokens < max(1, self.min_new_tokens):
            refuse("max_new_tokens", f"at least {max(1, self.min_new_tokens)}")
        if not all(self.stop):
            refuse("stop", "texts that are not empty")
        if not 0 <= self.seed < 2**63:
            refuse("seed", "0 or more and below 2**63")
        if not all(math.isfinite(value) for _, value in self.logit_bias):
            refuse("logit_bias", "pairs of a token id and a finite number")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How a drafter is trained.

    Attributes:
        steps: steps of training-time test: how far the drafter is unrolled on its own hidden state.
        step_decay: weight of step i is `step_decay ** i`.
        updates: optimiser updates in all.
        batch: rows of a batch.
        length: tokens of a row; documents are packed into rows.
        learning_rate: peak of the schedule (linear warm-up, then cosine to a tenth).
        warmup: share of the updates spent warming up.
        weight_decay: AdamW's.
        beta1: AdamW's first moment decay.
        beta2: AdamW's second moment decay.
        clip: global norm the gradients are clipped to.
        seed: of initial weights and the order of the data.
        save_every: updates between checkpoints.
        held_out: share of the data rows kept for validation.
        rows: packed rows used, the first ones; None is all.
        dtype: of the drafter's products, `float32` or `bfloat16`; its weights are float32. None is
            the verifier's.
    """

    steps: int = 7
    step_decay: float = 0.8
    updates: int = 1000
    batch: int = 8
    length: int = 256
    learning_rate: float = 1e-3
    warmup: float = 0.05
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 0.5
    seed: int = 0
    save_every: int = 200
    held_out: float = 0.02
    rows: int | None = None
    dtype: Literal["float32", "bfloat16"] | None = None

    def __post_init__(self):
        for name in ("steps", "updates", "batch", "save_every", "rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RequestError(f"train {name} {getattr(self, name)} must be at least 1")
        if self.length < self.steps + 3:
            raise RequestError(
                f"train length {self.length} is too short for {self.steps} steps; "
                f"at least {self.steps + 3} tokens are needed"
            )
        if not 0 <= self.held_out < 1:
            raise RequestError(f"train held_out {self.held_out} must be between 0 and 1")
