"""A GGUF file: its metadata, and its tensors dequantised one at a time.

The header is read here, and no count or length in it is believed before it is held against the
file's size; the package `gguf` knows the block formats and turns them into float32.

Source: ggml `docs/gguf.md`, versions 2 and 3, little-endian.
"""

import functools
import math
import os
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from checkpoints.sources import Entry
from checkpoints.tensors import finite, one_line, some
from eagle3_jax.contracts import LoadError

SCALARS = dict(enumerate("BbHhIif?")) | dict(enumerate("Qqd", 10))
STRING, ARRAY = 8, 9
"""Types of metadata values; the scalars by their `struct` letter."""

ALIGNMENT = 32
MOST_AXES = 4


BLOCK = 32
BLOCKS = {"Q4_0": ("scales",), "Q4_1": ("scales", "minima"), "Q8_0": ("scales",)}
"""Formats of blocks of 32 that are read packed: the float16 numbers that a block begins with."""


class Stored(NamedTuple):
    """Where a tensor lies and how it is stored.

    Attributes:
        shape: slowest axis first, as numpy has it (the file has it the other way round).
        kind: the block format, a `gguf.GGMLQuantizationType`.
        start: of its bytes in the file.
        size: in bytes.
    """

    shape: tuple[int, ...]
    kind: Any
    start: int
    size: int


class GgufFile:
    """An open file; weights stay on disk until they are asked for.

    Attributes:
        path: of the file.
        metadata: values by key, as plain Python values and lists.
        tensors: where each lies, by the file's own names.

    Raises:
        LoadError: it is no whole GGUF file, or holds a tensor in a format that cannot be read.
    """

    def __init__(self, path: Path):
        self.path = path
        if not os.path.isfile(path):
            raise LoadError(f"{path} is {'no file' if os.path.lexists(path) else 'missing'}")
        try:
            with open(path, "rb") as file:
                header = _Header(path, file)
                self.metadata = header.metadata()
                self.tensors = header.tensors(self.metadata)
        except OSError as error:
            raise LoadError(f"{path} cannot be read: {one_line(error)}") from None

    def read(self, name: str) -> np.ndarray:
        """One tensor in float32.

        Raises:
            LoadError: its bytes are gone, or it holds a NaN or an infinity.
        """
        quants = _package()[1]
        shape, kind = self.tensors[name][:2]
        raw = self._bytes(name)
        with np.errstate(all="ignore"):  # what overflows is refused below
            value = quants.dequantize(raw.reshape(*shape[:-1], -1), kind).reshape(shape)
        return self._finite(name, value)

    def packed(self, name: str) -> bool:
        """Whether a tensor is a matrix in a block format that `read_packed` has."""
        stored = self.tensors[name]
        return stored.kind.name in BLOCKS and len(stored.shape) == 2

    def packed_entries(self, name: str) -> dict[str, Entry]:
        """What `read_packed` gives, before it is read."""
        shape, kind = self.tensors[name][:2]
        whole = kind.name == "Q8_0"
        codes = (shape[0], shape[1] if whole else shape[1] // 2)
        numbers = Entry((shape[0], shape[1] // BLOCK), np.dtype(np.float32))
        found = {"codes": Entry(codes, np.dtype(np.int8 if whole else np.uint8))}
        return found | dict.fromkeys(BLOCKS[kind.name], numbers)

    def read_packed(self, name: str) -> dict[str, np.ndarray]:
        """Codes [z a] or, two a byte, [z a/2], and float32 scales and minima [z a/32].

        As `eagle3_jax/packed.py` has them, and value for value what `read` gives.

        Raises:
            LoadError: its bytes are gone, or it holds a NaN or an infinity.
        """
        shape, kind = self.tensors[name][:2]
        halves = BLOCKS[kind.name]
        blocks = self._bytes(name).reshape(shape[0], shape[1] // BLOCK, -1)
        numbers = np.ascontiguousarray(blocks[..., : 2 * len(halves)]).view(np.float16)
        numbers = self._finite(name, numbers.astype(np.float32))
        codes = np.ascontiguousarray(blocks[..., 2 * len(halves) :])
        if codes.shape[-1] == BLOCK:
            codes = codes.view(np.int8)
        else:
            # A byte of a block has inputs j and j + 16; of ours, two neighbours.
            each = np.concatenate([codes & 15, codes >> 4], axis=-1)
            codes = each[..., 0::2] | each[..., 1::2] << 4
        parts = {half: np.ascontiguousarray(numbers[..., i]) for i, half in enumerate(halves)}
        return {"codes": codes.reshape(shape[0], -1), **parts}

    def _finite(self, name: str, value: np.ndarray) -> np.ndarray:
        if not finite(value):
            raise LoadError(
                f"{self.path} holds NaN or infinite values in {some([name])}; expected finite "
                "weights, the file is damaged"
            )
        return value

    def _bytes(self, name: str) -> np.ndarray:
        _, _, start, size = self.tensors[name]
        try:
            # Not mapped into memory: a file cut short meanwhile is an error then, not a crash.
            raw = np.fromfile(self.path, np.uint8, size, offset=start)
            if len(raw) < size:
                raise OSError("the file was cut short")
        except OSError as error:
            raise LoadError(
                f"{self.path} cannot be read at {some([name])}: {one_line(error)}"
            ) from None
        return raw


class _Header:
    """A position in the file's header, moved on by every read."""

    def __init__(self, path: Path, file: BinaryIO):
        self.path, self.file, self.at = path, file, 0
        self.size = os.fstat(file.fileno()).st_size

    def damaged(self, what: str) -> LoadError:
        return LoadError(
            f"{self.path} ({self.size} bytes) is no whole GGUF file: {what}; it may be truncated, "
            "copy or download it again"
        )

    def take(self, size: int) -> bytes:
        """The next bytes."""
        if size > self.size - self.at:
            raise self.damaged(f"{size} bytes are announced at byte {self.at}")
        self.at += size
        return self.file.read(size)

    def scalars(self, letter: str, count: int = 1) -> list[Any]:
        """The next values of one scalar type."""
        data = self.take(count * struct.calcsize("<" + letter))
        return list(struct.unpack(f"<{count}{letter}", data))

    def text(self) -> str:
        """The next string."""
        data = self.take(self.scalars("Q")[0])
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"the text before byte {self.at} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        """The next metadata value."""
        if kind in SCALARS:
            return self.scalars(SCALARS[kind])[0]
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise self.damaged(f"a value before byte {self.at} has the unknown type {kind}")
        of, count = self.scalars("I")[0], self.scalars("Q")[0]
        if of in SCALARS:
            return self.scalars(SCALARS[of], count)
        if of != STRING or count > self.size // 8:
            raise self.damaged(f"an array before byte {self.at} has {count} values of type {of}")
        return [self.text() for _ in range(count)]

    def metadata(self) -> dict[str, Any]:
        """All of it, and how many tensors there are under `tensors`."""
        if self.take(4) != b"GGUF":
            raise LoadError(f"{self.path} is no GGUF file: it does not begin with GGUF")
        version = self.scalars("I")[0]
        if version not in (2, 3):
            raise LoadError(
                f"{self.path} is GGUF version {version}; versions 2 and 3, little-endian, are read"
            )
        self.count, pairs = self.scalars("Q", 2)
        out: dict[str, Any] = {}
        for _ in range(pairs):
            key = self.text()
            if key in out:
                raise self.damaged(f"the key {some([key])} is there twice")
            out[key] = self.value(self.scalars("I")[0])
        return out

    def tensors(self, metadata: dict[str, Any]) -> dict[str, Stored]:
        """Every tensor's place, held against the file's size."""
        found = []
        for _ in range(self.count):
            name, axes = self.text(), self.scalars("I")[0]
            if not 1 <= axes <= MOST_AXES:
                raise self.damaged(f"{some([name])} has {axes} axes")
            shape = tuple(reversed(self.scalars("Q", axes)))
            found.append((name, shape, self.scalars("I")[0], self.scalars("Q")[0]))
        step = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(step, int) or step < 1 or step & (step - 1):
            raise self.damaged(
                f"general.alignment is {one_line(repr(step), 60)}; expected a power of two"
            )
        base = -(-self.at // step) * step
        out: dict[str, Stored] = {}
        for name, shape, number, offset in found:
            kind, length, size = self._block(name, number)
            if shape[-1] % length or not all(shape):
                what = f"{list(shape)} does not divide into {kind.name} blocks of {length}"
                raise self.damaged(f"{some([name])} {what}")
            stored = Stored(shape, kind, base + offset, math.prod(shape) // length * size)
            if name in out:
                raise self.damaged(f"{some([name])} is there twice")
            if stored.start + stored.size > self.size:
                raise self.damaged(f"{some([name])} ends at byte {stored.start + stored.size}")
            out[name] = stored
        return out

    def _block(self, name: str, number: int) -> tuple[Any, int, int]:
        """A block format by its number: itself, values a block, bytes a block."""
        package, quants = _package()
        try:
            kind = package.GGMLQuantizationType(number)
            length, size = package.GGML_QUANT_SIZES[kind]
            _try(quants.dequantize, kind, size)
        except (ValueError, KeyError, NotImplementedError):
            known = [k.name for k in package.GGMLQuantizationType if k.value == number]
            raise LoadError(
                f"{self.path} stores {some([name])} as type {(known or [number])[0]}, which the "
                "installed gguf package cannot dequantise; convert it to Q8_0 or F16"
            ) from None
        return kind, length, size


@functools.cache
def _try(dequantize, kind: Any, size: int) -> None:
    """Dequantise one block of zeros; what cannot be read shows before any weight is."""
    dequantize(np.zeros((1, size), np.uint8), kind)


def _package() -> tuple[Any, Any]:
    """The package `gguf` and its block formats.

    Raises:
        LoadError: it is not installed.
    """
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise LoadError(
            'GGUF files need the package gguf: pip install "eagle3-jax[gguf]"'
        ) from None
    return gguf, gguf.quants
