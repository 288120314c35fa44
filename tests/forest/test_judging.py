"""Greedy judging of random trees against a plain walk, and the shapes of chains and trees."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.forest.judging import agree, judge_greedily
from eagle3_jax.forest.topology import Forest, chain, links, tree

VOCABULARY, SLOTS, ROWS = 4, 9, 2
DEPTH = SLOTS - 1


@st.composite
def trees(draw):
    """Parents before children, siblings with different tokens: (parents, tokens) of one row."""
    parents, tokens = [0], [draw(st.integers(0, VOCABULARY - 1))]
    for slot in range(1, SLOTS):
        taken: dict[int, set[int]] = {}
        for child in range(1, slot):
            taken.setdefault(parents[child], set()).add(tokens[child])
        free = [p for p in range(slot) if len(taken.get(p, ())) < VOCABULARY]
        parent = draw(st.sampled_from(free))
        left = sorted(set(range(VOCABULARY)) - taken.get(parent, set()))
        parents.append(parent)
        tokens.append(draw(st.sampled_from(left)))
    return parents, tokens


def forest_of(rows) -> Forest:
    """A forest of trees, its depths and ancestors from walks to the root."""
    depth = np.zeros((len(rows), SLOTS), np.int32)
    ancestors = np.zeros((len(rows), SLOTS, SLOTS), bool)
    for row, (parents, _) in enumerate(rows):
        for slot in range(SLOTS):
            at = slot
            ancestors[row, slot, at] = True
            while at:
                at = parents[at]
                ancestors[row, slot, at] = True
                depth[row, slot] += 1
    return Forest(
        tokens=jnp.asarray([tokens for _, tokens in rows], jnp.int32),
        parents=jnp.asarray([parents for parents, _ in rows], jnp.int32),
        depth=jnp.asarray(depth),
        ancestors=jnp.asarray(ancestors),
        logits=None,
    )


def walk(parents, tokens, best) -> list[int]:
    """From the root, always to the child that holds the verifier's choice."""
    path = [0]
    while True:
        children = [s for s in range(1, SLOTS) if parents[s] == path[-1]]
        agreed = [s for s in children if tokens[s] == best[path[-1]]]
        if not agreed:
            return path
        path.append(agreed[0])


judge = jax.jit(judge_greedily, static_argnums=2)
grown = jax.jit(tree, static_argnums=4)
linked = jax.jit(links)


@hypothesis.settings(max_examples=100)
@hypothesis.given(rows=st.tuples(*[trees()] * ROWS), data=st.data())
def test_the_path_is_that_of_a_plain_walk(rows, data):
    """The verifier agrees with some child most of the time, so that long paths occur."""
    best = np.zeros((ROWS, SLOTS), np.int32)
    for row, (parents, tokens) in enumerate(rows):
        for slot in range(SLOTS):
            children = [tokens[s] for s in range(1, SLOTS) if parents[s] == slot]
            choice = st.integers(0, VOCABULARY - 1)
            best[row, slot] = data.draw(st.sampled_from(children) | choice if children else choice)
    logits = jax.nn.one_hot(best, VOCABULARY)
    verdict = judge(forest_of(rows), logits, DEPTH)
    for row, (parents, tokens) in enumerate(rows):
        wanted = walk(parents, tokens, best[row])
        assert int(verdict.count[row]) == len(wanted)
        padded = wanted + [wanted[-1]] * (DEPTH + 1 - len(wanted))
        assert np.asarray(verdict.path[row]).tolist() == padded
        assert int(verdict.bonus[row]) == best[row, wanted[-1]]


def test_a_node_below_a_refused_one_is_refused():
    """Agreement at the grandchild does not mend a disagreement above it."""
    forest = chain(jnp.asarray([0], jnp.int32), jnp.asarray([[1, 2, 3]], jnp.int32), None)
    best = jnp.asarray([[2, 2, 3, 0]])
    verdict = judge(forest, jax.nn.one_hot(best, VOCABULARY), 3)
    assert verdict.count.tolist() == [1] and verdict.path.tolist() == [[0, 0, 0, 0]]
    assert verdict.bonus.tolist() == [2]


def test_a_chain_is_accepted_up_to_the_first_disagreement():
    root = jnp.asarray([0, 3], jnp.int32)
    forest = chain(root, jnp.asarray([[1, 2, 3], [1, 2, 3]], jnp.int32), None)
    best = jnp.asarray([[1, 2, 3, 0], [1, 0, 3, 0]])
    verdict = judge(forest, jax.nn.one_hot(best, VOCABULARY), 3)
    assert verdict.count.tolist() == [4, 2]
    assert verdict.path.tolist() == [[0, 1, 2, 3], [0, 1, 1, 1]]
    assert verdict.bonus.tolist() == [0, 0]


def test_the_shape_of_a_chain():
    drafted = jnp.asarray([[5, 6, 7], [8, 9, 4]], jnp.int32)
    logits = jnp.zeros((2, 3, 4))
    forest = chain(jnp.asarray([1, 2], jnp.int32), drafted, logits)
    assert forest.tokens.tolist() == [[1, 5, 6, 7], [2, 8, 9, 4]]
    assert forest.parents.tolist() == [[0, 0, 1, 2]] * 2
    assert forest.depth.tolist() == [[0, 1, 2, 3]] * 2
    np.testing.assert_array_equal(
        forest.ancestors, np.tril(np.ones((4, 4), bool))[None].repeat(2, 0)
    )
    assert forest.logits is logits


@hypothesis.settings(max_examples=50)
@hypothesis.given(rows=st.tuples(*[trees()] * ROWS))
def test_the_shape_of_a_tree(rows):
    """Ancestors by walks to the root; children in the order of their slots."""
    wanted = forest_of(rows)
    parts = (wanted.tokens[:, 1:], wanted.parents[:, 1:], wanted.depth[:, 1:])
    forest = grown(wanted.tokens[:, 0], *parts, DEPTH)
    for name in ("tokens", "parents", "depth", "ancestors"):
        np.testing.assert_array_equal(getattr(forest, name), getattr(wanted, name))
    first_child, next_sibling = linked(wanted.parents)
    for row, (parents, _) in enumerate(rows):
        for slot in range(SLOTS):
            children, at = [], int(first_child[row, slot])
            while at >= 0:
                children.append(at)
                at = int(next_sibling[row, at])
            assert children == [s for s in range(1, SLOTS) if parents[s] == slot]
        assert int(next_sibling[row, 0]) == -1


def test_plain_decoding_is_a_chain_of_nothing():
    forest = chain(jnp.asarray([1, 2], jnp.int32), jnp.zeros((2, 0), jnp.int32), None)
    verdict = judge(forest, jax.nn.one_hot(jnp.asarray([[3], [1]]), VOCABULARY), 0)
    assert forest.tokens.tolist() == [[1], [2]]
    assert (verdict.count.tolist(), verdict.path.tolist()) == ([1, 1], [[0], [0]])
    assert verdict.bonus.tolist() == [3, 1]


def test_agreement_is_equality():
    out = agree(jnp.asarray([[1, 2], [3, 4]]), jnp.asarray([[1, 0], [4, 4]]))
    assert out.tolist() == [[True, False], [False, True]]
