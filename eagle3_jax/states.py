"""Module states as flat dictionaries of arrays by dotted path, and back into modules."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from eagle3_jax.contracts import LoadError
from eagle3_jax.packed import PARTS, PackedWeight


def arrays_of(module: nnx.Module) -> dict[str, jax.Array]:
    """Every array of a module by its dotted path, e.g. `moe_layers.attention.o.kernel`."""
    flat = nnx.to_flat_state(nnx.state(module))
    return {".".join(str(part) for part in path): value[...] for path, value in flat}


def to_device(path: str, array: np.ndarray, dtype: Any) -> jax.Array:
    """An array from the host, in a dtype, on the default device."""
    return jax.numpy.asarray(np.asarray(array).astype(dtype))


def fill[M: nnx.Module](
    make: Callable[[], M],
    arrays: Mapping[str, Any],
    dtype: Any,
    place: Callable[[str, Any, Any], jax.Array] = to_device,
) -> M:
    """A module built without drawing its initial weights, holding `arrays` instead.

    Args:
        make: builds the module; run abstractly only.
        arrays: one for each of the module's arrays, by dotted path; of a kernel that comes packed
            two, its codes and scales.
        dtype: of matrices; norms and the router stay float32, routed experts that come in
            bfloat16 stay that.
        place: puts an array on devices, by its path, in a dtype.

    Raises:
        LoadError: an array is missing, unknown, or has another shape.
    """
    abstract = jax.eval_shape(make)
    graph, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    names = {path: ".".join(str(part) for part in path) for path in flat}
    packed = {name for name in names.values() if f"{name}.codes" in arrays}
    parts = {name: [p for p in PARTS if f"{name}.{p}" in arrays] for name in packed}
    wanted = {f"{name}.{p}" for name in packed for p in {"scales", *parts[name]}}
    wrong = sorted((set(names.values()) - packed | wanted) ^ set(arrays))
    if wrong:
        raise LoadError(f"arrays missing or unknown: {', '.join(wrong[:6])}")
    filled, weights = {}, {}
    for path, variable in flat.items():
        name = names[path]
        if name in packed:
            read = {part: arrays[f"{name}.{part}"] for part in parts[name]}
            own = {part: place(f"{name}.{part}", x, x.dtype) for part, x in read.items()}
            table = name == "embedding"
            weights[path] = PackedWeight(**own, dtype=np.dtype(dtype), table=table)
            filled[path] = variable
            continue
        value = arrays[name]
        if value.shape != variable.shape:
            raise LoadError(
                f"{name} has shape {list(value.shape)}; expected {list(variable.shape)}"
            )
        if np.issubdtype(variable.dtype, np.integer):
            target = variable.dtype
        else:
            keep = "norm" in name or "router" in name
            # Widening is exact, and experts are widened where they are used.
            narrow = name.startswith("experts.") and value.dtype == ml_dtypes.bfloat16
            target = np.float32 if keep else value.dtype if narrow else dtype
        filled[path] = variable.replace(place(name, value, target))
    module = nnx.merge(graph, nnx.from_flat_state(filled))
    for path, weight in weights.items():
        setattr(functools.reduce(getattr, path[:-1], module), path[-1], weight)
    return module
