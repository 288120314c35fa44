"""`eagle3 eval`: accept length and speed on sets of prompts."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import UseAppendAction

from eagle3_jax.configs import Sampling
from eagle3_jax.console import eval_table, progress
from eagle3_jax.contracts import RequestError
from eagle3_jax.training.evaluation import evaluate, read_prompts
from eagle3_jax.verbs.common import Dtype, Result, SamplingFlags, SpeculationFlags, load


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
