"""Generation: prompts in, new tokens out, any number of prompts over a few rows."""

import dataclasses
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np

from eagle3_jax.batch import Batch, Piece, Row, Seat
from eagle3_jax.configs import Sampling, Speculation
from eagle3_jax.contracts import CapacityError, RequestError
from eagle3_jax.drafter import Drafter
from eagle3_jax.forest.processing import Hook, plan_of
from eagle3_jax.load import recommended_speculation
from eagle3_jax.loop.decode import DecodeStages
from eagle3_jax.loop.forms import decoding_forms
from eagle3_jax.loop.prefill import CHUNK
from eagle3_jax.verifier.decoder import Verifier, check_tokens
from kernels_pallas import MOST_SLOTS, Backend, check_backend
from kernels_pallas.backends import interpreted
from kernels_pallas.forest_attention.xla import BLOCK
from sharding.mapped import WHOLE
from sharding.placement import put

CYCLES = 8
"""Cycles between two looks at the text where somebody waits for it or for a stop text."""

STEP = max(BLOCK, CHUNK)
"""A capacity is a multiple of it."""

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
    return -(-(length + max_new_tokens + stages.slack()) // STEP) * STEP


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
    sampling: Sampling | Sequence[Sampling] = Sampling(),
    logprobs: bool = False,
    logits_processor: Hook | None = None,
    kernels: Backend = "xla",
    progress: Callable[[int], None] | None = None,
) -> Output:
    """Continue prompts, with speculation where a drafter is given.

    Every token has the verifier's processed distribution exactly, with a drafter as without. A
    prompt's text does not depend on the other prompts, on its place or on `rows`; at temperature 0
    it is plain decoding's, and so it is above 0 unless candidates are sampled.

    Args:
        verifier: whose continuation is produced.
        drafter: None is plain decoding through the same code.
        prompts: texts, token lists or message lists, of any lengths and number.
        max_new_tokens: a text stops there or at an end token.
        rows: texts decoded side by side; a finished row is refilled from the waiting prompts.
        capacity: cache slots a row, a multiple of 256; None is what the longest prompt needs.
        raw: text prompts are not put through the chat template.
        speculation: None is what the drafter's manifest recommends.
        sampling: one for all, prompt i drawing from its seed folded with i; or one a prompt, each
            seed as given.
        logprobs: keep log-probabilities of new tokens.
        logits_processor: a function of (scores [b v], texts so far [b s], their lengths [b]) to
            scores, traced into the loop, after penalties and before temperature.
        kernels: what attention and judging run on in a cycle: `xla` anywhere, `mosaic_gpu` on GPUs
            of compute capability 9.0. Prompts are read by `xla`.
        progress: called with the number of finished prompts.

    Raises:
        RequestError: an empty prompt list, an empty prompt, a token outside the vocabulary, or
            settings that cannot be served.
        CapacityError: a prompt does not fit, found before anything runs.
    """
    batch = make_batch(
        verifier,
        drafter,
        prompts,
        max_new_tokens=max_new_tokens,
        rows=rows,
        capacity=capacity,
        raw=raw,
        speculation=speculation,
        sampling=sampling,
        logprobs=logprobs,
        logits_processor=logits_processor,
        kernels=kernels,
    )
    watched = any(who.sampling.stop for who in batch.seats)
    cycles = CYCLES if watched else max(who.new for who in batch.seats)
    while batch.going:
        batch.fill()
        batch.cycle(cycles)
        if progress is not None:
            progress(sum(result is not None for result in batch.results))
    return output_of(batch)


def stream(
    verifier: Verifier,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int = 128,
    rows: int = 8,
    capacity: int | None = None,
    raw: bool = False,
    speculation: Speculation | None = None,
    sampling: Sampling | Sequence[Sampling] = Sampling(),
    logprobs: bool = False,
    logits_processor: Hook | None = None,
    kernels: Backend = "xla",
) -> Generator[Piece, None, None]:
    """What `generate` gives, piece by piece; pieces of prompts that sit side by side alternate.

    Arguments and errors are those of `generate`; it is compiled and checked before the first piece
    is asked for. Whoever has enough stops asking.

    Yields:
        Pieces of `CYCLES` cycles each; a prompt's joined are its tokens and its text.
    """
    batch = make_batch(
        verifier,
        drafter,
        prompts,
        max_new_tokens=max_new_tokens,
        rows=rows,
        capacity=capacity,
        raw=raw,
        speculation=speculation,
        sampling=sampling,
        logprobs=logprobs,
        logits_processor=logits_processor,
        kernels=kernels,
    )
    return batch.pieces(CYCLES)


def output_of(batch: Batch) -> Output:
    """What a batch that is through has come to."""
    rows = [row for row in batch.results if row is not None]
    return Output(rows=rows, stats=stats_of(rows, batch.prefill_seconds, batch.seconds))


def make_batch(
    verifier: Verifier,
    drafter: Drafter | None,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    rows: int,
    capacity: int | None,
    raw: bool,
    speculation: Speculation | None,
    sampling: Sampling | Sequence[Sampling],
    logprobs: bool = False,
    logits_processor: Hook | None = None,
    kernels: Backend = "xla",
) -> Batch:
    """The rows of `generate`, compiled and not yet filled; arguments and errors are its own."""
    if not prompts:
        raise RequestError("there are no prompts")
    if max_new_tokens < 1 or rows < 1:
        raise RequestError(f"max_new_tokens {max_new_tokens} and rows {rows} must be at least 1")
    samplings = _samplings(sampling, len(prompts))
    for each in samplings:
        if (each.max_new_tokens or max_new_tokens) < each.min_new_tokens:
            raise RequestError(
                f"max_new_tokens {max_new_tokens} is below sampling min_new_tokens "
                f"{each.min_new_tokens}; raise one or lower the other"
            )
    stages = make_stages(
        verifier, drafter, speculation, samplings, logprobs, logits_processor, kernels
    )
    keys = [jax.random.key(each.seed) for each in samplings]
    if isinstance(sampling, Sampling):
        keys = [jax.random.fold_in(key, i) for i, key in enumerate(keys)]
    seats = [
        Seat(
            encode_prompt(verifier, prompt, raw),
            each,
            key,
            each.max_new_tokens or max_new_tokens,
        )
        for prompt, each, key in zip(prompts, samplings, keys, strict=True)
    ]
    capacity = _checked_capacity(seats, capacity, stages)
    return Batch(stages, seats, rows, capacity, verifier.tokenizer)


def make_stages(
    verifier: Verifier,
    drafter: Drafter | None,
    speculation: Speculation | None,
    samplings: Sequence[Sampling],
    logprobs: bool = False,
    logits_processor: Hook | None = None,
    kernels: Backend = "xla",
) -> DecodeStages:
    """Decoding's stages for some requests; arguments and errors are those of `generate`."""
    if speculation is None:
        speculation = recommended_speculation(drafter)
    if drafter is not None and speculation.topk > drafter.config.draft_vocab_size:
        raise RequestError(
            f"speculation topk {speculation.topk} passes the drafter's vocabulary of "
            f"{drafter.config.draft_vocab_size}"
        )
    for each in samplings:
        check_sampling(each, verifier)
    check_kernels(kernels, drafter, speculation)
    plan = plan_of(samplings, logprobs, logits_processor)
    reader, drafter = decoding_forms(verifier, drafter)
    if verifier.mesh is not None and drafter is not None:
        drafter = put(drafter, verifier.mesh, WHOLE)
    return DecodeStages(
        verifier=verifier,
        drafter=drafter,
        speculation=speculation,
        plan=plan,
        reader=reader,
        kernels=kernels,
    )


def check_kernels(kernels: Backend, drafter: Drafter | None, speculation: Speculation) -> None:
    """Refuse kernels that this process cannot run, and blocks of more slots than they take.

    Raises:
        RequestError: says which.
    """
    try:
        check_backend(kernels)
    except ValueError as error:
        raise RequestError(str(error)) from None
    if drafter is None or interpreted(kernels) is None:
        return
    drafted = speculation.nodes or speculation.depth
    slots = max(drafted + 1, (speculation.depth - 1) * speculation.topk)
    if slots > MOST_SLOTS:
        raise RequestError(
            f"kernels {kernels!r} take blocks of up to {MOST_SLOTS} slots; a shape of "
            f"{drafted} nodes, depth {speculation.depth} and topk {speculation.topk} needs "
            f"{slots}; draft fewer or use xla"
        )


def _samplings(sampling: Sampling | Sequence[Sampling], prompts: int) -> list[Sampling]:
    """One a prompt.

    Raises:
        RequestError: their number is another.
    """
    if isinstance(sampling, Sampling):
        return [sampling] * prompts
    if len(sampling) != prompts:
        raise RequestError(f"{len(sampling)} samplings were given for {prompts} prompts")
    return list(sampling)


def check_sampling(sampling: Sampling, verifier: Verifier) -> None:
    """Refuse settings that this verifier cannot serve.

    Raises:
        RequestError: tokens outside the vocabulary, or stop texts without a tokenizer.
    """
    v = verifier.config.vocab_size
    ids = [*sampling.stop_tokens, *(token for token, _ in sampling.logit_bias)]
    outside = [token for token in ids if not 0 <= token < v]
    if outside:
        raise RequestError(f"sampling names tokens {outside} outside the vocabulary of {v}")
    if sampling.stop and verifier.tokenizer is None:
        raise RequestError(
            f"stop texts need a tokenizer, and {verifier.name} has none: {verifier.no_tokenizer}"
        )


def _checked_capacity(seats: Sequence[Seat], capacity: int | None, stages: DecodeStages) -> int:
    """The capacity to use.

    Raises:
        CapacityError: the longest prompt does not fit it, or the model.
    """
    longest = max(range(len(seats)), key=lambda i: len(seats[i].tokens) + seats[i].new)
    length, new = len(seats[longest].tokens), seats[longest].new
    most = stages.verifier.config.max_length
    what = f"prompt {longest + 1}, of {length} tokens, and {new} new ones"
    if length + new > most:
        raise CapacityError(
            f"{what} pass the verifier's longest text of {most} tokens; shorten the prompt or "
            "lower max_new_tokens"
        )
    needed = needed_capacity(length, new, stages)
    if capacity is None:
        return needed
    if capacity < needed:
        raise CapacityError(
            f"{what} need a capacity of {needed} slots (with {stages.slack()} for a cycle's own "
            f"nodes); found capacity {capacity}"
        )
    check_multiple(capacity)
    return capacity


def check_multiple(capacity: int) -> None:
    """Refuse a capacity that is no whole number of chunks and blocks.

    Raises:
        CapacityError: it is not.
    """
    if capacity < STEP or capacity % STEP:
        raise CapacityError(f"capacity {capacity} must be a multiple of {STEP}")


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
