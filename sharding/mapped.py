"""Code that runs device by device, inside `jax.shard_map` over all axes of a mesh.

It sees its own rows, its own heads, experts and part of the vocabulary, and says itself where
devices exchange anything (`sharding/exchange.py`). Nothing of that is left to the compiler, which
may gather weights.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from sharding.mesh import DATA, shape_of
from sharding.rules import RULES

WHOLE = PartitionSpec()
"""The spec of an array that lies whole on every device."""

ROWS = PartitionSpec(DATA)
"""The spec of an array whose first axis is rows."""


def path_of(keys: tuple[Any, ...]) -> str:
    """The dotted path to an array, as in `states.arrays_of`, from its path in a pytree."""
    names = [str(getattr(key, "name", getattr(key, "key", key))) for key in keys]
    return ".".join(names[:-1] if names[-1] == "value" else names)


def shapes_of(tree: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a module's arrays, which may be abstract, by dotted path."""
    return {path_of(keys): x.shape for keys, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def specs_by(tree: Any, spec: Callable[[str, tuple[int, ...]], PartitionSpec]) -> Any:
    """A tree with a partition spec in place of every array, from its dotted path and shape."""
    return jax.tree_util.tree_map_with_path(lambda keys, x: spec(path_of(keys), x.shape), tree)


def specs_of(verifier: Any) -> Any:
    """A verifier with a partition spec in place of every array; None without a mesh."""
    return None if verifier.mesh is None else specs_by(verifier, RULES.spec)


def stage_specs(stages: Any) -> Any:
    """A loop's stages with a spec in place of every array; all but the verifier's lie whole."""
    if stages.verifier.mesh is None:
        return None

    def spec(path: str, shape: tuple[int, ...]) -> PartitionSpec:
        part, _, rest = path.partition(".")
        return RULES.spec(rest, shape) if part == "verifier" else WHOLE

    return specs_by(stages, spec)


def row_axis(mesh: Mesh | None, rows: int) -> str | None:
    """The axis that rows of texts lie over; where it does not divide them, all have all rows."""
    return DATA if rows % shape_of(mesh).data == 0 else None


def over_mesh(mesh: Mesh | None, f: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """`f` run device by device; as it is without a mesh."""
    if mesh is None:
        return f
    # Replication is ours to see to: loops over experts in use differ in length by device.
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
