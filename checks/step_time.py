"""A cycle takes the same time at capacity 2,048 and 16,384 for a short prompt.

tiny-kimi, one row, a prompt of 100 tokens, plain and speculative. The two capacities take turns, a
few cycles each, so that the machine's noise falls on both; the figure is the ratio of the medians.
"""

import statistics
import sys
import time

import jax
import jax.numpy as jnp

import eagle3_jax as e3
from eagle3_jax.batch import seat
from eagle3_jax.loop import run
from eagle3_jax.loop.decode import DecodeStages

CAPACITIES = (2048, 16384)
CYCLES, TURNS = 8, 15
MOST = 1.10


def main() -> int:
    """Print medians and their ratio; 0 where it is at most 1.10."""
    verifier = e3.load_verifier("tiny-kimi", dtype="float32")
    drafter = e3.load_drafter("tiny-kimi", verifier)
    prompt = list(range(100, 200))
    worst = 0.0
    for name, used in (("plain", None), ("speculative", drafter)):
        stages = DecodeStages(
            verifier=verifier, drafter=used, speculation=e3.recommended_speculation(used)
        )
        states, times = {}, {capacity: [] for capacity in CAPACITIES}
        for capacity in CAPACITIES:
            state = seat(stages, stages.make_state(1, capacity), 0, prompt, 2000)
            states[capacity] = run(stages, state, jnp.asarray(1, jnp.int32))
        n = jnp.asarray(CYCLES, jnp.int32)
        for _ in range(TURNS):
            for capacity in CAPACITIES:
                clock = time.perf_counter()
                states[capacity] = jax.block_until_ready(run(stages, states[capacity], n))
                times[capacity].append((time.perf_counter() - clock) / CYCLES)
        short, long = (1e3 * statistics.median(times[capacity]) for capacity in CAPACITIES)
        worst = max(worst, long / short)
        print(
            f"{name:12} {short:.2f} ms at {CAPACITIES[0]:,}, {long:.2f} ms at {CAPACITIES[1]:,}: "
            f"ratio {long / short:.2f}"
        )
    print(
        f"largest ratio {worst:.2f} (at most {MOST} wanted): {'PASS' if worst <= MOST else 'FAIL'}"
    )
    return 0 if worst <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
