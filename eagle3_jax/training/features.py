"""Kept readings: what the verifier says of packed rows, on disk, so that it reads each row once."""

import dataclasses
import functools
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Int

from checkpoints.tensors import read_json, write_json
from eagle3_jax.contracts import RequestError
from eagle3_jax.loop.learn import Reading, read_on_mesh
from eagle3_jax.training.data import Packed
from eagle3_jax.verifier import Verifier

_read = functools.partial(jax.jit, static_argnames="boundaries")(read_on_mesh)


class Readings:
    """The verifier's readings of packed rows, kept in a folder; rows are read when asked for first.

    A token takes (boundaries + 1) * width values. A killed process loses nothing but the rows it
    was about to write.

    Args:
        folder: made where missing; holds the readings of one verifier, of one packing.
        verifier: whose they are.
        packed: the rows.
        boundaries: of the features.

    Raises:
        RequestError: the folder holds readings of something else; says what differs.
    """

    def __init__(
        self, folder: Path, verifier: Verifier, packed: Packed, boundaries: tuple[int, ...]
    ):
        self.verifier, self.packed, self.boundaries = verifier, packed, tuple(boundaries)
        notes = {
            "features": dataclasses.asdict(verifier.spec(boundaries)),
            "dtype": str(verifier.dtype),
            "length": packed.tokens.shape[1],
            "tokens": zlib.crc32(np.ascontiguousarray(packed.tokens)),
            "starts": zlib.crc32(np.ascontiguousarray(packed.starts)),
        }
        notes["features"]["boundaries"] = list(boundaries)
        _match(folder / "readings.json", notes)
        width = verifier.config.width
        shape, kind = packed.tokens.shape, _KINDS[str(verifier.dtype)]
        self._features = _array(folder / "features.bin", kind, (*shape, len(boundaries) * width))
        self._hidden = _array(folder / "hidden.bin", kind, (*shape, width))
        self._best = _array(folder / "best.bin", np.int32, shape)
        self._kept = _array(folder / "kept.bin", np.bool_, shape[:1])

    def take(self, numbers: Int[np.ndarray, "n b"]) -> Reading:
        """Readings of some rows, [n b t …]; those that are missing are read now, b at a time."""
        missing = np.unique(numbers[~self._kept[numbers]])
        size = numbers.shape[1]
        for first in range(0, len(missing), size):
            rows = missing[first : first + size]
            # As many as ever, so that one shape compiles.
            asked = np.resize(rows, size)
            reading = _read(
                self.verifier,
                jnp.asarray(self.packed.tokens[asked]),
                jnp.asarray(self.packed.starts[asked]),
                self.boundaries,
            )
            self._features[rows] = np.asarray(reading.features)[: len(rows)]
            self._hidden[rows] = np.asarray(reading.hidden)[: len(rows)]
            self._best[rows] = np.asarray(reading.best)[: len(rows)]
            self._kept[rows] = True
        return Reading(
            features=jnp.asarray(self._features[numbers]),
            hidden=jnp.asarray(self._hidden[numbers]),
            best=jnp.asarray(self._best[numbers]),
        )


_KINDS = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def _match(path: Path, notes: dict) -> None:
    """Write what the folder holds, or compare it with what it is to hold.

    Raises:
        RequestError: they differ.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_json(path, notes)
        return
    before = read_json(path)
    other = [
        f"{key} was {before.get(key)!r}, is {value!r}"
        for key, value in notes.items()
        if before.get(key) != value
    ]
    if other:
        raise RequestError(
            f"{path.parent} keeps the readings of other rows or of another verifier: "
            f"{'; '.join(other)}; name another folder"
        )


def _array(path: Path, kind, shape: tuple[int, ...]) -> np.ndarray:
    """A file as an array; made, as zeros that take no space yet, where missing."""
    mode = "r+" if path.exists() else "w+"
    return np.memmap(path, np.dtype(kind), mode, shape=shape)
