"""`eagle3 synth`: training rows, by letting the verifier answer prompts."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import UseAppendAction

from eagle3_jax.console import fields, progress
from eagle3_jax.contracts import RequestError
from eagle3_jax.load import load_verifier
from eagle3_jax.training.synth import SynthConfig, synthesise
from eagle3_jax.verbs.common import Dtype, Quantization, Result, SpeculationFlags, load
from sharding.mesh import MeshShape, mesh_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Synth:
    """Answer prompts with the verifier: rows to train its drafter on.

    Attributes:
        prompts: JSONL files; a row is {"prompt": text}, {"turns": [text, …]} or
            {"messages": [{"role", "content"}, …]}.
        out: JSONL file of the rows; a run that was stopped goes on with it.
        verifier: a folder or a bundled name.
        drafter: a folder or a bundled name; None is plain decoding.
        dtype: of weights and activations; None is what the drafter's manifest recommends.
        quantization: `int8` packs the verifier's weights, as in `eagle3 decode`.
        rows: conversations answered side by side.
        limit: rows of the file at most; the first conversations.
        synth: what the rows are.
        speculation: what is drafted.
        mesh: devices that the verifier lies over.
        json: one JSON object on standard output, all else on standard error.
    """

    prompts: Annotated[tuple[tuple[Path, ...], ...], UseAppendAction]
    out: Path
    verifier: str = "tiny-kimi"
    drafter: str | None = None
    dtype: Dtype = None
    quantization: Quantization = None
    rows: int = 64
    limit: int | None = None
    synth: Annotated[SynthConfig, tyro.conf.arg(name="")] = SynthConfig()
    speculation: SpeculationFlags = SpeculationFlags()
    mesh: MeshShape = MeshShape()
    json: bool = False

    def execute(self) -> Result:
        """Answer what the file does not hold yet."""
        paths = sum(self.prompts, ())
        if not paths:
            raise RequestError("synth needs --prompts FILE, a JSONL file of prompts")
        drafter, where = None, (mesh_of(self.mesh), self.quantization)
        if self.drafter is None:
            verifier = load_verifier(self.verifier, self.dtype, *where)
        else:
            verifier, drafters = load(self.verifier, (self.drafter,), self.dtype, *where)
            drafter = drafters[self.drafter]
        speculation = self.speculation.over(drafter)
        with progress("answering") as show:
            found = synthesise(
                verifier,
                drafter,
                paths,
                self.out,
                self.synth,
                rows=self.rows,
                limit=self.limit,
                speculation=speculation,
                progress=show,
            )
        return found, fields(found)
