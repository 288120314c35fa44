"""Drafter folders of ours: manifest.json beside model.safetensors, arrays by dotted path.

Where files must stay small there are shards and an index in the place of model.safetensors, and an
array larger than a shard lies in parts along its first axis, `head.kernel.1-of-2` and so on.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.folders import Folder, write_folder
from checkpoints.tensors import Tensors, read_json, some, write_json
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
        recommended: what served it best: `speculation` (depth, topk, nodes; depth 0 where plain
            decoding is faster), `dtype` of the pair, `plain_dtype` of plain decoding, and for the
            reader `measured_on`.
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
        LoadError: either is missing or damaged, or parts of an array are.
    """
    manifest, source = read_manifest(folder), Folder(folder)
    return manifest, joined({name: source.read(name) for name in source.entries}, folder)


def write_drafter(
    folder: Path, manifest: Manifest, arrays: Tensors, most_bytes: int | None = None
) -> None:
    """Write a drafter folder; each file is whole or absent, and the manifest comes last.

    Args:
        folder: made where missing.
        manifest: what it says of itself.
        arrays: by dotted path.
        most_bytes: of a file's arrays, headers not counted; None is one file of any size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if most_bytes is not None:
        # Several files do not change in one instant: until all are there, the folder has no name.
        (folder / "manifest.json").unlink(missing_ok=True)
        arrays = cut(arrays, most_bytes)
    write_folder(folder, arrays, most_bytes)
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


def cut(arrays: Tensors, most_bytes: int) -> Tensors:
    """Arrays of more bytes in parts along their first axis, a row of which is never cut."""
    out = {}
    for name, value in arrays.items():
        if value.nbytes <= most_bytes or value.ndim == 0:
            out[name] = value
            continue
        rows = max(most_bytes // value[0].nbytes, 1)
        parts = [value[start : start + rows] for start in range(0, len(value), rows)]
        out |= {f"{name}.{i}-of-{len(parts)}": part for i, part in enumerate(parts, 1)}
    return out


def joined(arrays: Tensors, folder: Path) -> Tensors:
    """What `cut` was given.

    Raises:
        LoadError: parts are missing.
    """
    out, parts = {}, {}
    for name, value in arrays.items():
        if part := re.fullmatch(r"(.+)\.(\d{1,6})-of-(\d{1,6})", name):
            parts.setdefault((part[1], int(part[3])), {})[int(part[2])] = value
        else:
            out[name] = value
    for (name, count), found in parts.items():
        if sorted(found) != list(range(1, len(found) + 1)) or len(found) != count:
            raise LoadError(
                f"{folder} holds of {some([name])}'s {count} parts only {some(map(str, found))}; "
                "copy the folder again"
            )
        try:
            out[name] = np.concatenate([found[i] for i in sorted(found)])
        except ValueError as error:
            raise LoadError(
                f"{folder}: the parts of {some([name])} do not fit together: {error}"
            ) from None
    return out
