"""Loading: a source (folder or bundled name) to a verifier, a drafter that fits it."""

import difflib
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints import drafters, hub
from checkpoints.tensors import read_json, read_tensors
from eagle3_jax.configs import Speculation
from eagle3_jax.contracts import ContractError, Convention, LoadError, UnsupportedError
from eagle3_jax.drafter import Drafter
from eagle3_jax.drafter.vocabulary import check_vocabulary
from eagle3_jax.states import fill
from eagle3_jax.tokenizer import Tokenizer
from eagle3_jax.verifier import Verifier

BUNDLED = Path(__file__).parent / "bundled"

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def bundled() -> list[str]:
    """Names of the models that come with the library."""
    return sorted(p.name for p in BUNDLED.iterdir() if p.is_dir()) if BUNDLED.is_dir() else []


def _find(source: str | Path, part: str, holds: str) -> tuple[Path, str]:
    """The folder that a source means, and its name.

    Args:
        source: a folder or a bundled name.
        part: sub-folder of a bundled model (`verifier`, `drafter`).
        holds: the file that such a folder must hold.
    """
    folder = Path(source)
    if folder.is_dir():
        for inner in (folder, folder / part):
            if (inner / holds).is_file():
                return inner, folder.name
        raise LoadError(f"folder {source} holds no {holds}; expected a {part} folder")
    if folder.is_file():
        raise LoadError(f"{source} is a file; expected a folder that holds {holds}")
    names = bundled()
    if str(source) in names:
        return BUNDLED / str(source) / part, str(source)
    near = difflib.get_close_matches(str(source), names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"bundled: {', '.join(names) or 'none'}"
    raise LoadError(f"{part} {str(source)!r} is neither a folder nor a bundled name; {hint}")


def check_dtype(dtype: str | None) -> Any:
    """The jax dtype of a name.

    Raises:
        LoadError: an unknown name.
    """
    if dtype is None:
        return None
    if dtype not in DTYPES:
        raise LoadError(f"dtype {dtype!r} is unknown; expected {' or '.join(DTYPES)}")
    return DTYPES[dtype]


def load_verifier(source: str | Path, dtype: str | None = None, mesh: Any = None) -> Verifier:
    """A verifier from a folder of config.json and model.safetensors, or a bundled name.

    Args:
        source: the folder or name; a `tokenizer.json` beside the weights is read too.
        dtype: `float32` or `bfloat16`, of weights and activations. None is float32 on CPU, where it
            is the faster one for a single row, and bfloat16 elsewhere.
        mesh: not supported yet.

    Raises:
        LoadError: the source is unknown, incomplete, damaged, or of an unsupported family.
        UnsupportedError: a mesh was given.
    """
    if mesh is not None:
        raise UnsupportedError("mesh: sharded loading needs partition rules, which are not there")
    kind = check_dtype(dtype)
    if kind is None:
        kind = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    folder, name = _find(source, "verifier", "config.json")
    config = hub.config_from_hub(read_json(folder / "config.json"))
    arrays = hub.from_hub(config, read_tensors(folder / "model.safetensors"))
    make = functools.partial(Verifier, config, jax.random.key(0), name, _tokenizer(folder))
    return fill(make, arrays, kind)


def _tokenizer(folder: Path) -> Tokenizer | None:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    template, special = None, {}
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        raw = read_json(settings)
        template = raw.get("chat_template")
        for key in ("bos_token", "eos_token"):
            token = raw.get(key)
            if token is not None:
                special[key] = token["content"] if isinstance(token, dict) else str(token)
    return Tokenizer.from_file(path, template if isinstance(template, str) else None, special)


def find_drafter(source: str | Path) -> Path:
    """The drafter folder that a source means: itself, a run's `drafter`, or a bundled one.

    Raises:
        LoadError: there is none.
    """
    return _find(source, "drafter", "manifest.json")[0]


def load_drafter(
    source: str | Path, verifier: Verifier, convention: Convention | None = None
) -> Drafter:
    """A drafter that fits the verifier.

    Args:
        source: a drafter folder, a run's folder, or a bundled name.
        verifier: what it drafts for; its dtype is taken over.
        convention: only for folders of other projects, whose layer ids need one; ours name
            boundaries, and refuse it.

    Raises:
        LoadError: the source is unknown, incomplete or damaged.
        ContractError: width, layers, boundaries or vocabulary do not fit the verifier.
    """
    folder = find_drafter(source)
    manifest, arrays = drafters.read_drafter(folder)
    if convention is not None:
        raise ContractError(
            f"convention={convention!r} was given, but {folder.name} names boundaries itself; "
            "leave it out"
        )
    check_drafter(manifest, verifier)
    recommended = tuple(sorted((k, freeze(v)) for k, v in manifest.recommended.items()))
    make = functools.partial(
        Drafter, manifest.config, manifest.spec, jax.random.key(0), recommended
    )
    drafter = fill(make, arrays, verifier.dtype)
    check_vocabulary(jax.device_get(drafter.vocabulary[...]), manifest.config.vocab_size)
    return drafter


def freeze(value: Any) -> Any:
    """Dictionaries as sorted pairs, so that a module can carry them as static data."""
    if isinstance(value, dict):
        return tuple(sorted((k, freeze(v)) for k, v in value.items()))
    return value


def check_drafter(manifest: drafters.Manifest, verifier: Verifier) -> None:
    """Refuse a drafter trained for another model.

    Raises:
        ContractError: says what was expected, what was found, and the likely cause.
    """
    spec, config = manifest.spec, manifest.config
    if len(spec.boundaries) != config.num_features:
        raise ContractError(
            f"the drafter's weights take {config.num_features} features, its manifest names "
            f"boundaries {list(spec.boundaries)}; the manifest was edited, or is another drafter's"
        )
    found = verifier.spec(
        spec.boundaries if spec.num_layers == verifier.config.num_layers else (0,)
    )
    spec.require(found, of=f"the verifier {verifier.name}")
    if config.vocab_size != verifier.config.vocab_size:
        raise ContractError(
            f"the drafter was trained for a vocabulary of {config.vocab_size} tokens, the "
            f"verifier {verifier.name} has {verifier.config.vocab_size}; another model or tokenizer"
        )


def recommended_speculation(drafter: Drafter | None) -> Speculation:
    """What the drafter's manifest recommends; the default where it says nothing.

    Without a drafter, plain decoding.

    Raises:
        LoadError: the manifest recommends something that `Speculation` does not have.
    """
    if drafter is None:
        return Speculation(depth=0)
    settings: Any = dict(drafter.recommended).get("speculation", ())
    try:
        return Speculation(**dict(settings))
    except (TypeError, ValueError) as error:
        raise LoadError(f"the drafter's manifest recommends {settings!r}: {error}") from None
