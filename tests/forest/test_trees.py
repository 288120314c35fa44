"""Trees against a naive EAGLE-2 by whole paths, and drawn trees against their distribution."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from eagle3_jax.caches import text_scope
from eagle3_jax.configs import Sampling, Speculation
from eagle3_jax.contracts import DraftHidden
from eagle3_jax.drafter.drafter import Roots, context_pass
from eagle3_jax.forest.processing import empty_settings, plan_of
from eagle3_jax.forest.trees import depths_of, grow_tree, truncated
from eagle3_jax.generation import generate
from eagle3_jax.states import arrays_of
from eagle3_jax.testing import tiny_drafter, tiny_verifier
from tests.naive_drafter import NaiveDrafter

V, DV = 64, 12
TEXT = 9
DRAWS = 4000


@pytest.fixture(scope="module")
def pair():
    """A verifier, and a drafter of few tokens whose head is scaled so that paths differ."""
    drafter = jax.tree.map(lambda x: x, tiny_drafter("llama", draft_vocab_size=DV))
    drafter.vocabulary[...] = jnp.arange(3, 3 + 5 * DV, 5, dtype=jnp.int32)
    drafter.head.kernel[...] = 1.5 * drafter.head.kernel[...]
    return tiny_verifier("llama"), drafter


def grown(pair, texts, at, speculation, settings=None):
    """Trees below the rows at positions `at`, and the features of the texts."""
    verifier, drafter = pair
    texts, at = jnp.asarray(texts, jnp.int32), jnp.asarray(at, jnp.int32)
    features = verifier.score(texts, drafter.spec.boundaries).features
    b, t = texts.shape
    following = jnp.pad(texts[:, 1:], ((0, 0), (0, 1)))
    starts = jnp.zeros((b, t), jnp.int32)

    @jax.jit
    def grow(features, settings):
        scope, embeddings = text_scope(starts), verifier.embed(following)
        hidden, context = context_pass(drafter, features, embeddings, scope, None)
        own = jnp.take_along_axis(hidden.array, at[:, None, None], axis=1)
        roots = Roots(
            positions=at[:, None],
            lo=jnp.zeros((b, 1), jnp.int32),
            hi=at[:, None] + 1,
            context=context,
        )
        root = jnp.take_along_axis(following, at[:, None], axis=1)[:, 0]
        hidden = DraftHidden(array=own)
        return grow_tree(drafter, verifier.embed, hidden, root, roots, speculation, settings)

    return grow(features, settings), np.asarray(features.array)


def paths_of(forest, row: int) -> list[tuple[int, ...]]:
    """The tokens from below the root down to each node, in the order of the nodes."""
    tokens, parents = np.asarray(forest.tokens[row]), np.asarray(forest.parents[row])
    paths: list[tuple[int, ...]] = [()]
    for slot in range(1, len(tokens)):
        assert parents[slot] < slot
        paths.append((*paths[parents[slot]], int(tokens[slot])))
    return paths[1:]


def scores_after(oracle, features, text, at, path) -> np.ndarray:
    """Log-probabilities over the draft vocabulary after a path, which sees itself alone."""
    logits = oracle.chain(features, [*text[: at + 2], *path], at, len(path) + 1)[0][-1]
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def naive_tree(oracle, features, text, at, speculation) -> list[tuple[int, ...]]:
    """EAGLE-2 in lists: a beam of paths, and the best of all that were ever candidates."""
    vocabulary, k = np.asarray(oracle.w["vocabulary"], int), speculation.topk
    beam, found = [((), 0.0)], []
    for _ in range(speculation.depth):
        children = []
        for path, score in beam:
            scores = scores_after(oracle, features, text, at, path)
            best = np.argsort(-scores)[:k]
            children += [((*path, int(vocabulary[i])), score + scores[i]) for i in best]
        found += children
        beam = sorted(children, key=lambda child: -child[1])[:k]
    return [path for path, _ in sorted(found, key=lambda child: -child[1])[: speculation.nodes]]


@pytest.mark.parametrize(
    "shape", [(1, 3, 3), (3, 2, 6), (4, 3, 14)], ids=lambda shape: "-".join(map(str, shape))
)
def test_a_tree_is_that_of_naive_lists(pair, shape):
    """Same tokens below the same parents; two roots at different places of their texts."""
    speculation = Speculation(*shape)
    texts, at = np.random.default_rng(0).integers(2, V, (2, TEXT)), [TEXT - 2, 3]
    forest, features = grown(pair, texts, at, speculation)
    oracle = NaiveDrafter(arrays_of(pair[1]), pair[1].config, pair[0].embedding[...])
    deepest = 0
    for row in range(2):
        paths = paths_of(forest, row)
        wanted = naive_tree(oracle, features[row], texts[row], at[row], speculation)
        assert int(forest.tokens[row, 0]) == texts[row, at[row] + 1]
        assert sorted(paths) == sorted(wanted)
        assert forest.depth[row, 1:].tolist() == [len(path) for path in paths]
        deepest = max(deepest, *map(len, paths))
    assert deepest >= min(speculation.depth, 3)
    assert forest.logits is None and forest.expansion is None


def settings_of(temperature):
    """Rows of some temperatures, each with a key of its own."""
    rows, plan = len(temperature), plan_of([Sampling(temperature=1.0)])
    return dataclasses.replace(
        empty_settings(rows, V, plan), temperature=jnp.asarray(temperature, jnp.float32)
    )


def test_drawn_trees(pair):
    """Siblings differ, logits belong to their nodes, greedy rows' trees are the greedy ones."""
    speculation, rows = Speculation(3, 3, 12), 16
    text = np.random.default_rng(1).integers(2, V, TEXT)
    texts, at = np.tile(text, (rows, 1)), [TEXT - 2] * rows
    temperature = np.where(np.arange(rows) % 4, 0.8, 0.0)
    forest, features = grown(pair, texts, at, speculation, settings_of(temperature))
    greedy, _ = grown(pair, texts, at, speculation)
    oracle = NaiveDrafter(arrays_of(pair[1]), pair[1].config, pair[0].embedding[...])
    assert forest.logits is not None and forest.expansion is not None
    known, shapes = {}, set()
    for row in range(rows):
        paths = [(), *paths_of(forest, row)]
        assert len(set(paths)) == len(paths)
        shapes.add(tuple(np.asarray(forest.parents[row]).tolist()))
        if temperature[row] == 0:
            assert paths[1:] == paths_of(greedy, row)
        inner = {path[:-1] for path in paths[1:]}
        for slot, path in enumerate(paths):
            if path not in inner:
                continue
            if path not in known:
                known[path] = scores_after(oracle, features[row], text, at[row], path)
            logits = forest.logits[row, forest.expansion[row, slot]]
            np.testing.assert_allclose(jax.nn.log_softmax(logits), known[path], atol=2e-5)
    assert len(shapes) > 5


def test_children_are_drawn_without_replacement(pair):
    """First and second children of the root, and the first child of the likeliest of them."""
    speculation, temperature = Speculation(2, 2, 6), 0.8
    texts = np.tile(np.random.default_rng(2).integers(2, V, 4), (DRAWS, 1))
    settings = settings_of([temperature] * DRAWS)
    forest, _ = grown(pair, texts, [2] * DRAWS, speculation, settings)
    assert forest.logits is not None and forest.expansion is not None
    ids = {int(token): i for i, token in enumerate(pair[1].vocabulary[...])}
    tokens, parents = np.asarray(forest.tokens), np.asarray(forest.parents)
    logits = np.asarray(forest.logits, np.float64)

    def chances(logits):
        x = np.exp(logits / temperature)
        return x / x.sum()

    def matches(counts, wanted):
        """Chi-square; what is expected seldom is taken together with the first."""
        wanted = wanted * counts.sum()
        cells = np.where(wanted >= 5, np.arange(wanted.size), np.argmax(wanted))
        found, expected = (np.bincount(cells, x, wanted.size) for x in (counts, wanted))
        return chisquare(found[expected > 0], expected[expected > 0]).pvalue > 1e-4

    children = np.array([[ids[int(token)] for token in row] for row in tokens[:, 1:3]])
    assert (parents[:, 1:3] == 0).all()
    q = chances(logits[0, 0])
    both = q[:, None] * q[None] / (1 - q[:, None])
    np.fill_diagonal(both, 0.0)
    counts = np.zeros((DV, DV))
    np.add.at(counts, tuple(children.T), 1)
    assert counts[both == 0].sum() == 0
    assert matches(counts.reshape(-1), both.reshape(-1))
    # Below the root's likeliest child, where it was drawn first.
    rows = np.flatnonzero(children[:, 0] == q.argmax())
    below = [ids[int(tokens[row, 1 + list(parents[row, 1:]).index(1)])] for row in rows]
    own = logits[rows[0], forest.expansion[rows[0], 1]]
    assert matches(np.bincount(below, minlength=DV).astype(float), chances(own))


@hypothesis.settings(max_examples=50)
@hypothesis.given(
    scores=st.lists(st.floats(-30, 30, width=32), min_size=4, max_size=4),
    bound=st.floats(-30, 30, width=32),
)
def test_truncated_scores_keep_their_order_and_their_bound(scores, bound):
    """Against the definition in float64, where exponentials do not run over."""
    scores = np.sort(np.asarray(scores, np.float32))[::-1]
    out = truncated(jnp.asarray(scores.copy())[None, None], jnp.full((1, 1, 1), bound))[0, 0]
    out = np.asarray(out, np.float64)
    assert out[0] == np.float32(bound) and (np.diff(out) <= 0).all()
    wide = scores.astype(np.float64)
    more = np.exp(-wide[0]) * np.expm1(wide[0] - wide)
    wanted = -np.log(np.exp(-bound) + more)
    np.testing.assert_allclose(out, wanted, atol=1e-3)


def test_depths_of_candidates():
    assert depths_of(1, 3).tolist() == [1, 1, 1]
    assert depths_of(3, 2).tolist() == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3]


def test_trees_decode_the_plain_text():
    """Broad trees, so that a random drafter's nodes are accepted; rows are refilled."""
    verifier, drafter = tiny_verifier("llama"), tiny_drafter("llama", draft_vocab_size=V)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, V, n).tolist() for n in (3, 17, 9, 30)]
    plain = generate(verifier, None, prompts, max_new_tokens=24, rows=4)
    for shape, rows in ((Speculation(2, 16, 48), 3), (Speculation(3, 8, 40), 1)):
        out = generate(verifier, drafter, prompts, max_new_tokens=24, rows=rows, speculation=shape)
        assert out.tokens == plain.tokens
        assert min(out.stats.acceptance_by_depth[:2]) > 0
