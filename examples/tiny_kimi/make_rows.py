"""Training rows for tiny-kimi's drafter: library text, and the verifier's own continuations.

    python examples/tiny_kimi/make_rows.py --corpus runs/tiny-kimi/corpus \
        --out runs/tiny-kimi/rows.jsonl

Both kinds are learned from the verifier's soft labels at every position; its own continuations are
what decoding will ask of the drafter.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np
import tyro

import eagle3_jax as e3


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How many rows of which kind.

    Attributes:
        corpus: folder that corpus.py made.
        out: the JSONL file.
        verifier: what continues.
        continued: prompts that are continued.
        new_tokens: length of a continuation.
        texts: windows of plain text.
        text_length: tokens of such a window.
        rows: prompts continued side by side.
    """

    corpus: Path
    out: Path
    verifier: str = "tiny-kimi"
    continued: int = 3000
    new_tokens: int = 192
    texts: int = 6000
    text_length: int = 256
    rows: int = 32


def main(recipe: Recipe) -> None:
    """Write the rows beside their place and rename them in."""
    stream = np.load(recipe.corpus / "train.npy", mmap_mode="r")
    rng = np.random.default_rng(11)
    verifier = e3.load_verifier(recipe.verifier)
    beside = recipe.out.with_suffix(".part")
    with beside.open("w", encoding="utf-8") as file:

        def write(name: str, tokens: list[int]) -> None:
            row = {"id": name, "tokens": tokens, "loss": [[1, len(tokens)]], "temperature": 0.0}
            file.write(json.dumps(row) + "\n")

        for i, at in enumerate(rng.integers(0, len(stream) - recipe.text_length, recipe.texts)):
            write(f"text-{i}", stream[at : at + recipe.text_length].tolist())
        starts = rng.integers(0, len(stream) - 200, recipe.continued)
        lengths = rng.integers(24, 160, recipe.continued)
        step = recipe.rows * 8
        for first in range(0, recipe.continued, step):
            prompts = [
                stream[at : at + n].tolist()
                for at, n in zip(
                    starts[first : first + step], lengths[first : first + step], strict=True
                )
            ]
            out = e3.generate(
                verifier,
                None,
                prompts,
                max_new_tokens=recipe.new_tokens,
                rows=recipe.rows,
                capacity=512,
            )
            for i, (prompt, tokens) in enumerate(zip(prompts, out.tokens, strict=True)):
                write(f"own-{first + i}", prompt + tokens)
            print(f"{first + len(prompts)} continued, {out.stats.tokens_per_second:.0f} tokens/s")
    beside.replace(recipe.out)


if __name__ == "__main__":
    main(tyro.cli(Recipe))
