"""Trees against chains, drawn candidates against the likeliest: tiny-kimi, temperature 0 and 0.8.

Every prompt is a window of a held-out file of the standard library; for each, plain decoding and
every way of drafting run one after the other, so that the machine's noise falls on all alike.
Float32, one row at a time. Accept length is the tokens committed a cycle; the ratio is speed over
plain decoding at the same temperature. Nothing is passed or failed: the table is the result.
"""

import argparse
import collections
import sys
from pathlib import Path

import eagle3_jax as e3

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "tiny_kimi"))
from corpus import heldout_prompts  # noqa: E402  (found through the line above)

CAPACITY = 512
CHAINS = (3, 4, 5, 6)
TREES = ((3, 2, 6), (4, 2, 8), (4, 4, 8), (4, 4, 15), (5, 4, 10), (6, 2, 10))
DRAWN = (e3.Speculation(4), e3.Speculation(4, 2, 8), e3.Speculation(4, 4, 15))


def ways(temperature: float) -> dict[str, e3.Speculation]:
    """What is decoded at a temperature, by name."""
    out = {f"chain of {depth}": e3.Speculation(depth) for depth in CHAINS}
    out |= {f"tree {d} x {k}, {n} nodes": e3.Speculation(d, k, n) for d, k, n in TREES}
    if temperature > 0:
        for shape in DRAWN:
            drawn = {"depth": shape.depth, "topk": shape.topk, "nodes": shape.nodes}
            name = (
                "chain of 4" if shape.topk == 1 else f"tree 4 x {shape.topk}, {shape.nodes} nodes"
            )
            out[f"{name}, drawn"] = e3.Speculation(**drawn, sampled=True)
            if shape.topk == 1:
                out[f"{name}, drawn, no block"] = e3.Speculation(**drawn, sampled=True, block=False)
    return out


def main() -> int:
    """Print the two tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--new", type=int, default=128)
    args = parser.parse_args()

    verifier = e3.load_verifier("tiny-kimi", dtype="float32")
    drafter = e3.load_drafter("tiny-kimi", verifier)
    tokenizer = verifier.tokenizer
    assert tokenizer is not None
    prompts = heldout_prompts(tokenizer.encode, args.prompts, args.length)
    print(f"{len(prompts)} held-out prompts of {args.length} tokens, {args.new} new tokens")
    for temperature in (0.0, 0.8):
        named = {"plain": None, **ways(temperature)}
        seconds = dict.fromkeys(named, 0.0)
        tokens, cycles, same = (collections.Counter() for _ in range(3))
        for i, prompt in enumerate(prompts):
            texts = {}
            for name, shape in named.items():
                out = e3.generate(
                    verifier,
                    None if shape is None else drafter,
                    [prompt],
                    max_new_tokens=args.new,
                    capacity=CAPACITY,
                    speculation=shape,
                    sampling=e3.Sampling(temperature=temperature, seed=i),
                )
                texts[name] = out.tokens[0]
                seconds[name] += out.stats.seconds
                tokens[name] += out.stats.new_tokens - 1
                cycles[name] += out.stats.cycles
            same.update(name for name, text in texts.items() if text == texts["plain"])
        print(f"\ntemperature {temperature}")
        print(f"{'':34}  accept length  tokens/s  ratio  texts as plain")
        for name in named:
            speed = tokens[name] / seconds[name]
            ratio = speed / (tokens["plain"] / seconds["plain"])
            print(
                f"{name:34}  {tokens[name] / cycles[name]:13.2f}  {speed:8.0f}  {ratio:5.2f}  "
                f"{same[name]:7} of {len(prompts)}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
