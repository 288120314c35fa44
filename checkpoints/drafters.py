"""Drafter folders of ours: manifest.json beside model.safetensors, arrays by dotted path."""

import dataclasses
from pathlib import Path
from typing import Any

from checkpoints.tensors import Tensors, read_json, read_tensors, write_json, write_tensors
from eagle3_jax.configs import DrafterConfig, RopeConfig
from eagle3_jax.contracts import Eagle3Error, FeatureSpec, LoadError

FORMAT = "eagle3-jax drafter"
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a drafter folder says of itself.

    Attributes:
        config: the drafter's.
        spec: the features it was trained on.
        recommended: `speculation` (depth, topk, nodes) and `dtype` that served it best.
        training: how it was trained, for the reader.
    """

    config: DrafterConfig
    spec: FeatureSpec
    recommended: dict[str, Any] = dataclasses.field(default_factory=dict)
    training: dict[str, Any] = dataclasses.field(default_factory=dict)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a drafter folder.

    Raises:
        LoadError: it is missing, damaged, or of another format or version.
    """
    raw = read_json(folder / "manifest.json")
    if raw.get("format") != FORMAT:
        raise LoadError(f"{folder} is no drafter folder: format is {raw.get('format')!r}")
    if raw.get("version") != VERSION:
        raise LoadError(
            f"{folder} is version {raw.get('version')!r} of the drafter format; this library reads "
            f"version {VERSION}"
        )
    try:
        config = dict(raw["config"])
        spec = dict(raw["features"])
        return Manifest(
            config=DrafterConfig(**{**config, "rope": RopeConfig(**config["rope"])}),
            spec=FeatureSpec(**{**spec, "boundaries": tuple(spec["boundaries"])}),
            recommended=dict(raw.get("recommended", {})),
            training=dict(raw.get("training", {})),
        )
    except Eagle3Error as error:
        raise LoadError(f"{folder / 'manifest.json'}: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise LoadError(f"{folder / 'manifest.json'} cannot be read: {error!r}") from None


def read_drafter(folder: Path) -> tuple[Manifest, Tensors]:
    """Manifest and arrays of a drafter folder.

    Raises:
        LoadError: either is missing or damaged.
    """
    return read_manifest(folder), read_tensors(folder / "model.safetensors")


def write_drafter(folder: Path, manifest: Manifest, arrays: Tensors) -> None:
    """Write a drafter folder; each file is whole or absent, and the manifest comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", arrays)
    write_json(
        folder / "manifest.json",
        {
            "format": FORMAT,
            "version": VERSION,
            "config": dataclasses.asdict(manifest.config),
            "features": dataclasses.asdict(manifest.spec),
            "recommended": manifest.recommended,
            "training": manifest.training,
        },
    )
