"""Meshes and the exchange of a device that has no other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from eagle3_jax import testing
from eagle3_jax.contracts import RequestError
from eagle3_jax.describe import describe_part
from sharding.exchange import Exchange
from sharding.mapped import over_mesh, path_of, row_axis
from sharding.mesh import DATA, MeshShape, make_mesh, mesh_of, shape_of
from sharding.placement import made, placed, put, spread, to_host
from sharding.rules import RULES


def test_sizes_must_make_up_the_devices():
    with pytest.raises(RequestError, match=r"data 2 x tensor 1 x expert 3 has 6 devices, found 1"):
        make_mesh(data=2, expert=3)
    with pytest.raises(RequestError, match="mesh tensor 0 must be at least 1"):
        MeshShape(tensor=0)


def test_a_foreign_mesh_is_refused():
    with pytest.raises(RequestError, match="axes x; expected data, tensor, expert"):
        shape_of(jax.make_mesh((1,), ("x",)))


def test_one_device_has_no_mesh_unless_it_is_asked_for():
    assert mesh_of(MeshShape()) is None
    assert shape_of(None) == shape_of(make_mesh()) == MeshShape()
    assert row_axis(None, 3) == DATA
    assert str(MeshShape(2, 1, 4)) == "data 2 x tensor 1 x expert 4"


def test_alone_everything_stays_as_it_is():
    alone = Exchange(make_mesh(), (2, 70, 1))
    x = jnp.ones((2, 70, 1, 4))
    for same in (alone.own(x), alone.whole(x), alone.total(x), alone.vocabulary(x)):
        assert same is x
    chosen, weights = jnp.zeros((3, 2), jnp.int32), jnp.ones((3, 2))
    assert alone.mine(chosen, weights, 8) == (chosen, weights)
    assert not alone.scattered
    assert over_mesh(None, abs, None, None) is abs


def test_paths_of_a_pytree_are_those_of_the_state():
    verifier = testing.tiny_verifier("llama")
    keys = [path_of(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(verifier)[0]]
    assert "dense_layers.attention.qkv.kernel" in keys and "embedding" in keys


def test_parts_come_from_the_host_and_go_back():
    mesh, config = make_mesh(), testing.LLAMA
    kernel = np.arange(4 * 32 * 64, dtype=np.float32).reshape(4, 32, 64)
    array = placed("dense_layers.attention.qkv.kernel", kernel, jnp.bfloat16, mesh, config)
    assert array.dtype == jnp.bfloat16 and array.sharding.device_set == set(mesh.devices.flat)
    np.testing.assert_array_equal(to_host(array), kernel.astype(jnp.bfloat16))
    spec = RULES.spec("head.kernel", (4, 8))
    there = put({"a": jnp.ones((4, 8))}, mesh, spec)
    assert put(there, mesh, spec)["a"] is there["a"]
    assert made(lambda: jnp.ones((4, 8)), mesh, spec).sharding == NamedSharding(mesh, spec)


def test_matrices_of_a_learner_lie_over_data():
    assert tuple(spread((16, 24), 8)) == (None, DATA)
    assert tuple(spread((16, 20), 8)) == (DATA, None)
    for shape in ((24,), (), (3, 5)):
        assert tuple(spread(shape, 8)) == ()
    assert tuple(spread((16, 24), 1)) == ()


def test_info_says_which_key_value_heads_are_on_several_devices():
    verifier = testing.tiny_verifier("llama")  # 4 heads over 2
    found = describe_part(verifier, MeshShape(expert=4))
    assert (found["heads"], found["key_value_heads"]) == (1, 1)
    assert found["devices_with_the_same_key_value_heads"] == 2
    whole = describe_part(verifier, MeshShape())
    assert whole["weights_bytes"] == sum(x.nbytes for x in jax.tree.leaves(verifier))
    assert found["cache_bytes_per_token"] == whole["cache_bytes_per_token"] // 2
