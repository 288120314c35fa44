"""Decode with the library in a few calls: load a pair, speculate, compare with plain decoding.

python examples/decode.py [PROMPT]
"""

import sys

import eagle3_jax as e3

PROMPT = '''class Stack:
    """A last-in, first-out container."""

    def __init__(self, items=()):
        self._items = list(items)

    def push(self, item):
'''


def main() -> None:
    """Print the text and what speculation saved."""
    prompt = sys.argv[1] if len(sys.argv) > 1 else PROMPT

    # A frozen verifier and a drafter that was trained on its hidden states. Loading compares what
    # the drafter was trained on with what the verifier gives, and refuses a pair that does not fit.
    verifier = e3.load_verifier("tiny-kimi")
    drafter = e3.load_drafter("tiny-kimi", verifier)

    # One call decodes any number of prompts; without a drafter it is plain decoding.
    fast = e3.generate(verifier, drafter, [prompt], max_new_tokens=200)
    plain = e3.generate(verifier, None, [prompt], max_new_tokens=200)

    print(prompt + (fast.text[0] or ""))
    print("-" * 80)
    print(f"same tokens        {fast.tokens == plain.tokens}")
    print(f"accept length      {fast.stats.accept_length:.2f} tokens a cycle (plain: 1.00)")
    print(f"tokens a second    {fast.stats.tokens_per_second:.0f}")
    print(f"plain              {plain.stats.tokens_per_second:.0f}")
    print(f"speed ratio        {fast.stats.tokens_per_second / plain.stats.tokens_per_second:.2f}")


if __name__ == "__main__":
    main()
