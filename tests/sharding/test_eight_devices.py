"""On eight forced CPU devices: what one device computes, and what the compiled loop exchanges.

`on_eight.py` computes all of it in a process of its own; `make check NAME=eight_devices` does so
for every family and mesh.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLOSE = 1e-5


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `on_eight.py` prints."""
    folder = tmp_path_factory.mktemp("eight")
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("on_eight.py"), folder],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("tokens", ["few", "many", "biases", "replicated heads"])
def test_logits_and_whole_features_are_one_device_s(found, tokens):
    assert found[tokens] < CLOSE


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_packed_weights_give_what_they_give_on_one_device(found, kind):
    """Of few tokens and of many."""
    assert max(found[kind]) < CLOSE


@pytest.mark.parametrize("texts", ["same tokens", "same turns", "int4 tokens"])
def test_texts_are_one_device_s(found, texts):
    assert found[texts] is True


def test_a_step_of_learning_is_one_device_s(found):
    assert found["learned"] < CLOSE
    assert found["share"] == 1 / 2


def test_each_device_keeps_the_key_value_heads_that_its_own_need(found):
    assert found["cache"] == [4, 2, 8, 256, 8]


def test_a_layer_of_the_compiled_loop_has_two_all_reduces(found):
    """A loop for each kind of layer, and beside them the logits are gathered: nothing else."""
    rows = "2,1,3,32"  # [b 1 w d]: root and two nodes
    assert sorted(found["collectives"]) == [
        [["all-gather", "2,3,64"]],  # [b w v]
        *[[["all-reduce", rows]] * 2] * 2,
    ]


def test_a_folder_is_read_onto_a_mesh_part_by_part(found):
    difference, largest = found["from folder"]
    assert difference == 0
    assert largest == 1 / 8
