"""Judging by the processed distribution: which drafted nodes are accepted, and what follows them.

Three ways, each exact: what is committed has the verifier's processed distribution, whatever was
drafted.

| candidates | judged by |
|---|---|
| the drafter's likeliest | `walk`: the verifier's own draw at a slot, and whether a child has it |
| drawn from the drafter | `walk_sampled`: p / q with the running residual, without replacement |
| a chain drawn from it | `judge_block`: the longest prefix that a coin allows |

In the first, child after child is accepted with p and the rest drawn from what remains; that is a
draw from p and a look whether a child has it. The draw at a position depends on the row's key and
that position alone, so the text is the one that plain decoding draws.

The distribution at a slot is computed when the walk comes there: a penalty sees the walk's own
path, and nothing is computed for nodes that are not reached.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from eagle3_jax.forest.judging import Verdict, likeliest
from eagle3_jax.forest.processing import (
    Plan,
    RowSettings,
    adjusted,
    draw,
    uniforms,
    weights_of,
)
from eagle3_jax.forest.topology import Forest, links


@nnx.dataclass
class Walk(nnx.Pytree):
    """A walk down the forest, row by row.

    Attributes:
        slot: where it stands.
        going: it has not ended.
        path: slots so far, as in `Verdict`.
        tokens: chosen after each slot of the path.
        count: how many slots there are on the path.
        seen: tokens of the text and the path; None without a penalty.
        logprobs: of the chosen tokens under the verifier's own distribution; None unasked.
    """

    slot: Int[Array, " b"] = nnx.data()
    going: Bool[Array, " b"] = nnx.data()
    path: Int[Array, "b p"] = nnx.data()
    tokens: Int[Array, "b p"] = nnx.data()
    count: Int[Array, " b"] = nnx.data()
    seen: Bool[Array, "b v"] | None = nnx.data()
    logprobs: Float[Array, "b p"] | None = nnx.data()


@nnx.dataclass
class Asked(nnx.Pytree):
    """What the rows ask for, and the text that they ask it for.

    Attributes:
        settings: of each row.
        plan: of all; static.
        eos: the model's end tokens; static.
        length: of each row's text, the root among it: the position of the token after the root.
        seen: tokens of that text; None without a penalty.
        live: rows that take part.
        text: that text; None without a hook.
    """

    settings: RowSettings = nnx.data()
    plan: Plan = nnx.static()
    eos: tuple[int, ...] = nnx.static()
    length: Int[Array, " b"] = nnx.data()
    seen: Bool[Array, "b v"] | None = nnx.data()
    live: Bool[Array, " b"] = nnx.data()
    text: Int[Array, "b s"] | None = nnx.data(default=None)


@nnx.dataclass
class Drawn(nnx.Pytree):
    """A verdict and what else a walk leaves behind.

    Attributes:
        verdict: the accepted path and the token after it.
        seen: tokens of the text, path and last token among them; None without a penalty.
        logprobs: of each new token under the verifier's own distribution; None unasked.
    """

    verdict: Verdict = nnx.data()
    seen: Bool[Array, "b v"] | None = nnx.data()
    logprobs: Float[Array, "b p"] | None = nnx.data()


def start(asked: Asked, slots: int) -> Walk:
    """A walk at the root."""
    b = asked.length.shape[0]
    empty = jnp.zeros((b, slots), jnp.int32)
    return Walk(
        slot=jnp.zeros((b,), jnp.int32),
        going=asked.live,
        path=empty,
        tokens=empty,
        count=jnp.zeros((b,), jnp.int32),
        seen=asked.seen,
        logprobs=jnp.zeros((b, slots)) if asked.plan.logprobs else None,
    )


def _at(x: Array, slot: Int[Array, " b"]) -> Array:
    """Each row's entry of a slot: [b w ...] to [b ...]."""
    at = slot.reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.take_along_axis(x, at, axis=1)[:, 0]


def _scores(walk: Walk, logits: Float[Array, "b v"], asked: Asked) -> Float[Array, "b v"]:
    """Adjusted scores of the token after the walk's slot."""
    a = asked
    length = a.length + walk.count
    text = a.text
    if text is not None:
        # The path stands behind the text.
        at = jnp.arange(text.shape[1], dtype=jnp.int32)[None] - a.length[:, None]
        path = jnp.take_along_axis(walk.tokens, jnp.clip(at, 0, walk.tokens.shape[1] - 1), axis=1)
        text = jnp.where((at >= 0) & (at < walk.count[:, None]), path, text)
    return adjusted(logits, a.settings, a.plan, a.eos, length, walk.seen, text)


def _move(
    walk: Walk,
    moves: Bool[Array, " b"],
    token: Int[Array, " b"],
    slot: Int[Array, " b"],
    going: Bool[Array, " b"],
    logits: Float[Array, "b v"],
) -> Walk:
    """Put the walk's slot and the token chosen after it on the path, where a row moves."""
    place = (jnp.arange(walk.path.shape[1])[None] == walk.count[:, None]) & moves[:, None]
    seen, logprobs = walk.seen, walk.logprobs
    if seen is not None:
        row = jnp.arange(seen.shape[0])
        seen = seen.at[row, token].set(seen[row, token] | moves)
    if logprobs is not None:
        own = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), token[:, None], axis=1)
        logprobs = jnp.where(place, own, logprobs)
    return Walk(
        slot=jnp.where(moves, slot, walk.slot),
        going=jnp.where(moves, going, walk.going),
        path=jnp.where(place, walk.slot[:, None], walk.path),
        tokens=jnp.where(place, token[:, None], walk.tokens),
        count=walk.count + moves.astype(jnp.int32),
        seen=seen,
        logprobs=logprobs,
    )


def _finish(walk: Walk) -> Drawn:
    last = jnp.maximum(walk.count - 1, 0)[:, None]
    inside = jnp.arange(walk.path.shape[1])[None] <= last
    path = jnp.where(inside, walk.path, jnp.take_along_axis(walk.path, last, axis=1))
    bonus = jnp.take_along_axis(walk.tokens, last, axis=1)[:, 0]
    count = jnp.maximum(walk.count, 1)
    return Drawn(
        verdict=Verdict(path=path, count=count, bonus=bonus),
        seen=walk.seen,
        logprobs=walk.logprobs,
    )


def choose(
    scores: Float[Array, "b v"], asked: Asked, position: Int[Array, " b"]
) -> Int[Array, " b"]:
    """The verifier's own token at a position: the likeliest, or a draw."""
    if not asked.plan.drawn:
        return likeliest(scores)
    weights = weights_of(scores, asked.settings, asked.plan)
    return draw(weights, uniforms(asked.settings.key, position, jnp.zeros_like(position)))


def walk(forest: Forest, logits: Float[Array, "b w v"], asked: Asked, max_depth: int) -> Drawn:
    """Judge candidates that are no draws: the verifier's own token at each slot, if a child has it.

    Args:
        forest: siblings have different tokens.
        logits: the verifier's, at every slot.
        asked: what the rows ask for.
        max_depth: of the deepest node; p = max_depth + 1.
    """
    index = jnp.arange(forest.tokens.shape[1], dtype=jnp.int32)[None]

    def body(walk: Walk) -> Walk:
        here = _at(logits, walk.slot)
        token = choose(_scores(walk, here, asked), asked, asked.length + walk.count)
        child = (forest.parents == walk.slot[:, None]) & (forest.tokens == token[:, None])
        child = child & (index > 0)
        slot = jnp.argmax(child, axis=1).astype(jnp.int32)
        return _move(walk, walk.going, token, slot, jnp.any(child, axis=1), here)

    return _finish(_while(body, start(asked, max_depth + 1)))


def _while(body: Callable[[Walk], Walk], walk: Walk) -> Walk:
    return jax.lax.while_loop(lambda walk: jnp.any(walk.going), body, walk)


@nnx.dataclass
class Residual(nnx.Pytree):
    """What is left of the two distributions while a slot's candidates are tried.

    Attributes:
        walk: down to that slot.
        fresh: the walk has just come to it.
        child: the candidate to try; -1 where none is left.
        tried: how many were tried here.
        target: the verifier's distribution, less what was refused.
        drafter: the drafter's over its own vocabulary, less what was tried.
    """

    walk: Walk = nnx.data()
    fresh: Bool[Array, " b"] = nnx.data()
    child: Int[Array, " b"] = nnx.data()
    tried: Int[Array, " b"] = nnx.data()
    target: Float[Array, "b v"] = nnx.data()
    drafter: Float[Array, "b dv"] = nnx.data()


def walk_sampled(
    forest: Forest,
    logits: Float[Array, "b w v"],
    vocabulary: Int[Array, " dv"],
    asked: Asked,
    max_depth: int,
) -> Drawn:
    """Judge candidates drawn from the drafter without replacement, in the order of the draws.

    A candidate x is accepted with p(x) / q(x); refused, p becomes the normalised positive part of
    p - q, and q loses x. Greedy rows' candidates are the likeliest ones, and have q(x) = 1.

    Args:
        forest: with the drafter's logits; siblings in the order in which they were drawn.
        logits: the verifier's, at every slot.
        vocabulary: verifier ids of draft ids.
        asked: what the rows ask for.
        max_depth: of the deepest node; p = max_depth + 1.

    Source: SpecInfer, arXiv 2305.09781; without replacement: arXiv 2402.14160.
    """
    assert forest.logits is not None and forest.expansion is not None
    b, v = logits.shape[0], logits.shape[2]
    first_child, next_sibling = links(forest.parents)
    expansion, lift = forest.expansion, _lift(vocabulary, v)
    greedy = asked.settings.temperature <= 0
    drafted = draft_weights(forest.logits, asked.settings)

    def enter(r: Residual) -> Residual:
        """The two distributions at the slot that the walk has come to."""
        here = _at(logits, r.walk.slot)
        weights = weights_of(_scores(r.walk, here, asked), asked.settings, asked.plan)
        target = _normalised(weights, weights)
        drafter = _at(drafted, _at(expansion, r.walk.slot))
        fresh = r.fresh[:, None]
        return dataclasses.replace(
            r,
            fresh=jnp.zeros_like(r.fresh),
            child=jnp.where(r.fresh, _at(first_child, r.walk.slot), r.child),
            tried=jnp.where(r.fresh, 0, r.tried),
            target=jnp.where(fresh, target, r.target),
            drafter=jnp.where(fresh, drafter, r.drafter),
        )

    def body(r: Residual) -> Residual:
        r = jax.lax.cond(jnp.any(r.fresh), enter, lambda r: r, r)
        position = asked.length + r.walk.count
        there = r.child >= 0
        child = jnp.maximum(r.child, 0)
        token = _at(forest.tokens, child)
        one = (jnp.arange(v)[None] == token[:, None]).astype(jnp.float32)
        proposed = jnp.where(greedy[:, None], one, lift(r.drafter))
        p, q = (_at(x, token) for x in (r.target, proposed))
        coin = uniforms(asked.settings.key, position, r.tried + 1)
        accepted = there & (coin * q < p)
        # Refused: what is left of both, and the next candidate.
        left = _normalised(jnp.maximum(r.target - proposed, 0.0), r.target)
        rest = jnp.where(lift_ids(vocabulary, token), 0.0, r.drafter)
        refused = there & jnp.logical_not(accepted)
        bonus = draw(r.target, uniforms(asked.settings.key, position, jnp.zeros_like(position)))
        going = r.walk.going
        moves = going & (accepted | jnp.logical_not(there))
        here = _at(logits, r.walk.slot)
        walk = _move(r.walk, moves, jnp.where(there, token, bonus), child, there, here)
        return Residual(
            walk=walk,
            fresh=moves & there,
            child=jnp.where(refused, _at(next_sibling, child), r.child),
            tried=r.tried + refused.astype(jnp.int32),
            target=jnp.where(refused[:, None], left, r.target),
            drafter=jnp.where(refused[:, None], _normalised(rest, r.drafter), r.drafter),
        )

    r = Residual(
        walk=start(asked, max_depth + 1),
        fresh=asked.live,
        child=jnp.full((b,), -1, jnp.int32),
        tried=jnp.zeros((b,), jnp.int32),
        target=jnp.ones((b, v)) / v,
        drafter=jnp.zeros((b, vocabulary.shape[0])),
    )
    r = jax.lax.while_loop(lambda r: jnp.any(r.walk.going), body, r)
    return _finish(r.walk)


def _normalised(weights: Float[Array, "b v"], otherwise: Float[Array, "b v"]):
    """Weights that sum to one; where all are zero, another distribution."""
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), otherwise)


def _lift(vocabulary: Int[Array, " dv"], v: int):
    """From a distribution over the draft vocabulary to the same over the verifier's."""
    dv = vocabulary.shape[0]
    if dv == v:
        return lambda x: x
    place = jnp.full((v,), dv, jnp.int32).at[vocabulary].set(jnp.arange(dv, dtype=jnp.int32))
    return lambda x: jnp.pad(x, ((0, 0), (0, 1)))[:, place]


def lift_ids(vocabulary: Int[Array, " dv"], token: Int[Array, " b"]) -> Bool[Array, "b dv"]:
    """Which draft id a verifier's token is."""
    return vocabulary[None] == token[:, None]


def draft_weights(logits: Float[Array, "b g dv"], settings: RowSettings) -> Float[Array, "b g dv"]:
    """The drafter's distribution that candidates are drawn from: at the row's temperature.

    A greedy row's is taken at temperature 1, and its candidates are not drawn.
    """
    return jax.nn.softmax(tempered(logits, settings), axis=-1)


def tempered(logits: Float[Array, "b g dv"], settings: RowSettings) -> Float[Array, "b g dv"]:
    """The drafter's scores at each row's temperature."""
    warm = settings.temperature > 0
    return logits / jnp.where(warm, settings.temperature, 1.0)[:, None, None]


def judge_block(
    forest: Forest,
    logits: Float[Array, "b w v"],
    vocabulary: Int[Array, " dv"],
    asked: Asked,
) -> Drawn:
    """Judge a chain of drawn candidates as a whole: the longest prefix that a coin allows.

    Args:
        forest: a chain, with the drafter's logits.
        logits: the verifier's, at every slot.
        vocabulary: verifier ids of draft ids.
        asked: what the rows ask for.

    Source: Block verification, arXiv 2403.10444, algorithm 2.
    """
    assert forest.logits is not None
    b, w, v = logits.shape
    n = w - 1
    lift = _lift(vocabulary, v)
    greedy = (asked.settings.temperature <= 0)[:, None]
    drafted = draft_weights(forest.logits, asked.settings)

    # The distributions at every slot, the penalty following the chain.
    steps = start(asked, w)
    target = []
    for slot in range(w):
        here = logits[:, slot]
        weights = weights_of(_scores(steps, here, asked), asked.settings, asked.plan)
        target.append(_normalised(weights, weights))
        if slot < n:
            token, to = forest.tokens[:, slot + 1], jnp.full((b,), slot + 1, jnp.int32)
            steps = _move(steps, asked.live, token, to, asked.live, here)
    proposed = []
    for slot in range(n):
        token = forest.tokens[:, slot + 1]
        one = (jnp.arange(v)[None] == token[:, None]).astype(jnp.float32)
        proposed.append(jnp.where(greedy, one, lift(drafted[:, slot])))

    ratio = jnp.ones((b,))
    ratios, chances = [ratio], []
    for slot in range(n):
        token = forest.tokens[:, slot + 1]
        chances.append(_gain(ratio, target[slot], proposed[slot]))
        ratio = jnp.minimum(ratio * _at(target[slot], token) / _at(proposed[slot], token), 1.0)
        ratios.append(ratio)
    chances.append(ratio)
    # Position by position its own coin; the last one that falls well counts.
    kept = jnp.zeros((b,), jnp.int32)
    for count in range(1, w):
        position = asked.length + count - 1
        # By depth too: the next cycle's coins at positions past the kept prefix are others.
        coin = uniforms(asked.settings.key, position, jnp.full_like(position, count))
        kept = jnp.where(coin < chances[count], count, kept)

    stack = functools.partial(_at, jnp.stack(target, axis=1))
    base = stack(kept)
    none = jnp.zeros((b, v))
    less = _at(jnp.stack([*proposed, none], axis=1), kept)
    share = _at(jnp.stack(ratios, axis=1), kept)[:, None]
    share = jnp.where((kept == n)[:, None], 1.0, share)
    left = _normalised(jnp.maximum(share * base - less, 0.0), base)
    position = asked.length + kept
    bonus = draw(left, uniforms(asked.settings.key, position, jnp.zeros_like(position)))

    steps = start(asked, w)
    for slot in range(w):
        ended = kept == slot
        after = forest.tokens[:, min(slot + 1, n)]
        to = jnp.full((b,), min(slot + 1, n), jnp.int32)
        token = jnp.where(ended, bonus, after)
        steps = _move(steps, steps.going, token, to, jnp.logical_not(ended), logits[:, slot])
    return _finish(steps)


def _gain(ratio: Float[Array, " b"], target: Float[Array, "b v"], proposed: Float[Array, "b v"]):
    """Chance that a prefix is kept if nothing longer is."""
    gain = jnp.sum(jnp.maximum(ratio[:, None] * target - proposed, 0.0), axis=1)
    whole = gain + 1.0 - ratio
    return jnp.where(whole > 0, gain / jnp.where(whole > 0, whole, 1.0), 0.0)
