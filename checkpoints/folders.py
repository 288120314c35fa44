"""The weights of a Hugging Face folder: one safetensors file, or an index and its shards."""

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import numpy as np

from checkpoints.sources import Entry
from checkpoints.tensors import File, Tensors, read_json, some, write_json, write_tensors
from eagle3_jax.contracts import LoadError

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Folder:
    """A folder's weights as a source: headers are read now, a tensor when asked for.

    Where there are a whole file and an index, the file is taken, as transformers does. Files that
    neither is or names are left alone, and nothing is ever written.

    Attributes:
        path: the folder.
        entries: every tensor's shape and dtype, by name.

    Raises:
        LoadError: there are no weights that can be read, or index and shards disagree; every fault
            of an index is in the one message.
    """

    def __init__(self, path: Path):
        self.path = path
        if os.path.lexists(path / WHOLE):
            file = File(path / WHOLE)
            self._holders: Mapping[str, File] = dict.fromkeys(file.entries, file)
        elif os.path.lexists(path / INDEX):
            self._holders = _shards(path)
        else:
            raise LoadError(f"{WHOLE} is missing from {path}, and so is {INDEX}; {_instead(path)}")
        self.entries: Mapping[str, Entry] = {
            name: file.entries[name] for name, file in self._holders.items()
        }

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype.

        Raises:
            LoadError: its bytes are gone or of a dtype that is not read, or it holds a NaN or an
                infinity.
        """
        return self._holders[name].read(name)


def _instead(path: Path) -> str:
    """What a folder without weights holds, and what to do about it."""
    names = sorted(entry.name for entry in path.iterdir())
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickled:
        return (
            f"found {some(pickled)}: pickled weights are not read, since loading them runs code; "
            "convert them to safetensors"
        )
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        return f"found {some(ggufs)}: pass the .gguf file itself"
    return f"found {some(names) or 'nothing'}; download the weights again"


def _named(path: Path) -> dict[str, str]:
    """The index: each tensor's file, both by name.

    Raises:
        LoadError: it is no index, or names a file outside the folder.
    """
    index = path / INDEX
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise LoadError(f"{index} is no index: expected tensors and their files under weight_map")
    odd = [name for name, file in named.items() if not isinstance(file, str) or not file]
    if odd:
        raise LoadError(f"{index} names no file for {some(odd)}; download it again")
    files = {file: PurePosixPath(file) for file in named.values()}
    outside = [file for file, at in files.items() if at.is_absolute() or ".." in at.parts]
    if outside:
        raise LoadError(
            f"{index} names files outside its folder: {some(outside)}; expected names of files "
            "beside it"
        )
    return {name: str(files[file]) for name, file in named.items()}


def _shards(path: Path) -> dict[str, File]:
    """The shard that holds each tensor, by the tensor's name.

    Raises:
        LoadError: index and shards disagree, or shards are missing or damaged.
    """
    named = _named(path)
    files: dict[str, File] = {}
    missing, damaged = [], []
    for name in sorted(set(named.values())):
        if not os.path.lexists(path / name):
            missing.append(name)
            continue
        try:
            files[name] = File(path / name)
        except LoadError as error:
            damaged.append(str(error))
    holders: dict[str, list[str]] = {}
    for name, file in files.items():
        for tensor in file.entries:
            holders.setdefault(tensor, []).append(name)
    absent = [
        f"{tensor} ({name})"
        for tensor, name in named.items()
        if name in files and tensor not in files[name].entries
    ]
    twice = [
        f"{tensor} ({' and '.join(names)})" for tensor, names in holders.items() if len(names) > 1
    ]
    unexpected = [tensor for tensor in holders if tensor not in named]
    faults = [
        f"{what}: {some(found)}"
        for what, found in (
            ("missing shards", missing),
            ("tensors not in the shard that the index names", absent),
            ("tensors in two shards", twice),
            ("tensors that the index does not name", unexpected),
            ("damaged shards", damaged),
        )
        if found
    ]
    if faults:
        raise LoadError(f"{path / INDEX} does not fit its shards: {'; '.join(faults)}")
    return {tensor: files[name] for tensor, name in named.items()}


def write_folder(path: Path, tensors: Tensors, most_bytes: int | None = None) -> None:
    """Write a folder's weights: one file, or an index and shards; what was there before goes.

    Args:
        path: the folder.
        tensors: all of them.
        most_bytes: of a file's tensors, unless one alone has more; headers come on top. None is
            one file.
    """
    shards: list[Tensors] = [{}]
    room = most_bytes
    for name, value in tensors.items():
        if room is not None and most_bytes is not None:
            if shards[-1] and value.nbytes > room:
                shards.append({})
                room = most_bytes
            room -= value.nbytes
        shards[-1][name] = value
    files = {f"model-{i:05}-of-{len(shards):05}.safetensors": s for i, s in enumerate(shards, 1)}
    if len(files) == 1:
        files = {WHOLE: tensors}
    for name, shard in files.items():
        write_tensors(path / name, shard)
    if len(files) > 1:
        named = {tensor: name for name, shard in files.items() for tensor in shard}
        size = sum(value.nbytes for value in tensors.values())
        write_json(path / INDEX, {"metadata": {"total_size": size}, "weight_map": named})
    for old in [path / WHOLE, *path.glob("model-*-of-*.safetensors")]:
        if old.name not in files:
            old.unlink(missing_ok=True)
    if len(files) == 1:
        (path / INDEX).unlink(missing_ok=True)
