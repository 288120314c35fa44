"""Folders from the Hugging Face hub: `org/name` or `org/name@revision` to a local folder."""

import re
from pathlib import Path

from checkpoints.tensors import one_line
from eagle3_jax.contracts import LoadError

VERIFIER_FILES = (
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "tiktoken.model",
    "tokenizer.model",
)
DRAFTER_FILES = ("manifest.json", "model*.safetensors", "model.safetensors.index.json")
"""What is fetched, from the top of a repository only: some keep a second copy in a folder."""


def is_hub_id(source: str) -> bool:
    """Whether a source reads as `org/name` or `org/name@revision`."""
    part = r"[A-Za-z0-9][\w.-]*"
    return re.fullmatch(rf"{part}/{part}(@[^@\s]+)?", source, re.ASCII) is not None


def fetch(source: str, files: tuple[str, ...]) -> tuple[Path, str]:
    """The local copy of a repository, and its name without the revision.

    Files that are in the hub's own cache are not fetched again; `HF_HUB_OFFLINE=1` takes nothing
    else. `HF_HUB_CACHE` and `HF_TOKEN` are followed too.

    Args:
        source: `org/name` or `org/name@revision`.
        files: patterns of the files that are wanted.

    Raises:
        LoadError: the package is not installed, the repository or revision does not exist, is
            gated, or cannot be reached.
    """
    name, _, revision = source.partition("@")
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError:
        raise LoadError(
            f"{source} is no folder here; to fetch it from the hub, pip install 'eagle3-jax[hub]'"
        ) from None
    start = f"{source} is no folder here, and"
    try:
        found = huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=list(files), ignore_patterns="*/*"
        )
    except errors.GatedRepoError:
        raise LoadError(
            f"{start} gated on the hub: accept its terms there, then set HF_TOKEN or run "
            "`hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise LoadError(
            f"{start} not on the hub, or private: check the name, or set HF_TOKEN for a private one"
        ) from None
    except errors.RevisionNotFoundError:
        raise LoadError(f"the hub's {name} has no revision {revision or 'main'!r}") from None
    except errors.LocalEntryNotFoundError as error:
        raise LoadError(
            f"{start} neither whole in the hub's cache nor in reach: "
            f"{one_line(error.__cause__ or error, 200)}; fetch it where there is a connection, or "
            "pass a folder"
        ) from None
    except Exception as error:  # of whichever library carries the connection
        raise LoadError(f"{start} fetching it from the hub failed: {one_line(error)}") from None
    return Path(found), name
