"""Safetensors and JSON files, read and written whole, with errors a user can act on."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from checkpoints.sources import Entry
from eagle3_jax.contracts import LoadError

Tensors = dict[str, np.ndarray]

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "C64": np.complex64,
    "BOOL": np.bool_,
    **{f"I{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"U{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F6_E2M3": ml_dtypes.float6_e2m3fn,
    "F6_E3M2": ml_dtypes.float6_e3m2fn,
    "F4": ml_dtypes.float4_e2m1fn,
}
"""Every dtype of the safetensors format by its name there. Those from F8 on are known, not read."""

MOST_JSON = 1 << 28
"""Bytes of a JSON file that is still read; the largest tokenizers and indices have a tenth."""

BLOCK = 1 << 22
"""Elements looked at in one go where all are looked at, so that no second copy is made."""


class File:
    """One safetensors file as a source: its header is read now, a tensor when asked for.

    Attributes:
        path: the file.
        entries: every tensor's shape and dtype, by name.

    Raises:
        LoadError: the file is missing, truncated or no safetensors file.
    """

    def __init__(self, path: Path):
        self.path = path
        if not os.path.isfile(path):  # a directory, a pipe or a loop of links is there, too
            there = os.path.lexists(path)
            raise LoadError(
                f"{path} is no file" if there else f"{path.name} is missing from {path.parent}"
            )
        try:
            # Not mapped into memory: a file cut short meanwhile is an error then, not a crash.
            self._file = safetensors.safe_open(path, "np", backend="pread")
            slices = {name: self._file.get_slice(name) for name in self._file.keys()}
        except (safetensors.SafetensorError, OSError) as error:
            if _pointer(path):
                raise LoadError(
                    f"{path} is the pointer of Git LFS, not the file; run git lfs pull there"
                ) from None
            raise LoadError(
                f"{path} ({path.stat().st_size} bytes) is no whole safetensors file: "
                f"{one_line(error)}; it may be truncated, copy or download it again"
            ) from None
        self.entries = {
            name: Entry(tuple(x.get_shape()), np.dtype(DTYPES[x.get_dtype()]))
            for name, x in slices.items()
        }

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype (bfloat16 through ml_dtypes).

        Raises:
            LoadError: its bytes are gone or of a dtype that is not read, or it holds a NaN or an
                infinity.
        """
        try:
            value = self._file.get_tensor(name)
        except AttributeError:  # numpy has no such dtype
            raise LoadError(
                f"{self.path} holds {some([name])} in {self.entries[name].dtype}, which is not "
                "read; expected bfloat16, float16 or float32 weights"
            ) from None
        except (safetensors.SafetensorError, OSError) as error:
            raise LoadError(
                f"{self.path} cannot be read at {some([name])}: {one_line(error)}"
            ) from None
        if not finite(value):
            raise LoadError(
                f"{self.path} holds NaN or infinite values in {some([name])}; expected finite "
                "weights, the checkpoint is damaged or its training diverged"
            )
        return value


def _pointer(path: Path) -> bool:
    """Whether a file is what Git leaves in place of a large one that was not fetched."""
    with path.open("rb") as file:
        return file.read(40).startswith(b"version https://git-lfs.github.com/")


def read_tensors(path: Path) -> Tensors:
    """Every tensor of one file, in its stored dtype.

    Raises:
        LoadError: as `File` and its `read`.
    """
    file = File(path)
    return {name: file.read(name) for name in file.entries}


def finite(value: np.ndarray) -> bool:
    """Whether a floating tensor holds no NaN and no infinity; true for whole numbers."""
    if value.dtype.kind in "biu":
        return True
    flat = value.reshape(-1)
    blocks = range(0, flat.size, BLOCK)
    return all(bool(np.isfinite(flat[start : start + BLOCK]).all()) for start in blocks)


def some(names: Iterable[str], most: int = 4) -> str:
    """A few names and how many more there are, in one line whatever they hold."""
    names = list(names)
    shown = [
        name if name.isprintable() and len(name) < 400 else ascii(name)[:400]
        for name in names[:most]
    ]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(shown) + more


def one_line(error: object, most: int = 300) -> str:
    """A message of another library as one line, cut where it is long."""
    text = " ".join(str(error).split())
    return text if len(text) <= most else text[:most] + "..."


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write beside the place and rename in, so that a file is whole or absent."""
    beside = path.with_name(f".{path.name}.part")
    contiguous = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    safetensors.numpy.save_file(contiguous, beside, metadata={"format": "pt"})
    beside.chmod(0o644)
    beside.replace(path)


def read_text(path: Path) -> str:
    """A text file in UTF-8.

    Raises:
        LoadError: missing, no file, no text, or larger than any of a model's is.
    """
    try:
        if os.path.lexists(path) and not os.path.isfile(path):
            raise LoadError(f"{path} is no file")
        if (size := path.stat().st_size) > MOST_JSON:
            raise LoadError(
                f"{path} has {size} bytes; expected at most {MOST_JSON}, it is another file"
            )
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise LoadError(f"{path.name} is missing from {path.parent}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} cannot be read: {one_line(error)}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        LoadError: missing, damaged, no object, or a key is there twice with two values.
    """
    text = read_text(path)
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path} is no JSON file: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds {type(value).__name__}; expected a JSON object")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's pairs as a dictionary; a key that is there twice must say the same."""
    value = {}
    for key, item in pairs:
        if key in value and value[key] != item:
            raise ValueError(f"the key {ascii(key)} is there twice, with different values")
        value[key] = item
    return value


def write_json(path: Path, value: Any) -> None:
    """Write JSON beside its place and rename it in, so that it is never half there."""
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)
