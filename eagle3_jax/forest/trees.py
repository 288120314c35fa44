"""Growing a tree of nodes below each row's root: EAGLE-2's dynamic trees, exact at every depth.

A beam of `topk` nodes a level, each with its `topk` best children; in the end the best `nodes` of
all candidates are kept. A node's score never passes its parent's, so parents are kept with their
children. A node attends to its true ancestors, whose keys its block holds: no branch is fed another
one's keys.

Where candidates are the drafter's likeliest, the score is the path's log-probability (EAGLE-2).
Where they are drawn, ranking by that would bias what is judged; there it is the path's Gumbel-
perturbed log-probability, and the tree is a stochastic beam search: children without replacement,
and which nodes are kept says nothing of a node's token beyond those drawn before it.

Source: EAGLE-2, arXiv 2406.16858, as SafeAILab/EAGLE `eagle/model/cnets.py` `topK_genrate` does it;
stochastic beams: arXiv 1903.06059.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from eagle3_jax.configs import Speculation
from eagle3_jax.contracts import DraftHidden
from eagle3_jax.drafter.drafter import Drafter, Roots, growth_step
from eagle3_jax.forest.drawing import tempered
from eagle3_jax.forest.growth import UNROLLED_STEPS
from eagle3_jax.forest.processing import RowSettings, gumbels
from eagle3_jax.forest.topology import Forest, tree


def grow_tree(
    drafter: Drafter,
    embed: Callable[[Int[Array, "b t"]], Float[Array, "b t d"]],
    hidden: DraftHidden,
    root: Int[Array, " b"],
    roots: Roots,
    speculation: Speculation,
    settings: RowSettings | None = None,
) -> Forest:
    """A tree below each row's one root, looped level by level in the compiled program.

    Args:
        drafter: proposes.
        embed: the verifier's embedding of tokens.
        hidden: of the root's context row.
        root: the root's token.
        roots: r = 1.
        speculation: depth, topk, nodes; static.
        settings: of the rows, where candidates are drawn; a greedy row's are the likeliest.
    """
    depth, k = speculation.depth, speculation.topk
    assert speculation.nodes is not None
    b = root.shape[0]
    slots = max(depth - 1, 1) * k

    def children(hidden, beam, depth, first):
        """Of every node of a beam the k best children, and the logits they came from.

        Args:
            hidden: what the beam's nodes feed back.
            beam: their (ranks, log-probabilities) [b w].
            depth: theirs.
            first: number of the first of them among all nodes that are expanded.

        Returns:
            Draft ids, ranks and log-probabilities [b w k], and the logits [b w dv].
        """
        logits = drafter.read_out(hidden)
        ranks, chances = beam
        if settings is None:
            best, ids = jax.lax.top_k(jax.nn.log_softmax(logits, axis=-1), k)
            scores = ranks[..., None] + best
            return ids, scores, scores, logits
        of_path = chances[..., None] + jax.nn.log_softmax(tempered(logits, settings), axis=-1)
        warm = settings.temperature > 0
        noise = gumbels(settings.key, roots.positions[:, 0] + 1 + depth, first, logits.shape[1:])
        noisy = of_path + jnp.where(warm[:, None, None], noise, 0.0)
        best, ids = jax.lax.top_k(noisy, k)
        chance = jnp.take_along_axis(of_path, ids, axis=-1)
        # The greatest child has its parent's rank, the others what follows from that.
        bounded = truncated(best, ranks[..., None])
        return ids, jnp.where(warm[:, None, None], bounded, chance), chance, logits

    def level(carry, at):
        """Grow the beam of depth `at`, and choose the next beam among its children."""
        hidden, tokens, beam, numbers, ancestors, block = carry
        first = (at - 1) * k
        own = jnp.arange(slots)[None] == (first + jnp.arange(k))[:, None]
        ancestors = ancestors | own[None]
        hidden, block = growth_step(
            drafter,
            hidden,
            embed(drafter.to_verifier(tokens)),
            roots,
            at,
            block,
            first,
            ancestors,
        )
        ids, ranks, chances, logits = children(hidden, beam, at, first + 1)
        ids, ranks, chances = (x.reshape(b, k * k) for x in (ids, ranks, chances))
        best, place = jax.lax.top_k(ranks, k)
        parent = place // k

        def chosen(x):
            return jnp.take_along_axis(x, place, axis=1)

        def of_parent(x):
            return jnp.take_along_axis(x, parent.reshape(b, k, *(1,) * (x.ndim - 2)), axis=1)

        carry = (
            DraftHidden(array=of_parent(hidden.array)),
            chosen(ids),
            (best, chosen(chances)),
            k + (at - 1) * k * k + place,
            of_parent(ancestors),
            block,
        )
        found = ids, ranks, jnp.repeat(numbers, k, axis=1), numbers
        return carry, (found, logits if keeps else None)

    keeps = settings is not None
    zero = jnp.zeros((b, 1))
    ids, ranks, chances, logits = children(hidden, (zero, zero), 0, 0)
    ids, ranks, chances = ids[:, 0], ranks[:, 0], chances[:, 0]
    numbers = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32)[None], (b, k))
    carry = (
        DraftHidden(array=jnp.repeat(hidden.array, k, axis=1)),
        ids,
        (ranks, chances),
        numbers,
        jnp.zeros((b, k, slots), bool),
        drafter.make_block(b, 1, slots),
    )
    steps = jnp.arange(1, depth, dtype=jnp.int32)
    unroll = max(min(depth - 1, UNROLLED_STEPS), 1)
    _, (found, more_logits) = jax.lax.scan(level, carry, steps, unroll=unroll)

    def by_row(rest):
        """What the levels found, side by side: [l b x ...] to [b (l x) ...]."""
        rest = jnp.moveaxis(rest, 0, 1)
        return rest.reshape(b, -1, *rest.shape[3:])

    def all_of(first, rest):
        """Candidates of the first level and of the others: [b c]."""
        return jnp.concatenate([first, by_row(rest)], axis=1)

    ids, ranks = all_of(ids, found[0]), all_of(ranks, found[1])
    parents = all_of(jnp.full((b, k), -1, jnp.int32), found[2])
    kept = jnp.sort(jax.lax.top_k(ranks, speculation.nodes)[1], axis=1)

    def keep(x):
        return jnp.take_along_axis(x, kept, axis=1)

    depths = jnp.asarray(depths_of(depth, k))[kept]
    # A parent's place among the kept candidates; -1, the root's, is before all of them.
    before = jnp.sum(kept[:, None] < keep(parents)[..., None], axis=-1, dtype=jnp.int32)
    slot = jnp.where(keep(parents) < 0, 0, before + 1)
    forest = tree(root, drafter.to_verifier(keep(ids)), slot, depths, depth)
    if not keeps:
        return forest
    # The root was expanded first, then beam after beam; leaves have no logits and need none.
    expanded = by_row(found[3])[:, None] == kept[..., None]
    expansion = jnp.where(
        jnp.any(expanded, axis=-1), 1 + jnp.argmax(expanded, axis=-1).astype(jnp.int32), 0
    )
    return dataclasses.replace(
        forest,
        logits=jnp.concatenate([logits, by_row(more_logits)], axis=1),
        expansion=jnp.concatenate([jnp.zeros((b, 1), jnp.int32), expansion], axis=1),
    )


def depths_of(depth: int, topk: int) -> np.ndarray:
    """Depth of every candidate in order: `topk` of the first level, `topk ** 2` of each other."""
    return np.repeat(np.arange(1, depth + 1), [topk] + [topk * topk] * (depth - 1)).astype(np.int32)


def truncated(perturbed: Float[Array, "b w a"], bound: Float[Array, "b w 1"]):
    """Gumbel-perturbed scores of a node's children, given that the greatest equals the node's.

    Args:
        perturbed: of its best children, greatest first.
        bound: the node's own.

    Source: arXiv 1903.06059, appendix B.3, in its numerically stable form.
    """
    below = perturbed - perturbed[..., :1]
    # log(1 - exp(below)); the greatest child itself has -inf and comes out at the bound.
    gap = jnp.where(below < 0, jnp.log(-jnp.expm1(jnp.minimum(below, -1e-30))), -jnp.inf)
    v = bound - perturbed + gap
    return bound - jnp.maximum(v, 0.0) - jnp.log1p(jnp.exp(-jnp.abs(v)))
