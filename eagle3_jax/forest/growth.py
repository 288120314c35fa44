"""Growing a chain of nodes from context rows with the drafter."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from eagle3_jax.contracts import DraftHidden
from eagle3_jax.drafter.drafter import Drafter, Roots, growth_step
from eagle3_jax.forest.judging import likeliest

Choose = Callable[[Float[Array, "b t dv"], Int[Array, ""]], Int[Array, "b t"]]
"""From the drafter's logits and a depth, the draft ids of the nodes of that depth."""


UNROLLED_STEPS = 4
"""Growth steps compiled side by side; a loop's turn costs as much as a tenth of a small step."""


def greedy(logits: Float[Array, "b t dv"], depth: Int[Array, ""]) -> Int[Array, "b t"]:
    """The drafter's likeliest token."""
    return likeliest(logits)


def grow_chain(
    drafter: Drafter,
    embed: Callable[[Int[Array, "b t"]], Float[Array, "b t d"]],
    hidden: DraftHidden,
    roots: Roots,
    depth: int,
    choose: Choose = greedy,
) -> tuple[Int[Array, "b n"], Float[Array, "b n dv"]]:
    """A chain below each row's one root, looped in the compiled program.

    Args:
        drafter: proposes.
        embed: the verifier's embedding of tokens.
        hidden: of the root's context row.
        roots: r = 1.
        depth: nodes of the chain, n.
        choose: how a node's token is chosen.

    Returns:
        Verifier ids of the nodes, and the logits that each came from.
    """
    b = roots.positions.shape[0]
    slots = max(depth - 1, 1)

    def propose(hidden, at):
        logits = drafter.read_out(hidden)
        return drafter.to_verifier(choose(logits, at)), logits

    def body(carry, at):
        hidden, tokens, block = carry
        ancestors = jnp.broadcast_to((jnp.arange(slots) < at)[None, None], (b, 1, slots))
        hidden, block = growth_step(
            drafter, hidden, embed(tokens), roots, at, block, at - 1, ancestors
        )
        tokens, logits = propose(hidden, at + 1)
        return (hidden, tokens, block), (tokens, logits)

    tokens, logits = propose(hidden, jnp.ones((), jnp.int32))
    start = (hidden, tokens, drafter.make_block(b, 1, slots))
    steps = jnp.arange(1, depth, dtype=jnp.int32)
    _, (more, more_logits) = jax.lax.scan(
        body, start, steps, unroll=max(min(depth - 1, UNROLLED_STEPS), 1)
    )
    return (
        jnp.concatenate([tokens, jnp.moveaxis(more[..., 0], 0, 1)], axis=1),
        jnp.concatenate([logits, jnp.moveaxis(more_logits[:, :, 0], 0, 1)], axis=1),
    )
