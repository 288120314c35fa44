"""Drafter folders: manifest and arrays there and back, and every way a folder can be wrong."""

import dataclasses
import json

import numpy as np
import pytest

from checkpoints.drafters import Manifest, read_drafter, read_manifest, write_drafter
from checkpoints.folders import INDEX, WHOLE
from checkpoints.tensors import read_tensors, write_tensors
from eagle3_jax import testing
from eagle3_jax.configs import RopeConfig
from eagle3_jax.contracts import LoadError
from eagle3_jax.states import arrays_of

DRAFTER = testing.tiny_drafter("llama")
MANIFEST = Manifest(
    config=dataclasses.replace(DRAFTER.config, rope=RopeConfig(theta=5e5, interleaved=True)),
    spec=dataclasses.replace(DRAFTER.spec, tokenizer="abc"),
    recommended={"speculation": {"depth": 3}, "dtype": "float32"},
    training={"updates": 7},
)
ARRAYS = {name: np.asarray(value) for name, value in arrays_of(DRAFTER).items()}


@pytest.fixture
def folder(tmp_path):
    write_drafter(tmp_path / "run" / "drafter", MANIFEST, ARRAYS)
    return tmp_path / "run" / "drafter"


def test_there_and_back(folder):
    manifest, arrays = read_drafter(folder)
    assert manifest == MANIFEST
    assert isinstance(manifest.spec.boundaries, tuple)
    assert set(arrays) == set(ARRAYS)
    for name, value in ARRAYS.items():
        assert arrays[name].dtype == value.dtype
        np.testing.assert_array_equal(arrays[name], value)
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "model.safetensors"}


def edited(folder, edit):
    """The manifest with a change."""
    path = folder / "manifest.json"
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda raw: raw.update(format="other"), "no drafter folder: format is 'other'"),
        (lambda raw: raw.pop("format"), "format is None"),
        (lambda raw: raw.update(version=2), "version 2 .* reads version 1"),
        (lambda raw: raw.pop("features"), "cannot be read: KeyError"),
        (lambda raw: raw["config"].pop("width"), "cannot be read: TypeError.*width"),
        (lambda raw: raw["config"].update(surprise=1), "cannot be read: TypeError.*surprise"),
        (lambda raw: raw["config"].pop("rope"), "cannot be read: KeyError"),
        (lambda raw: raw.update(config=3), "cannot be read: TypeError"),
        (lambda raw: raw["features"].update(boundaries=[1, 2, 9]), "boundaries .1, 2, 9."),
        (lambda raw: raw["config"].update(draft_vocab_size=0), "draft_vocab_size 0"),
    ],
)
def test_bad_manifests_are_named(folder, edit, words):
    edited(folder, edit)
    with pytest.raises(LoadError, match=words) as refusal:
        read_manifest(folder)
    assert "\n" not in str(refusal.value) and str(folder) in str(refusal.value)


def test_missing_parts_are_named(folder):
    (folder / "model.safetensors").unlink()
    assert read_manifest(folder) == MANIFEST
    with pytest.raises(LoadError, match="model.safetensors is missing"):
        read_drafter(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(LoadError, match="manifest.json is missing"):
        read_drafter(folder)


def test_the_manifest_comes_last(tmp_path, monkeypatch):
    """A folder whose writing was cut short has no manifest, so nobody takes it for whole."""

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("checkpoints.drafters.write_json", stop)
    with pytest.raises(KeyboardInterrupt):
        write_drafter(tmp_path, MANIFEST, ARRAYS)
    assert not (tmp_path / "manifest.json").exists()
    assert (tmp_path / "model.safetensors").exists()


MOST = 4_000
"""Bytes of a file's arrays; the fusion has 9,216."""


def test_small_files_there_and_back(tmp_path):
    write_drafter(tmp_path, MANIFEST, ARRAYS)
    write_drafter(tmp_path, MANIFEST, ARRAYS, most_bytes=MOST)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 3 and not (tmp_path / WHOLE).exists()
    for path in shards:
        assert sum(value.nbytes for value in read_tensors(path).values()) <= MOST
    assert read_drafter(tmp_path)[0] == MANIFEST
    found = read_drafter(tmp_path)[1]
    assert set(found) == set(ARRAYS)
    for name, value in ARRAYS.items():
        np.testing.assert_array_equal(found[name], value)
    # Fewer shards, then one file again: nothing of the former stays.
    write_drafter(tmp_path, MANIFEST, ARRAYS, most_bytes=2 * MOST)
    assert set(read_drafter(tmp_path)[1]) == set(ARRAYS)
    assert len(list(tmp_path.glob("model-*.safetensors"))) < len(shards)
    write_drafter(tmp_path, MANIFEST, ARRAYS)
    assert {path.name for path in tmp_path.iterdir()} == {"manifest.json", WHOLE}


def test_damaged_small_files_are_named(tmp_path):
    write_drafter(tmp_path, MANIFEST, ARRAYS, most_bytes=MOST)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[:-50])
    with pytest.raises(LoadError, match=f"damaged shards: .*{shards[1].name}.*truncated"):
        read_drafter(tmp_path)
    shards[1].unlink()
    with pytest.raises(LoadError, match=f"missing shards: {shards[1].name}"):
        read_drafter(tmp_path)
    shards[1].write_bytes(whole)

    index = json.loads((tmp_path / INDEX).read_text())
    part = next(name for name in index["weight_map"] if name.endswith(".2-of-3"))
    path = tmp_path / index["weight_map"].pop(part)
    (tmp_path / INDEX).write_text(json.dumps(index))
    tensors = read_tensors(path)
    value = tensors.pop(part)
    write_tensors(path, tensors)
    name = part.removesuffix(".2-of-3")
    with pytest.raises(
        LoadError, match=f"{name}'s 3 parts only .*copy the folder again"
    ) as refusal:
        read_drafter(tmp_path)
    assert "\n" not in str(refusal.value)
    index["weight_map"][part] = path.name
    (tmp_path / INDEX).write_text(json.dumps(index))
    write_tensors(path, {**tensors, part: value[:, :-1]})
    with pytest.raises(LoadError, match=f"the parts of {name} do not fit together"):
        read_drafter(tmp_path)
