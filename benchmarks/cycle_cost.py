"""What a cycle costs: a verifier pass by rows, a draft chain by depth, break-even accept lengths.

One row of text, one process. A verifier pass is the verify stage and the judging of a chain of
`rows - 1` nodes; a draft is the draft stage, its refresh of the context included. Every entry runs
a few cycles in one compiled loop, the first of them unmeasured so that caches are its own, and all
entries take turns, so that the machine's noise falls on all alike; the median of the rounds
counts, and the spread is the distance between the quartiles over it.

A cycle costs what it costs whatever is accepted: its time (a pass over `rows`, a draft of depth
`rows - 1`) over the best plain step (a pass over one row, in the faster dtype) is the accept length
at which speculation begins to pay.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

import eagle3_jax as e3
from eagle3_jax.batch import seat
from eagle3_jax.configs import DrafterConfig
from eagle3_jax.drafter import Drafter
from eagle3_jax.forest.topology import chain
from eagle3_jax.loop.decode import DecodeStages, DecodeState
from eagle3_jax.loop.forms import decoding_forms
from eagle3_jax.verifier import Verifier

Turn = Callable[[int], object]
"""Runs so many cycles of one entry."""


def random_drafter(verifier: Verifier, vocabulary: int, inner: int) -> Drafter:
    """A drafter of some sizes whose weights are drawn; what it costs does not depend on them."""
    c = verifier.config
    heads = max(c.width // 64, 1)
    config = DrafterConfig(
        verifier_width=c.width,
        num_features=3,
        width=c.width,
        num_heads=heads,
        num_kv_heads=heads // 3 if heads % 3 == 0 else heads,
        head_width=64,
        mlp_width=inner or c.mlp_width,
        vocab_size=c.vocab_size,
        draft_vocab_size=vocabulary,
        norm_eps=c.norm_eps,
    )
    drafter = Drafter(config, verifier.spec(), jax.random.key(0))
    # Kernels; norms stay float32 and the vocabulary whole numbers.
    return jax.tree.map(lambda x: x.astype(verifier.dtype) if x.ndim > 1 else x, drafter)


@functools.partial(jax.jit, static_argnames="rows")
def passes(stages: DecodeStages, state: DecodeState, n, rows: int):
    """`n` verifier passes over a chain of so many rows, each from the token the last one yields."""
    vocab = stages.verifier.config.vocab_size

    def once(_, carry):
        root, sink = carry
        nodes = (root[:, None] + jnp.arange(1, rows, dtype=jnp.int32)[None]) % vocab
        forest = chain(root, nodes, None)
        scores = stages.verify(state, forest)
        verdict = stages.judge(state, forest, scores).verdict
        # Rows and features are used, so that they are computed.
        kept = jax.tree.leaves((scores.rows, scores.features))
        sink = sum((jnp.max(x).astype(jnp.float32) for x in kept), sink)
        return verdict.bonus, sink

    start = jnp.ones((1,), jnp.int32), jnp.zeros(())
    return jax.lax.fori_loop(0, n, once, start)


@jax.jit
def drafts(stages: DecodeStages, state: DecodeState, n):
    """`n` drafts, each from a text that ends with the last one's deepest node."""

    def once(_, state):
        state, forest = stages.draft(state)
        last = forest.tokens[:, -1]
        tokens = state.tokens.at[jnp.arange(1), state.length].set(last)
        return dataclasses.replace(state, tokens=tokens)

    return jax.lax.fori_loop(0, n, once, state)


def entries(verifier: Verifier, drafter: Drafter, arguments) -> dict[tuple[str, int], Turn]:
    """What is measured of one dtype: ("verify", rows) and ("draft", depth)."""
    reader, turned = decoding_forms(verifier, drafter)
    prompt = [i % verifier.config.vocab_size for i in range(50, 50 + arguments.prompt)]
    out: dict[tuple[str, int], Turn] = {}

    def stages_of(depth):
        return DecodeStages(
            verifier=verifier,
            drafter=turned if depth else None,
            speculation=e3.Speculation(depth=depth),
            reader=reader,
        )

    def seated(stages):
        state = stages.make_state(1, arguments.capacity)
        return seat(stages, state, 0, prompt, arguments.capacity - len(prompt) - 64)

    for rows in arguments.rows:
        stages = stages_of(rows - 1)
        state = seated(stages)
        out["verify", rows] = lambda n, a=(stages, state), rows=rows: jax.block_until_ready(
            passes(*a, jnp.asarray(n, jnp.int32), rows)
        )
    for depth in arguments.depths:
        stages = stages_of(depth)
        state = seated(stages)
        out["draft", depth] = lambda n, a=(stages, state): jax.block_until_ready(
            drafts(*a, jnp.asarray(n, jnp.int32))
        )
    return out


def measure(turns: dict, cycles: int, rounds: int) -> dict:
    """Milliseconds a cycle of every entry, by round."""
    times = {key: [] for key in turns}
    for turn in turns.values():
        turn(1)
    for index in range(rounds):
        for key, turn in turns.items():
            turn(1)
            clock = time.perf_counter()
            turn(cycles)
            times[key].append(1e3 * (time.perf_counter() - clock) / cycles)
        print(f"round {index + 1} of {rounds}", file=sys.stderr, flush=True)
    return times


def spread(times: list[float]) -> float:
    """Distance between the quartiles over the median; 0 for a single round."""
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / middle


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--verifier", default="tiny-kimi")
    parser.add_argument("--drafter", help="none named: a random one of the sizes below")
    parser.add_argument("--draft-vocabulary", type=int, default=8192)
    parser.add_argument("--mlp-width", type=int, default=0, help="the verifier's where 0")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16])
    parser.add_argument("--depths", type=int, nargs="+", help="one less than the rows unless named")
    parser.add_argument("--prompt", type=int, default=100, help="tokens of the prompt")
    parser.add_argument("--capacity", type=int, default=512)
    parser.add_argument("--cycles", type=int, default=4, help="cycles of one turn")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    arguments = parser.parse_args()
    arguments.rows = sorted({1, *arguments.rows})
    arguments.depths = sorted(set(arguments.depths or [rows - 1 for rows in arguments.rows]) - {0})

    turns = {}
    for dtype in arguments.dtype:
        verifier = e3.load_verifier(arguments.verifier, dtype=dtype)
        if arguments.drafter:
            drafter = e3.load_drafter(arguments.drafter, verifier)
        else:
            vocabulary = min(arguments.draft_vocabulary, verifier.config.vocab_size)
            drafter = random_drafter(verifier, vocabulary, arguments.mlp_width)
        for key, turn in entries(verifier, drafter, arguments).items():
            turns[dtype, *key] = turn
    times = measure(turns, arguments.cycles, arguments.rounds)
    cost = {key: statistics.median(found) for key, found in times.items()}
    best = min(cost[dtype, "verify", 1] for dtype in arguments.dtype)
    noise = statistics.median(spread(found) for found in times.values())

    table = []
    for dtype in arguments.dtype:
        for rows in arguments.rows:
            verify, draft = cost[dtype, "verify", rows], cost.get((dtype, "draft", rows - 1))
            whole = verify if rows == 1 else None if draft is None else verify + draft
            table.append(
                {
                    "dtype": dtype,
                    "rows": rows,
                    "verify_ms": verify,
                    "draft_depth": rows - 1,
                    "draft_ms": 0.0 if rows == 1 else draft,
                    "break_even_accept_length": None if whole is None else whole / best,
                    "verify_over_best_plain": verify / best,
                }
            )
    if arguments.json:
        print(json.dumps({"best_plain_ms": best, "spread": noise, "table": table}))
        return
    print("dtype     rows  verify ms  over best plain  chain's draft ms  break-even accept length")
    for row in table:
        draft, even = row["draft_ms"], row["break_even_accept_length"]
        print(
            f"{row['dtype']:9} {row['rows']:4}  {row['verify_ms']:9.2f}  "
            f"{row['verify_over_best_plain']:15.2f}  "
            f"{'' if draft is None else f'{draft:.2f}':>16}  "
            f"{'' if even is None else f'{even:.2f}':>24}"
        )
    print(f"best plain step {best:.2f} ms; spread of a figure over the rounds {noise:.0%} (median)")


if __name__ == "__main__":
    main()
