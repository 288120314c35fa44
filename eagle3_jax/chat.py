"""Conversations: a turn continues the caches that the turns before have filled."""

import functools
from collections.abc import Generator
from typing import Any

import jax
import numpy as np

from eagle3_jax.batch import Batch, Piece, Seat, warm
from eagle3_jax.configs import Sampling, Speculation
from eagle3_jax.contracts import CapacityError, RequestError
from eagle3_jax.drafter import Drafter
from eagle3_jax.generation import (
    CYCLES,
    Stats,
    check_multiple,
    encode_prompt,
    make_stages,
    needed_capacity,
    stats_of,
)
from eagle3_jax.loop.decode import DecodeState
from eagle3_jax.verifier.decoder import Verifier
from kernels_pallas import Backend
from sharding.mesh import shape_of
from sharding.placement import to_host

FIRST = 4096
"""Slots that a conversation begins with, where the verifier reads texts that long."""


class Chat:
    """A conversation through the verifier's chat template, in a row of its own.

    A turn gives what `generate` gives for the whole conversation as token ids, and reads only what
    its row has not read: positions up to the first token in which they differ are kept. So
    `messages` may be changed between turns; what was said since is read again.

    A conversation that outgrows its row moves to one at least twice as large. The move holds both
    at once, and the loop is compiled for the new size.

    Args:
        verifier: must have a tokenizer with a chat template.
        drafter: None is plain decoding.
        capacity: slots to begin with, a multiple of 256; None is `FIRST`, or fewer where the
            verifier's longest text needs no more.
        speculation: None is what the drafter's manifest recommends.
        sampling: of every turn; draws are those of `generate` for a single prompt.
        max_new_tokens: a turn stops there or at an end token.
        system: the system message.
        kernels: what attention and judging run on in a cycle, as in `generate`.

    Attributes:
        messages: of the conversation so far, each a role and a content.
        stats: of the last turn; None before the first.

    Raises:
        RequestError: there is no chat template, or settings cannot be served.
        CapacityError: the capacity is no multiple of 256.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter | None,
        *,
        capacity: int | None = None,
        speculation: Speculation | None = None,
        sampling: Sampling = Sampling(),
        max_new_tokens: int = 512,
        system: str | None = None,
        kernels: Backend = "xla",
    ):
        if verifier.tokenizer is None or verifier.tokenizer.template is None:
            raise RequestError(
                f"{verifier.name} has no chat template, which a conversation needs; pass the whole "
                "text to generate"
            )
        self._new = sampling.max_new_tokens or max_new_tokens
        if self._new < 1:
            raise RequestError(f"max_new_tokens {max_new_tokens} must be at least 1")
        self._stages = make_stages(verifier, drafter, speculation, [sampling], kernels=kernels)
        self._most = needed_capacity(verifier.config.max_length, 0, self._stages)
        self._first = min(FIRST, self._most) if capacity is None else capacity
        check_multiple(self._first)
        self._sampling = sampling
        self._key = jax.random.fold_in(jax.random.key(sampling.seed), 0)
        self._state: DecodeState | None = None
        self._turn: Generator[Piece, None, None] | None = None
        self.messages: list[dict[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self.stats: Stats | None = None

    def send(self, text: str) -> str:
        """The answer to a message; both are in `messages` afterwards.

        Raises:
            RequestError: the template refuses the conversation.
            CapacityError: the conversation and a turn pass the verifier's longest text.
        """
        return "".join(piece.text for piece in self.stream(text))

    def stream(self, text: str) -> Generator[Piece, None, None]:
        """The answer to a message, piece by piece; errors are those of `send`.

        Whoever stops asking leaves the answer at what was given; the next turn begins there.
        """
        if self._turn is not None:
            self._turn.close()
        message = {"role": "user", "content": text}
        tokens = encode_prompt(self._stages.verifier, [*self.messages, message])
        most = self._stages.verifier.config.max_length
        if len(tokens) + self._new > most:
            raise CapacityError(
                f"the conversation, of {len(tokens)} tokens, and {self._new} new ones pass the "
                f"verifier's longest text of {most} tokens; leave out early messages or lower "
                "max_new_tokens"
            )
        self._turn = self._answer(tokens, message)
        return self._turn

    def _answer(self, tokens: list[int], message: dict[str, Any]) -> Generator[Piece, None, None]:
        state = self._room(needed_capacity(len(tokens), self._new, self._stages))
        # A turn that is interrupted between two pieces leaves no row, and all is read again.
        self._state = None
        seat = Seat(tokens, self._sampling, self._key, self._new, kept(state, tokens))
        capacity, tokenizer = state.tokens.shape[1], self._stages.verifier.tokenizer
        batch = Batch(self._stages, [seat], 1, capacity, tokenizer, state)
        answer = {"role": "assistant", "content": ""}
        for number, piece in enumerate(batch.pieces(CYCLES)):
            if number == 0:
                self.messages += [message, answer]
            answer["content"] += piece.text
            self.stats = stats_of([batch.grown[0]], batch.prefill_seconds, batch.seconds)
            self._state = batch.state
            yield piece
            self._state = None
        self._state = batch.state

    def _room(self, needed: int) -> DecodeState:
        """The conversation's row, of at least so many slots."""
        state = self._state
        if state is not None and state.tokens.shape[1] >= needed:
            return state
        capacity = max(needed, self._first)
        if state is not None:
            capacity = min(max(needed, 2 * state.tokens.shape[1]), self._most)
        # Over a mesh each group of devices has a row; the conversation's is the first.
        rows = shape_of(self._stages.verifier.mesh).data
        larger = warm(self._stages, self._stages.make_state(rows, capacity))
        return larger if state is None else self._stages.placed(_moved(state, larger))


@functools.partial(jax.jit, donate_argnames=("larger",))
def _moved(state: DecodeState, larger: DecodeState) -> DecodeState:
    """What the state holds, at the beginning of a larger one."""

    def put(old, new):
        return jax.lax.dynamic_update_slice(new, old, (0,) * new.ndim)

    return jax.tree.map(put, state, larger)


def kept(state: DecodeState, tokens: list[int]) -> int:
    """First position of a text that the state's first row must read; those before it are right.

    The verifier's rows are right up to the first token in which row and text differ. Drafter row t
    has seen token t + 1, so it is right one position less far; and only committed ones are there.
    """
    texts, lengths = to_host((state.tokens, state.length))
    row = texts[0, : lengths[0]]
    n = min(len(row), len(tokens))
    same = row[:n] == np.asarray(tokens[:n])
    first = n if same.all() else int(np.argmin(same))
    return max(0, min(first - 1, int(state.draft_length[0])))
