"""The verifier's distribution as a request wants it, and draws from it.

Scores are processed in transformers' order: logit bias, repetition penalty, minimum of new tokens,
the caller's own processor; then temperature, top-k, top-p, min-p. Every row has its own settings;
what no row asks for is left out of the compiled program, and a setting that is off changes no bit.

There is no sort: thresholds are found by bisection over the bits of a float32, exactly.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int, Key, UInt

from eagle3_jax.configs import Sampling
from eagle3_jax.forest.judging import likeliest

Hook = Callable[[Float[Array, "b v"], Int[Array, "b s"], Int[Array, " b"]], Float[Array, "b v"]]
"""A caller's processor, traced: scores, the text so far (prompt, new tokens and the accepted path),
and its length, past which the text is arbitrary. It leaves a row some finite score."""

FEW_KEPT = 128
"""Up to this top-k the greatest scores are taken out; beyond it a threshold is bisected."""

SPAN = 256
"""Tokens of a span, of which a draw finds one first."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the rows ask for in all; static, so that the rest is not compiled.

    Attributes:
        drawn: some row has a temperature; without one every token is the likeliest.
        most_kept: the greatest top-k, rounded up to a power of two; 0 where no row has one.
        top_p: some row has one below 1.
        min_p: some row has one above 0.
        penalty: some row has a repetition penalty.
        bias: some row has a logit bias.
        minimum: some row has a minimum of new tokens.
        stops: stop tokens of a row beside the model's own, at most; never 0, since jaxlib 0.11.2
            crashes where it compiles a mapped loop that carries an empty array.
        logprobs: log-probabilities of emitted tokens are kept.
        hook: the caller's own processor.
    """

    drawn: bool = False
    most_kept: int = 0
    top_p: bool = False
    min_p: bool = False
    penalty: bool = False
    bias: bool = False
    minimum: bool = False
    stops: int = 1
    logprobs: bool = False
    hook: Hook | None = None

    @property
    def plainly_greedy(self) -> bool:
        """Whether every token is the verifier's likeliest, whatever came before."""
        settings = (self.drawn, self.penalty, self.bias, self.minimum, self.logprobs, self.hook)
        return not any(settings)


@nnx.dataclass
class RowSettings(nnx.Pytree):
    """Each row's settings.

    Attributes:
        key: draws come from it and the position of what is drawn alone.
        temperature: 0 is greedy.
        top_k: tokens kept; the whole vocabulary where off.
        top_p: 1 where off.
        min_p: 0 where off.
        penalty: repetition penalty; 1 where off.
        floor: length of text before which no token may end it.
        stops: token ids that end the row's text beside the model's own; -1 where unused.
        bias: added to the scores; None where no row has one.
    """

    key: Key[Array, " b"] = nnx.data()
    temperature: Float[Array, " b"] = nnx.data()
    top_k: Int[Array, " b"] = nnx.data()
    top_p: Float[Array, " b"] = nnx.data()
    min_p: Float[Array, " b"] = nnx.data()
    penalty: Float[Array, " b"] = nnx.data()
    floor: Int[Array, " b"] = nnx.data()
    stops: Int[Array, "b a"] = nnx.data()
    bias: Float[Array, "b v"] | None = nnx.data()


def plan_of(
    samplings: Sequence[Sampling], logprobs: bool = False, hook: Hook | None = None
) -> Plan:
    """What some requests ask for in all."""
    most = max((s.top_k for s in samplings), default=0)
    return Plan(
        drawn=any(s.temperature > 0 for s in samplings),
        most_kept=0 if most == 0 else 1 << (most - 1).bit_length(),
        top_p=any(s.top_p < 1 for s in samplings),
        min_p=any(s.min_p > 0 for s in samplings),
        penalty=any(s.repetition_penalty != 1 for s in samplings),
        bias=any(s.logit_bias for s in samplings),
        minimum=any(s.min_new_tokens > 0 for s in samplings),
        stops=max([1, *(len(s.stop_tokens) for s in samplings)]),
        logprobs=logprobs,
        hook=hook,
    )


def empty_settings(rows: int, vocab_size: int, plan: Plan) -> RowSettings:
    """Settings of rows nobody sits in."""
    return RowSettings(
        key=jax.random.split(jax.random.key(0), rows),
        temperature=jnp.zeros((rows,)),
        top_k=jnp.full((rows,), vocab_size, jnp.int32),
        top_p=jnp.ones((rows,)),
        min_p=jnp.zeros((rows,)),
        penalty=jnp.ones((rows,)),
        floor=jnp.zeros((rows,), jnp.int32),
        stops=jnp.full((rows, plan.stops), -1, jnp.int32),
        bias=jnp.zeros((rows, vocab_size)) if plan.bias else None,
    )


def one_setting(
    sampling: Sampling, key: Key[Array, ""], length: int, vocab_size: int, plan: Plan
) -> RowSettings:
    """The settings of one row, b = 1.

    Args:
        sampling: the request's.
        key: of its draws.
        length: of its prompt, in tokens.
        vocab_size: the verifier's.
        plan: what it was counted into.
    """
    s = sampling
    stops = np.full((1, plan.stops), -1, np.int32)
    stops[0, : len(s.stop_tokens)] = s.stop_tokens
    bias = None
    if plan.bias:
        values = np.zeros((1, vocab_size), np.float32)
        for token, value in s.logit_bias:
            values[0, token] += value
        bias = jnp.asarray(values)

    def one(value, dtype: Any = jnp.float32):
        return jnp.asarray([value], dtype)

    return RowSettings(
        key=key[None],
        temperature=one(s.temperature),
        top_k=one(s.top_k or vocab_size, jnp.int32),
        top_p=one(s.top_p),
        min_p=one(s.min_p),
        penalty=one(s.repetition_penalty),
        floor=one(length + s.min_new_tokens, jnp.int32),
        stops=jnp.asarray(stops),
        bias=bias,
    )


def ends(
    tokens: Int[Array, "b p"], eos: tuple[int, ...], settings: RowSettings
) -> Bool[Array, "b p"]:
    """Which tokens end their row's text."""
    out = jnp.any(tokens[..., None] == settings.stops[:, None], axis=-1)
    for token in eos:
        out = out | (tokens == token)
    return out


def adjusted(
    logits: Float[Array, "b v"],
    settings: RowSettings,
    plan: Plan,
    eos: tuple[int, ...],
    length: Int[Array, " b"],
    seen: Bool[Array, "b v"] | None,
    text: Int[Array, "b s"] | None = None,
) -> Float[Array, "b v"]:
    """Scores after everything that changes which token is likeliest.

    Args:
        logits: the verifier's, float32.
        settings: of the rows.
        plan: of the batch.
        eos: the model's end tokens.
        length: of the text that the token would be added to; the token's position.
        seen: tokens of that text, where the plan has a penalty.
        text: that text, where the plan has a hook.
    """
    scores = logits
    if settings.bias is not None:
        scores = scores + settings.bias
    if plan.penalty:
        assert seen is not None
        by = settings.penalty[:, None]
        scores = jnp.where(seen, jnp.where(scores < 0, scores * by, scores / by), scores)
    if plan.minimum:
        ids = jnp.broadcast_to(jnp.arange(scores.shape[1], dtype=jnp.int32)[None], scores.shape)
        early = (length < settings.floor)[:, None] & ends(ids, eos, settings)
        scores = jnp.where(early, -jnp.inf, scores)
    if plan.hook is not None:
        assert text is not None
        scores = plan.hook(scores, text, length)
    return scores


def weights_of(
    scores: Float[Array, "b v"], settings: RowSettings, plan: Plan
) -> Float[Array, "b v"]:
    """Unnormalised probabilities after temperature, top-k, top-p and min-p.

    A greedy row has one weight, at its likeliest token; no row's weights are all zero.
    """
    warm = settings.temperature > 0
    divisor = jnp.where(warm, settings.temperature, 1.0)[:, None]
    # Materialised: a compiler that fuses the division into what follows rounds it otherwise there
    # (the likeliest weight is not 1 then), and as the plan changes what follows.
    scores = jax.lax.optimization_barrier(scores / divisor)
    if plan.most_kept:
        scores = jnp.where(scores >= _kth(scores, settings.top_k, plan.most_kept), scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    if plan.top_p:
        weights = jnp.where(weights >= _nucleus(weights, settings.top_p), weights, 0.0)
    if plan.min_p:
        weights = jnp.where(weights >= settings.min_p[:, None], weights, 0.0)
    ids = jnp.arange(scores.shape[1], dtype=jnp.int32)[None]
    alone = (ids == likeliest(scores)[:, None]).astype(weights.dtype)
    return jnp.where(warm[:, None], weights, alone)


def _kth(scores: Float[Array, "b v"], k: Int[Array, " b"], most: int) -> Float[Array, "b 1"]:
    """The k-th greatest score of each row; the least where k is the whole vocabulary."""
    v = scores.shape[1]
    if most <= min(FEW_KEPT, v):
        best = jax.lax.top_k(scores, most)[0]
        found = jnp.take_along_axis(best, jnp.minimum(k, most)[:, None] - 1, axis=1)
        return jnp.where(k[:, None] >= v, -jnp.inf, found)
    keys = _ordered(scores)

    def bit(i, low):
        """The greatest threshold that k scores reach, bit by bit from above."""
        high = low | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        reach = jnp.sum(keys >= high[:, None], axis=1, dtype=jnp.int32)
        return jnp.where(reach >= k, high, low)

    low = jax.lax.fori_loop(0, 32, bit, jnp.zeros(k.shape, jnp.uint32))
    return jnp.min(jnp.where(keys >= low[:, None], scores, jnp.inf), axis=1, keepdims=True)


def _ordered(x: Float[Array, "b v"]) -> UInt[Array, "b v"]:
    """Whole numbers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, jnp.bitwise_not(bits), bits | jnp.uint32(1 << 31))


def _nucleus(weights: Float[Array, "b v"], top_p: Float[Array, " b"]) -> Float[Array, "b 1"]:
    """The least weight in the nucleus: those above it sum to less than top_p.

    Equal weights are all in or all out, where transformers cuts among them by the order of a sort.
    """
    most = top_p * jnp.sum(weights, axis=1)
    off = top_p >= 1

    def bit(i, high):
        """The least threshold above which there is less than `most`, bit by bit from above."""
        low = high & jnp.bitwise_not(jnp.uint32(1) << (30 - i).astype(jnp.uint32))
        at = jax.lax.bitcast_convert_type(low, jnp.float32)
        above = jnp.sum(jnp.where(weights > at[:, None], weights, 0.0), axis=1)
        return jnp.where(above < most, low, high)

    # Weights lie between 0 and 1; all bits of a positive float but the sign's.
    start = jnp.full(top_p.shape, 0x7FFFFFFF, jnp.uint32)
    found = jax.lax.bitcast_convert_type(jax.lax.fori_loop(0, 31, bit, start), jnp.float32)
    return jnp.where(off, 0.0, found)[:, None]


def draw(weights: Float[Array, "b v"], uniform: Float[Array, " b"]) -> Int[Array, " b"]:
    """One token a row by the inverse of the cumulative weights; never one of weight zero.

    First a span of the vocabulary is found, then the token in it: a cumulative sum over the whole
    vocabulary would cost several times as much.

    Args:
        weights: unnormalised; not all zero.
        uniform: in [0, 1).
    """
    spans = jnp.pad(weights, ((0, 0), (0, -weights.shape[1] % SPAN)))
    spans = spans.reshape(weights.shape[0], -1, SPAN)
    sums = jnp.sum(spans, axis=2)
    target = uniform * jnp.max(jnp.cumsum(sums, axis=1), axis=1)
    span, target = _reaching(sums, target)
    inside = jnp.take_along_axis(spans, span[:, None, None], axis=1)[:, 0]
    return span * SPAN + _reaching(inside, target)[0]


def _reaching(
    weights: Float[Array, "b a"], target: Float[Array, " b"]
) -> tuple[Int[Array, " b"], Float[Array, " b"]]:
    """The first place where the cumulative weights pass a target, and how far into it that lies."""
    a = weights.shape[1]
    ids = jnp.arange(a, dtype=jnp.int32)[None]
    cumulative = jnp.cumsum(weights, axis=1)
    there = weights > 0
    first = jnp.min(jnp.where(there & (cumulative > target[:, None]), ids, a), axis=1)
    # Rounding may leave none past the target: then it is the last that has a weight.
    first = jnp.where(first < a, first, jnp.max(jnp.where(there, ids, 0), axis=1))
    before = jnp.max(jnp.where(ids < first[:, None], cumulative, 0.0), axis=1)
    return first, target - before


def uniforms(
    keys: Key[Array, " b"], position: Int[Array, " b"], what: Int[Array, " b"]
) -> Float[Array, " b"]:
    """One uniform number in [0, 1) a row.

    Args:
        keys: the rows'.
        position: of the token it decides on; a row's draws depend on nothing else.
        what: 0 for the verifier's own token, j for the j-th candidate at that position, or for a
            candidate of depth j where a cycle looks at positions that a later one decides.
    """

    def one(key, position, what):
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, position), what))

    return jax.vmap(one)(keys, position, what)


CANDIDATES = 1 << 20
"""Draws of candidates are numbered from here on, so that none meets a draw of judging."""


def gumbels(
    keys: Key[Array, " b"],
    position: Int[Array, " b"],
    first: Int[Array, ""] | int,
    shape: tuple[int, ...],
) -> Float[Array, "b w dv"]:
    """Gumbel noise for the children of some nodes: one draw a row, position and node.

    Args:
        keys: the rows'.
        position: of the children.
        first: number of the first node.
        shape: nodes and draft vocabulary, (w, dv).
    """
    w, dv = shape
    numbers = CANDIDATES + first + jnp.arange(w, dtype=jnp.int32)

    def one(key, position):
        key = jax.random.fold_in(key, position)
        return jax.vmap(lambda n: jax.random.gumbel(jax.random.fold_in(key, n), (dv,)))(numbers)

    return jax.vmap(one)(keys, position)
