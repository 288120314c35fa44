"""The largest relative error of each attention kernel, interpreted on CPU, over drawn calls.

Sizes, limits (0, 1, and slots about block edges), ancestors, windows, sinks and splits are drawn;
every draw is a shape of its own and is compiled for itself. What no query sees of the cache holds
1e30, and memory that nobody wrote is NaN in the interpreter. The error is the largest difference
from the definition in numpy's float64 on the same rounded inputs, over the largest value.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("NPROC", "32")  # a thread for each interpreted warpgroup

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from kernels_pallas import forest_attention, latent_forest_attention  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.kernels_pallas.cases import (  # noqa: E402
    SCALE,
    Case,
    Shape,
    expected,
    plain_case,
    poisoned,
    rounded,
)

MOST = {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}


def drawn(rng: np.random.Generator, latent: bool) -> Case:
    """A call of a shape of its own."""
    w, u = (int(rng.choice([1, 2, 5, 17, 33, 64])) for _ in range(2))
    k = 1 if latent else int(rng.choice([1, 2]))
    shape = Shape(
        b=int(rng.choice([1, 2])),
        r=1,
        w=w,
        u=u,
        k=k,
        h=k * int(rng.choice([1, 3, 4])),
        s=8 * int(rng.integers(8, 64)),
        hd=16 * int(rng.integers(4 if latent else 1, 7)),
        hv=None if latent else 16 * int(rng.integers(1, 7)),
        sinks=not latent and bool(rng.choice([False, True])),
        width=32 * int(rng.integers(1, 3)),
    )
    case = plain_case(shape, rng)
    edges = [e for e in (0, 1, 63, 64, 65, 319, 320, 321, shape.s - 1, shape.s) if e <= shape.s]
    case["hi"] = rng.choice(edges, case["hi"].shape).astype(np.int32)
    if rng.random() < 0.5:
        case["lo"] = rng.choice(edges, case["lo"].shape).astype(np.int32)
    case["ancestors"] = rng.random(case["ancestors"].shape) < rng.choice([0.1, 0.5, 0.9])
    case["layer"] = np.int32(rng.integers(shape.l))
    case["row"] = np.int32(rng.integers(shape.rows - shape.b + 1))
    return case


def run(case: Case, splits: int):
    """The kernel's output."""
    given = {n: None if x is None else jnp.asarray(x) for n, x in case.items()}
    del given["width"]
    options = {"scale": SCALE, "backend": "mosaic_gpu_interpret", "splits": splits}
    if case["values"] is not None:
        return jax.jit(lambda given: forest_attention(**given, **options))(given)
    own = given.pop("own_keys")
    given = {"latents": given.pop("keys"), "own": own} | {
        n: x for n, x in given.items() if n not in ("values", "own_values", "sinks")
    }
    options["value_width"] = case["width"]
    return jax.jit(lambda given: latent_forest_attention(**given, **options))(given)


def main() -> int:
    """Print the errors; 0 where all are within the limits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--draws", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    passed = True
    for latent in (False, True):
        for dtype, most in MOST.items():
            rng = np.random.default_rng((args.seed, latent))
            worst, clock = 0.0, time.perf_counter()
            for _ in range(args.draws):
                case = drawn(rng, latent)
                # 1e30 is more than float16 holds.
                case, exact = rounded(case if dtype == "float16" else poisoned(case), dtype)
                out = np.asarray(run(case, int(rng.integers(1, 4))), np.float64)
                wanted = expected(exact)
                error = np.abs(out - wanted).max() / max(np.abs(wanted).max(), 1e-3)
                worst = max(worst, error) if np.isfinite(error) else np.inf
                jax.clear_caches()
            passed &= worst <= most
            print(
                f"{'latent_forest_attention' if latent else 'forest_attention':24} {dtype:9} "
                f"{args.draws} draws: largest relative error {worst:.1e}, at most {most:.0e} "
                f"({time.perf_counter() - clock:.0f} s)",
                flush=True,
            )
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
