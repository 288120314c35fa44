"""The verbs of the command line: each one's flags, and what it calls in the library.

A verb's `execute` returns its JSON object and what is shown in its place without `--json`.
"""

import ast
import dataclasses
import functools
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console, Group, RenderableType
from tyro.conf import Positional, UseAppendAction

from checkpoints.drafters import read_manifest
from eagle3_jax.configs import Sampling, Speculation, TrainConfig
from eagle3_jax.console import Answer, decode_table, eval_table, fields, pieces, progress
from eagle3_jax.contracts import LoadError, RequestError
from eagle3_jax.describe import describe_drafter, describe_library, describe_verifier
from eagle3_jax.drafter import Drafter
from eagle3_jax.generation import CYCLES, Output, generate, make_batch, output_of
from eagle3_jax.load import (
    find_drafter,
    load_drafter,
    load_verifier,
    recommended_speculation,
)
from eagle3_jax.training.evaluation import evaluate, pooled, read_prompts, reason
from eagle3_jax.training.trainer import DrafterShape, train
from eagle3_jax.verifier import Verifier

Dtype = Literal["float32", "bfloat16"] | None
Result = tuple[dict[str, Any], RenderableType]
SamplingFlags = Annotated[Sampling, UseAppendAction]
"""What is several is given one by one, so that no flag takes the prompts behind it."""

RUNS = 3
"""Timed runs of each way of decoding in a comparison; the median one counts."""


@dataclasses.dataclass(frozen=True)
class SpeculationFlags:
    """How many tokens are drafted in a cycle.

    Attributes:
        depth: tokens along one path; None is what the drafter's manifest recommends.
        topk: children a node gets; 1 is a chain.
        nodes: drafted nodes kept, the root not counted; a tree of another depth or topk than the
            recommended one has to name it.
        sampled: draw candidates from the drafter, in place of its likeliest.
        block: judge a chain of sampled candidates as a whole.
    """

    depth: int | None = None
    topk: int | None = None
    nodes: int | None = None
    sampled: bool = False
    block: bool = True

    def over(self, drafter: Drafter | None) -> Speculation:
        """What the drafter recommends, with what was given put over it."""
        unset = SpeculationFlags()
        given = {k: value for k, value in vars(self).items() if value != getattr(unset, k)}
        if given and drafter is None:
            raise RequestError(f"speculation.{next(iter(given))} was given, but no drafter")
        if "depth" in given or "topk" in given:
            given.setdefault("nodes", None)  # the recommended number belongs to its own shape
        return dataclasses.replace(recommended_speculation(drafter), **given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode:
    """Continue prompts with speculation.

    Attributes:
        prompt: texts to continue; some Python source where there is none.
        prompt_file: files that each hold a prompt.
        verifier: a folder or a bundled name.
        drafter: a folder or a bundled name; None is the one that comes with the verifier.
        no_drafter: plain decoding.
        dtype: of weights and activations; None is what the drafter's manifest recommends.
        max_new_tokens: a text stops there or at an end token.
        rows: texts decoded side by side.
        capacity: cache slots a row; None is what the longest prompt needs.
        raw: do not put prompts through the chat template.
        speculation: what is drafted.
        sampling: how tokens are chosen.
        compare_plain: decode plainly too, and compare tokens and speed.
        plain_dtype: of plain decoding in the comparison; None is the same.
        json: one JSON object on standard output, all else on standard error.
    """

    prompt: Positional[tuple[str, ...]] = ()
    prompt_file: Annotated[tuple[tuple[Path, ...], ...], UseAppendAction] = ()
    verifier: str = "tiny-kimi"
    drafter: str | None = None
    no_drafter: bool = False
    dtype: Dtype = None
    max_new_tokens: int = 128
    rows: int = 8
    capacity: int | None = None
    raw: bool = False
    speculation: SpeculationFlags = SpeculationFlags()
    sampling: SamplingFlags = Sampling()
    compare_plain: bool = False
    plain_dtype: Dtype = None
    json: bool = False

    def execute(self) -> Result:
        """Decode, and compare where asked to."""
        if self.no_drafter and (self.drafter is not None or self.compare_plain):
            other = "--compare-plain" if self.compare_plain else "--drafter"
            raise RequestError(f"--no-drafter is plain decoding; leave out {other}")
        if self.plain_dtype is not None and not self.compare_plain:
            raise RequestError("--plain-dtype is for --compare-plain; give both")
        prompts = [*self.prompt, *map(read_text, sum(self.prompt_file, ()))]
        # The default prompt is the beginning of a file, not a message.
        raw = self.raw or not prompts
        prompts = prompts or [default_prompt()]
        sources = () if self.no_drafter else (self.drafter,)
        verifier, drafters = load(self.verifier, sources, self.dtype)
        drafter = next(iter(drafters.values()), None)
        speculation = self.speculation.over(drafter)
        common = {
            "prompts": prompts,
            "max_new_tokens": self.max_new_tokens,
            "rows": self.rows,
            "capacity": self.capacity,
            "raw": raw,
            "sampling": self.sampling,
        }
        label = "plain" if drafter is None else f"speculation ({shape_of(speculation)})"
        ways = {
            label: functools.partial(generate, verifier, drafter, speculation=speculation, **common)
        }
        dtypes = {label: str(verifier.dtype)}
        if self.compare_plain:
            other = verifier
            if self.plain_dtype not in (None, str(verifier.dtype)):
                other = load_verifier(self.verifier, self.plain_dtype)
            ways["plain"] = functools.partial(generate, other, None, **common)
            dtypes["plain"] = str(other.dtype)
        answers: list[RenderableType] = []
        if len(prompts) == 1 and sys.stdout.isatty() and not (self.json or self.compare_plain):
            batch = make_batch(verifier, drafter, speculation=speculation, **common)
            answer = Answer(prompts[0] + _gap(verifier, raw), ())
            answer.live(Console(highlight=False), batch.pieces(CYCLES), verifier.tokenizer)
            outputs = {label: output_of(batch)}
        else:
            outputs = self._decode(ways, len(prompts))
            answers = self._answers(prompts, raw, verifier, outputs[label])
        found = as_json(list(outputs.values()), list(dtypes.values()))
        return found, Group(
            *answers,
            decode_table(
                {name: (outputs[name].stats, dtypes[name]) for name in ways},
                comparison(found, speculation.sampled and self.sampling.temperature > 0),
            ),
        )

    def _decode(self, ways: Mapping[str, Any], prompts: int) -> dict[str, Output]:
        """Every way's output; of several runs in turn, after one to warm up, the median one."""
        rounds = RUNS + 1 if self.compare_plain else 1
        runs: dict[str, list[Output]] = {name: [] for name in ways}
        total = rounds * len(ways) * prompts
        with progress("decoding") as show:
            for turn in range(rounds):
                for i, (name, way) in enumerate(ways.items()):
                    before = (turn * len(ways) + i) * prompts
                    tell = functools.partial(_tell, show, before, total)
                    runs[name].append(way(progress=tell))
        return {name: median_run(found[rounds > 1 :]) for name, found in runs.items()}

    def _answers(self, prompts, raw, verifier: Verifier, output: Output) -> list[RenderableType]:
        many = len(prompts) > 1
        return [
            Answer(
                prompt + _gap(verifier, raw),
                pieces(row, verifier.tokenizer),
                f"prompt {i} of {len(prompts)}" if many else "",
                legend=i == len(prompts),
            )
            for i, (prompt, row) in enumerate(zip(prompts, output.rows, strict=True), 1)
        ]


def _gap(verifier: Verifier, raw: bool) -> str:
    """What stands between a prompt and its new text: an answer begins a new paragraph."""
    chat = verifier.tokenizer is not None and verifier.tokenizer.template is not None
    return "\n\n" if chat and not raw else ""


def _tell(show, before: int, total: int, done: int) -> None:
    show(before + done, total)


def median_run(runs: Sequence[Output]) -> Output:
    """The run of median speed."""
    return sorted(runs, key=lambda run: run.stats.tokens_per_second)[len(runs) // 2]


def as_json(outputs: Sequence[Output], dtypes: Sequence[str]) -> dict[str, Any]:
    """The JSON object of `decode`: of one way, or of speculation and plain decoding.

    A row's counts are its own; its times are those of the whole run, in which its tokens a second
    are its share.
    """

    def part(output: Output, i: int, dtype: str) -> dict[str, Any]:
        stats = pooled([dataclasses.replace(output, rows=[output.rows[i]])])
        return {
            "tokens": output.rows[i].tokens,
            "text": output.rows[i].text,
            "stats": dataclasses.asdict(stats),
            "dtype": dtype,
        }

    rows = [part(outputs[0], i, dtypes[0]) for i in range(len(outputs[0].rows))]
    found: dict[str, Any] = {"rows": rows}
    if len(outputs) > 1:
        for i, row in enumerate(rows):
            plain = part(outputs[1], i, dtypes[1])
            del plain["text"]
            row["plain"] = plain
            row["same_tokens"] = row["tokens"] == plain["tokens"]
        speeds = [output.stats.tokens_per_second for output in outputs]
        found["speedup"] = speeds[0] / speeds[1] if speeds[1] else 0.0
    return found


def shape_of(speculation: Speculation) -> str:
    """A chain or tree in a few words."""
    depth = f"depth {speculation.depth}"
    if speculation.topk == 1:
        return depth
    return f"{depth}, topk {speculation.topk}, nodes {speculation.nodes}"


def comparison(found: Mapping[str, Any], sampled: bool = False) -> list[str]:
    """Lines on speed ratio and sameness, where plain decoding ran too.

    Args:
        found: the JSON object.
        sampled: candidates were drawn, so that the texts are other draws than plain decoding's.
    """
    if "speedup" not in found:
        return []
    rows = found["rows"]
    same = sum(row["same_tokens"] for row in rows)
    which = "the tokens are the same" if same else "the tokens differ"
    if len(rows) > 1:
        which = f"the tokens are the same in {same} of {len(rows)} texts"
    if sampled:
        which += " (sampled candidates give another draw of the same distribution)"
    return [f"speed ratio {found['speedup']:.2f} (median of {RUNS} runs in turn); {which}"]


def read_text(path: Path) -> str:
    """A prompt file.

    Raises:
        RequestError: it cannot be read, or is empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"prompt file {path} cannot be read: {reason(error)}") from None
    if not text:
        raise RequestError(f"prompt file {path} is empty: there is no token to continue from")
    return text


FALLBACK_PROMPT = '''import os


def read_lines(path):
    """Return the lines of a file, without their line breaks."""
    with open(path) as file:
'''


def default_prompt() -> str:
    """The beginning of a standard library module that tiny-kimi was not trained on."""
    for name in ("glob.py", "sched.py"):
        path = Path(sysconfig.get_paths()["stdlib"]) / name
        try:
            source = path.read_text(encoding="utf-8")
            first = ast.parse(source).body[0]
        except (OSError, ValueError, SyntaxError, IndexError):
            continue
        lines = source.splitlines(keepends=True)[first.end_lineno or 0 :]
        return "".join(lines[:25]).lstrip("\n")
    return FALLBACK_PROMPT


def load(
    verifier: str, drafters: Sequence[str | None], dtype: str | None
) -> tuple[Verifier, dict[str, Drafter]]:
    """A verifier, and drafters for it by the source they were named by.

    Args:
        verifier: its source.
        drafters: their sources; None is the drafter that comes with the verifier.
        dtype: None is what the drafters' manifests recommend, where they agree.

    Raises:
        RequestError: no drafter comes with the verifier, or one is named twice.
        LoadError, ContractError: as loading does.
    """
    sources = [verifier if source is None else source for source in drafters]
    if len(set(sources)) < len(sources):
        raise RequestError("a drafter is named twice")
    try:
        folders = [find_drafter(source) for source in sources]
    except LoadError:
        load_verifier(verifier, dtype)  # where its own source is wrong, this says so
        if None in drafters:
            raise RequestError(
                f"no drafter comes with the verifier {verifier}; name one with --drafter"
            ) from None
        raise
    if dtype is None:
        recommended = {read_manifest(folder).recommended.get("dtype") for folder in folders}
        dtype = recommended.pop() if len(recommended) == 1 else None
    loaded = load_verifier(verifier, dtype)
    return loaded, {source: load_drafter(source, loaded) for source in sources}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Train a drafter.

    Attributes:
        verifier: a folder or a bundled name.
        data: training rows, a JSONL file.
        run: the run's folder, e.g. runs/NAME; the drafter is written into it.
        dtype: of the verifier's weights and activations.
        boundaries: of the features the drafter is fed; None is 2, L // 2, L - 3.
        train: how it is trained.
        drafter: its sizes; what is None follows the verifier.
        start: a drafter to start from, in place of a new one.
        resume: go on from the run's last checkpoint.
        json: one JSON object on standard output, all else on standard error.
    """

    verifier: str = "tiny-kimi"
    data: Path
    run: Path
    dtype: Dtype = None
    boundaries: tuple[int, ...] | None = None
    train: TrainConfig = TrainConfig()
    drafter: DrafterShape = DrafterShape()
    start: str | None = None
    resume: bool = False
    json: bool = False

    def execute(self) -> Result:
        """Train to the end, or go on with a run."""
        verifier = load_verifier(self.verifier, self.dtype)
        start = None
        if self.start is not None:
            if self.boundaries is not None or self.drafter != DrafterShape():
                raise RequestError(
                    "--start takes sizes and boundaries of the drafter it names; leave out "
                    "--boundaries and --drafter.*"
                )
            start = load_drafter(self.start, verifier)
        found = train(
            verifier,
            self.data,
            self.run,
            self.train,
            self.drafter,
            self.boundaries,
            progress=sys.stderr.isatty(),
            resume=self.resume,
            start=start,
        )
        return found, fields(found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eval:
    """Measure accept length and speed on sets of prompts, one row at a time.

    Attributes:
        prompts: JSONL files, each a set; a row is {"turns": [text, …]} or {"prompt": text}.
        verifier: a folder or a bundled name.
        drafter: folders or bundled names; none is the one that comes with the verifier.
        dtype: of weights and activations; None is what the drafters' manifests recommend.
        max_new_tokens: of one answer.
        limit: conversations of a set; the first ones.
        speculation: what is drafted.
        sampling: how tokens are chosen; conversation i draws from the seed plus i.
        json: one JSON object on standard output, all else on standard error.
    """

    prompts: Annotated[tuple[tuple[Path, ...], ...], UseAppendAction]
    verifier: str = "tiny-kimi"
    drafter: Annotated[tuple[tuple[str, ...], ...], UseAppendAction] = ()
    dtype: Dtype = None
    max_new_tokens: int = 128
    limit: int | None = None
    speculation: SpeculationFlags = SpeculationFlags()
    sampling: SamplingFlags = Sampling()
    json: bool = False

    def execute(self) -> Result:
        """Evaluate every drafter on every set."""
        sets = {}
        paths = sum(self.prompts, ())
        if not paths:
            raise RequestError("eval needs --prompts FILE, a JSONL file of prompts")
        for path in paths:
            if path.stem in sets:
                raise RequestError(f"two prompt files are called {path.stem}; sets go by that name")
            sets[path.stem] = read_prompts(path)
        verifier, drafters = load(self.verifier, sum(self.drafter, ()) or (None,), self.dtype)
        settings = {name: self.speculation.over(drafter) for name, drafter in drafters.items()}
        with progress("evaluating") as show:
            found = evaluate(
                verifier,
                drafters,
                sets,
                max_new_tokens=self.max_new_tokens,
                speculation=settings,
                sampling=self.sampling,
                limit=self.limit,
                progress=show,
            )
        by_drafter = found.get("drafters") or {next(iter(drafters)): found}
        return found, eval_table(by_drafter, slower(by_drafter))


def slower(drafters: Mapping[str, Mapping[str, Any]]) -> str | None:
    """A line where even the best drafter is slower than plain decoding."""
    name, found = max(drafters.items(), key=lambda item: item[1]["mean"]["speedup"])
    speedup = found["mean"]["speedup"]
    if speedup >= 1:
        return None
    best = "speculation" if len(drafters) == 1 else f"the best drafter, {name},"
    return f"{best} is slower than plain decoding here: speedup {speedup:.2f}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Info:
    """Show versions, devices and backends, and what a verifier or drafter is.

    Attributes:
        verifier: a folder or a bundled name.
        drafter: a folder or a bundled name; checked against the verifier where both are given.
        json: one JSON object on standard output, all else on standard error.
    """

    verifier: str | None = None
    drafter: str | None = None
    json: bool = False

    def execute(self) -> Result:
        """Collect what there is to know."""
        found = describe_library()
        verifier = None
        if self.verifier is not None:
            verifier = load_verifier(self.verifier)
            found["verifier"] = describe_verifier(verifier)
        if self.drafter is not None:
            if verifier is not None:
                load_drafter(self.drafter, verifier)
            found["drafter"] = describe_drafter(find_drafter(self.drafter), verifier)
        return found, fields(found)


VERBS: dict[str, type] = {"decode": Decode, "train": Train, "eval": Eval, "info": Info}
"""What `eagle3` can do."""
