"""Rows that prompts sit in: seating, cycles in chunks, stop texts, harvest, pieces of text."""

import collections
import dataclasses
import functools
import time
from collections.abc import Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int, Key

from eagle3_jax.configs import Sampling
from eagle3_jax.forest.processing import RowSettings, one_setting
from eagle3_jax.loop import run
from eagle3_jax.loop.decode import DecodeStages, DecodeState
from eagle3_jax.loop.prefill import CHUNK, prefill_chunk
from eagle3_jax.tokenizer import Tokenizer
from sharding.mesh import shape_of
from sharding.placement import to_host

SEEN = ("done", "end", "tokens", "drafted", "cycles", "accepted", "logprobs")
"""What is looked at between cycles."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One prompt's result.

    Attributes:
        tokens: the new ones.
        text: where a tokenizer is known; without the stop text that ended it.
        drafted: for each new token, whether it was an accepted draft and not the verifier's own (a
            bonus token, or the prefill's).
        cycles: cycles it took.
        accepted: cycles whose node of each depth was accepted.
        logprobs: of the new tokens under the verifier's own distribution, before temperature and
            the like; None where they were not asked for.
    """

    tokens: list[int]
    drafted: list[bool]
    text: str | None
    cycles: int
    accepted: tuple[int, ...]
    logprobs: list[float] | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a prompt's text has grown by.

    Attributes:
        prompt: which.
        tokens: the new ones.
        text: a prompt's joined are its `Row.text`; it lags behind the tokens where a character is
            not whole or a stop text may have begun. Empty where no tokenizer is known.
        drafted: as in `Row`, for these tokens.
        done: no more of this prompt comes.
    """

    prompt: int
    tokens: list[int]
    text: str
    drafted: list[bool]
    done: bool


@dataclasses.dataclass(frozen=True)
class Seat:
    """A prompt as a row takes it.

    Attributes:
        tokens: its ids.
        sampling: how its text is chosen.
        key: of its draws.
        new: tokens at most.
        keep: first position to read, where the row has those before it.
    """

    tokens: list[int]
    sampling: Sampling
    key: Key[Array, ""]
    new: int
    keep: int = 0


class Batch:
    """Prompts over a few rows; a finished row is refilled from those that wait.

    Args:
        stages: verifier and drafter.
        seats: the prompts.
        rows: at most.
        capacity: slots a row.
        tokenizer: None where there is none; then there is no text.
        state: rows to sit in, with what they hold; donated. None is empty ones.

    Attributes:
        results: by prompt; None until it is through.
        seen: what the last cycles have left of the state's `SEEN`, on the host.
        grown: texts so far that the last cycles have worked on, by prompt.
        prefill_seconds: reading prompts, without compilation.
        seconds: cycles, without compilation.
    """

    def __init__(
        self,
        stages: DecodeStages,
        seats: Sequence[Seat],
        rows: int,
        capacity: int,
        tokenizer: Tokenizer | None,
        state: DecodeState | None = None,
    ):
        self.stages, self.seats, self.tokenizer = stages, seats, tokenizer
        self.results: list[Row | None] = [None] * len(seats)
        self.seen: dict[str, Any] = {}
        self.grown: dict[int, Row] = {}
        self.prefill_seconds = self.seconds = 0.0
        self._waiting = collections.deque(range(len(seats)))
        # Over a mesh rows are divided evenly; those past the prompts stay empty.
        data = shape_of(stages.verifier.mesh).data
        self.seated: list[int | None] = [None] * (-(-min(rows, len(seats)) // data) * data)
        if state is None:
            state = warm(stages, stages.make_state(len(self.seated), capacity))
        self.state = state

    @property
    def going(self) -> bool:
        """Whether a prompt waits or is being answered."""
        return bool(self._waiting) or any(index is not None for index in self.seated)

    def fill(self) -> None:
        """Seat waiting prompts in the rows that are free."""
        clock = time.perf_counter()
        for row, index in enumerate(self.seated):
            if index is None and self._waiting:
                self.seated[row] = index = self._waiting.popleft()
                who = self.seats[index]
                how = (who.tokens, who.new, who.sampling, who.key, who.keep)
                self.state = seat(self.stages, self.state, row, *how)
        waiting = jnp.asarray(bool(self._waiting))
        self.state = self.stages.placed(dataclasses.replace(self.state, waiting=waiting))
        jax.block_until_ready(self.state.length)
        self.prefill_seconds += time.perf_counter() - clock

    def cycle(self, count: int) -> None:
        """Run up to `count` cycles, and free the rows that are through."""
        clock = time.perf_counter()
        self.state = run(self.stages, self.state, jnp.asarray(count, jnp.int32))
        self.seen = to_host({name: getattr(self.state, name) for name in SEEN})
        done = self.seen["done"]
        self.seconds += time.perf_counter() - clock
        self.grown = {}
        for row, index in enumerate(self.seated):
            if index is None:
                continue
            found = self.harvest(row)
            stopped = self._stopped(found, self.seats[index].sampling.stop)
            self.grown[index] = stopped or found
            if stopped is not None or done[row]:
                self.results[index] = self.grown[index]
                self.seated[row] = None
                if not done[row]:
                    off = self.state.done.at[row].set(True)
                    self.state = self.stages.placed(dataclasses.replace(self.state, done=off))

    def pieces(self, count: int) -> Generator[Piece, None, None]:
        """All prompts' texts as they grow, looked at every `count` cycles."""
        tokens, shown = [0] * len(self.seats), [0] * len(self.seats)
        while self.going:
            self.fill()
            self.cycle(count)
            for index, row in self.grown.items():
                done = self.results[index] is not None
                text = row.text or ""
                if not done:
                    text = sure(text, self.seats[index].sampling.stop)
                piece = Piece(
                    prompt=index,
                    tokens=row.tokens[tokens[index] :],
                    text=text[shown[index] :],
                    drafted=row.drafted[tokens[index] :],
                    done=done,
                )
                tokens[index] = len(row.tokens)
                shown[index] = max(shown[index], len(text))
                yield piece

    def harvest(self, row: int) -> Row:
        """A row's text so far."""
        index = self.seated[row]
        assert index is not None
        seen = self.seen
        new = slice(len(self.seats[index].tokens), int(seen["end"][row]))
        tokens = seen["tokens"][row][new].tolist()
        logprobs = seen["logprobs"]
        return Row(
            tokens=tokens,
            drafted=seen["drafted"][row][new].astype(bool).tolist(),
            text=None if self.tokenizer is None else self.tokenizer.decode(tokens),
            cycles=int(seen["cycles"][row]),
            accepted=tuple(int(i) for i in seen["accepted"][row][: self.stages.depth]),
            logprobs=None if logprobs is None else logprobs[row][new].tolist(),
        )

    def _stopped(self, found: Row, stops: tuple[str, ...]) -> Row | None:
        """The row cut at the first stop text, None where there is none in it."""
        if not stops or found.text is None or not any(stop in found.text for stop in stops):
            return None
        assert self.tokenizer is not None
        count = 1
        while not any(stop in self.tokenizer.decode(found.tokens[:count]) for stop in stops):
            count += 1
        text = self.tokenizer.decode(found.tokens[:count])
        at = min(text.index(stop) for stop in stops if stop in text)
        return dataclasses.replace(
            found,
            tokens=found.tokens[:count],
            drafted=found.drafted[:count],
            text=text[:at],
            logprobs=None if found.logprobs is None else found.logprobs[:count],
        )


def sure(text: str, stops: Sequence[str]) -> str:
    """The part of an unfinished text that more tokens will not change.

    Args:
        text: what is decoded so far; a character whose bytes are not all there ends it as a
            replacement character.
        stops: stop texts, none of them in the text; an end that may become one is left out.
    """
    text = text.rstrip("\N{REPLACEMENT CHARACTER}")
    begun = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return text[: len(text) - max(begun, default=0)]


def warm(stages: DecodeStages, state: DecodeState) -> DecodeState:
    """Compile loop and prefill on the empty state, so that no clock sees it."""
    zero, no = jnp.zeros((), jnp.int32), jnp.zeros((), bool)
    state = run(stages, state, zero)
    empty = jnp.zeros((CHUNK + 1,), jnp.int32)
    return prefill_chunk(stages, state, zero, empty, zero, zero + 1, zero, no)


@functools.partial(jax.jit, donate_argnames=("settings",))
def _put(settings: RowSettings, one: RowSettings, row: Int[Array, ""]) -> RowSettings:
    return jax.tree.map(lambda x, y: x.at[row].set(y[0]), settings, one)


def seat(
    stages: DecodeStages,
    state: DecodeState,
    row: int,
    text: list[int],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    key: Key[Array, ""] | None = None,
    keep: int = 0,
) -> DecodeState:
    """Read a prompt into a row, chunk by chunk; the row is live afterwards.

    Args:
        stages: verifier and drafter.
        state: donated.
        row: which.
        text: the prompt's token ids; at least one.
        max_new_tokens: where the row stops.
        sampling: how its text is chosen; the stages' plan must know of it.
        key: of its draws; None is the sampling's own seed.
        keep: first position to read, before the prompt's end. The row has the verifier's and the
            drafter's rows before it, of this same text up to this position's token.
    """
    key = jax.random.key(sampling.seed) if key is None else key
    at, limit = jnp.asarray(row, jnp.int32), len(text) + max_new_tokens
    v = stages.verifier.config.vocab_size
    one = one_setting(sampling, key, len(text), v, stages.plan)
    state = dataclasses.replace(state, settings=_put(state.settings, one, at))
    if state.seen is not None and keep:
        seen = np.zeros((v,), bool)
        seen[text[:keep]] = True
        state = dataclasses.replace(state, seen=state.seen.at[at].set(seen))
    state = stages.placed(state)
    for start in range(keep, len(text), CHUNK):
        # A chunk that would pass the row's end begins earlier, and reads some positions again.
        start = min(start, state.tokens.shape[1] - CHUNK)
        chunk = text[start : start + CHUNK + 1]
        padded = np.zeros((CHUNK + 1,), np.int32)
        padded[: len(chunk)] = chunk
        state = prefill_chunk(
            stages,
            state,
            at,
            jnp.asarray(padded),
            jnp.asarray(start, jnp.int32),
            jnp.asarray(min(CHUNK, len(text) - start), jnp.int32),
            jnp.asarray(limit, jnp.int32),
            jnp.asarray(start + CHUNK >= len(text)),
        )
    return state
