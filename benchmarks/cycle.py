"""What a cycle costs, by depth, against a plain step: the break-even accept length.

One row, one process; plain and every depth take turns of a few cycles each, so that the machine's
noise falls on all alike. A cycle costs the same whatever is accepted, so the ratio of its time to a
plain step's is the accept length at which speculation begins to pay.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

import eagle3_jax as e3
from eagle3_jax.batch import seat
from eagle3_jax.loop import run
from eagle3_jax.loop.decode import DecodeStages


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verifier", default="tiny-kimi")
    parser.add_argument("--drafter", default="tiny-kimi")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6])
    parser.add_argument("--prompt", type=int, default=100, help="tokens of the prompt")
    parser.add_argument("--cycles", type=int, default=10, help="cycles of one turn")
    parser.add_argument("--turns", type=int, default=11)
    args = parser.parse_args()

    depths = [0, *args.depths]
    n = jnp.asarray(args.cycles, jnp.int32)
    new = (max(depths) + 1) * (args.cycles * args.turns + 2)
    stages, states = {}, {}
    times: dict[tuple[str, int], list[float]] = {}
    for dtype in args.dtype:
        verifier = e3.load_verifier(args.verifier, dtype=dtype)
        drafter = e3.load_drafter(args.drafter, verifier)
        prompt = [i % verifier.config.vocab_size for i in range(50, 50 + args.prompt)]
        capacity = -(-(args.prompt + new + 64) // 256) * 256
        for depth in depths:
            key = dtype, depth
            stages[key] = DecodeStages(
                verifier=verifier,
                drafter=drafter if depth else None,
                speculation=e3.Speculation(depth=depth),
            )
            state = seat(stages[key], stages[key].make_state(1, capacity), 0, prompt, new)
            states[key] = run(stages[key], state, jnp.asarray(1, jnp.int32))
            times[key] = []
    for _ in range(args.turns):
        for key in stages:
            before = int(states[key].cycles[0])
            clock = time.perf_counter()
            states[key] = jax.block_until_ready(run(stages[key], states[key], n))
            seconds = time.perf_counter() - clock
            done = int(states[key].cycles[0]) - before
            if done:
                times[key].append(seconds / done)
    best = min(statistics.median(times[dtype, 0]) for dtype in args.dtype)
    print("dtype     depth  ms a cycle  over plain of its dtype  over the best plain (break-even)")
    for (dtype, depth), found in times.items():
        middle = statistics.median(found)
        own = middle / statistics.median(times[dtype, 0])
        name = depth or "plain"
        print(f"{dtype:9} {name:>5}  {1e3 * middle:10.2f}  {own:23.2f}  {middle / best:32.2f}")


if __name__ == "__main__":
    main()
