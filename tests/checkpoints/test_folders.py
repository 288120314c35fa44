"""Weights of a folder: one file or shards, read one by one, and every way they disagree."""

import json
import re
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.folders import Folder
from checkpoints.sources import Entry
from checkpoints.tensors import write_tensors
from eagle3_jax.contracts import LoadError

TENSORS = {
    "a.weight": np.arange(600, dtype=np.float32).reshape(20, 30),
    "b.weight": np.linspace(-1, 1, 50).astype(ml_dtypes.bfloat16),
    "c.weight": np.ones((2, 3, 4), np.float16),
    "d.ids": np.arange(5, dtype=np.int32),
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
NAMED = {name: SHARDS[i % 2] for i, name in enumerate(TENSORS)}


def write_index(path, named) -> None:
    """The index alone, with whatever it names."""
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": named}))


@pytest.fixture
def sharded(tmp_path):
    """A folder of two shards."""
    for shard in SHARDS:
        held = {name: x for name, x in TENSORS.items() if NAMED[name] == shard}
        write_tensors(tmp_path / shard, held)
    write_index(tmp_path, NAMED)
    return tmp_path


def refusal(path) -> str:
    """The one line in which the folder is refused."""
    with pytest.raises(LoadError) as caught:
        Folder(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def check(folder: Folder) -> None:
    assert folder.entries == {name: Entry(x.shape, x.dtype) for name, x in TENSORS.items()}
    for name, value in TENSORS.items():
        np.testing.assert_array_equal(folder.read(name), value)
        assert folder.read(name).dtype == value.dtype


def test_one_file(tmp_path):
    write_tensors(tmp_path / "model.safetensors", TENSORS)
    check(Folder(tmp_path))


def test_shards(sharded):
    check(Folder(sharded))


def test_shards_may_lie_in_a_folder_or_behind_a_link(sharded):
    (sharded / "blobs").mkdir()
    (sharded / SHARDS[0]).rename(sharded / "blobs" / "x")
    (sharded / SHARDS[0]).symlink_to(sharded / "blobs" / "x")
    check(Folder(sharded))
    (sharded / SHARDS[0]).unlink()
    write_index(sharded, {k: f.replace(SHARDS[0], "./blobs/x") for k, f in NAMED.items()})
    check(Folder(sharded))


def test_a_whole_file_goes_before_an_index(sharded):
    """As transformers has it; other files of a folder are left alone."""
    write_tensors(sharded / "model.safetensors", {"x": TENSORS["a.weight"]})
    (sharded / "pytorch_model.bin").write_bytes(b"x")
    assert list(Folder(sharded).entries) == ["x"]


def test_only_headers_are_read_at_first(tmp_path):
    """A tensor's own damage shows when it is asked for, and no sooner."""
    broken = {**TENSORS, "b.weight": np.array([0, np.nan, 1], ml_dtypes.bfloat16)}
    write_tensors(tmp_path / "model.safetensors", broken)
    folder = Folder(tmp_path)
    np.testing.assert_array_equal(folder.read("a.weight"), TENSORS["a.weight"])
    with pytest.raises(LoadError, match="NaN or infinite values in b.weight; expected finite"):
        folder.read("b.weight")
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(700)
    with pytest.raises(LoadError, match="cannot be read at a.weight"):
        folder.read("a.weight")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (None, "found nothing; download the weights again"),
        ("pytorch_model.bin", "found pytorch_model.bin: pickled weights are not read"),
        ("consolidated.00.pth", "loading them runs code; convert them to safetensors"),
        ("x.Q4_1.gguf", "found x.Q4_1.gguf: pass the .gguf file itself"),
        ("consolidated.safetensors", "found consolidated.safetensors; download"),
    ],
)
def test_a_folder_without_weights_says_what_it_holds(tmp_path, name, said):
    if name is not None:
        (tmp_path / name).write_bytes(b"x")
    message = refusal(tmp_path)
    assert said in message
    assert f"model.safetensors is missing from {tmp_path}, and so is {INDEX}; " in message


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ("", "is no JSON file"),
        ("[]", "expected a JSON object"),
        ("{}", "is no index: expected tensors and their files under weight_map"),
        ('{"weight_map": {}}', "is no index"),
        ('{"weight_map": ["a.weight"]}', "is no index"),
        ('{"weight_map": {"a.weight": 3}}', "names no file for a.weight"),
        ('{"weight_map": {"a.weight": ""}}', "names no file for a.weight"),
        ('{"weight_map": {"a.weight": "../x"}}', "outside its folder: ../x"),
        ('{"weight_map": {"a.weight": "a/../../x"}}', "outside its folder"),
        ('{"weight_map": {"a.weight": "/etc/passwd"}}', "outside its folder: /etc/passwd"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "key 'a' is there twice"),
        ('{"weight_map": {"a.weight": "."}}', "is no file"),
    ],
)
def test_an_index_that_is_none(sharded, index, said):
    (sharded / INDEX).write_text(index)
    assert said in refusal(sharded)


def test_every_fault_of_the_shards_is_in_one_message(sharded):
    held = {"a.weight": TENSORS["a.weight"], "b.weight": TENSORS["b.weight"]}
    write_tensors(sharded / SHARDS[0], {**held, "e.weight": held["a.weight"]})
    write_index(sharded, {**NAMED, "f.weight": "model-00003.safetensors"})
    message = refusal(sharded)
    assert f"{INDEX} does not fit its shards" in message
    assert "missing shards: model-00003.safetensors" in message
    assert f"tensors not in the shard that the index names: c.weight ({SHARDS[0]})" in message
    assert f"tensors in two shards: b.weight ({SHARDS[0]} and {SHARDS[1]})" in message
    assert "tensors that the index does not name: e.weight" in message


@pytest.mark.parametrize("length", [0, 7, 60, 300])
def test_a_truncated_shard_is_named(sharded, length):
    with open(sharded / SHARDS[1], "r+b") as file:
        file.truncate(length)
    message = refusal(sharded)
    assert f"damaged shards: {sharded / SHARDS[1]} ({length} bytes) is no whole" in message


def test_a_directory_or_a_loop_in_place_of_a_file(sharded):
    (sharded / SHARDS[1]).unlink()
    (sharded / SHARDS[1]).symlink_to(SHARDS[1])
    assert "is no file" in refusal(sharded)
    (sharded / "model.safetensors").mkdir()
    assert "model.safetensors is no file" in refusal(sharded)


NARROW = ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3"]


@pytest.mark.parametrize("kind", NARROW)
def test_narrow_floats_are_known_and_not_read(tmp_path, kind):
    """A config that expects such weights is another matter; a plain one is refused by dtype."""
    bits = int(re.findall(r"\d", kind)[0])
    entry = {"dtype": kind, "shape": [8], "data_offsets": [0, bits]}
    header = json.dumps({"x": entry}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(bits)
    (tmp_path / "model.safetensors").write_bytes(data)
    folder = Folder(tmp_path)
    assert folder.entries["x"].shape == (8,) and f"float{bits}" in str(folder.entries["x"].dtype)
    with pytest.raises(LoadError, match="model.safetensors.* x"):
        folder.read("x")


@given(st.data())
def test_a_damaged_header_never_gives_other_tensors(tmp_path_factory, data):
    """One changed byte of a header: what can still be read is what was written, or is refused."""
    path = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    write_tensors(path, TENSORS)
    whole = bytearray(path.read_bytes())
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    whole[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        folder = Folder(path.parent)
        found = {name: folder.read(name) for name in folder.entries}
    except LoadError as error:
        assert "\n" not in str(error)
        return
    # A name, a dtype of the same width or a shape may have changed: never the bytes.
    assert sum(x.nbytes for x in found.values()) == sum(x.nbytes for x in TENSORS.values())
