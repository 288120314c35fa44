"""Safetensors files, read and written whole, with errors a user can act on."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from eagle3_jax.contracts import LoadError

Tensors = dict[str, np.ndarray]


def read_tensors(path: Path) -> Tensors:
    """Every tensor of one file, in its stored dtype (bfloat16 through ml_dtypes).

    Raises:
        LoadError: the file is missing, truncated or no safetensors file, or holds a NaN or an
            infinity.
    """
    try:
        tensors = safetensors.numpy.load_file(path)
    except FileNotFoundError:
        raise LoadError(f"{path.name} is missing from {path.parent}") from None
    except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise LoadError(
            f"{path} ({size} bytes) is no whole safetensors file: {error}; it may be truncated, "
            "copy or download it again"
        ) from None
    broken = [name for name, value in tensors.items() if not finite(value)]
    if broken:
        raise LoadError(
            f"{path} holds NaN or infinite values in {some(broken)}; expected finite weights, "
            "the checkpoint is damaged or its training diverged"
        )
    return tensors


def finite(value: np.ndarray) -> bool:
    """Whether a floating tensor holds no NaN and no infinity; true for whole numbers."""
    kinds = (np.floating,)
    if value.dtype == ml_dtypes.bfloat16:
        value = value.astype(np.float32)
    return not issubclass(value.dtype.type, kinds) or bool(np.isfinite(value).all())


def some(names: list[str], most: int = 4) -> str:
    """A few names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def write_tensors(path: Path, tensors: Tensors) -> None:
    """Write beside the place and rename in, so that a file is whole or absent."""
    beside = path.with_name(f".{path.name}.part")
    contiguous = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    safetensors.numpy.save_file(contiguous, beside, metadata={"format": "pt"})
    beside.chmod(0o644)
    beside.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        LoadError: missing, damaged, or no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{path.name} is missing from {path.parent}") from None
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} is no JSON file: {error}") from None
    if not isinstance(value, dict):
        raise LoadError(f"{path} holds {type(value).__name__}; expected a JSON object")
    return value


def write_json(path: Path, value: Any) -> None:
    """Write JSON beside its place and rename it in, so that it is never half there."""
    beside = path.with_name(f".{path.name}.part")
    beside.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)
