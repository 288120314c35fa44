"""`eagle3 info`: versions, devices, backends; what a verifier or drafter is."""

import dataclasses

from eagle3_jax.console import fields
from eagle3_jax.contracts import RequestError
from eagle3_jax.describe import (
    describe_drafter,
    describe_library,
    describe_part,
    describe_verifier,
)
from eagle3_jax.load import (
    find_drafter,
    load_drafter,
    load_verifier,
)
from eagle3_jax.verbs.common import Quantization, Result
from kernels_pallas import Backend, check_backend
from sharding.mesh import MeshShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Info:
    """Show versions, devices and backends, and what a verifier or drafter is.

    Attributes:
        verifier: a folder or a bundled name.
        drafter: a folder or a bundled name; checked against the verifier where both are given.
        quantization: `int8` packs the verifier's weights, as in `eagle3 decode`.
        mesh: devices that the verifier would lie over; they need not be there.
        kernels: what attention and judging are to run on in a cycle, as in `eagle3 decode`.
        json: one JSON object on standard output, all else on standard error.
    """

    verifier: str | None = None
    drafter: str | None = None
    quantization: Quantization = None
    kernels: Backend = "xla"
    mesh: MeshShape = MeshShape()
    json: bool = False

    def execute(self) -> Result:
        """Collect what there is to know."""
        try:
            found = describe_library(check_backend(self.kernels))
        except ValueError as error:
            raise RequestError(str(error)) from None
        verifier = None
        if self.verifier is not None:
            verifier = load_verifier(self.verifier, quantization=self.quantization)
            found["verifier"] = describe_verifier(verifier)
            if self.mesh != MeshShape():
                found["each_device"] = describe_part(verifier, self.mesh)
        if self.drafter is not None:
            if verifier is not None:
                load_drafter(self.drafter, verifier)
            found["drafter"] = describe_drafter(find_drafter(self.drafter), verifier)
        return found, fields(found)
