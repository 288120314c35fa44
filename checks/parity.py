"""Logits and every boundary are within 2e-5 of transformers on all tiny verifiers, in float32.

Each golden file holds what transformers computed for one tiny random model. The model is drawn
again, written as a hub folder, loaded by `load_verifier` and scored. The table has the largest
errors; the last line is PASS or FAIL, and so is the exit status.
"""

import runpy
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.load import load_verifier

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
TOLERANCE = 2e-5


def errors_of(models: dict, name: str) -> list[float]:
    """Largest errors of one model: of the logits, then of each boundary."""
    with np.load(GOLDEN / "verifiers" / f"{name}.npz") as file:
        wanted = dict(file)
    with tempfile.TemporaryDirectory() as folder:
        verifier = load_verifier(models["write_folder"](name, folder), dtype="float32")
    boundaries = tuple(range(verifier.config.num_layers + 1))
    scores = verifier.score(jnp.asarray(wanted["tokens"]), boundaries)
    streams = np.split(np.asarray(scores.features.array), len(boundaries), axis=-1)
    pairs = [(np.asarray(scores.logits), wanted["logits"])]
    pairs += list(zip(streams, wanted["boundaries"], strict=True))
    return [float(np.abs(mine - theirs).max()) for mine, theirs in pairs]


def main() -> int:
    """Print the table; 0 where everything is within the tolerance."""
    jax.config.update("jax_default_matmul_precision", "highest")
    models = runpy.run_path(str(GOLDEN / "tiny_models.py"))
    names = list(models["CONFIGS"])
    most = max(models["CONFIGS"][name]["num_hidden_layers"] for name in names) + 1
    columns = ["logits", *(f"b{k}" for k in range(most))]
    print(f"largest error against transformers, tolerance {TOLERANCE:g}; bK is boundary K")
    print(f"{'config':28}", *(f"{column:>8}" for column in columns))
    worst = 0.0
    for name in names:
        errors = errors_of(models, name)
        # A NaN is no error that a maximum would keep.
        worst = max(worst, *(error if np.isfinite(error) else np.inf for error in errors))
        cells = [f"{error:8.1e}" for error in errors] + [" " * 7 + "-"] * (most + 1 - len(errors))
        print(f"{name:28}", *cells, flush=True)
    passed = worst <= TOLERANCE
    print(f"{len(names)} configurations, largest error {worst:.2g}: {'PASS' if passed else 'FAIL'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
