"""tiny-kimi on held-out source: accept length 2.5 or more and a speed ratio above 1.3, by depth.

Every prompt is a window of a held-out file of the standard library; for each, plain decoding and
every depth run one after the other, so that the machine's noise falls on all alike. Greedy,
float32, one row at a time; the speed ratio that counts is that of the recommended depth.
"""

import argparse
import sys
from pathlib import Path

import eagle3_jax as e3

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "tiny_kimi"))
from corpus import heldout_prompts  # noqa: E402  (found through the line above)

CAPACITY = 512


def main() -> int:
    """Print the table; 0 where the recommended depth passes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6])
    args = parser.parse_args()

    verifier = e3.load_verifier("tiny-kimi", dtype="float32")
    drafter = e3.load_drafter("tiny-kimi", verifier)
    tokenizer = verifier.tokenizer
    assert tokenizer is not None
    recommended = e3.recommended_speculation(drafter).depth
    prompts = heldout_prompts(tokenizer.encode, args.prompts, args.length)
    depths = sorted({0, *args.depths, recommended})
    seconds = dict.fromkeys(depths, 0.0)
    tokens, cycles = dict.fromkeys(depths, 0), dict.fromkeys(depths, 0)
    accepted = {depth: [0] * depth for depth in depths}
    same = 0
    for prompt in prompts:
        texts = []
        for depth in depths:
            out = e3.generate(
                verifier,
                drafter if depth else None,
                [prompt],
                max_new_tokens=args.new,
                capacity=CAPACITY,
                speculation=e3.Speculation(depth=depth),
            )
            texts.append(out.tokens[0])
            seconds[depth] += out.stats.seconds
            tokens[depth] += out.stats.new_tokens - 1
            cycles[depth] += out.stats.cycles
            for i, count in enumerate(out.rows[0].accepted):
                accepted[depth][i] += count
        same += all(text == texts[0] for text in texts)

    print(f"{len(prompts)} held-out prompts of {args.length} tokens, {args.new} new tokens, greedy")
    print("depth  accept length  tokens/s  ratio  acceptance by depth")
    ratio, length = {}, {}
    for depth in depths:
        length[depth] = tokens[depth] / max(cycles[depth], 1)
        ratio[depth] = (seconds[0] / tokens[0]) / (seconds[depth] / tokens[depth])
        reached = [cycles[depth], *accepted[depth]]
        shares = " ".join(
            f"{after / max(before, 1):.2f}"
            for before, after in zip(reached, reached[1:], strict=False)
        )
        name = "plain" if depth == 0 else f"{depth}{'*' if depth == recommended else ''}"
        print(
            f"{name:>5}  {length[depth]:13.2f}  {tokens[depth] / seconds[depth]:8.0f}  "
            f"{ratio[depth]:5.2f}  {shares}"
        )
    best = max(length.values())
    print(f"same tokens at every depth: {same} of {len(prompts)} prompts; * is the recommendation")
    passed = best >= 2.5 and ratio[recommended] > 1.3
    print(
        f"best accept length {best:.2f} (2.5 wanted), ratio at the recommendation "
        f"{ratio[recommended]:.2f} (above 1.3 wanted): {'PASS' if passed else 'FAIL'}"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
