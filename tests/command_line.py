"""Fixtures that run commands of the command line, on a tiny pair named tiny-kimi."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from checkpoints import families, hub
from checkpoints.drafters import Manifest, write_drafter
from checkpoints.tensors import write_json, write_tensors
from eagle3_jax import load, testing
from eagle3_jax.cli import main
from eagle3_jax.configs import DrafterConfig, RopeConfig
from eagle3_jax.drafter import Drafter
from eagle3_jax.verifier import Verifier

CONFIG = dataclasses.replace(testing.DEEPSEEK, rope=RopeConfig(interleaved=True))
DRAFTER = DrafterConfig(
    width=24,
    verifier_width=CONFIG.width,
    num_features=3,
    num_heads=4,
    num_kv_heads=2,
    head_width=6,
    mlp_width=40,
    vocab_size=CONFIG.vocab_size,
    draft_vocab_size=64,
)


def random_arrays(make) -> dict[str, np.ndarray]:
    """Arrays for the module that `make` would make, drawn without compiling anything."""
    rng = np.random.default_rng(0)
    state = nnx.to_flat_state(nnx.state(jax.eval_shape(make)))
    arrays = {".".join(str(part) for part in path): value for path, value in state}
    return {
        name: np.ones(value.shape, np.float32)
        if "norm" in name
        else rng.normal(size=value.shape, scale=value.shape[-1] ** -0.5).astype(np.float32)
        for name, value in arrays.items()
    }


def put_verifier(folder: Path) -> Verifier:
    """Write a random verifier with the tiny tokenizer, and load it."""
    folder.mkdir(parents=True)
    arrays = random_arrays(functools.partial(Verifier, CONFIG, jax.random.key(0)))
    write_tensors(folder / "model.safetensors", hub.to_hub(CONFIG, arrays))
    write_json(folder / "config.json", families.config_to_hub(CONFIG))
    (folder / "tokenizer.json").write_text(testing.tiny_tokenizer()._backend.to_str())
    return load.load_verifier(folder.parent)


def put_drafter(folder: Path, verifier: Verifier, boundaries=(1, 2, 3)) -> None:
    """Write a random drafter for a verifier, over its whole vocabulary."""
    spec = verifier.spec(boundaries)
    arrays = random_arrays(functools.partial(Drafter, DRAFTER, spec, jax.random.key(1)))
    arrays["vocabulary"] = np.arange(64, dtype=np.int32)
    manifest = Manifest(
        DRAFTER,
        spec,
        recommended={"speculation": {"depth": 3}, "dtype": "float32"},
        training={"updates": 7},
    )
    write_drafter(folder, manifest, arrays)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """A folder named tiny-kimi of a verifier and its drafter."""
    folder = tmp_path_factory.mktemp("models") / "tiny-kimi"
    put_drafter(folder / "drafter", put_verifier(folder / "verifier"))
    return folder


@pytest.fixture
def run(pair, capsys, monkeypatch):
    """Run a command where that pair is what is bundled; its exit status, its two outputs."""
    monkeypatch.setattr(load, "BUNDLED", pair.parent)

    def run(*words):
        status = main([str(word) for word in words])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def refused(run):
    """Run a command that is to fail; its one line."""

    def refused(*words) -> str:
        status, out, err = run(*words)
        assert status == 2, (out, err)
        assert out == ""
        assert err.startswith("eagle3: error: ") and err.count("\n") == 1, err
        return err.removeprefix("eagle3: error: ").strip()

    return refused
