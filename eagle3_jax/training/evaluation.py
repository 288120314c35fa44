"""Evaluation: accept length and speed of drafters on sets of prompts, beside plain decoding.

Accept length does not depend on how many rows are decoded side by side, so that it alone is
measured many at a time (`accept_lengths`); speed one row at a time (`evaluate`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from eagle3_jax.configs import Sampling, Speculation
from eagle3_jax.contracts import CapacityError, RequestError
from eagle3_jax.drafter import Drafter
from eagle3_jax.forest.judging import likeliest
from eagle3_jax.forest.processing import plan_of
from eagle3_jax.generation import (
    Output,
    Prompt,
    Stats,
    encode_prompt,
    generate,
    needed_capacity,
    stats_of,
)
from eagle3_jax.load import recommended_speculation
from eagle3_jax.loop.decode import DecodeStages
from eagle3_jax.training.prompts import read_prompt_rows
from eagle3_jax.verifier import Verifier
from sharding.placement import to_host

Conversation = list[str]
"""The user's turns, in order; every one is answered before the next is asked."""

PLAIN, SAME_DTYPE = "", " "
"""What plain decoding is called among the drafters, none of which has a blank name: in its own
dtype, and in the drafters' where that is another."""

SCORED = 64
"""Texts are read in lengths of whole multiples, so that few compile."""


def read_prompts(path: Path) -> list[Conversation]:
    """The prompts of a JSONL file, one row a line: `{"turns": [text, …]}` or `{"prompt": text}`.

    Raises:
        RequestError: the file cannot be read, a row is something else, or there is none; rows are
            named by their line.
    """
    rows = read_prompt_rows(path)
    for row in rows:
        if row.before:
            raise RequestError(
                f"{row.where} begins in the middle of a conversation; expected the user's turns "
                "alone, whose answers are measured"
            )
    return [list(row.turns) for row in rows]


def reason(error: Exception) -> str:
    """What went wrong with a file, without repeating its name."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def evaluate(
    verifier: Verifier,
    drafters: Mapping[str, Drafter],
    prompt_sets: Mapping[str, Sequence[Conversation]],
    *,
    max_new_tokens: int = 128,
    speculation: Speculation | Mapping[str, Speculation] | None = None,
    sampling: Sampling = Sampling(),
    plain: bool = True,
    plain_verifier: Verifier | None = None,
    same_dtype: bool = True,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Decode sets of prompts with every drafter and plainly, one row at a time.

    All run on the same texts, in turn and in changing order, so that a noisy machine troubles them
    alike. A second turn continues the conversation with the answer of plain decoding (of the first
    drafter where there is no plain decoding): as messages where the tokenizer has a chat template,
    as concatenated text otherwise.

    Args:
        verifier: whose answers they are.
        drafters: by name; one with several settings goes by several names.
        prompt_sets: conversations, by the set's name.
        max_new_tokens: of one answer.
        speculation: for all drafters, or by name; None is what each one's manifest recommends.
        sampling: how tokens are chosen; the i-th conversation of a set draws from the seed plus i,
            with every drafter and plainly.
        plain: whether plain decoding is measured.
        plain_verifier: the verifier in plain decoding's best dtype; None is `verifier`.
        same_dtype: where that dtype is another, measure plain decoding in the drafters' too.
        limit: conversations of a set; the first ones.
        progress: called with the number of answers done and of all.

    Returns:
        For one drafter `{"sets": {NAME: figures}, "mean": figures}`, for several
        `{"drafters": {NAME: that}}`. Figures are `accept_length`, `acceptance_by_depth` (both from
        sums over the set), `new_tokens`, `tokens_per_second` and, with `plain`,
        `plain_tokens_per_second`, `speedup`, `break_even_accept_length` (plain tokens in a cycle's
        time: the speedup is the accept length over it), `same_tokens` (share of the answers equal
        to plain decoding's, of which sampled candidates give other draws) and, where plain
        decoding ran in the drafters' dtype too, `same_dtype_speedup`; `mean` is the plain mean over
        sets.

    Raises:
        RequestError: no drafter, no set, or a prompt that cannot be served.
        CapacityError: a conversation grows past the verifier's longest text; says which.
    """
    sets = _checked_sets(drafters, prompt_sets, limit)
    ways, max_new_tokens = _ways(verifier, drafters, speculation, sampling, max_new_tokens)
    if plain:
        other = plain_verifier or verifier
        way = _Way(other, None, Speculation(depth=0), next(iter(ways.values())).sampling)
        beside = {PLAIN: way}
        if same_dtype and other.dtype != verifier.dtype:
            beside[SAME_DTYPE] = dataclasses.replace(way, verifier=verifier)
        ways = {**beside, **ways}
    advance = _counter(sets, 1, progress)
    figures: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in drafters}
    for name, rows in sets.items():
        measured = _measure(name, ways, rows, max_new_tokens, advance)
        for drafter in drafters:
            beside = (measured.get(PLAIN), measured.get(SAME_DTYPE))
            figures[drafter][name] = _figures(measured[drafter], *beside)
    return _by_drafter(figures)


def accept_lengths(
    verifier: Verifier,
    drafters: Mapping[str, Drafter],
    prompt_sets: Mapping[str, Sequence[Conversation]],
    *,
    max_new_tokens: int = 128,
    speculation: Speculation | Mapping[str, Speculation] | None = None,
    sampling: Sampling = Sampling(),
    rows: int = 8,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Accept length of drafters on sets of prompts, many rows at a time and without a clock.

    A second turn continues the conversation with the answer of the first drafter. Arguments and
    errors are those of `evaluate`, and `rows` are decoded side by side.

    Returns:
        As `evaluate` does; figures are `accept_length`, `acceptance_by_depth` and `new_tokens`.
    """
    sets = _checked_sets(drafters, prompt_sets, limit)
    ways, max_new_tokens = _ways(verifier, drafters, speculation, sampling, max_new_tokens)
    advance = _counter(sets, len(ways), progress)
    figures: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in drafters}
    for name, conversations in sets.items():
        measured = _measure_together(name, ways, conversations, max_new_tokens, rows, advance)
        for drafter in drafters:
            figures[drafter][name] = _lengths(pooled(measured[drafter]))
    return _by_drafter(figures)


def _checked_sets(
    drafters: Mapping[str, Drafter],
    prompt_sets: Mapping[str, Sequence[Conversation]],
    limit: int | None,
) -> dict[str, list[Conversation]]:
    """The conversations to answer, by set."""
    if not drafters or not all(name.strip() for name in drafters):
        raise RequestError("evaluation needs at least one drafter, each with a name")
    if not prompt_sets or not all(prompt_sets.values()):
        raise RequestError("evaluation needs at least one set of prompts, each with a row")
    if limit is not None and limit < 1:
        raise RequestError(f"limit {limit} must be at least 1")
    return {name: list(rows)[:limit] for name, rows in prompt_sets.items()}


def _ways(
    verifier: Verifier,
    drafters: Mapping[str, Drafter],
    speculation: Speculation | Mapping[str, Speculation] | None,
    sampling: Sampling,
    max_new_tokens: int,
) -> tuple[dict[str, "_Way"], int]:
    """Every drafter's way of decoding, and the new tokens of an answer."""
    if speculation is None:
        settings = {name: recommended_speculation(d) for name, d in drafters.items()}
    elif isinstance(speculation, Speculation):
        settings = dict.fromkeys(drafters, speculation)
    else:
        settings = speculation
    new = sampling.max_new_tokens or max_new_tokens
    sampling = dataclasses.replace(sampling, max_new_tokens=None)
    return {name: _Way(verifier, d, settings[name], sampling) for name, d in drafters.items()}, new


def _counter(
    sets: Mapping[str, Sequence[Conversation]],
    times: int,
    progress: Callable[[int, int], None] | None,
) -> Callable[[int], None]:
    """Tells of so many more answers, each of which is given so many times."""
    answers = times * sum(len(turns) for rows in sets.values() for turns in rows)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, answers)

    return advance


def _by_drafter(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    objects = {name: {"sets": found, "mean": mean(found)} for name, found in figures.items()}
    return next(iter(objects.values())) if len(objects) == 1 else {"drafters": objects}


@dataclasses.dataclass(frozen=True)
class _Way:
    """One way of decoding: with a drafter, or plain."""

    verifier: Verifier
    drafter: Drafter | None
    speculation: Speculation
    sampling: Sampling

    def needs(self, length: int, new: int) -> int:
        """Cache slots for a prompt of `length` tokens."""
        stages = DecodeStages(
            verifier=self.verifier, drafter=self.drafter, speculation=self.speculation
        )
        return needed_capacity(length, new, stages)

    def decode(
        self,
        prompts: Mapping[int, list[int]],
        new: int,
        capacity: int,
        rows: int = 1,
        progress: Callable[[int], None] | None = None,
    ) -> Output:
        """Answers in the conversations of those numbers."""
        longest = max(map(len, prompts.values()))
        seeds = [(self.sampling.seed + number) % 2**63 for number in prompts]
        return generate(
            self.verifier,
            self.drafter,
            list(prompts.values()),
            max_new_tokens=new,
            rows=rows,
            capacity=max(capacity, self.needs(longest, new)),
            speculation=self.speculation,
            sampling=[dataclasses.replace(self.sampling, seed=seed) for seed in seeds],
            progress=progress,
        )


def _measure(
    name: str,
    ways: Mapping[str, _Way],
    rows: Sequence[Conversation],
    new: int,
    advance: Callable[[int], None],
) -> dict[str, list[Output]]:
    """Every answer to every turn of a set, by way."""
    first = next(iter(ways))
    verifier = ways[first].verifier
    capacity = _capacity(ways, rows, new)
    outputs: dict[str, list[Output]] = {way: [] for way in ways}
    order = list(ways)
    for number, turns in enumerate(rows, 1):
        answers: list[str] = []
        for count in range(1, len(turns) + 1):
            try:
                prompt = encode_prompt(verifier, conversation(verifier, turns[:count], answers))
                if not any(outputs.values()):
                    for way in ways.values():  # compiles and warms up
                        few = min(new, max(8, way.sampling.min_new_tokens))
                        way.decode({number: prompt}, few, capacity)
                for way in order:
                    outputs[way].append(ways[way].decode({number: prompt}, new, capacity))
            except (CapacityError, RequestError) as error:
                where = f"set {name}, conversation {number}, turn {count}"
                raise type(error)(f"{where}: {error}") from None
            order.reverse()
            answers.append(outputs[first][-1].text[0] or "")
            advance(1)
    return outputs


def _measure_together(
    name: str,
    ways: Mapping[str, _Way],
    conversations: Sequence[Conversation],
    new: int,
    rows: int,
    advance: Callable[[int], None],
) -> dict[str, list[Output]]:
    """As `_measure`, turn by turn over all conversations of a set."""
    first = next(iter(ways))
    verifier = ways[first].verifier
    capacity = _capacity(ways, conversations, new)
    answers: dict[int, list[str]] = {number: [] for number in range(1, len(conversations) + 1)}
    outputs: dict[str, list[Output]] = {way: [] for way in ways}
    for count in range(1, max(map(len, conversations)) + 1):
        asked = [n for n in answers if len(conversations[n - 1]) >= count]
        try:
            prompts = {
                number: encode_prompt(
                    verifier,
                    conversation(verifier, conversations[number - 1][:count], answers[number]),
                )
                for number in asked
            }
            for way in ways:
                tell = _Steps(advance)
                outputs[way].append(ways[way].decode(prompts, new, capacity, rows, tell))
        except (CapacityError, RequestError) as error:
            raise type(error)(f"set {name}, turn {count}: {error}") from None
        for number, text in zip(asked, outputs[first][-1].text, strict=True):
            answers[number].append(text or "")
    return outputs


class _Steps:
    """Counts told so far, as steps."""

    def __init__(self, advance: Callable[[int], None]):
        self._advance, self._told = advance, 0

    def __call__(self, done: int) -> None:
        self._advance(done - self._told)
        self._told = done


def _capacity(ways: Mapping[str, _Way], rows: Sequence[Conversation], new: int) -> int:
    """One capacity for a set, so that each way compiles once for it."""
    verifier = next(iter(ways.values())).verifier
    longest = max(_longest(verifier, turns, new) for turns in rows)
    longest = max(min(longest, verifier.config.max_length - new), 1)
    return max(way.needs(longest, new) for way in ways.values())


def conversation(verifier: Verifier, turns: Conversation, answers: Sequence[str]) -> Prompt:
    """The prompt of the last turn, after the turns before it and their answers."""
    tokenizer = verifier.tokenizer
    if tokenizer is None or tokenizer.template is None:
        return "".join(a + b for a, b in zip(turns, [*answers, ""], strict=True))
    messages = [{"role": "user", "content": turns[0]}]
    for answer, turn in zip(answers, turns[1:], strict=True):
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": turn})
    return messages


def _longest(verifier: Verifier, turns: Conversation, new: int) -> int:
    """About how long the last prompt of a conversation becomes, in tokens."""
    unanswered = conversation(verifier, turns, [""] * (len(turns) - 1))
    return len(encode_prompt(verifier, unanswered)) + (len(turns) - 1) * new


def pooled(outputs: Sequence[Output]) -> Stats:
    """The stats of several generations as of one: from sums, not means of ratios."""
    return stats_of(
        [row for output in outputs for row in output.rows],
        sum(output.stats.prefill_seconds for output in outputs),
        sum(output.stats.seconds for output in outputs),
    )


def _lengths(stats: Stats) -> dict[str, Any]:
    return {
        "accept_length": stats.accept_length,
        "acceptance_by_depth": list(stats.acceptance_by_depth),
        "new_tokens": stats.new_tokens,
    }


def _figures(
    outputs: Sequence[Output],
    plain: Sequence[Output] | None,
    same_dtype: Sequence[Output] | None,
) -> dict[str, Any]:
    stats = pooled(outputs)
    figures = {**_lengths(stats), "tokens_per_second": stats.tokens_per_second}
    if plain is not None:
        speed = pooled(plain).tokens_per_second
        same = [a.tokens == b.tokens for a, b in zip(outputs, plain, strict=True)]
        figures["plain_tokens_per_second"] = speed
        figures["speedup"] = _ratio(stats.tokens_per_second, speed)
        figures["break_even_accept_length"] = _ratio(stats.seconds, stats.cycles) * speed
        figures["same_tokens"] = sum(same) / len(same)
    if same_dtype is not None:
        speed = pooled(same_dtype).tokens_per_second
        figures["same_dtype_speedup"] = _ratio(stats.tokens_per_second, speed)
    return figures


def _ratio(a: float, b: float | int) -> float:
    return a / b if b else 0.0


def mean(sets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The plain mean over sets of every figure, depth by depth for a list."""
    columns = list(sets.values())
    return {key: np.mean([c[key] for c in columns], axis=0).tolist() for key in columns[0]}


def not_chosen(
    verifier: Verifier, prompt: Sequence[int], new: Sequence[int], sampling: Sampling = Sampling()
) -> int | None:
    """How many new tokens of a text the verifier itself, reading it, would not have chosen.

    Args:
        verifier: of any dtype; float32 may call a near tie differently than decoding did.
        prompt: ids of what the new tokens follow.
        new: the text's new tokens, written by whatever.
        sampling: how they were chosen.

    Returns:
        None where tokens were drawn or scores processed: no one token is right then.
    """
    if not plan_of([sampling]).plainly_greedy:
        return None
    text = [*prompt, *new]
    # What follows a position changes nothing there.
    length = -(-len(text) // SCORED) * SCORED
    padded = text + [0] * (min(length, verifier.config.max_length) - len(text))
    best = likeliest(verifier.score(jnp.asarray([padded], jnp.int32), (0,)).logits[0])
    chosen = to_host(best)[len(prompt) - 1 : len(text) - 1]
    return int(np.sum(chosen != np.asarray(new)))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two token lists part; None where they are the same."""
    if list(a) == list(b):
        return None
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
