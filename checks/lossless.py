"""Speculative equals plain, token for token: tiny-kimi, float32, chain or trees, batch 1, 3 and 8.

With `--trees` six shapes of tree are decoded in place of the recommended chain. Prompts are windows
of held-out source files, of 1 to 300 tokens, and there are more of them than rows, so that rows are
refilled. A difference is shown with the verifier's gap between the two tokens: a near tie is a gap
of the order of float32's rounding.
"""

import argparse
import itertools
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import eagle3_jax as e3

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "tiny_kimi"))
from corpus import heldout_prompts  # noqa: E402  (found through the line above)

CAPACITY = 768

TREES = ((1, 6, 6), (2, 2, 6), (3, 3, 8), (4, 4, 15), (6, 8, 31), (8, 2, 16))
"""Depth, topk and nodes: flat, all candidates kept, and more and more that are left out."""


def main() -> int:
    """Print one line a shape and batch size; 0 where every text is the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--trees", action="store_true")
    args = parser.parse_args()

    verifier = e3.load_verifier("tiny-kimi", dtype="float32")
    drafter = e3.load_drafter("tiny-kimi", verifier)
    tokenizer = verifier.tokenizer
    assert tokenizer is not None
    rng = np.random.default_rng(5)
    prompts = [
        prompt[: int(rng.integers(1, 301))]
        for prompt in heldout_prompts(tokenizer.encode, args.prompts, 300)
    ]
    plain = e3.generate(verifier, None, prompts, max_new_tokens=args.new, rows=1, capacity=CAPACITY)
    shapes = [e3.recommended_speculation(drafter)]
    if args.trees:
        shapes = [e3.Speculation(*shape) for shape in TREES]
    failed = 0
    for shape, rows in itertools.product(shapes, (1, 3, 8)):
        out = e3.generate(
            verifier,
            drafter,
            prompts,
            max_new_tokens=args.new,
            rows=rows,
            capacity=CAPACITY,
            speculation=shape,
        )
        different = [i for i in range(len(prompts)) if out.tokens[i] != plain.tokens[i]]
        failed += len(different)
        print(
            f"depth {shape.depth} topk {shape.topk} nodes {shape.nodes or shape.depth}, batch "
            f"{rows}: {len(prompts) - len(different)} of {len(prompts)} prompts the same, "
            f"{plain.stats.new_tokens} tokens, accept length {out.stats.accept_length:.2f}, "
            f"{max(len(prompts) - rows, 0)} rows refilled",
            flush=True,
        )
        for i in different:
            mine, theirs = out.tokens[i], plain.tokens[i]
            at = next(k for k, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b)
            logits = verifier.score(jnp.asarray([prompts[i] + theirs[:at]])).logits[0, -1]
            gap = float(jnp.abs(logits[mine[at]] - logits[theirs[at]]))
            print(
                f"  prompt {i} differs from new token {at} on; the two logits are {gap:.1e} apart"
            )
    print(f"{failed} differences: {'PASS' if not failed else 'FAIL'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
