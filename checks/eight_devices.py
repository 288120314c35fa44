"""Eight devices give what one gives: logits, features, tokens, one learning step's gradients.

For each family and mesh, on eight forced CPU devices in float32: the largest difference, values
above 1 in units of themselves, of `score` over few and over many tokens, of gradients and of the
drafter after one step; and whether chains, trees and sampled texts are the same tokens. `--family`
and `--mesh` name some of them. The last line is PASS or FAIL.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sharding"))

import jax  # noqa: E402
from on_eight import (  # noqa: E402  (found through the line above)
    FAMILIES,
    apart,
    kimi,
    learned,
    random_drafter,
    random_verifier,
    scores,
    texts,
)

import eagle3_jax as e3  # noqa: E402
from eagle3_jax.verifier.meshed import on_mesh  # noqa: E402
from sharding import make_mesh  # noqa: E402

MESHES = ((1, 1, 8), (1, 2, 4), (2, 1, 4), (8, 1, 1))
MOST = 1e-5
HOW = {
    "chain": {},
    "tree": {"speculation": e3.Speculation(3, 3, 7)},
    "sampled": {
        "speculation": e3.Speculation(depth=2, sampled=True),
        "sampling": e3.Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=5),
    },
}


def main() -> int:
    """Print a line for each family and mesh; 0 where all are equal."""
    families = {"tiny-kimi": kimi(), **FAMILIES}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", nargs="*", choices=list(families), default=list(families))
    parser.add_argument("--mesh", nargs="*", default=[",".join(map(str, m)) for m in MESHES])
    args = parser.parse_args()
    passed = True
    for name in args.family:
        verifier = random_verifier(families[name])
        drafter = random_drafter(verifier)
        few, many = scores(verifier, 2, 7), scores(verifier, 2, 70)
        tokens = {way: texts(verifier, drafter, **how) for way, how in HOW.items()}
        step = learned(verifier, drafter)
        for text in args.mesh:
            clock = time.perf_counter()
            data, tensor, expert = map(int, text.split(","))
            over = on_mesh(verifier, make_mesh(data, tensor, expert))
            found = {
                "few": apart(few, scores(over, 2, 7)),
                "many": apart(many, scores(over, 2, 70)),
                "gradients": apart(step[0], (mine := learned(over, drafter))[0]),
                "step": apart(step[1], mine[1]),
            }
            same = {way: tokens[way] == texts(over, drafter, **how) for way, how in HOW.items()}
            fine = max(found.values()) <= MOST and all(same.values())
            passed &= fine
            print(
                f"{name:10} ({text})",
                *(f"{what} {value:.1e}" for what, value in found.items()),
                *(f"{way} {'same' if is_same else 'DIFFERENT'}" for way, is_same in same.items()),
                f"{time.perf_counter() - clock:.0f} s {'PASS' if fine else 'FAIL'}",
                flush=True,
            )
            # Of compiled functions, each of which holds some tens of the maps a process may have.
            jax.clear_caches()
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
