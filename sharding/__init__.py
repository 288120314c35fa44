"""Meshes, partition rules and the start of several processes."""

from sharding.exchange import Exchange
from sharding.mesh import DATA, EXPERT, MODEL, TENSOR, MeshShape, make_mesh
from sharding.placement import placed, to_host
from sharding.rules import Cut, PartitionRules, Rule

__all__ = [
    "DATA",
    "EXPERT",
    "MODEL",
    "TENSOR",
    "Cut",
    "Exchange",
    "MeshShape",
    "PartitionRules",
    "Rule",
    "make_mesh",
    "placed",
    "to_host",
]

EAGLE3_JAX_MARK = "eagle3-jax 0.1.0"
