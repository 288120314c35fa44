"""Folders from the hub: its cache followed without a network, and every refusal in one line."""

import builtins
import types

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from checkpoints.downloads import DRAFTER_FILES, VERIFIER_FILES, fetch, is_hub_id
from eagle3_jax.contracts import LoadError

COMMIT = "0123456789012345678901234567890123456789"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no way to the network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def refusal(source: str) -> str:
    """The one line in which a source is refused."""
    with pytest.raises(LoadError) as caught:
        fetch(source, VERIFIER_FILES)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("source", ["a/b", "meta-llama/Llama-3.1-8B", "a/b@main", "a/b@refs/pr/1"])
def test_hub_ids(source):
    assert is_hub_id(source)


@pytest.mark.parametrize(
    "source", ["a", "a/b/c", "/a/b", "./a", "../a", "~/a", "a/", "", "a/b@", "a/b c", "a/é", "a\\b"]
)
def test_what_is_no_hub_id(source):
    assert not is_hub_id(source)


def test_the_cache_is_followed(cache):
    """Laid out as the hub's own library does: references, and a folder a commit."""
    repository = cache / "models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs" / "v").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "refs" / "v" / "2").write_text(COMMIT)
    for source in ("org/name", "org/name@v/2", f"org/name@{COMMIT}"):
        assert fetch(source, VERIFIER_FILES) == (snapshot, "org/name")
    assert "neither whole in the hub's cache nor in reach" in refusal("org/name@other")
    assert "org/other is no folder here" in refusal("org/other")
    assert "HF_HUB_OFFLINE" in refusal("org/other")


def test_only_what_is_needed_is_asked_for(monkeypatch, tmp_path):
    """Not a repository's second copy in another format, which is as large as the first."""
    asked = {}
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *names, **how: asked.update(how) or tmp_path
    )
    fetch("org/name@v1", DRAFTER_FILES)
    assert asked == {
        "revision": "v1",
        "allow_patterns": list(DRAFTER_FILES),
        "ignore_patterns": "*/*",
    }
    names = ["config.json", "model-00001-of-00002.safetensors", "original/model.safetensors"]
    names += ["pytorch_model.bin", "model.safetensors.index.json", "metal/model.bin", "README.md"]
    names += ["consolidated.safetensors", "modeling_kimi.py", "tokenizer.json", "x.gguf"]
    fetch("org/name", VERIFIER_FILES)
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(huggingface_hub.utils.filter_repo_objects(names, **patterns)) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (errors.GatedRepoError, "gated on the hub: accept its terms there, then set HF_TOKEN"),
        (errors.RepositoryNotFoundError, "not on the hub, or private: check the name"),
        (errors.RevisionNotFoundError, "the hub's org/name has no revision 'main'"),
        (errors.HfHubHTTPError, "fetching it from the hub failed: 503 Come back"),
    ],
)
def test_refusals_of_the_hub(monkeypatch, kind, said):
    response = types.SimpleNamespace(headers={}, request=None, status_code=503)

    def refuse(*names, **how):
        raise kind("503\nCome back", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    assert said in refusal("org/name")


def test_names_that_the_hub_does_not_take():
    assert "fetching it from the hub failed: " in refusal("org/na--me")


def test_without_the_package(monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert "pip install 'eagle3-jax[hub]'" in refusal("org/name")
