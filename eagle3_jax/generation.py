"""Generation: prompts in, new tokens out, any number of prompts over a few rows."""

import collections
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.configs import Sampling, Speculation
from eagle3_jax.contracts import CapacityError, RequestError
from eagle3_jax.drafter import Drafter
from eagle3_jax.load import recommended_speculation
from eagle3_jax.loop import run
from eagle3_jax.loop.decode import DecodeStages, DecodeState
from eagle3_jax.loop.prefill import CHUNK, prefill_chunk
from eagle3_jax.verifier.decoder import Verifier, check_tokens
from kernels_pallas.forest_attention.xla import BLOCK

Prompt = str | Sequence[int] | Sequence[dict[str, Any]]
"""A text, a token list, or a list of messages."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a generation took.

    Attributes:
        new_tokens: emitted, end tokens among them.
        cycles: summed over rows.
        accept_length: (new tokens - texts) / cycles; the prefill's token belongs to no cycle. Plain
            decoding is 1.0.
        acceptance_by_depth: at depth i, the share of cycles whose i-th node was accepted among
            those whose first i - 1 were.
        prefill_seconds: reading the prompts, without compilation.
        seconds: the loop, without compilation and prefill.
        tokens_per_second: tokens of the loop a second.
    """

    new_tokens: int
    cycles: int
    accept_length: float
    acceptance_by_depth: tuple[float, ...]
    prefill_seconds: float
    seconds: float
    tokens_per_second: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One prompt's result.

    Attributes:
        tokens: the new ones.
        text: where a tokenizer is known.
        drafted: for each new token, whether it was an accepted draft and not the verifier's own (a
            bonus token, or the prefill's).
        cycles: cycles it took.
        accepted: cycles whose node of each depth was accepted.
    """

    tokens: list[int]
    drafted: list[bool]
    text: str | None
    cycles: int
    accepted: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Output:
    """Results in the order of the prompts, and what they took together."""

    rows: list[Row]
    stats: Stats

    @property
    def tokens(self) -> list[list[int]]:
        """New tokens, one list a prompt."""
        return [row.tokens for row in self.rows]

    @property
    def text(self) -> list[str | None]:
        """New text, one a prompt; None where no tokenizer is known."""
        return [row.text for row in self.rows]


def encode_prompt(verifier: Verifier, prompt: Prompt, raw: bool = False) -> list[int]:
    """Token ids of a prompt.

    Args:
        verifier: whose tokenizer and chat template are used.
        prompt: a text goes through the chat template as a user's message where the model has one;
            else it gets the special tokens that the tokenizer puts around plain text.
        raw: plain text whatever the model has.

    Raises:
        RequestError: it is empty, has a token outside the vocabulary, is text for a verifier
            without tokenizer, or holds anything but text.
    """
    tokenizer = verifier.tokenizer
    messages: Any = None
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError("the prompt is empty: there is no token to continue from")
        if tokenizer is not None and tokenizer.template is not None and not raw:
            messages = [{"role": "user", "content": prompt}]
    elif len(prompt) and isinstance(prompt[0], dict):
        messages = list(prompt)
        _check_messages(messages, verifier)
    else:
        return _checked_tokens(prompt, verifier)
    if tokenizer is None:
        raise RequestError(
            f"the verifier {verifier.name} cannot read text: {verifier.no_tokenizer}; pass prompts "
            "as token lists"
        )
    ids = tokenizer.chat(messages) if messages else tokenizer.encode(str(prompt), special=True)
    return _checked_tokens(ids, verifier)


def _check_messages(messages: list[Any], verifier: Verifier) -> None:
    """Refuse what is no message, and parts of a message that are not text.

    Raises:
        RequestError: says what was found.
    """
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else []
        if not isinstance(message, dict) or not all(isinstance(part, dict) for part in parts):
            raise RequestError(
                "messages are dictionaries of a role and a content, and the parts of a content "
                f"dictionaries of a type and a text; found {ascii(message)[:80]}"
            )
        kinds = [str(part.get("type", "text" if "text" in part else "?")) for part in parts]
        for kind in kinds:
            if kind != "text":
                what = next((w for w in ("image", "video", "audio") if w in kind), f"{kind} part")
                raise RequestError(
                    f"{verifier.name} takes text only; the prompt holds "
                    f"{'an' if what[0] in 'aeiou' else 'a'} {what}"
                )


def _checked_tokens(prompt: Any, verifier: Verifier) -> list[int]:
    """A token list that the verifier can read.

    Raises:
        RequestError: it is empty, leaves the vocabulary, or holds an image's place.
    """
    tokens = np.asarray(prompt)
    check_tokens(tokens, verifier.config.vocab_size)
    images = np.isin(tokens, verifier.config.image_tokens)
    if images.any():
        raise RequestError(
            f"{verifier.name} takes text only; the prompt holds an image (token "
            f"{tokens[images][0]} at position {int(images.argmax())})"
        )
    return tokens.tolist()


def needed_capacity(length: int, max_new_tokens: int, stages: DecodeStages) -> int:
    """Cache slots for a prompt of `length` tokens, rounded up so that few shapes compile."""
    step = max(BLOCK, CHUNK)
    return -(-(length + max_new_tokens + stages.slack()) // step) * step


def generate(
    verifier: Verifier,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    rows: int = 8,
    capacity: int | None = None,
    raw: bool = False,
    speculation: Speculation | None = None,
    sampling: Sampling = Sampling(),
    progress: Callable[[int], None] | None = None,
) -> Output:
    """Continue prompts, with speculation where a drafter is given.

    Args:
        verifier: whose greedy continuation is produced, token for token in float32.
        drafter: None is plain decoding through the same code.
        prompts: texts, token lists or message lists, of any lengths and number.
        max_new_tokens: a text stops there or at an end token.
        rows: texts decoded side by side; a finished row is refilled from the waiting prompts.
        capacity: cache slots a row, a multiple of 256; None is what the longest prompt needs.
        raw: text prompts are not put through the chat template.
        speculation: None is what the drafter's manifest recommends.
        sampling: greedy in this version.
        progress: called with the number of finished prompts.

    Raises:
        RequestError: an empty prompt list, an empty prompt, or a token outside the vocabulary.
        CapacityError: a prompt does not fit, found before anything runs.
    """
    del sampling  # its own check has refused everything but greedy
    if speculation is None:
        speculation = recommended_speculation(drafter)
    if not prompts:
        raise RequestError("there are no prompts")
    if max_new_tokens < 1 or rows < 1:
        raise RequestError(f"max_new_tokens {max_new_tokens} and rows {rows} must be at least 1")
    stages = DecodeStages(verifier=verifier, drafter=drafter, speculation=speculation)
    texts = [encode_prompt(verifier, prompt, raw) for prompt in prompts]
    capacity = _checked_capacity(texts, max_new_tokens, capacity, stages)
    rows = min(rows, len(texts))

    state = stages.make_state(rows, capacity)
    state = _compile(stages, state)
    waiting = collections.deque(range(len(texts)))
    seated: list[int | None] = [None] * rows
    results: list[Row | None] = [None] * len(texts)
    prefill_seconds = seconds = 0.0
    while waiting or any(index is not None for index in seated):
        clock = time.perf_counter()
        for row, index in enumerate(seated):
            if index is None and waiting:
                seated[row] = index = waiting.popleft()
                state = seat(stages, state, row, texts[index], max_new_tokens)
        state = dataclasses.replace(state, waiting=jnp.asarray(bool(waiting)))
        jax.block_until_ready(state.length)
        prefill_seconds += time.perf_counter() - clock
        clock = time.perf_counter()
        state = run(stages, state, jnp.asarray(max_new_tokens, jnp.int32))
        done = np.asarray(state.done)
        seconds += time.perf_counter() - clock
        for row, index in enumerate(seated):
            if index is not None and done[row]:
                results[index] = _harvest(verifier, state, row, len(texts[index]))
                seated[row] = None
        if progress is not None:
            progress(sum(result is not None for result in results))
    rows_out = [row for row in results if row is not None]
    return Output(rows=rows_out, stats=stats_of(rows_out, prefill_seconds, seconds))


def _checked_capacity(texts, max_new_tokens, capacity, stages: DecodeStages) -> int:
    """The capacity to use.

    Raises:
        CapacityError: the longest prompt does not fit it, or the model.
    """
    longest = max(range(len(texts)), key=lambda i: len(texts[i]))
    length, most = len(texts[longest]), stages.verifier.config.max_length
    what = f"prompt {longest + 1}, of {length} tokens, and {max_new_tokens} new ones"
    if length + max_new_tokens > most:
        raise CapacityError(
            f"{what} pass the verifier's longest text of {most} tokens; shorten the prompt or "
            "lower max_new_tokens"
        )
    needed = needed_capacity(length, max_new_tokens, stages)
    if capacity is None:
        return needed
    if capacity < needed:
        raise CapacityError(
            f"{what} need a capacity of {needed} slots (with {stages.slack()} for a cycle's own "
            f"nodes); found capacity {capacity}"
        )
    step = max(BLOCK, CHUNK)
    if capacity % step:
        raise CapacityError(f"capacity {capacity} must be a multiple of {step}")
    return capacity


def _compile(stages: DecodeStages, state: DecodeState) -> DecodeState:
    """Compile loop and prefill on the empty state, so that no clock sees it."""
    zero, no = jnp.zeros((), jnp.int32), jnp.zeros((), bool)
    state = run(stages, state, zero)
    empty = jnp.zeros((CHUNK + 1,), jnp.int32)
    return prefill_chunk(stages, state, zero, empty, zero, zero + 1, zero, no)


def seat(
    stages: DecodeStages, state: DecodeState, row: int, text: list[int], max_new_tokens: int
) -> DecodeState:
    """Read a prompt into a row, chunk by chunk; the row is live afterwards.

    Args:
        stages: verifier and drafter.
        state: donated.
        row: which.
        text: the prompt's token ids; at least one.
        max_new_tokens: where the row stops.
    """
    limit = len(text) + max_new_tokens
    for start in range(0, len(text), CHUNK):
        chunk = text[start : start + CHUNK + 1]
        padded = np.zeros((CHUNK + 1,), np.int32)
        padded[: len(chunk)] = chunk
        state = prefill_chunk(
            stages,
            state,
            jnp.asarray(row, jnp.int32),
            jnp.asarray(padded),
            jnp.asarray(start, jnp.int32),
            jnp.asarray(min(CHUNK, len(text) - start), jnp.int32),
            jnp.asarray(limit, jnp.int32),
            jnp.asarray(start + CHUNK >= len(text)),
        )
    return state


def _harvest(verifier: Verifier, state: DecodeState, row: int, length: int) -> Row:
    new = slice(length, int(state.end[row]))
    tokens = np.asarray(state.tokens[row])[new].tolist()
    drafted = np.asarray(state.drafted[row])[new].astype(bool).tolist()
    text = None if verifier.tokenizer is None else verifier.tokenizer.decode(tokens)
    accepted = tuple(int(i) for i in np.asarray(state.accepted[row]))
    cycles = int(state.cycles[row])
    return Row(tokens=tokens, drafted=drafted, text=text, cycles=cycles, accepted=accepted)


def stats_of(rows: Sequence[Row], prefill_seconds: float, seconds: float) -> Stats:
    """What some rows took together, from their sums.

    Args:
        rows: all decoded to the same depth.
        prefill_seconds: reading their prompts.
        seconds: decoding them.
    """
    new = sum(len(row.tokens) for row in rows)
    cycles = sum(row.cycles for row in rows)
    looped = new - len(rows)
    by_depth, reached = [], cycles
    for depth in range(len(rows[0].accepted)):
        accepted = sum(row.accepted[depth] for row in rows)
        by_depth.append(accepted / reached if reached else 0.0)
        reached = accepted
    return Stats(
        new_tokens=new,
        cycles=cycles,
        accept_length=looped / cycles if cycles else 0.0,
        acceptance_by_depth=tuple(by_depth),
        prefill_seconds=prefill_seconds,
        seconds=seconds,
        tokens_per_second=looped / seconds if seconds else 0.0,
    )
