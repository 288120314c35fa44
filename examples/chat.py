"""A conversation in a terminal: answers appear as they come, and each turn reads only what is new.

python examples/chat.py [VERIFIER [DRAFTER]]
"""

import sys

import eagle3_jax as e3


def main() -> None:
    """Talk until an empty line."""
    names = sys.argv[1:] or ["smollm2"]
    verifier = e3.load_verifier(names[0])
    drafter = e3.load_drafter(names[1], verifier) if len(names) > 1 else None
    chat = e3.Chat(
        verifier,
        drafter,
        system="You are a helpful assistant. Answer in a sentence or two.",
        sampling=e3.Sampling(temperature=0.7, top_p=0.9),
        max_new_tokens=256,
    )
    while question := input("> "):
        for piece in chat.stream(question):
            print(piece.text, end="", flush=True)
        assert chat.stats is not None
        print(
            f"\n[read in {chat.stats.prefill_seconds:.2f} s, "
            f"{chat.stats.tokens_per_second:.0f} tokens a second]\n"
        )


if __name__ == "__main__":
    main()
