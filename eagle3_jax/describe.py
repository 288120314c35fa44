"""What `eagle3 info` tells: of the library and its platform, a verifier, a drafter."""

import dataclasses
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

import eagle3_jax
from checkpoints.drafters import read_drafter
from eagle3_jax.caches import Cache
from eagle3_jax.configs import VerifierConfig
from eagle3_jax.contracts import ContractError, default_boundaries
from eagle3_jax.load import bundled
from eagle3_jax.packed import PARTS
from eagle3_jax.states import arrays_of
from eagle3_jax.verifier import Verifier
from kernels_pallas import Backend, available
from sharding.mesh import MeshShape
from sharding.placement import part_shape
from sharding.rules import RULES, kv_heads


def describe_library(kernels: Backend = "xla") -> dict[str, Any]:
    """Versions, devices, the backend of every operation, bundled models.

    Args:
        kernels: asked for of a cycle.
    """
    cpu = jax.default_backend() == "cpu"
    return {
        "versions": {
            "eagle3_jax": eagle3_jax.__version__,
            "jax": jax.__version__,
            "flax": flax.__version__,
            "python": platform.python_version(),
        },
        "platform": jax.default_backend(),
        "devices": [str(device) for device in jax.devices()],
        "backends": {
            "attention": {"cycle": kernels, "prompts": "xla"},
            "tree_walk": kernels,
            "mosaic_gpu": available("mosaic_gpu") or "available",
            "experts": {
                "few_tokens": "experts_in_use" if cpu else "experts_ragged",
                "many_tokens": "experts_by_tile" if cpu else "experts_ragged",
                "gradients": "experts_by_tile" if cpu else "experts_ragged",
            },
        },
        "bundled": bundled(),
    }


def describe_verifier(verifier: Verifier) -> dict[str, Any]:
    """What a verifier is."""
    c = verifier.config
    try:
        boundaries = list(default_boundaries(c.num_layers))
    except ContractError:
        boundaries = None
    arrays = arrays_of(verifier)
    memory = bytes_by_format(arrays)
    if c.tied_head:  # the embedding's, counted there
        arrays = {path: x for path, x in arrays.items() if not path.startswith("head.kernel")}
    return {
        "name": verifier.name,
        "family": c.family,
        "dtype": str(verifier.dtype),
        "parameters": count_by_part(arrays),
        "weights_bytes": memory,
        "layers": c.num_layers,
        "width": c.width,
        "attention": attention(c),
        "experts": experts(c),
        "vocabulary": c.vocab_size,
        "end_tokens": list(c.eos_tokens),
        "longest_text": c.max_length,
        "default_boundaries": boundaries,
        "cache_bytes_per_token": cache_bytes(lambda: verifier.make_cache(1, 1)),
        "tokenizer": None if verifier.tokenizer is None else verifier.tokenizer.fingerprint,
        "no_tokenizer": verifier.no_tokenizer if verifier.tokenizer is None else None,
    }


def describe_part(verifier: Verifier, mesh: MeshShape) -> dict[str, Any]:
    """What each device of a mesh holds of a verifier.

    Raises:
        RequestError: the mesh does not divide it.
    """
    c = verifier.config
    shapes = {path: array.shape for path, array in arrays_of(verifier).items()}
    RULES.check(shapes, c, mesh)
    kv = kv_heads(c, mesh.model)
    cache = cache_bytes(lambda: verifier.make_cache(1, 1))
    weights = sum(
        int(np.prod(part_shape(path, array.shape, mesh, c))) * array.dtype.itemsize
        for path, array in arrays_of(verifier).items()
    )
    return {
        "mesh": str(mesh),
        "heads": c.num_heads // mesh.model,
        "key_value_heads": "the latent of all heads" if c.latent else kv,
        "devices_with_the_same_key_value_heads": (
            mesh.model if c.latent else mesh.model * kv // c.num_kv_heads
        ),
        "experts": c.experts.count // mesh.expert if c.experts else None,
        "vocabulary": c.vocab_size // mesh.model,
        "weights_bytes": weights,
        "cache_bytes_per_token": cache if c.latent else cache * kv // c.num_kv_heads,
    }


def attention(config: VerifierConfig) -> str:
    """A verifier's attention and rope in one line."""
    c = config
    if c.latent:
        parts = [f"latent, {c.num_heads} heads, rank {c.latent.kv_rank}"]
    else:
        parts = [f"{c.num_heads} heads over {c.num_kv_heads} of width {c.head_width}"]
    kind = "" if c.rope.kind == "default" else f" {c.rope.kind} x{c.rope.factor:g}"
    parts.append(f"rope theta {c.rope.theta:g}{kind}")
    parts += ["normed heads"] if c.qk_norm else []
    parts += ["sinks"] if c.sinks else []
    parts += ["biases"] if c.attention_bias else []
    if c.windowed:
        parts.append(f"window of {c.window} in {len(c.windowed)} layers")
    return "; ".join(parts)


def experts(config: VerifierConfig) -> str | None:
    """A verifier's mixture of experts in one line; None where it has none."""
    e = config.experts
    if e is None:
        return None
    shared = f" and {e.shared} shared" if e.shared else ""
    groups = f", {e.chosen_groups} of {e.groups} groups" if e.groups > 1 else ""
    return (
        f"{e.chosen} of {e.count}{shared} of width {e.width} in {len(config.moe_layers)} layers; "
        f"{e.score}{groups}"
    )


def describe_drafter(folder: Path, verifier: Verifier | None = None) -> dict[str, Any]:
    """What a drafter folder holds.

    Args:
        folder: of manifest and arrays.
        verifier: whose dtype the drafter takes over; without one its own is meant.
    """
    manifest, arrays = read_drafter(folder)
    c = manifest.config
    dtype = arrays["fusion.kernel"].dtype if verifier is None else verifier.dtype
    return {
        "parameters": count_by_part(arrays),
        "dtype": str(dtype),
        "width": c.width,
        "flags": [f.name for f in dataclasses.fields(c) if getattr(c, f.name) is True],
        "boundaries": list(manifest.spec.boundaries),
        "trained_for": manifest.spec.verifier,
        "draft_vocabulary": c.draft_vocab_size,
        "vocabulary": c.vocab_size,
        "cache_bytes_per_token": 2 * c.num_kv_heads * c.head_width * jnp.dtype(dtype).itemsize,
        "recommended": manifest.recommended,
        "training": manifest.training,
    }


def count_by_part(arrays: Mapping[str, Any]) -> dict[str, int]:
    """Parameters by the first part of their path, and `total`; tables of ids are none."""
    parts: dict[str, int] = {}
    for path, array in arrays.items():
        part, last = path.split(".")[0], path.rpartition(".")[2]
        if last == "codes" or (last not in PARTS and jnp.issubdtype(array.dtype, jnp.floating)):
            count = int(np.prod(array.shape)) * (2 if array.dtype == jnp.uint8 else 1)
            parts[part] = parts.get(part, 0) + count
    return {**parts, "total": sum(parts.values())}


def bytes_by_format(arrays: Mapping[str, Any]) -> dict[str, int]:
    """Bytes by how weights are stored, and `total`; memory that two places share counts once."""
    formats: dict[str, int] = {}
    seen = set()
    for path, array in arrays.items():
        kernel, _, part = path.rpartition(".")
        codes = arrays[f"{kernel}.codes"] if part in PARTS else array
        kind = str(codes.dtype)
        kind = "int4" if kind == "uint8" else kind
        if id(array) not in seen:
            formats[kind] = formats.get(kind, 0) + array.nbytes
        seen.add(id(array))
    return {**formats, "total": sum(formats.values())}


def cache_bytes(make: Callable[[], Cache]) -> int:
    """Bytes of the cache that `make` would make; nothing is allocated."""
    leaves = jax.tree.leaves(jax.eval_shape(make))
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)
