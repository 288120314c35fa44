"""The speculative loop on the GPU kernels, interpreted on CPU: the same tokens and cycles.

The bundled pair (latent attention, experts) and a random Llama, chain and tree, in float32, against
the loop without kernels. Interpreting compiles a kernel anew at every call: half a minute a cycle.
"""

import argparse
import dataclasses
import os
import sys
import time

# Interpreted warpgroups wait for each other, each on a thread of XLA's.
os.environ.setdefault("NPROC", "32")

import jax  # noqa: E402

import eagle3_jax as e3  # noqa: E402
from eagle3_jax.drafter import Drafter  # noqa: E402
from eagle3_jax.testing import tiny_drafter, tiny_verifier  # noqa: E402

TEXT = "class Stack:\n    def __init__(self, items=()):\n        self._items = list(items)\n"


def pairs():
    """(name, verifier, drafter, prompt); the Llama's drafter is random and its vocabulary small."""
    verifier = e3.load_verifier("tiny-kimi")
    yield "tiny-kimi", verifier, e3.load_drafter("tiny-kimi", verifier), TEXT
    verifier = tiny_verifier("llama", num_layers=2, vocab_size=16, head_width=16)
    config = dataclasses.replace(
        tiny_drafter("llama").config,
        head_width=16,
        num_features=2,
        vocab_size=16,
        draft_vocab_size=16,
    )
    drafter = Drafter(config, verifier.spec((1, 2)), jax.random.key(1))
    yield "random Llama", verifier, drafter, list(range(2, 16))


def main() -> int:
    """Print a line a pair and shape; 0 where nothing differs."""
    parser = argparse.ArgumentParser(description="the speculative loop on interpreted kernels")
    parser.add_argument("--new", type=int, default=12, help="new tokens")
    args = parser.parse_args()
    passed = True
    for name, verifier, drafter, prompt in pairs():
        for shape in (e3.Speculation(depth=3), e3.Speculation(depth=3, topk=3, nodes=8)):
            clock = time.perf_counter()
            xla, kernels = (
                e3.generate(
                    verifier,
                    drafter,
                    [prompt],
                    max_new_tokens=args.new,
                    rows=1,
                    speculation=shape,
                    kernels=backend,
                )
                for backend in ("xla", "mosaic_gpu_interpret")
            )
            same = xla.tokens == kernels.tokens and xla.stats.cycles == kernels.stats.cycles
            passed &= same
            print(
                f"{name}, depth {shape.depth}, topk {shape.topk}: {len(kernels.tokens[0])} tokens "
                f"in {kernels.stats.cycles} cycles, accept length "
                f"{kernels.stats.accept_length:.2f}, {'the same' if same else 'DIFFERENT'} "
                f"({time.perf_counter() - clock:.0f} s)",
                flush=True,
            )
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
