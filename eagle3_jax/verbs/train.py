"""`eagle3 train`: a drafter from training rows."""

import dataclasses
import sys
from pathlib import Path

from eagle3_jax.configs import TrainConfig
from eagle3_jax.console import fields
from eagle3_jax.contracts import RequestError
from eagle3_jax.load import (
    load_drafter,
    load_verifier,
)
from eagle3_jax.training.start import DrafterShape
from eagle3_jax.training.trainer import train
from eagle3_jax.verbs.common import Dtype, Quantization, Result
from sharding.mesh import MeshShape, mesh_of
from sharding.processes import Processes, start_processes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Train a drafter.

    Attributes:
        verifier: a folder or a bundled name.
        data: training rows, a JSONL file.
        run: the run's folder, e.g. runs/NAME; the drafter is written into it.
        dtype: of the verifier's weights and activations.
        quantization: `int8` packs the verifier's weights, as in `eagle3 decode`.
        boundaries: of the features the drafter is fed; None is 2, L // 2, L - 3.
        train: how it is trained.
        drafter: its sizes; what is None follows the verifier.
        start: a drafter to start from, in place of a new one.
        readings: a folder that keeps what the verifier says of the rows, so that later epochs and
            runs need not read them again.
        resume: go on from the run's last checkpoint.
        mesh: devices that the verifier lies over.
        spread: over a mesh, the drafter's matrices and moments lie over its data axis; else they
            are whole on every device.
        processes: several processes, each started with the same words but its index.
        json: one JSON object on standard output, all else on standard error.
    """

    verifier: str = "tiny-kimi"
    data: Path
    run: Path
    dtype: Dtype = None
    quantization: Quantization = None
    boundaries: tuple[int, ...] | None = None
    train: TrainConfig = TrainConfig()
    drafter: DrafterShape = DrafterShape()
    start: str | None = None
    readings: Path | None = None
    resume: bool = False
    mesh: MeshShape = MeshShape()
    spread: bool = True
    processes: Processes = Processes()
    json: bool = False

    def execute(self) -> Result:
        """Train to the end, or go on with a run."""
        start_processes(self.processes)
        mesh = mesh_of(self.mesh)
        verifier = load_verifier(self.verifier, self.dtype, mesh, self.quantization)
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
            readings=self.readings,
            spread=self.spread,
        )
        return found, fields(found)
