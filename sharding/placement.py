"""Putting arrays on a mesh: each device's part straight from the host, and back to the host."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from eagle3_jax.configs import VerifierConfig
from sharding.mesh import DATA, MeshShape, shape_of
from sharding.rules import RULES, PartitionRules


def part_shape(
    path: str,
    shape: tuple[int, ...],
    mesh: MeshShape,
    config: VerifierConfig,
    rules: PartitionRules = RULES,
) -> tuple[int, ...]:
    """Shape on one device of an array that has `shape` in the checkpoint."""
    sizes = list(shape)
    for cut in rules.cuts(path, shape):
        sizes[cut.axis] = cut.size(shape[cut.axis], cut.parts(mesh), config)
    return tuple(sizes)


def laid_out(
    path: str,
    shape: tuple[int, ...],
    mesh: Mesh,
    config: VerifierConfig,
    rules: PartitionRules = RULES,
) -> tuple[tuple[int, ...], NamedSharding]:
    """Shape and sharding on the mesh of an array that has `shape` in the checkpoint."""
    sizes = list(part_shape(path, shape, shape_of(mesh), config, rules))
    for cut in rules.cuts(path, shape):
        sizes[cut.axis] *= cut.parts(shape_of(mesh))
    return tuple(sizes), NamedSharding(mesh, rules.spec(path, shape))


def placed(
    path: str,
    array: Any,
    dtype: Any,
    mesh: Mesh,
    config: VerifierConfig,
    rules: PartitionRules = RULES,
) -> jax.Array:
    """A verifier's array on the mesh; each device is sent its own part and nothing else.

    Args:
        path: dotted, in the verifier.
        array: as in the checkpoint; one that reads its parts when it is indexed will do.
        dtype: to cast to; None is the array's own.
        mesh: over the devices of any number of processes, which all call this.
        config: the verifier's.
        rules: how it lies there.
    """
    cuts, shape = rules.cuts(path, array.shape), shape_of(mesh)
    own_shape = part_shape(path, array.shape, shape, config, rules)
    whole, sharding = laid_out(path, array.shape, mesh, config, rules)

    def part(index: tuple[slice, ...]) -> np.ndarray:
        at, joined = [slice(None)] * array.ndim, {}
        for cut in cuts:
            axis = array.ndim + cut.axis
            number = (index[axis].start or 0) // own_shape[axis]
            spans = cut.spans(array.shape[axis], number, cut.parts(shape), config)
            if len(spans) == 1:
                at[axis] = spans[0]
            else:
                joined[axis] = spans
        own = array[tuple(at)]
        for axis, spans in joined.items():
            pieces = [own[(slice(None),) * axis + (span,)] for span in spans]
            own = np.concatenate(pieces, axis=axis) if pieces else np.zeros_like(own)
        return np.ascontiguousarray(own, dtype=dtype)

    # Device by device, so that the host holds one part at a time.
    arrays, last = [], ((), np.empty(0))
    for device, index in sharding.addressable_devices_indices_map(whole).items():
        assert index is not None
        if index != last[0]:
            last = index, part(index)
        arrays.append(jax.device_put(last[1], device).block_until_ready())
    return jax.make_array_from_single_device_arrays(whole, sharding, arrays)


def shardings(mesh: Mesh, specs: Any) -> Any:
    """A tree of shardings from a tree of specs."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def put(tree: Any, mesh: Mesh, specs: Any) -> Any:
    """A tree with every array where its spec says; arrays that are there already stay.

    Args:
        tree: arrays of one device, of the host or of the mesh; equal in every process.
        mesh: where to.
        specs: a tree of specs, or of parts of it.
    """

    def move(spec, part):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: _move(x, sharding), part)

    return jax.tree.map(move, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))


def _move(x, sharding: NamedSharding):
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
        return x
    local = not isinstance(x, jax.Array) or x.is_fully_addressable
    if local and not sharding.is_fully_addressable:
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
    return jax.device_put(x, sharding)


def made(make: Callable[[], Any], mesh: Mesh, specs: Any) -> Any:
    """What `make` makes, made on the mesh, so that no device ever holds it whole."""
    return jax.jit(make, out_shardings=shardings(mesh, specs))()


def to_host(tree: Any) -> Any:
    """A tree's arrays as numpy's, whole in every process; all processes call this together."""

    def one(x):
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        assert isinstance(x.sharding, NamedSharding)
        whole = NamedSharding(x.sharding.mesh, PartitionSpec())
        return np.asarray(jax.jit(lambda x: x, out_shardings=whole)(x))

    return jax.tree.map(one, tree)


def spread(shape: tuple[int, ...], parts: int) -> PartitionSpec:
    """How an array of a learning drafter lies over data: its longest axis that divides evenly.

    A vector lies whole on every device, and so does a matrix of which no axis divides.
    """
    even = [axis for axis, size in enumerate(shape) if size % parts == 0]
    if len(shape) < 2 or parts == 1 or not even:
        return PartitionSpec()
    longest = max(even, key=lambda axis: shape[axis])
    return PartitionSpec(*(DATA if axis == longest else None for axis in range(len(shape))))


def gathered(part: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Inside `shard_map`, a whole array of which each device has the part that `spread` says."""
    for axis, name in enumerate(spec):
        if name is not None:
            part = jax.lax.all_gather(part, name, axis=axis, tiled=True)
    return part
