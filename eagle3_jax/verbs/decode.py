"""`eagle3 decode`: continue prompts, beside plain decoding where asked to."""

import ast
import dataclasses
import functools
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console, Group, RenderableType
from tyro.conf import Positional, UseAppendAction

from eagle3_jax.configs import Sampling
from eagle3_jax.console import Answer, decode_table, pieces, progress
from eagle3_jax.contracts import RequestError
from eagle3_jax.drafter import Drafter
from eagle3_jax.generation import (
    CYCLES,
    Output,
    encode_prompt,
    generate,
    make_batch,
    output_of,
)
from eagle3_jax.load import recommended_speculation
from eagle3_jax.training.evaluation import first_difference, not_chosen, pooled, reason
from eagle3_jax.verbs.common import (
    Dtype,
    Quantization,
    Result,
    SamplingFlags,
    SpeculationFlags,
    load,
    load_plain,
    shape_of,
)
from eagle3_jax.verifier import Verifier
from kernels_pallas import Backend
from sharding.mesh import MeshShape, mesh_of
from sharding.processes import Processes, start_processes

RUNS = 3
"""Timed runs of each way of decoding in a comparison; the median one counts."""


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
        quantization: `int8` packs the verifier's weights, with a scale an output; `stored` keeps a
            GGUF's blocks as they are.
        max_new_tokens: a text stops there or at an end token.
        rows: texts decoded side by side.
        capacity: cache slots a row; None is what the longest prompt needs.
        raw: do not put prompts through the chat template.
        speculation: what is drafted.
        sampling: how tokens are chosen.
        kernels: what attention and judging run on in a cycle; `mosaic_gpu` needs a GPU of compute
            capability 9.0.
        compare_plain: decode plainly too, and compare tokens and speed.
        plain_dtype: of plain decoding in the comparison; None is what the drafter's manifest
            recommends for it.
        mesh: devices that the verifier lies over.
        processes: several processes, each started with the same words but its index.
        json: one JSON object on standard output, all else on standard error.
    """

    prompt: Positional[tuple[str, ...]] = ()
    prompt_file: Annotated[tuple[tuple[Path, ...], ...], UseAppendAction] = ()
    verifier: str = "tiny-kimi"
    drafter: str | None = None
    no_drafter: bool = False
    dtype: Dtype = None
    quantization: Quantization = None
    max_new_tokens: int = 128
    rows: int = 8
    capacity: int | None = None
    raw: bool = False
    speculation: SpeculationFlags = SpeculationFlags()
    sampling: SamplingFlags = Sampling()
    kernels: Backend = "xla"
    compare_plain: bool = False
    plain_dtype: Dtype = None
    mesh: MeshShape = MeshShape()
    processes: Processes = Processes()
    json: bool = False

    def execute(self) -> Result:
        """Decode, and compare where asked to."""
        start_processes(self.processes)
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
        where = mesh_of(self.mesh), self.quantization
        verifier, drafters = load(self.verifier, sources, self.dtype, *where)
        drafter = next(iter(drafters.values()), None)
        speculation = self.speculation.over(drafter)
        common = {
            "prompts": prompts,
            "max_new_tokens": self.max_new_tokens,
            "rows": self.rows,
            "capacity": self.capacity,
            "raw": raw,
            "sampling": self.sampling,
            "kernels": self.kernels,
        }
        plainly = drafter is None or (speculation.depth == 0 and not self.compare_plain)
        label = "plain" if plainly else f"speculation ({shape_of(speculation)})"
        ways = {
            label: functools.partial(generate, verifier, drafter, speculation=speculation, **common)
        }
        dtypes = {label: str(verifier.dtype)}
        other = verifier
        if self.compare_plain:
            given = self.plain_dtype, self.quantization
            other = load_plain(self.verifier, verifier, drafters, *given)
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
        if self.compare_plain:
            for prompt, row in zip(prompts, found["rows"], strict=True):
                ids, new = encode_prompt(other, prompt, raw), row["tokens"]
                wrong = not_chosen(other, ids, new, self.sampling)
                row["differing_tokens"] = None if wrong is None else wrong / len(new)
                row["first_difference"] = first_difference(new, row["plain"]["tokens"])
        notes = [] if speculation.depth else plain_recommended(drafter)
        notes += comparison(found, speculation.sampled and self.sampling.temperature > 0)
        table = {name: (outputs[name].stats, dtypes[name]) for name in ways}
        return found, Group(*answers, decode_table(table, notes))

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
    lines = [f"speed ratio {found['speedup']:.2f} (median of {RUNS} runs in turn); {which}"]
    if all(row.get("differing_tokens") is not None for row in rows):
        count = sum(len(row["tokens"]) for row in rows)
        wrong = round(sum(row["differing_tokens"] * len(row["tokens"]) for row in rows))
        lines.append(
            f"plain decoding in {rows[0]['plain']['dtype']}, reading the same text, would have "
            f"chosen other tokens at {wrong} of {count} places ({wrong / count:.1%})"
        )
    if found["speedup"] < 1:
        lines.append("plain decoding is faster here, and the better setting")
    return lines


def plain_recommended(drafter: Drafter | None) -> list[str]:
    """A line where a drafter's manifest advises against it."""
    if drafter is None or recommended_speculation(drafter).depth:
        return []
    where = dict(drafter.recommended).get("measured_on")
    return [
        f"plain decoding is recommended for this pair{f' on {where}' if where else ''}; "
        "--speculation.depth N drafts all the same"
    ]


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
