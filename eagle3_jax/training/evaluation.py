"""Evaluation: accept length and speed of drafters on sets of prompts, beside plain decoding."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.configs import Sampling, Speculation
from eagle3_jax.contracts import CapacityError, RequestError
from eagle3_jax.drafter import Drafter
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
from eagle3_jax.verifier import Verifier

Conversation = list[str]
"""The user's turns, in order; every one is answered before the next is asked."""

PLAIN = ""
"""What plain decoding is called among the drafters, none of which has an empty name."""


def read_prompts(path: Path) -> list[Conversation]:
    """The prompts of a JSONL file, one row a line: `{"turns": [text, …]}` or `{"prompt": text}`.

    Raises:
        RequestError: the file cannot be read, a row is something else, or there is none; rows are
            named by their line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"prompts {path} cannot be read: {reason(error)}") from None
    rows = [_turns(line, f"{path} line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise RequestError(f"prompts {path} holds no row")
    return rows


def reason(error: Exception) -> str:
    """What went wrong with a file, without repeating its name."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _turns(line: str, where: str) -> Conversation:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where} is no JSON: {error}") from None
    wanted = 'expected {"turns": [text, …]} or {"prompt": text}'
    if not isinstance(row, dict) or not {"turns", "prompt"} & set(row):
        found = f"the keys {sorted(row)}" if isinstance(row, dict) else type(row).__name__
        raise RequestError(f"{where} has {found}; {wanted}")
    turns = row["turns"] if "turns" in row else [row["prompt"]]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise RequestError(f"{where}: turns must be a list of texts, at least one; {wanted}")
    if not all(turns):
        raise RequestError(f"{where} has an empty text: there is no token to continue from")
    return turns


def evaluate(
    verifier: Verifier,
    drafters: Mapping[str, Drafter],
    prompt_sets: Mapping[str, Sequence[Conversation]],
    *,
    max_new_tokens: int = 128,
    speculation: Speculation | Mapping[str, Speculation] | None = None,
    sampling: Sampling = Sampling(),
    plain: bool = True,
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
        drafters: by name.
        prompt_sets: conversations, by the set's name.
        max_new_tokens: of one answer.
        speculation: for all drafters, or by drafter; None is what each one's manifest recommends.
        sampling: how tokens are chosen; the i-th conversation of a set draws from the seed plus i,
            with every drafter and plainly.
        plain: whether plain decoding is measured.
        limit: conversations of a set; the first ones.
        progress: called with the number of answers done and of all.

    Returns:
        For one drafter `{"sets": {NAME: figures}, "mean": figures}`, for several
        `{"drafters": {NAME: that}}`. Figures are `accept_length`, `acceptance_by_depth` (both from
        sums over the set), `tokens_per_second` and, with `plain`, `plain_tokens_per_second`,
        `speedup`, `same_tokens` (share of the answers equal to plain decoding's, of which sampled
        candidates give other draws); `mean` is the plain mean over sets.

    Raises:
        RequestError: no drafter, no set, or a prompt that cannot be served.
        CapacityError: a conversation grows past the verifier's longest text; says which.
    """
    if not drafters or PLAIN in drafters:
        raise RequestError("evaluation needs at least one drafter, each with a name")
    if not prompt_sets or not all(prompt_sets.values()):
        raise RequestError("evaluation needs at least one set of prompts, each with a row")
    if limit is not None and limit < 1:
        raise RequestError(f"limit {limit} must be at least 1")
    sets = {name: list(rows)[:limit] for name, rows in prompt_sets.items()}
    if speculation is None:
        settings = {name: recommended_speculation(d) for name, d in drafters.items()}
    elif isinstance(speculation, Speculation):
        settings = dict.fromkeys(drafters, speculation)
    else:
        settings = speculation
    max_new_tokens = sampling.max_new_tokens or max_new_tokens
    sampling = dataclasses.replace(sampling, max_new_tokens=None)
    ways = {name: _Way(verifier, d, settings[name], sampling) for name, d in drafters.items()}
    if plain:
        ways = {PLAIN: _Way(verifier, None, Speculation(depth=0), sampling), **ways}
    answers = sum(len(row) for rows in sets.values() for row in rows)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, answers)

    figures: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in drafters}
    for name, rows in sets.items():
        measured = _measure(name, ways, rows, max_new_tokens, advance)
        for drafter in drafters:
            figures[drafter][name] = _figures(measured[drafter], measured.get(PLAIN))
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

    def decode(self, prompt: list[int], new: int, capacity: int, number: int) -> Output:
        """One row's answer, in the conversation of that number."""
        seed = (self.sampling.seed + number) % 2**63
        return generate(
            self.verifier,
            self.drafter,
            [prompt],
            max_new_tokens=new,
            rows=1,
            capacity=max(capacity, self.needs(len(prompt), new)),
            speculation=self.speculation,
            sampling=[dataclasses.replace(self.sampling, seed=seed)],
        )


def _measure(
    name: str,
    ways: Mapping[str, _Way],
    rows: Sequence[Conversation],
    new: int,
    advance: Callable[[], None],
) -> dict[str, list[Output]]:
    """Every answer to every turn of a set, by way."""
    first = next(iter(ways))
    verifier = ways[first].verifier
    # One capacity for the set, so that each way compiles once for it.
    longest = max(_longest(verifier, turns, new) for turns in rows)
    longest = max(min(longest, verifier.config.max_length - new), 1)
    capacity = max(way.needs(longest, new) for way in ways.values())
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
                        way.decode(prompt, few, capacity, number)
                for way in order:
                    outputs[way].append(ways[way].decode(prompt, new, capacity, number))
            except (CapacityError, RequestError) as error:
                where = f"set {name}, conversation {number}, turn {count}"
                raise type(error)(f"{where}: {error}") from None
            order.reverse()
            answers.append(outputs[first][-1].text[0] or "")
            advance()
    return outputs


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


def _figures(outputs: Sequence[Output], plain: Sequence[Output] | None) -> dict[str, Any]:
    stats = pooled(outputs)
    figures = {
        "accept_length": stats.accept_length,
        "acceptance_by_depth": list(stats.acceptance_by_depth),
        "tokens_per_second": stats.tokens_per_second,
    }
    if plain is not None:
        speed = pooled(plain).tokens_per_second
        same = [a.tokens == b.tokens for a, b in zip(outputs, plain, strict=True)]
        figures["plain_tokens_per_second"] = speed
        figures["speedup"] = stats.tokens_per_second / speed if speed else 0.0
        figures["same_tokens"] = sum(same) / len(same)
    return figures


def mean(sets: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The plain mean over sets of every figure, depth by depth for a list."""
    columns = list(sets.values())
    return {key: np.mean([c[key] for c in columns], axis=0).tolist() for key in columns[0]}
