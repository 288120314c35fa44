"""Drafter folders: manifest and arrays there and back, and every way a folder can be wrong."""

import dataclasses
import json

import numpy as np
import pytest

from checkpoints.drafters import Manifest, read_drafter, read_manifest, write_drafter
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
