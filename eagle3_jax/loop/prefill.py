"""Prefill: one row's prompt in chunks of fixed size, so that every length compiles once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int

from eagle3_jax.caches import Rows, block_scope, causal, write_rows
from eagle3_jax.contracts import VerifierFeatures
from eagle3_jax.drafter.drafter import context_pass
from eagle3_jax.forest.drawing import Asked, walk
from eagle3_jax.forest.processing import RowSettings, ends
from eagle3_jax.forest.topology import chain
from eagle3_jax.loop.decode import DecodeStages, DecodeState
from sharding.mapped import WHOLE, over_mesh
from sharding.mesh import DATA, shape_of

CHUNK = 128
"""Tokens of one chunk; a capacity is a multiple of it."""


@functools.partial(jax.jit, donate_argnames=("state",))
def prefill_chunk(
    stages: DecodeStages,
    state: DecodeState,
    row: Int[Array, ""],
    tokens: Int[Array, " c"],
    start: Int[Array, ""],
    count: Int[Array, ""],
    limit: Int[Array, ""],
    last: Bool[Array, ""],
) -> DecodeState:
    """Read one chunk of one row's prompt into verifier and drafter; other rows stay as they are.

    Drafter row t needs token t + 1, so the chunk comes with the token after it; the row of the
    prompt's last position stays pending until its next token, the verifier's first own, is known.

    Args:
        stages: verifier and drafter.
        state: donated.
        row: which row.
        tokens: the chunk and the token after it, CHUNK + 1 in all; zeros past the prompt's end.
        start: position of the chunk's first token; the row has all before it, and `start + CHUNK`
            does not pass the capacity.
        count: how many of the chunk's tokens are the prompt's.
        limit: length of text at which the row stops.
        last: whether the prompt ends with this chunk; then the row becomes live.
    """
    what = (row, tokens, start, count, limit, last)
    mapped = stages.mapped(state)
    if mapped is None:
        return _read(stages, state, *what)
    mesh, *specs = mapped
    return over_mesh(mesh, _read_own, (*specs, *[WHOLE] * len(what)), specs[1])(
        stages, state, *what
    )


def _read_own(stages: DecodeStages, state: DecodeState, row: Int[Array, ""], *what) -> DecodeState:
    """`_read` by the devices that have the row; the others' rows are left alone."""
    own = state.tokens.shape[0]
    if shape_of(stages.verifier.mesh).data == 1:
        return _read(stages, state, row, *what)
    row = row - jax.lax.axis_index(DATA) * own
    here = (row >= 0) & (row < own)
    read = functools.partial(_read, stages)
    return jax.lax.cond(here, read, lambda state, *_: state, state, row, *what)


def _read(
    stages: DecodeStages,
    state: DecodeState,
    row: Int[Array, ""],
    tokens: Int[Array, " c"],
    start: Int[Array, ""],
    count: Int[Array, ""],
    limit: Int[Array, ""],
    last: Bool[Array, ""],
) -> DecodeState:
    """`prefill_chunk` by one device that has the row."""
    verifier, drafter = stages.verifier, stages.drafter
    c = tokens.shape[0] - 1
    chunk = tokens[:c][None]
    offset = jnp.arange(c, dtype=jnp.int32)[None]
    scope = block_scope(start[None], offset, causal(1, c), row)
    hidden, features, rows = verifier.forward(chunk[:, None], scope, state.cache, stages.boundaries)
    assert rows is not None
    cache = write_rows(state.cache, rows, start[None], row, after=hidden)
    final = jax.lax.dynamic_slice_in_dim(hidden[:, 0], count - 1, 1, axis=1)
    logits = verifier.read_out(final)
    one = row_settings(state.settings, row)
    seen = state.seen
    if seen is not None:
        v = seen.shape[1]
        here = jnp.where(offset[0] < count, tokens[:c], v)
        own = jnp.where(start == 0, False, jax.lax.dynamic_slice_in_dim(seen, row, 1)[0])
        own = own.at[here].set(True, mode="drop")
        seen = seen.at[row].set(own)
    text = jax.lax.dynamic_update_slice(state.tokens, chunk, (row, start))
    # The prompt's last token is a root without nodes; the walk that judges moves on the last chunk.
    asked = Asked(
        settings=one,
        plan=stages.plan,
        eos=verifier.config.eos_tokens,
        length=(start + count)[None],
        seen=None if seen is None else jax.lax.dynamic_slice_in_dim(seen, row, 1),
        live=last[None],
        text=None if stages.plan.hook is None else jax.lax.dynamic_slice_in_dim(text, row, 1),
    )
    root = chain(jax.lax.dynamic_slice_in_dim(tokens, count - 1, 1), chunk[:, :0], None)
    drawn = walk(root, logits, asked, 0)
    first = drawn.verdict.bonus[0]
    logprobs = state.logprobs
    if logprobs is not None:
        assert drawn.logprobs is not None
        logprobs = logprobs.at[row, start + count].set(drawn.logprobs[0, 0])
    if seen is not None:
        assert drawn.seen is not None
        seen = seen.at[row].set(drawn.seen[0])

    end = start + count + 1
    text = text.at[row, end - 1].set(jnp.where(last, first, tokens[count]))
    drafted = state.drafted.at[row, end - 1].set(0)

    pending, draft_cache, draft_length = state.pending, state.draft_cache, state.draft_length
    if features is not None:
        assert drafter is not None and draft_cache is not None and pending is not None
        draft_hidden, draft_rows = context_pass(
            drafter,
            VerifierFeatures(array=features, spec=stages.spec),
            verifier.embed(tokens[1:][None]),
            scope,
            draft_cache,
        )
        draft_cache = write_rows(
            draft_cache,
            Rows(keys=draft_rows.keys, values=draft_rows.values),
            start[None],
            row,
            after=draft_hidden.array,
        )
        waiting = jax.lax.dynamic_slice_in_dim(features, count - 1, 1, axis=1)
        pending = jax.lax.dynamic_update_slice(pending, waiting, (row, 0, 0))

    def at_row(values, new):
        """`values` with the row's entry replaced, on the last chunk."""
        return values.at[row].set(jnp.where(last, new, values[row]))

    stop = ends(first[None, None], verifier.config.eos_tokens, one)[0, 0] | (end >= limit)
    return dataclasses.replace(
        state,
        tokens=text,
        drafted=drafted,
        length=at_row(state.length, start + count),
        draft_length=at_row(draft_length, start + count - 1),
        pending=pending,
        cache=cache,
        draft_cache=draft_cache,
        end=at_row(state.end, end),
        limit=at_row(state.limit, limit),
        done=at_row(state.done, stop),
        seen=seen,
        logprobs=logprobs,
        cycles=at_row(state.cycles, 0),
        accepted=at_row(state.accepted, 0),
    )


def row_settings(settings: RowSettings, row: Int[Array, ""]) -> RowSettings:
    """The settings of one row, b = 1."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), settings)
