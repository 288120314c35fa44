"""Logits and every boundary are within 2e-5 of transformers on all tiny verifiers, in float32.

Each golden file holds what transformers computed for one tiny random model. The model is drawn
again, written as a hub folder, loaded by `load_verifier` and run three times: in one whole pass, in
chunks as a prompt is read, and token by token, in caches whose other slots hold noise. The whole
pass must be within 2e-5 of transformers, the other two within 1e-5 of the whole pass; there
boundaries, whose values reach some ten, count relative to the largest one.

    parity.py [--oracle PYTHON] [NAME ...]

`--oracle` is the Python of an environment with transformers (tests/golden/README.md says which):
the golden files are then made again by it, and compared with in place of the committed ones.
The last line is PASS or FAIL, and so is the exit status.
"""

import argparse
import functools
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.caches import block_scope, causal, write_rows
from eagle3_jax.load import load_verifier

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
TOLERANCE, SAME = 2e-5, 1e-5
CAPACITY, CHUNK = 64, 16
COLUMNS = ("logits", "boundaries", "chunks", "(bound.)", "by token", "(bound.)")


@functools.partial(jax.jit, static_argnames="boundaries")
def step(model, tokens, cache, length, boundaries):
    """Read one block a row into the cache: the block's logits, its features, the cache."""
    b, n = tokens.shape
    depth = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[None], (b, n))
    scope = block_scope(length, depth, causal(b, n))
    hidden, features, rows = model.forward(tokens[:, None], scope, cache, boundaries)
    return model.read_out(hidden[:, 0]), features, write_rows(cache, rows, length)


def in_blocks(model, tokens, boundaries, sizes) -> tuple[np.ndarray, np.ndarray]:
    """Logits and features of a text read in blocks of some sizes."""
    noise = np.random.default_rng(0)
    cache = jax.tree.map(
        lambda x: jnp.asarray(noise.standard_normal(x.shape), x.dtype),
        model.make_cache(len(tokens), CAPACITY),
    )
    logits, features, at = [], [], 0
    for size in sizes:
        length = jnp.full((len(tokens),), at, jnp.int32)
        out = step(model, tokens[:, at : at + size], cache, length, boundaries)
        logits.append(np.asarray(out[0]))
        features.append(np.asarray(out[1]))
        cache, at = out[2], at + size
    return np.concatenate(logits, axis=1), np.concatenate(features, axis=1)


def largest(mine, theirs, relative: bool = False) -> float:
    """The largest error; infinite where either is no number."""
    scale = max(1.0, float(np.abs(theirs).max())) if relative else 1.0
    error = float(np.abs(np.asarray(mine) - np.asarray(theirs)).max()) / scale
    return error if np.isfinite(error) else np.inf


def errors_of(models: dict, golden: Path, name: str) -> list[float]:
    """Largest errors of one model, in the order of COLUMNS."""
    with np.load(golden / f"{name}.npz") as file:
        wanted = dict(file)
    with tempfile.TemporaryDirectory() as folder:
        verifier = load_verifier(models["write_folder"](name, folder), dtype="float32")
    every = np.arange(verifier.config.num_layers + 1)
    boundaries = tuple(wanted.get("kept_boundaries", every).tolist())
    tokens = jnp.asarray(wanted["tokens"])
    scores = verifier.score(tokens, boundaries)
    whole = np.asarray(scores.logits), np.asarray(scores.features.array)
    streams = np.split(whole[1], len(boundaries), axis=-1)
    length = tokens.shape[1]
    chunks = [CHUNK] * (length // CHUNK) + ([length % CHUNK] if length % CHUNK else [])
    passes = []
    for sizes in (chunks, [CHUNK] + [1] * (length - CHUNK)):
        found = in_blocks(verifier, tokens, boundaries, sizes)
        passes += [largest(found[0], whole[0]), largest(found[1], whole[1], relative=True)]
    return [
        largest(whole[0], wanted["logits"]),
        max(largest(a, b) for a, b in zip(streams, wanted["boundaries"], strict=True)),
        *passes,
    ]


def remake(python: str, names: list[str], folder: Path) -> Path:
    """Golden files made by a live transformers, in a folder."""
    script = GOLDEN / "make_verifiers.py"
    subprocess.run([python, script, "--out", folder, *names], check=True, stdout=sys.stderr)
    return folder


def main() -> int:
    """Print the table; 0 where everything is within the tolerances."""
    models = runpy.run_path(str(GOLDEN / "tiny_models.py"))
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--oracle", metavar="PYTHON")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(models["CONFIGS"])
    if unknown:
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    names = arguments.names or list(models["CONFIGS"])
    jax.config.update("jax_default_matmul_precision", "highest")
    with tempfile.TemporaryDirectory() as folder:
        golden = GOLDEN / "verifiers"
        if arguments.oracle:
            golden = remake(arguments.oracle, names, Path(folder))
        print(f"largest errors against transformers, at most {TOLERANCE:g}; passes, {SAME:g}")
        print(f"{'configuration':28}", *(f"{c:>11}" for c in COLUMNS))
        worst = np.zeros(len(COLUMNS))
        for name in names:
            errors = errors_of(models, golden, name)
            worst = np.maximum(worst, errors)
            print(f"{name:28}", *(f"{error:11.1e}" for error in errors), flush=True)
    passed = bool((worst <= [TOLERANCE] * 2 + [SAME] * 4).all())
    print(
        f"{len(names)} configurations; largest error {worst[:2].max():.2g} against transformers, "
        f"{worst[2:].max():.2g} between passes: {'PASS' if passed else 'FAIL'}"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
