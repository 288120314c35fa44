"""Loading: a source (folder, name, file or hub id) to a verifier, a drafter that fits it."""

import difflib
import functools
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from checkpoints import drafters, hub
from checkpoints.downloads import DRAFTER_FILES, VERIFIER_FILES, fetch, is_hub_id
from checkpoints.families import config_from_hub
from checkpoints.folders import Folder
from checkpoints.sources import Source
from checkpoints.tensors import read_json
from eagle3_jax.configs import Speculation, VerifierConfig
from eagle3_jax.contracts import ContractError, Convention, LoadError
from eagle3_jax.drafter import Drafter
from eagle3_jax.drafter.vocabulary import check_vocabulary
from eagle3_jax.int8 import Int8
from eagle3_jax.packed import PackedWeight
from eagle3_jax.states import fill
from eagle3_jax.tokenizer import Tokenizer, read_tokenizer
from eagle3_jax.verifier import Verifier
from eagle3_jax.verifier.meshed import check_mesh, settled
from sharding.mapped import WHOLE
from sharding.placement import placed, put

BUNDLED = Path(__file__).parent / "bundled"

SMOLLM2 = "smollm2"
"""A bundled name whose verifier comes in a package of its own; its drafter lies here."""

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
QUANTIZATIONS = ("int8", "stored")


def bundled() -> list[str]:
    """Names of the models that come with the library."""
    return sorted(p.name for p in BUNDLED.iterdir() if p.is_dir()) if BUNDLED.is_dir() else []


def _find(source: str | Path, part: str, holds: str, files: tuple[str, ...]) -> tuple[Path, str]:
    """The folder that a source means, and its name; what is here goes before the hub.

    Args:
        source: a folder, a bundled name or a hub id.
        part: sub-folder of a bundled model (`verifier`, `drafter`).
        holds: the file that such a folder must hold.
        files: what is fetched from the hub.
    """
    folder, name = Path(source), str(source)
    if os.path.isdir(folder):
        for inner in (folder, folder / part):
            if os.path.lexists(inner / holds):
                return inner, folder.absolute().name
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        instead = f"pass the file {ggufs[0]} itself" if ggufs else f"expected a {part} folder"
        raise LoadError(f"folder {folder} holds no {holds}; {instead}")
    if os.path.lexists(folder):
        raise LoadError(f"{source} is a file; expected a folder that holds {holds}")
    names = [name for name in bundled() if (BUNDLED / name / part).is_dir()]
    if name in names:
        return BUNDLED / name / part, name
    if is_hub_id(name):
        fetched, name = fetch(name, files)
        if not os.path.lexists(fetched / holds):
            raise LoadError(f"the hub's {source} holds no {holds}; expected a {part} folder")
        return fetched, name
    names += [SMOLLM2] if part == "verifier" else []
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"bundled: {', '.join(names) or 'none'}"
    raise LoadError(f"{part} {name!r} is neither a folder nor a bundled name; {hint}")


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


class _Model(NamedTuple):
    """What a verifier's source holds; weights are not yet read."""

    config: VerifierConfig
    weights: Source
    name: str
    tokenizer: Tokenizer | None
    no_tokenizer: str | None


def _open(source: str | Path, packed: bool) -> _Model:
    """What a source holds; a GGUF's weights stay as they are there where `packed`."""
    path = Path(source)
    smollm2 = str(source) == SMOLLM2 and not os.path.lexists(path)
    if smollm2 or (path.suffix == ".gguf" and not os.path.isdir(path)):
        from checkpoints.gguf import find_smollm2, read_gguf

        model = read_gguf(find_smollm2() if smollm2 else path, packed)
        name = SMOLLM2 if smollm2 else path.stem
        return _Model(model.config, model.source, name, model.tokenizer, model.why_no_tokenizer)
    if packed:
        raise LoadError(
            f"quantization 'stored' wants a GGUF file, found {source}; leave it out: a folder's "
            "int4 weights stay packed anyhow"
        )
    folder, name = _find(source, "verifier", "config.json", VERIFIER_FILES)
    generation = folder / "generation_config.json"
    config = config_from_hub(
        read_json(folder / "config.json"),
        read_json(generation) if os.path.lexists(generation) else None,
    )
    return _Model(config, Folder(folder), name, *read_tokenizer(folder))


def load_verifier(
    source: str | Path,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    quantization: str | None = None,
) -> Verifier:
    """A verifier from a Hugging Face folder, a GGUF file, the hub, or a bundled name.

    Nothing is written into a folder, and weights are read one after another.

    Args:
        source: a folder of config.json and safetensors, with its tokenizer where it has one; a
            `.gguf` file; a bundled name (`tiny-kimi`, `smollm2`); or a hub id, `org/name` or
            `org/name@revision`. What lies here under that name goes first.
        dtype: `float32` or `bfloat16`, of weights and activations. None is float32 on CPU, where it
            is the faster one for a single row, and bfloat16 elsewhere.
        mesh: over which it is to lie, from `sharding.make_mesh`; each device is sent its part.
        quantization: `int8` packs kernels and embedding while loading, with a scale an output
            (`eagle3_jax/packed.py`); what comes packed stays as it is. `stored` leaves a GGUF's
            4- and 8-bit blocks as they are, in float32 on one device: memory of a fifth, plain
            decoding somewhat faster on CPU and passes over several rows slower. None widens them.

    Raises:
        LoadError: the source is unknown, out of reach, incomplete, damaged, or of an unsupported
            family; dtype or quantization are unknown.
        RequestError: the mesh does not divide the verifier.
        UnsupportedError: the config asks for what this version cannot do.
    """
    kind = check_dtype(dtype)
    if quantization not in (None, *QUANTIZATIONS):
        raise LoadError(
            f"quantization {quantization!r} is unknown; expected {' or '.join(QUANTIZATIONS)}"
        )
    if kind is None:
        kind = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    stored = quantization == "stored"
    if stored and (kind != jnp.float32 or mesh is not None):
        raise LoadError(
            "quantization 'stored' wants float32 on one device, found "
            f"{'a mesh' if mesh is not None else jnp.dtype(kind).name}; leave it out"
        )
    model = _open(source, packed=stored)
    arrays = hub.from_hub(model.config, model.weights)
    if quantization == "int8":
        arrays = Int8(arrays)
    make = functools.partial(
        Verifier,
        model.config,
        jax.random.key(0),
        model.name,
        model.tokenizer,
        model.no_tokenizer,
    )
    if mesh is None:
        verifier = fill(make, arrays, kind)
        table = verifier.embedding
        if model.config.tied_head and isinstance(table, PackedWeight):
            verifier.head.kernel = table.kernel  # the same memory
        return verifier
    check_mesh(jax.eval_shape(make), mesh)
    place = functools.partial(placed, mesh=mesh, config=model.config)
    if isinstance(arrays, hub.Arrays):
        arrays = hub.stacks(arrays)
    return settled(fill(make, arrays, kind, place), mesh)


def find_drafter(source: str | Path) -> Path:
    """The drafter folder that a source means: itself, a run's, a bundled one or one on the hub.

    Raises:
        LoadError: there is none.
    """
    return _find(source, "drafter", "manifest.json", DRAFTER_FILES)[0]


def load_drafter(
    source: str | Path, verifier: Verifier, convention: Convention | None = None
) -> Drafter:
    """A drafter that fits the verifier.

    Args:
        source: a drafter folder, a run's folder, a bundled name, or a hub id of such a folder.
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
    if verifier.mesh is not None:
        drafter = put(drafter, verifier.mesh, WHOLE)
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


def recommended_plain_dtype(drafter: Drafter) -> str | None:
    """Plain decoding's best dtype by the drafter's manifest; None where it says nothing.

    Raises:
        LoadError: it names no dtype.
    """
    dtype: Any = dict(drafter.recommended).get("plain_dtype")
    if dtype is not None and dtype not in list(DTYPES):
        raise LoadError(
            f"the drafter's manifest recommends plain_dtype {dtype!r}; expected "
            f"{' or '.join(DTYPES)}"
        )
    return dtype


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
