"""Logits and greedy chains are within 2e-5 of speculators on all tiny drafters, in float32.

Each golden file holds what speculators' Eagle3DraftModel computed for one tiny random drafter. The
drafter is drawn again and run by the functions that decoding runs (context passes in chunks, then a
grown chain) and by those that learning runs (training-time test over a packed text). The table has
the largest errors; the last line is PASS or FAIL, and so is the exit status.
"""

import runpy
import sys
from pathlib import Path

import jax
import numpy as np

PARITY = runpy.run_path(
    str(Path(__file__).parents[1] / "tests" / "drafter" / "test_parity.py"), run_name="parity"
)
TOLERANCE, ROUTES = PARITY["TOLERANCE"], PARITY["ROUTES"]


def main() -> int:
    """Print the table; 0 where everything is within the tolerance."""
    jax.config.update("jax_default_matmul_precision", "highest")
    configs = PARITY["TINY"]["CONFIGS"]
    print(f"largest error against speculators, tolerance {TOLERANCE:g}")
    print(
        f"{'drafter':21}", *(f"{route:>18}" for route in ROUTES), "  what is not EAGLE-3's default"
    )
    worst, same = 0.0, True
    for name in configs:
        pairs = PARITY["compared"](name)
        errors = [float(np.abs(np.subtract(*pairs[route])).max()) for route in ROUTES]
        # A NaN is no error that a maximum would keep.
        worst = max(worst, *(error if np.isfinite(error) else np.inf for error in errors))
        same = same and np.array_equal(*pairs["chain"])
        cells = [f"{error:18.1e}" for error in errors]
        print(f"{name:21}", *cells, " ", ", ".join(configs[name]), flush=True)
    passed = same and worst <= TOLERANCE
    print(
        f"{len(configs)} drafters, largest error {worst:.2g}, greedy chains "
        f"{'the same' if same else 'differ'}: {'PASS' if passed else 'FAIL'}"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
