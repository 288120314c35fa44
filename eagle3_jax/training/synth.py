"""Synthesis: the verifier answers prompts, which makes the rows that a drafter learns from."""

import copy
import dataclasses
import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import jax

from checkpoints.tensors import read_json, write_json
from eagle3_jax.batch import Batch, Row, Seat, warm
from eagle3_jax.configs import Sampling, Speculation
from eagle3_jax.contracts import CapacityError, RequestError
from eagle3_jax.drafter import Drafter
from eagle3_jax.generation import (
    CYCLES,
    Prompt,
    encode_prompt,
    make_stages,
    needed_capacity,
)
from eagle3_jax.loop.decode import DecodeStages
from eagle3_jax.training.prompts import PromptRow, read_prompt_rows, unique
from eagle3_jax.verifier import Verifier


@dataclasses.dataclass(frozen=True)
class SynthConfig:
    """What the rows are; an output goes on under the same settings only.

    Attributes:
        temperatures: equal parts of the conversations are answered at each; 0 is greedy.
        seed: of which conversation gets which temperature, and of the draws.
        max_new_tokens: of one answer, which stops there or at an end token.
        length: tokens of a whole row at most; a prompt that leaves no room for an answer of
            `max_new_tokens` is left out.
        go_on: write on past the end token of the last answer, up to `max_new_tokens`: what follows
            is the verifier's own distribution too, with turns of its own.
        raw: do not put prompts through the chat template.
    """

    temperatures: tuple[float, ...] = (0.0, 0.7, 0.7, 1.0)
    seed: int = 0
    max_new_tokens: int = 256
    length: int = 768
    go_on: bool = False
    raw: bool = False

    def __post_init__(self):
        if not self.temperatures:
            raise RequestError("temperatures must name at least one")
        for temperature in self.temperatures:
            Sampling(temperature=temperature)
        if not 0 <= self.seed < 2**63:
            raise RequestError(f"seed {self.seed} must be 0 or more and below 2**63")
        if self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens {self.max_new_tokens} must be at least 1")
        if self.length <= self.max_new_tokens:
            raise RequestError(
                f"length {self.length} must be above max_new_tokens {self.max_new_tokens}, so that "
                "there is room for a prompt"
            )

    def sampling(self, id: str) -> Sampling:
        """How the conversation of that id is answered; nothing else decides on it."""
        digest = hashlib.sha256(f"{self.seed}:{id}".encode()).digest()
        part = int.from_bytes(digest[:8], "big") % len(self.temperatures)
        seed = int.from_bytes(digest[8:12], "big")  # JAX takes 32 bits of a seed
        return Sampling(temperature=self.temperatures[part], seed=seed)


def synthesise(
    verifier: Verifier,
    drafter: Drafter | None,
    prompts: Sequence[Path],
    out: Path,
    config: SynthConfig = SynthConfig(),
    *,
    rows: int = 64,
    limit: int | None = None,
    speculation: Speculation | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Answer the prompts of some files; a conversation becomes one line of a JSONL file.

    A line is a training row, `{"id", "tokens", "loss"}`, with `temperature`, `seed`, `verifier`,
    `dtype`, `source` (the prompt file's name) and `finished` (whether the last answer came to an
    end token). `loss` covers what the verifier wrote: answers, as far as the next turn's prompt
    repeats their tokens; no prompt, and no answer that came with it.

    Lines are written as conversations end. A run that was stopped, at whatever instant, goes on
    when it is started again: conversations that the file holds are not answered again. A row
    depends on its id, its prompt and the configuration, not on the order.

    Args:
        verifier: whose answers they are.
        drafter: makes it faster; None is plain decoding.
        prompts: files, as `read_prompt_rows` reads them; texts that came before are left out.
        out: the JSONL file; made where missing. Its settings stand beside it, in
            `NAME.settings.json`.
        config: what the rows are.
        rows: conversations answered side by side.
        limit: lines of the file at most; the first conversations.
        speculation: None is what the drafter's manifest recommends.
        progress: called with the number of lines there are and that there will be.

    Returns:
        `out`; how many `prompts` were read, `duplicates` and `too_long` left out, `done_before`,
        `written`, and of those `cut_short` (a later turn did not fit); `tokens` of the answers;
        where there are any `tokens_per_second` (prompts are read and rows written meanwhile),
        `seconds` and `prefill_seconds` of that, and `accept_length`.

    Raises:
        RequestError: prompts that cannot be read, two texts of one id, an output that is in use, is
            no such file, or was begun under other settings.
        CapacityError: the length passes the verifier's longest text.
    """
    if rows < 1 or (limit is not None and limit < 1):
        raise RequestError(f"rows {rows} and limit {limit} must be at least 1")
    if config.length > verifier.config.max_length:
        raise CapacityError(
            f"length {config.length} passes the verifier's longest text of "
            f"{verifier.config.max_length} tokens; lower it"
        )
    read = [row for path in prompts for row in read_prompt_rows(Path(path))]
    wanted = unique(read)
    talks: list[_Talk] = []
    too_long = 0
    for row in wanted:
        if len(talks) == limit:
            break
        talk = _Talk(verifier, config, row)
        if talk.fits:
            talks.append(talk)
        else:
            too_long += 1
    found: dict[str, Any] = {
        "out": str(out),
        "prompts": len(read),
        "duplicates": len(read) - len(wanted),
        "too_long": too_long,
    }
    with _Log(Path(out), _settings(verifier, config)) as log:
        left = [talk for talk in talks if talk.row.id not in log.done]
        done = before = len(talks) - len(left)
        batch = _rows(verifier, drafter, config, speculation, left, min(rows, len(talks)))
        for talk in batch.answered() if batch else ():
            log.write(talk.line())
            done += 1
            if progress is not None:
                progress(done, len(talks))
    found |= {"done_before": before, "written": len(left)}
    found["cut_short"] = sum(talk.cut_short for talk in left)
    found["tokens"] = batch.new if batch else 0
    if batch:
        looped = batch.new - len(batch.seats)
        found |= {
            "tokens_per_second": batch.new / batch.whole,
            "seconds": batch.seconds,
            "prefill_seconds": batch.prefill_seconds,
            "accept_length": looped / batch.cycles if batch.cycles else 0.0,
        }
    return found


def _settings(verifier: Verifier, config: SynthConfig) -> dict[str, Any]:
    """What the rows depend on, as JSON gives it back."""
    tokenizer = verifier.tokenizer
    found = {
        "verifier": verifier.name,
        "tokenizer": None if tokenizer is None else tokenizer.fingerprint,
        "dtype": str(verifier.dtype),
        **dataclasses.asdict(config),
    }
    return json.loads(json.dumps(found))


class _Log:
    """The output: whole lines of one process, and which conversations it holds.

    Attributes:
        done: their ids.
    """

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path = path
        self._file = path.open("a+b")
        try:
            self.done = self._open(settings)
        except BaseException:
            self._file.close()
            raise

    def _open(self, settings: dict[str, Any]) -> set[str]:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(
                f"{self.path} is being written by another process; wait for it, or name another"
            ) from None
        self._file.seek(0)
        held = self._file.read()
        beside = self.path.with_name(f"{self.path.name}.settings.json")
        if not held:  # settings of a run that has written nothing bind nobody
            write_json(beside, settings)
            return set()
        if not beside.exists():
            raise RequestError(
                f"{self.path} holds something already, and there is no {beside.name} beside it to "
                "go on by; name another file"
            )
        begun = read_json(beside)
        other = [
            f"{key} was {begun.get(key)!r}, is {value!r}"
            for key, value in settings.items()
            if begun.get(key) != value
        ]
        if other:
            raise RequestError(f"{self.path} was begun with other settings: {'; '.join(other)}")
        whole = held.rfind(b"\n") + 1
        done = set()
        for number, line in enumerate(held[:whole].split(b"\n")[:-1], 1):
            try:
                done.add(json.loads(line)["id"])
            except (ValueError, KeyError, TypeError):
                raise RequestError(
                    f"{self.path} line {number} is no row that synth has written; remove it, or "
                    "name another file"
                ) from None
        self._file.truncate(whole)  # of a line that was broken off; it is written again
        return done

    def __enter__(self) -> "_Log":
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def write(self, row: dict[str, Any]) -> None:
        """Append a line."""
        self._file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
        self._file.flush()


class _Talk:
    """A conversation while it is answered.

    Attributes:
        row: what is asked.
        sampling: how it is answered.
        tokens: its text so far, the prompt of the turn that is answered now at its end.
        loss: spans of the text that the verifier wrote.
        finished: whether the last answer came to an end token.
        cut_short: a later turn did not fit.
    """

    def __init__(self, verifier: Verifier, config: SynthConfig, row: PromptRow):
        self.verifier, self.config, self.row = verifier, config, row
        self.sampling = config.sampling(row.id)
        self.answers: list[str] = []
        self.loss: list[tuple[int, int]] = []
        self.finished = self.cut_short = False
        self.tokens = self._prompt()

    @property
    def fits(self) -> bool:
        """Whether the text leaves room for an answer."""
        return len(self.tokens) + self.config.max_new_tokens <= self.config.length

    def seat(self) -> Seat:
        """The turn to be answered now, as a row takes it."""
        sampling = self.sampling
        last = len(self.answers) + 1 == len(self.row.turns)
        if self.config.go_on and not last:
            stops = self.verifier.config.eos_tokens
            sampling = dataclasses.replace(sampling, stop_tokens=stops)
        key = jax.random.key(sampling.seed)
        return Seat(self.tokens, sampling, key, self.config.max_new_tokens)

    def take(self, new: list[int]) -> bool:
        """Take the answer to this turn; whether there is another turn to be answered."""
        ends = self.verifier.config.eos_tokens
        at = next((i for i, token in enumerate(new) if token in ends), None)
        self.finished = at is not None
        self.loss.append((len(self.tokens), len(self.tokens) + len(new)))
        self.tokens = self.tokens + new
        if len(self.answers) + 1 == len(self.row.turns):
            return False
        assert self.verifier.tokenizer is not None
        self.answers.append(self.verifier.tokenizer.decode(new[:at]))
        text, self.tokens = self.tokens, self._prompt()
        if not self.fits:
            self.tokens, self.cut_short = text, True
            return False
        # Read again, a text may have other tokens: from the first of them on none is an answer's.
        pairs = enumerate(zip(text, self.tokens, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(text), len(self.tokens)))
        self.loss = [(a, min(b, same)) for a, b in self.loss if a < same]
        return True

    def line(self) -> dict[str, Any]:
        """The training row."""
        return {
            "id": self.row.id,
            "tokens": self.tokens,
            "loss": self.loss,
            "temperature": self.sampling.temperature,
            "seed": self.sampling.seed,
            "verifier": self.verifier.name,
            "dtype": str(self.verifier.dtype),
            "source": self.row.path.name,
            "finished": self.finished,
        }

    def _prompt(self) -> list[int]:
        """Token ids up to the turn that comes after the answers there are."""
        row, tokenizer = self.row, self.verifier.tokenizer
        turns = row.turns[: len(self.answers) + 1]
        prompt: Prompt
        if tokenizer is None or tokenizer.template is None or self.config.raw:
            if row.before:
                raise RequestError(
                    f"{row.where} holds messages, which need a chat template: {self.verifier.name} "
                    "has none, or raw was asked for; give a prompt"
                )
            prompt = "".join(a + b for a, b in zip(turns, [*self.answers, ""], strict=True))
        else:
            prompt = [{"role": role, "content": text} for role, text in row.before]
            for turn, answer in zip(turns, [*self.answers, None], strict=True):
                prompt.append({"role": "user", "content": turn})
                if answer is not None:
                    prompt.append({"role": "assistant", "content": answer})
        try:
            return encode_prompt(self.verifier, prompt, self.config.raw)
        except RequestError as error:
            raise RequestError(f"{row.where}: {error}") from None


class _Rows(Batch):
    """Rows that conversations are answered in, turn after turn.

    Attributes:
        new: tokens of the answers so far.
        cycles: that they took, summed over rows.
        whole: seconds since the first prompt was read.
    """

    def __init__(self, stages: DecodeStages, talks: Sequence[_Talk], rows: int, capacity: int):
        # As many rows whatever is left to do, so that a run that goes on computes the same.
        state = warm(stages, stages.make_state(rows, capacity))
        self.seats: list[Seat] = [talk.seat() for talk in talks]
        super().__init__(stages, self.seats, rows, capacity, None, state)
        self._talks = list(talks)
        self.new = self.cycles = 0
        self.whole = 0.0

    def harvest(self, row: int) -> Row:
        """A row's text where it is through; nobody reads it before."""
        return super().harvest(row) if self.seen["done"][row] else _GOING

    def answered(self) -> Generator[_Talk, None, None]:
        """Conversations as they end."""
        clock = time.perf_counter()
        while self.going:
            self.fill()
            self.cycle(CYCLES)
            for index in self.grown:
                row, self.results[index] = self.results[index], None
                if row is None:
                    continue
                self.new += len(row.tokens)
                self.cycles += row.cycles
                self.whole = time.perf_counter() - clock
                talk = self._talks[index]
                if talk.take(row.tokens):
                    self._waiting.append(len(self.seats))
                    self._talks.append(talk)
                    self.seats.append(talk.seat())
                    self.results.append(None)
                else:
                    yield talk


_GOING = Row([], [], None, 0, ())


def _rows(
    verifier: Verifier,
    drafter: Drafter | None,
    config: SynthConfig,
    speculation: Speculation | None,
    talks: Sequence[_Talk],
    rows: int,
) -> _Rows | None:
    """Rows for some conversations, compiled; None where there is none."""
    samplings = [Sampling(temperature=temperature) for temperature in config.temperatures]
    if config.go_on:
        # No end token stops this one; turns that another follows stop at them all the same.
        samplings.append(Sampling(stop_tokens=verifier.config.eos_tokens))
        verifier = copy.copy(verifier)
        verifier.config = dataclasses.replace(verifier.config, eos_tokens=())
    stages = make_stages(verifier, drafter, speculation, samplings)
    if not talks:
        return None
    return _Rows(stages, talks, rows, needed_capacity(config.length, 0, stages))
