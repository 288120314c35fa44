"""Putting a verifier on a mesh."""

import jax
import numpy as np
from jax.sharding import Mesh

from eagle3_jax.verifier.attention import LatentAttention
from eagle3_jax.verifier.decoder import Verifier
from sharding.mapped import path_of, shapes_of
from sharding.mesh import shape_of
from sharding.placement import laid_out, placed
from sharding.rules import RULES, kv_heads


def check_mesh(verifier: Verifier, mesh: Mesh) -> None:
    """Refuse a mesh that does not divide the verifier.

    Args:
        verifier: its arrays may be abstract.
        mesh: made by `sharding.make_mesh`.

    Raises:
        RequestError: says what does not fit.
    """
    RULES.check(shapes_of(verifier), verifier.config, shape_of(mesh))


def on_mesh(verifier: Verifier, mesh: Mesh) -> Verifier:
    """A copy whose arrays lie over a mesh; every process has the verifier and calls this.

    Args:
        verifier: its arrays may be abstract; then the copy's are, with their shardings.
        mesh: made by `sharding.make_mesh`.

    Raises:
        RequestError: the mesh does not divide the verifier.
    """
    check_mesh(verifier, mesh)

    def move(keys, x):
        path = path_of(keys)
        if isinstance(x, jax.ShapeDtypeStruct):
            shape, sharding = laid_out(path, x.shape, mesh, verifier.config)
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)
        return placed(path, np.asarray(x), None, mesh, verifier.config)

    return settled(jax.tree_util.tree_map_with_path(move, verifier), mesh)


def settled(verifier: Verifier, mesh: Mesh) -> Verifier:
    """The verifier, whose arrays lie over the mesh, told so; its layers count a device's heads."""
    c, parts = verifier.config, shape_of(mesh).model
    verifier.mesh = mesh
    for stack in (verifier.dense_layers, verifier.moe_layers):
        if stack is None:
            continue
        if isinstance(stack.attention, LatentAttention):
            stack.attention.heads = c.num_heads // parts
        else:
            stack.attention.shape = (c.num_heads // parts, kv_heads(c, parts), c.head_width)
    return verifier
