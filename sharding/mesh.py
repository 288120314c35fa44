"""The mesh: three named axes, whose product is the number of devices.

| axis | what lies over it |
|---|---|
| data | rows of a batch, with their caches; a drafter's weights and moments while it learns |
| tensor | an expert's width |
| expert | the routed experts |

Heads, vocabulary and dense feed-forwards lie over tensor and expert together: those devices hold
one copy of the verifier between them, a group of them for each step of data.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from eagle3_jax.contracts import RequestError

DATA, TENSOR, EXPERT = "data", "tensor", "expert"

MODEL = (TENSOR, EXPERT)
"""The axes over which one copy of the verifier lies."""


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """How many devices lie along each axis.

    Attributes:
        data: copies of the verifier, among which rows are divided.
        tensor: devices that share an expert's width.
        expert: devices that share the experts.
    """

    data: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self):
        for name, size in vars(self).items():
            if size < 1:
                raise RequestError(f"mesh {name} {size} must be at least 1")

    @property
    def model(self) -> int:
        """Devices that hold one copy of the verifier between them."""
        return self.tensor * self.expert

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.data * self.model

    def __str__(self) -> str:
        return f"data {self.data} x tensor {self.tensor} x expert {self.expert}"


def shape_of(mesh: Mesh | None) -> MeshShape:
    """A mesh's shape; without one, a single device's."""
    if mesh is None:
        return MeshShape()
    if mesh.axis_names != (DATA, *MODEL):
        raise RequestError(
            f"the mesh has the axes {', '.join(map(str, mesh.axis_names))}; expected "
            f"{DATA}, {TENSOR}, {EXPERT}: use sharding.make_mesh"
        )
    return MeshShape(*(mesh.shape[name] for name in (DATA, *MODEL)))


def mesh_of(shape: MeshShape) -> Mesh | None:
    """A mesh of a shape over all devices; None where it has one device and so has this program."""
    if shape.devices == 1 and jax.process_count() == 1:
        return None
    return make_mesh(*dataclasses.astuple(shape))


def make_mesh(
    data: int = 1, tensor: int = 1, expert: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh over all devices, of every process.

    Args:
        data: copies of the verifier, among which rows are divided.
        tensor: devices that share an expert's width.
        expert: devices that share the experts.
        devices: the ones to use, in place of all.

    Raises:
        RequestError: their number is another.
    """
    shape = MeshShape(data, tensor, expert)
    devices = jax.devices() if devices is None else list(devices)
    if shape.devices != len(devices):
        raise RequestError(
            f"a mesh of {shape} has {shape.devices} devices, found {len(devices)}; "
            f"name sizes whose product is {len(devices)}, or pass devices="
        )
    sizes = dataclasses.astuple(shape)
    # Neighbours in the last axis are nearest; passes exchange over it and the one before it.
    return jax.make_mesh(
        sizes, (DATA, *MODEL), axis_types=(AxisType.Auto,) * 3, devices=tuple(devices)
    )
