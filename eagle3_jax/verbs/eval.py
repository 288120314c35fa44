"""`eagle3 eval`: accept length and speed on sets of prompts."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import UseAppendAction

from eagle3_jax.configs import Sampling, Speculation
from eagle3_jax.console import eval_table, progress
from eagle3_jax.contracts import RequestError
from eagle3_jax.training.evaluation import accept_lengths, evaluate, read_prompts
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
from sharding.mesh import MeshShape, mesh_of
from sharding.processes import Processes, start_processes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eval:
    """Measure accept length and speed on sets of prompts, beside plain decoding.

    Attributes:
        prompts: JSONL files, each a set; a row is {"turns": [text, …]} or {"prompt": text}.
        verifier: a folder or a bundled name.
        drafter: folders or bundled names; none is the one that comes with the verifier.
        dtype: of weights and activations; None is what the drafters' manifests recommend.
        quantization: `int8` packs the verifier's weights, with a scale an output; `stored` keeps a
            GGUF's blocks as they are.
        plain_dtype: of plain decoding; None is what the manifests recommend for it.
        same_dtype: where plain decoding has its own dtype, run it in the drafters' too.
        speed: measure speed, one row at a time; without it accept length alone, and quickly.
        rows: texts decoded side by side where speed is not measured; None is 8.
        max_new_tokens: of one answer.
        limit: conversations of a set; the first ones.
        speculation: what is drafted.
        settings: shapes to measure each drafter with, e.g. depth=4 or depth=4,topk=4,nodes=15; in
            the place of speculation's depth, topk and nodes.
        sampling: how tokens are chosen; conversation i draws from the seed plus i.
        mesh: devices that the verifier lies over.
        processes: several processes, each started with the same words but its index.
        json: one JSON object on standard output, all else on standard error.
    """

    prompts: Annotated[tuple[tuple[Path, ...], ...], UseAppendAction]
    verifier: str = "tiny-kimi"
    drafter: Annotated[tuple[tuple[str, ...], ...], UseAppendAction] = ()
    dtype: Dtype = None
    quantization: Quantization = None
    plain_dtype: Dtype = None
    same_dtype: bool = True
    speed: bool = True
    rows: int | None = None
    max_new_tokens: int = 128
    limit: int | None = None
    speculation: SpeculationFlags = SpeculationFlags()
    settings: Annotated[tuple[str, ...], UseAppendAction] = ()
    sampling: SamplingFlags = Sampling()
    mesh: MeshShape = MeshShape()
    processes: Processes = Processes()
    json: bool = False

    def execute(self) -> Result:
        """Evaluate every drafter on every set."""
        start_processes(self.processes)
        sets = {}
        paths = sum(self.prompts, ())
        if not paths:
            raise RequestError("eval needs --prompts FILE, a JSONL file of prompts")
        for path in paths:
            if path.stem in sets:
                raise RequestError(f"two prompt files are called {path.stem}; sets go by that name")
            sets[path.stem] = read_prompts(path)
        if self.speed and self.rows is not None:
            raise RequestError("speed is measured one row at a time; --rows is for --no-speed")
        if not self.speed and self.plain_dtype is not None:
            raise RequestError("--no-speed decodes nothing plainly; leave out --plain-dtype")
        shapes = self._shapes()
        sources = sum(self.drafter, ()) or (None,)
        where = mesh_of(self.mesh), self.quantization
        verifier, loaded = load(self.verifier, sources, self.dtype, *where)
        drafters, speculation = {}, {}
        for name, drafter in loaded.items():
            named = {f"{name} {label}": shape for label, shape in shapes.items()}
            speculation |= named or {name: self.speculation.over(drafter)}
            drafters |= dict.fromkeys(named or (name,), drafter)
        common = {
            "max_new_tokens": self.max_new_tokens,
            "speculation": speculation,
            "sampling": self.sampling,
            "limit": self.limit,
        }
        with progress("evaluating") as show:
            if self.speed:
                given = self.plain_dtype, self.quantization
                found = evaluate(
                    verifier,
                    drafters,
                    sets,
                    plain_verifier=load_plain(self.verifier, verifier, loaded, *given),
                    same_dtype=self.same_dtype,
                    progress=show,
                    **common,
                )
            else:
                rows = 8 if self.rows is None else self.rows
                found = accept_lengths(verifier, drafters, sets, rows=rows, progress=show, **common)
        by_drafter = found.get("drafters") or {next(iter(drafters)): found}
        return found, eval_table(by_drafter, [fastest(by_drafter)] if self.speed else [])

    def _shapes(self) -> dict[str, Speculation]:
        """The settings to measure every drafter with, by what they are called."""
        shapes: dict[str, Speculation] = {}
        for text in self.settings:
            shape = self.speculation.whole(text)
            if shape_of(shape) in shapes:
                raise RequestError(f"the settings {shape_of(shape)} are given twice")
            shapes[shape_of(shape)] = shape
        given = [x for x in ("depth", "topk", "nodes") if getattr(self.speculation, x) is not None]
        if shapes and given:
            raise RequestError(f"--settings name whole shapes; leave out --speculation.{given[0]}")
        return shapes


def fastest(drafters: Mapping[str, Mapping[str, Any]]) -> str:
    """A line on which setting is the fastest; plain decoding is one."""
    slow = slower(drafters)
    if slow is not None:
        return f"{slow}; plain decoding is the best setting"
    name, found = max(drafters.items(), key=lambda item: item[1]["mean"]["speedup"])
    return f"fastest: {name}, speedup {found['mean']['speedup']:.2f} over plain decoding"


def slower(drafters: Mapping[str, Mapping[str, Any]]) -> str | None:
    """A line where even the best drafter is slower than plain decoding."""
    name, found = max(drafters.items(), key=lambda item: item[1]["mean"]["speedup"])
    speedup = found["mean"]["speedup"]
    if speedup >= 1:
        return None
    best = "speculation" if len(drafters) == 1 else f"the best drafter, {name},"
    return f"{best} is slower than plain decoding here: speedup {speedup:.2f}"
