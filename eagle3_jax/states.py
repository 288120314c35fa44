"""Module states as flat dictionaries of arrays by dotted path, and back into modules."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from eagle3_jax.contracts import LoadError


def arrays_of(module: nnx.Module) -> dict[str, jax.Array]:
    """Every array of a module by its dotted path, e.g. `moe_layers.attention.o.kernel`."""
    flat = nnx.to_flat_state(nnx.state(module))
    return {".".join(str(part) for part in path): value[...] for path, value in flat}


def fill[M: nnx.Module](make: Callable[[], M], arrays: Mapping[str, np.ndarray], dtype: Any) -> M:
    """A module built without drawing its initial weights, holding `arrays` instead.

    Args:
        make: builds the module; run abstractly only.
        arrays: one for each of the module's arrays, by dotted path.
        dtype: of matrices; norms and the router stay float32, routed experts that come in
            bfloat16 stay that.

    Raises:
        LoadError: an array is missing, unknown, or has another shape.
    """
    abstract = jax.eval_shape(make)
    graph, state = nnx.split(abstract)
    flat = dict(nnx.to_flat_state(state))
    names = {path: ".".join(str(part) for part in path) for path in flat}
    wrong = sorted(set(names.values()) ^ set(arrays))
    if wrong:
        raise LoadError(f"arrays missing or unknown: {', '.join(wrong[:6])}")
    filled = {}
    for path, variable in flat.items():
        name, value = names[path], arrays[names[path]]
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
        filled[path] = variable.replace(jax.numpy.asarray(np.asarray(value).astype(target)))
    return nnx.merge(graph, nnx.from_flat_state(filled))
