"""int8 weights, made while loading: a verifier's kernels in whole numbers, a scale an output.

Weights alone are quantised; activations stay as they are.
"""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

MOST = 127
"""The largest code; -128 is not used, so that codes reach as far on both sides."""

BOTH = ("codes", "scales")


def pack(kernel: Float[np.ndarray, "*lead a z"], table: bool = False) -> dict[str, np.ndarray]:
    """Codes and scales of a kernel [... a z] (an embedding [... z a]) in int8, on the host.

    A scale is an output's largest weight over 127; one matrix at a time is on the device.
    """
    stack = kernel.reshape(-1, *kernel.shape[-2:])
    pairs = [tuple(map(np.asarray, _pack(one if table else one.T))) for one in stack]
    joined = map(np.stack, zip(*pairs, strict=True))
    lead = kernel.shape[:-2]
    return {name: x.reshape(*lead, *x.shape[1:]) for name, x in zip(BOTH, joined, strict=True)}


@jax.jit
def _pack(rows):
    """int8 codes and float32 scales of [z a]."""
    rows = rows.astype(jnp.float32)
    largest = jnp.max(jnp.abs(rows), axis=1, keepdims=True)
    scales = jnp.where(largest == 0, 1.0, largest) / MOST
    return jnp.round(rows / scales).astype(jnp.int8), scales


class Int8(Mapping[str, np.ndarray]):
    """Arrays by dotted path, whose kernels are packed in int8 when they are asked for.

    Kernels of linear maps, experts and the embedding are; those of routers are not, nor is what
    comes packed. Memory on the host peaks at one stack of kernels and its codes.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._arrays = arrays
        self._packed = {path for path in arrays if packable(path)}
        self._last: tuple[str, dict[str, np.ndarray]] = ("", {})

    def __iter__(self) -> Iterator[str]:
        for path in self._arrays:
            yield from [f"{path}.{part}" for part in BOTH] if path in self._packed else [path]

    def __len__(self) -> int:
        return len(self._arrays) + len(self._packed)

    def __contains__(self, path: object) -> bool:
        stem, _, part = str(path).rpartition(".")
        return (
            stem in self._packed
            and part in BOTH
            or (path in self._arrays and path not in self._packed)
        )

    def __getitem__(self, path: str) -> np.ndarray:
        stem, _, part = path.rpartition(".")
        if stem not in self._packed:
            return self._arrays[path]
        if self._last[0] != stem:
            self._last = stem, pack(self._arrays[stem], table=stem == "embedding")
        return self._last[1][part]


def packable(path: str) -> bool:
    """Whether an array of a verifier, by its dotted path, is one that int8 packs."""
    kernel = path.endswith(".kernel") and ".router." not in path
    return kernel or path in ("embedding", "experts.gate_up", "experts.down")
