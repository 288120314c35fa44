"""The loop: draft, verify, judge, commit, compiled once and run on the device."""

import functools
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jaxtyping import Bool, Int

from sharding.mapped import WHOLE, over_mesh


@runtime_checkable
class Stages(Protocol):
    """What a turn of the loop does; decoding and learning differ in these alone.

    Bodies are pure functions of a state; an implementation is a pytree whose arrays (verifier,
    drafter) are read-only.
    """

    def going(self, state: Any) -> Bool[Array, ""]:
        """Whether another cycle is worth running."""
        ...

    def draft(self, state: Any) -> tuple[Any, Any]:
        """The state and a forest of proposed nodes."""
        ...

    def verify(self, state: Any, forest: Any) -> Any:
        """What the verifier says at every node."""
        ...

    def judge(self, state: Any, forest: Any, scores: Any) -> Any:
        """The verdict, node by node."""
        ...

    def commit(self, state: Any, forest: Any, scores: Any, verdict: Any) -> Any:
        """The state after the cycle."""
        ...

    def mapped(self, state: Any) -> tuple[Mesh, Any, Any] | None:
        """A mesh over which whole cycles run device by device, and the specs of stages and state.

        None: cycles are one program, whose stages see to a mesh themselves where there is one.
        """
        ...


@functools.partial(jax.jit, donate_argnames=("state",))
def run(stages: Stages, state: Any, n: Int[Array, ""]) -> Any:
    """Up to `n` cycles in one compiled loop, with no transfer to the host.

    Args:
        stages: what a cycle does.
        state: donated; the caller uses the one returned.
        n: cycles at most; traced, so that another number compiles nothing. 0 compiles only.

    Returns:
        The state after the last cycle.
    """

    mapped = stages.mapped(state)
    if mapped is None:
        return _cycles(stages, state, n)
    mesh, *specs = mapped
    return over_mesh(mesh, _cycles, (*specs, WHOLE), specs[1])(stages, state, n)


def _cycles(stages: Stages, state: Any, n: Int[Array, ""]) -> Any:
    def more(carry):
        done, state = carry
        return (done < n) & stages.going(state)

    def cycle(carry):
        done, state = carry
        with jax.named_scope("draft"):
            state, forest = stages.draft(state)
        with jax.named_scope("verify"):
            scores = stages.verify(state, forest)
        with jax.named_scope("judge"):
            verdict = stages.judge(state, forest, scores)
        with jax.named_scope("commit"):
            state = stages.commit(state, forest, scores, verdict)
        return done + 1, state

    return jax.lax.while_loop(more, cycle, (jnp.zeros((), jnp.int32), state))[1]
