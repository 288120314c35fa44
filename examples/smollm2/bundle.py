"""Write SmolLM2's drafter as it is bundled: bfloat16, small files, the recommendation.

python examples/smollm2/bundle.py --run R --speculation.depth 3 --dtype bfloat16 \\
    --plain-dtype float32
"""

import dataclasses
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import tyro

from checkpoints import drafters
from eagle3_jax.configs import Speculation
from eagle3_jax.load import BUNDLED, find_drafter

Dtype = Literal["float32", "bfloat16"]

MOST_FILE, MOST = 8 << 20, 24 << 20
"""Bytes of a file and of the folder that the project keeps."""

HEADERS = 1 << 16
"""Bytes left in a file for what stands beside the arrays."""


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Bundle the best drafter of an `eagle3 train` run.

    Attributes:
        run: its folder, or a drafter's.
        speculation: the fastest shape measured; depth 0 where plain decoding is faster.
        dtype: of the speculating pair, the fastest measured.
        plain_dtype: of plain decoding, the fastest measured.
        measured_on: the machine that all that was measured on, for the reader.
        out: where to.
    """

    run: Path
    speculation: Speculation
    dtype: Dtype
    plain_dtype: Dtype
    measured_on: str = "two cores of an x86-64 CPU"
    out: Path = BUNDLED / "smollm2" / "drafter"

    def go(self) -> None:
        """The run's exported drafter, in bfloat16 but for its norms, with the recommendation."""
        manifest, arrays = drafters.read_drafter(find_drafter(self.run))
        stored = {
            name: value.astype(ml_dtypes.bfloat16)
            if value.dtype == np.float32 and "norm" not in name
            else value
            for name, value in arrays.items()
        }
        shape = dataclasses.asdict(self.speculation)
        unset = dataclasses.asdict(Speculation())
        recommended = {
            "speculation": {k: v for k, v in shape.items() if k == "depth" or v != unset[k]},
            "dtype": self.dtype,
            "plain_dtype": self.plain_dtype,
            "measured_on": self.measured_on,
        }
        size = sum(value.nbytes for value in stored.values())
        assert size <= MOST - HEADERS, f"{size} bytes; a drafter of at most {MOST} is bundled"
        drafters.write_drafter(
            self.out,
            dataclasses.replace(manifest, recommended=recommended),
            stored,
            most_bytes=MOST_FILE - HEADERS,
        )
        sizes = {path.name: path.stat().st_size for path in sorted(self.out.iterdir())}
        print(*(f"{name} {size:,}" for name, size in sizes.items()), sep="\n")
        assert max(sizes.values()) <= MOST_FILE and sum(sizes.values()) <= MOST


if __name__ == "__main__":
    tyro.cli(Bundle).go()
