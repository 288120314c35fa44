"""Judging by draws: plain walks, exact distributions on hand-made trees, greedy rows among others.

Continuations that a verdict leaves open are drawn here, so that every outcome has as many tokens.
"""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from eagle3_jax.configs import Sampling
from eagle3_jax.forest.drawing import Asked, judge_block, walk, walk_sampled
from eagle3_jax.forest.judging import judge_greedily
from eagle3_jax.forest.processing import RowSettings, draw, empty_settings, plan_of, uniforms
from eagle3_jax.forest.topology import Forest, chain, tree
from eagle3_jax.loop.decode import drawn_chain

V, LENGTH, DRAWS = 5, 10, 20_000
VOCABULARY = jnp.asarray([0, 1, 3, 4], jnp.int32)
DV = len(VOCABULARY)
ROWS, SLOTS = 48, 7
PENALTY = 1.5

walked = jax.jit(walk, static_argnums=3)
walked_sampled = jax.jit(walk_sampled, static_argnums=4)
judged_block = jax.jit(judge_block)


def asked_of(temperature, penalty: float = 1.0, seen=None) -> Asked:
    """Rows of some temperatures, each with a key of its own."""
    temperature = np.asarray(temperature, np.float32)
    rows = len(temperature)
    plan = plan_of([Sampling(temperature=1.0, repetition_penalty=penalty)])
    settings: RowSettings = dataclasses.replace(
        empty_settings(rows, V, plan),
        key=jax.random.split(jax.random.key(3), rows),
        temperature=jnp.asarray(temperature),
        penalty=jnp.full((rows,), penalty, jnp.float32),
    )
    return Asked(
        settings=settings,
        plan=plan,
        eos=(),
        length=jnp.full((rows,), LENGTH, jnp.int32),
        seen=seen,
        live=jnp.ones((rows,), bool),
    )


def softmax(x) -> np.ndarray:
    x = np.exp(np.asarray(x, np.float64))
    return x / x.sum(axis=-1, keepdims=True)


def draws_of(rng, chances) -> np.ndarray:
    """One draw a row."""
    return (rng.random((len(chances), 1)) > np.cumsum(chances, axis=1)).sum(axis=1)


@hypothesis.settings(max_examples=50)
@hypothesis.given(
    weights=st.lists(st.integers(0, 4), min_size=8, max_size=8).filter(any),
    at=st.integers(0, 63),
)
def test_a_draw_is_the_inverse_of_the_cumulative_weights(weights, at):
    """Whole weights and binary fractions: no rounding on either side."""
    found = int(draw(jnp.asarray([weights], jnp.float32), jnp.asarray([at / 64]))[0])
    assert found == np.searchsorted(np.cumsum(weights), at / 64 * sum(weights), side="right")
    assert weights[found] > 0


def test_a_draw_past_all_rounding_is_the_last_token_with_a_weight():
    weights = jnp.asarray([[0.1, 0.0, 0.7, 0.2, 0.0]])
    assert draw(weights, jnp.asarray([1 - 2.0**-24])).tolist() == [3]
    assert draw(weights, jnp.asarray([1.0])).tolist() == [3]


def random_forest(rng) -> tuple[Forest, np.ndarray, np.ndarray]:
    """Random trees with parents before children and different siblings; parents and tokens."""
    parents, tokens = np.zeros((ROWS, SLOTS), np.int32), np.zeros((ROWS, SLOTS), np.int32)
    depth = np.zeros((ROWS, SLOTS), np.int32)
    for row in range(ROWS):
        for slot in range(1, SLOTS):
            parent = rng.integers(max(slot - 3, 0), slot)
            taken = tokens[row, 1:slot][parents[row, 1:slot] == parent]
            parents[row, slot] = parent
            tokens[row, slot] = rng.choice(np.setdiff1d(np.arange(V), taken))
            depth[row, slot] = depth[row, parent] + 1
    below = (jnp.asarray(x[:, 1:]) for x in (tokens, parents, depth))
    return tree(jnp.asarray(tokens[:, 0]), *below, max_depth=SLOTS - 1), parents, tokens


def naive_walk(parents, tokens, logits, seen, coin, temperature) -> tuple[list[int], int]:
    """From the root to the child that has the verifier's own token; the penalty sees that path."""
    path, seen = [0], seen.copy()
    while True:
        scores = logits[path[-1]]
        scores = np.where(seen, np.where(scores < 0, scores * PENALTY, scores / PENALTY), scores)
        token = int(np.argmax(scores))
        if temperature:
            cumulative = np.cumsum(softmax(scores / temperature))
            token = int(np.searchsorted(cumulative, coin(len(path) - 1)))
        seen[token] = True
        child = [s for s in range(1, SLOTS) if (parents[s], tokens[s]) == (path[-1], token)]
        if not child:
            return path, token
        path += child


def test_a_walk_is_a_plain_walk_whose_penalty_follows_its_path():
    """Half the rows draw, half are greedy; a draw depends on its row and position alone."""
    rng = np.random.default_rng(0)
    forest, parents, tokens = random_forest(rng)
    logits = rng.standard_normal((ROWS, SLOTS, V)).astype(np.float32)
    seen = rng.random((ROWS, V)) < 0.3
    temperature = np.where(np.arange(ROWS) % 2, 0.8, 0.0)
    asked = asked_of(temperature, PENALTY, jnp.asarray(seen))
    drawn = walked(forest, jnp.asarray(logits), asked, SLOTS - 1)
    coins = np.stack(
        [
            uniforms(asked.settings.key, asked.length + i, jnp.zeros_like(asked.length))
            for i in range(SLOTS)
        ]
    )
    lengths = set()
    for row in range(ROWS):
        path, bonus = naive_walk(
            parents[row],
            tokens[row],
            logits[row].astype(np.float64),
            seen[row],
            lambda i, row=row: coins[i, row],
            temperature[row],
        )
        lengths.add(len(path))
        assert drawn.verdict.path[row, : len(path)].tolist() == path
        assert (int(drawn.verdict.count[row]), int(drawn.verdict.bonus[row])) == (len(path), bonus)
        among = seen[row].copy()
        among[[*tokens[row, path[1:]], bonus]] = True
        np.testing.assert_array_equal(drawn.seen[row], among)
    assert lengths >= {1, 2, 3}


@dataclasses.dataclass
class Made:
    """Candidates drawn in numpy below one root, and the distributions behind them.

    Attributes:
        forest: with the drafter's logits.
        logits: the verifier's, at every slot.
        asked: rows that all draw at temperature 1.
        target: of the first token, and of one that follows each token.
    """

    forest: Forest
    logits: jax.Array
    asked: Asked
    target: np.ndarray


def tables() -> tuple[np.ndarray, np.ndarray]:
    """Logits of verifier and drafter after each token, and after the root, V."""
    rng = np.random.default_rng(4)
    target, drafter = rng.standard_normal((V + 1, V)), rng.standard_normal((V + 1, DV))
    return 0.6 * target.astype(np.float32), 0.6 * drafter.astype(np.float32)


def made(kind: str, rows: int) -> Made:
    """A chain of three, or a tree of two children whose first has two of its own."""
    rng = np.random.default_rng(1)
    target, drafter = tables()
    vocabulary, root = np.asarray(VOCABULARY), np.full(rows, V)

    def child_of(token, tried=None):
        """A draft id drawn after a token (V is the root), and not the one tried before."""
        chances = softmax(drafter[token])
        if tried is not None:
            chances[np.arange(rows), tried] = 0.0
            chances /= chances.sum(axis=1, keepdims=True)
        return draws_of(rng, chances)

    if kind == "chain":
        nodes = [root]
        for _ in range(3):
            nodes.append(vocabulary[child_of(nodes[-1])])
        drafted = np.stack(nodes[1:], axis=1)
        known = jnp.asarray(drafter[np.stack(nodes[:-1], axis=1)])
        forest = chain(jnp.zeros(rows, jnp.int32), jnp.asarray(drafted, jnp.int32), known)
    else:
        first = child_of(root)
        second = child_of(root, first)
        below = child_of(vocabulary[first])
        last = child_of(vocabulary[first], below)
        drafted = vocabulary[np.stack([first, second, below, last], axis=1)]
        shape = jnp.asarray([[0, 0, 1, 1], [1, 1, 2, 2]], jnp.int32)
        parents, depth = (jnp.broadcast_to(x, (rows, 4)) for x in shape)
        expansion = jnp.broadcast_to(jnp.asarray([0, 1, 0, 0, 0], jnp.int32), (rows, 5))
        forest = dataclasses.replace(
            tree(jnp.zeros(rows, jnp.int32), jnp.asarray(drafted, jnp.int32), parents, depth, 2),
            logits=jnp.asarray(drafter[np.stack([root, drafted[:, 0]], axis=1)]),
            expansion=expansion,
        )
    logits = target[np.concatenate([root[:, None], drafted], axis=1)]
    return Made(forest, jnp.asarray(logits), asked_of(np.ones(rows)), softmax(target))


def continuations(made: Made, verdict, new: int) -> np.ndarray:
    """The first `new` tokens a row: what was judged, then plain draws."""
    rng = np.random.default_rng(2)
    path, count = np.asarray(verdict.path), np.asarray(verdict.count)
    tokens, rows = np.asarray(made.forest.tokens), np.arange(len(path))
    out = np.full(len(path), V)
    texts = []
    for i in range(new):
        free = draws_of(rng, made.target[out])
        accepted = tokens[rows, path[:, min(i + 1, path.shape[1] - 1)]]
        judged = np.where(i < count - 1, accepted, np.asarray(verdict.bonus))
        out = np.where(i < count, judged, free)
        texts.append(out)
    return np.stack(texts, axis=1)


def matches(texts: np.ndarray, target: np.ndarray) -> bool:
    """Chi-square of texts [rows, new] over all that there may be."""
    rows, new = texts.shape
    counts, wanted = np.zeros((V,) * new), target[V]
    np.add.at(counts, tuple(texts.T), 1)
    for _ in range(new - 1):
        wanted = wanted[..., None] * target[:V]
    assert wanted.min() * rows > 2
    return chisquare(counts.reshape(-1), wanted.reshape(-1) * rows).pvalue > 1e-4


@pytest.mark.parametrize(
    ("kind", "judge", "new"),
    [("chain", "walk", 3), ("chain", "block", 3), ("tree", "walk", 2)],
)
def test_judged_text_has_the_verifiers_distribution(kind, judge, new):
    """Chi-square over all texts; the verifier has a token that the drafter cannot say."""
    some = made(kind, DRAWS)
    if judge == "block":
        drawn = judged_block(some.forest, some.logits, VOCABULARY, some.asked)
    else:
        depth = 3 if kind == "chain" else 2
        drawn = walked_sampled(some.forest, some.logits, VOCABULARY, some.asked, depth)
    texts = continuations(some, drawn.verdict, new)
    assert matches(texts, some.target)
    assert len(np.unique(np.asarray(drawn.verdict.count))) == (4 if kind == "chain" else 3)


def test_no_draw_of_one_cycle_decides_in_the_next():
    """Block verification looks at nodes past the path; at their positions the next cycle draws."""
    target, drafter = tables()
    asked, vocabulary, rows = asked_of(np.ones(DRAWS)), np.asarray(VOCABULARY), np.arange(DRAWS)
    texts, filled, last = np.zeros((DRAWS, 3), int), np.zeros(DRAWS, int), np.full(DRAWS, V)
    while filled.min() < 3:
        length = jnp.asarray(LENGTH + filled, jnp.int32)
        choose, nodes = drawn_chain(asked.settings, length - 1), [last]
        for depth in (1, 2, 3):
            ids = choose(jnp.asarray(drafter[nodes[-1]])[:, None], jnp.asarray(depth, jnp.int32))
            nodes.append(vocabulary[np.asarray(ids)[:, 0]])
        drafted, known = np.stack(nodes[1:], axis=1), drafter[np.stack(nodes[:-1], axis=1)]
        root = jnp.zeros(DRAWS, jnp.int32)
        forest = chain(root, jnp.asarray(drafted, jnp.int32), jnp.asarray(known))
        logits = jnp.asarray(target[np.stack(nodes, axis=1)])
        now = dataclasses.replace(asked, length=length)
        verdict = judged_block(forest, logits, VOCABULARY, now).verdict
        count, last = np.asarray(verdict.count), np.asarray(verdict.bonus)
        for i in range(4):
            new = np.where(i < count - 1, drafted[:, min(i, 2)], last)
            here = (i < count) & (filled + i < 3)
            texts[rows[here], (filled + i)[here]] = new[here]
        filled = filled + count
    assert matches(texts, softmax(target))


def test_block_verification_accepts_more():
    some = made("chain", DRAWS)
    block = judged_block(some.forest, some.logits, VOCABULARY, some.asked)
    one_by_one = walked_sampled(some.forest, some.logits, VOCABULARY, some.asked, 3)
    means = [float(np.mean(drawn.verdict.count)) for drawn in (block, one_by_one)]
    assert means[0] > means[1] + 0.02


@pytest.mark.parametrize("kind", ["chain", "tree", "block"])
def test_greedy_rows_among_drawing_ones_are_judged_greedily(kind):
    """Whatever the drafter's logits say of their candidates, and with every way of judging."""
    some = made("chain" if kind == "block" else kind, 600)
    greedy = np.arange(600) % 2 == 0
    asked = asked_of(np.where(greedy, 0.0, 1.0))
    depth = 2 if kind == "tree" else 3
    wanted = judge_greedily(some.forest, some.logits, depth)
    found = [walked(some.forest, some.logits, asked, depth)]
    if kind == "block":
        found.append(judged_block(some.forest, some.logits, VOCABULARY, asked))
    else:
        found.append(walked_sampled(some.forest, some.logits, VOCABULARY, asked, depth))
    for drawn in found:
        verdict = drawn.verdict
        for name in ("path", "count", "bonus"):
            mine, theirs = np.asarray(getattr(verdict, name)), np.asarray(getattr(wanted, name))
            np.testing.assert_array_equal(mine[greedy], theirs[greedy])
        # The drawing rows are something else.
        assert np.any(np.asarray(verdict.bonus) != np.asarray(wanted.bonus))
    assert len(np.unique(np.asarray(wanted.count)[greedy])) > 1
