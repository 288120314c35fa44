"""Where tensors come from: names, shapes and dtypes are known before any of them is read.

What a configuration asks for is compared with what there is by shape alone, so that a wrong folder
is refused in moments, however large it is or claims to be.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np


class Entry(NamedTuple):
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: np.dtype


@runtime_checkable
class Source(Protocol):
    """Named tensors.

    Attributes:
        entries: every tensor's shape and dtype, by name.
    """

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, whole.

        Raises:
            LoadError: its bytes are damaged, or it holds a NaN or an infinity.
        """
        ...


class Held:
    """Tensors held in memory as a source."""

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        self._tensors = dict(tensors)
        self.entries = {name: Entry(x.shape, x.dtype) for name, x in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """The tensor itself, not copied."""
        return self._tensors[name]
