"""A conversation's second turn: the tokens of re-reading it all, and the reading time saved.

Rows of mt_bench with SmolLM2, decoded plainly in float32. Both turns go through `Chat`, where the
second continues the caches of the first; `generate` reads the same conversation as token ids. A
difference is shown with the verifier's gap between the two tokens. ARGS="mt_bench.jsonl --limit N".
"""

import argparse
import json
import sys
from pathlib import Path

import jax.numpy as jnp

import eagle3_jax as e3
from eagle3_jax.generation import encode_prompt

CAPACITY = 4096


def main() -> int:
    """Print a line a conversation; 0 where all second turns are the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, help='mt_bench.jsonl: {"turns": [text, text]} a line')
    parser.add_argument("--limit", type=int, default=20, help="conversations at most")
    parser.add_argument("--new", type=int, default=64, help="new tokens a turn")
    args = parser.parse_args()

    rows = [json.loads(line) for line in args.rows.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if len(row["turns"]) > 1][: args.limit]
    verifier = e3.load_verifier("smollm2", dtype="float32")
    same, kept, reread = 0, 0.0, 0.0
    for row in rows:
        chat = e3.Chat(verifier, None, capacity=CAPACITY, max_new_tokens=args.new)
        chat.send(row["turns"][0])
        tokens = [token for piece in chat.stream(row["turns"][1]) for token in piece.tokens]
        assert chat.stats is not None
        whole = encode_prompt(verifier, chat.messages[:-1])
        out = e3.generate(
            verifier, None, [whole], max_new_tokens=args.new, rows=1, capacity=CAPACITY
        )
        kept += chat.stats.prefill_seconds
        reread += out.stats.prefill_seconds
        same += tokens == out.tokens[0]
        what = "same"
        if tokens != out.tokens[0]:
            pairs = zip(tokens, out.tokens[0], strict=False)
            at = next(i for i, (mine, theirs) in enumerate(pairs) if mine != theirs)
            text = jnp.asarray([whole + tokens[:at]])
            logits = verifier.score(text, (1,)).logits[0, -1]
            gap = float(jnp.abs(logits[tokens[at]] - logits[out.tokens[0][at]]))
            what = f"differs from new token {at} on; the two logits are {gap:.1e} apart"
        print(
            f"{row['id']:13} {len(whole):4} + {len(tokens):3} tokens, read in "
            f"{chat.stats.prefill_seconds:5.2f} s instead of {out.stats.prefill_seconds:5.2f} s: "
            f"{what}",
            flush=True,
        )
    print(
        f"{same} of {len(rows)} second turns the same; read in {kept:.2f} s instead of "
        f"{reread:.2f} s, {1 - kept / reread:.0%} saved: {'PASS' if same == len(rows) else 'FAIL'}"
    )
    return 0 if same == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
