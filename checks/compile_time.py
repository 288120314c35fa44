"""Compiling 61 layers takes at most 1.5 times as long as compiling 4 of them.

For each kind of verifier: `score` and one step over a cache, compiled for abstract arguments, the
two depths in turn. The median of the runs counts. The last line is PASS or FAIL, and so is the exit
status.
"""

import dataclasses
import statistics
import sys
import time

import jax
import jax.numpy as jnp

from eagle3_jax import testing
from eagle3_jax.caches import block_scope, causal
from eagle3_jax.configs import ExpertsConfig, VerifierConfig
from eagle3_jax.verifier import Verifier

DEPTHS, RUNS, MOST = (4, 61), 5, 1.5

OSS = ExpertsConfig(count=8, chosen=3, width=12, score="softmax of chosen", bias=True, limit=7.0)


def kinds(depth: int) -> dict[str, VerifierConfig]:
    """A configuration of each kind, with so many layers."""
    llama = dataclasses.replace(testing.LLAMA, num_layers=depth)
    deepseek = dataclasses.replace(testing.DEEPSEEK, num_layers=depth)
    qwen = dataclasses.replace(llama, qk_norm=True)
    return {
        "llama": llama,
        "deepseek": deepseek,
        "qwen3_moe": dataclasses.replace(
            qwen, experts=ExpertsConfig(count=8, chosen=3, width=12, score="softmax")
        ),
        "gpt_oss": dataclasses.replace(
            llama,
            experts=OSS,
            sinks=True,
            attention_bias=True,
            window=8,
            windowed=tuple(range(0, depth, 2)),
        ),
    }


def seconds(config: VerifierConfig) -> float:
    """Time to compile the two passes."""
    verifier = jax.eval_shape(lambda: Verifier(config, jax.random.key(0)))
    cache = jax.eval_shape(lambda: verifier.make_cache(2, 256))
    tokens = jax.ShapeDtypeStruct((2, 5), jnp.int32)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)

    def step(verifier, cache, tokens, lengths):
        depth = jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32)[None], (2, 5))
        scope = block_scope(lengths, depth, causal(2, 5))
        hidden, features, rows = verifier.forward(tokens[:, None], scope, cache, (1, 2, 3))
        return verifier.read_out(hidden[:, 0]), features, rows

    def score(verifier, tokens):
        scores = verifier.score(tokens, (1, 2, 3))
        return scores.logits, scores.features.array

    jax.clear_caches()
    clock = time.perf_counter()
    jax.jit(step).lower(verifier, cache, tokens, lengths).compile()
    jax.jit(score).lower(verifier, tokens).compile()
    return time.perf_counter() - clock


def main() -> int:
    """Print the table; 0 where every ratio is within the limit."""
    jax.config.update("jax_enable_compilation_cache", False)
    by_depth = {depth: kinds(depth) for depth in DEPTHS}
    print(f"{'kind':12}", *(f"{depth:>4} layers" for depth in DEPTHS), "   ratio")
    worst = 0.0
    for name in by_depth[DEPTHS[0]]:
        runs = [[seconds(by_depth[depth][name]) for depth in DEPTHS] for _ in range(RUNS + 1)][1:]
        few, many = (statistics.median(column) for column in zip(*runs, strict=True))
        ratio = statistics.median(b / a for a, b in runs)
        worst = max(worst, ratio)
        print(f"{name:12} {few:9.2f} s {many:9.2f} s {ratio:7.2f}", flush=True)
    passed = worst <= MOST
    print(f"largest ratio {worst:.2f}, at most {MOST}: {'PASS' if passed else 'FAIL'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
