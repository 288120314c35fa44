"""Make processing.npz: distributions as transformers processes them; see README.md.

Each case is a row of `CASES`: settings by the names of `eagle3_jax.configs.Sampling` (`eos` is the
model's end tokens), the scores it starts from, and how many of a prompt's tokens count as new. What
is kept is the softmax of the scores after the processors that `GenerationMixin` builds for them, in
its own order.
"""

# pyright: reportMissingImports=false
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, PretrainedConfig
from transformers.generation import GenerationMixin

HERE = Path(__file__).parent
NEW = 3
"""The last tokens of every prompt are new ones."""
MARGIN = 2e-6
"""How far a threshold must be from the next probability, so that rounding does not decide."""
ROUNDING = 5e-7
"""The furthest that float32 may take a probability from float64."""

WARM = {"temperature": 0.8}
SCORES = (
    [{"temperature": t} for t in (0.3, 0.5, 1.0, 1.7)]
    + [{**WARM, "top_k": k} for k in (1, 2, 17, 64, 100, 101, 500)]
    + [{**WARM, "top_p": p} for p in (0.05, 0.3, 0.7, 0.9, 0.99)]
    + [{**WARM, "min_p": p} for p in (0.01, 0.1, 0.5, 1.0)]
    + [{**WARM, "repetition_penalty": r} for r in (0.7, 1.1, 2.0)]
    + [
        {**WARM, "logit_bias": [[5, 3.5]]},
        {**WARM, "logit_bias": [[7, -20.0], [96, 2.25], [0, 1.5]]},
        {**WARM, "logit_bias": [[41, 4.0]], "repetition_penalty": 1.4},
        {**WARM, "min_new_tokens": 4, "eos": [3]},
        {**WARM, "min_new_tokens": 4, "eos": [3, 50, 100]},
        {**WARM, "min_new_tokens": 3, "eos": [3, 50]},
        {**WARM, "top_k": 20, "top_p": 0.8},
        {**WARM, "top_k": 3, "top_p": 0.99},
        {**WARM, "top_k": 40, "min_p": 0.05},
        {**WARM, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
        {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.2},
        {"temperature": 0.6, "top_k": 25, "logit_bias": [[2, 6.0], [3, -1.0]]},
        {**WARM, "top_k": 2, "min_new_tokens": 5, "eos": [9, 11]},
    ]
)
ALL: dict[str, Any] = {
    **{"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.03, "repetition_penalty": 1.15},
    **{"logit_bias": [[8, 2.0], [60, -3.0]], "min_new_tokens": 9, "eos": [1, 20]},
}
WIDE = [
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 200},
    {"temperature": 1.0, "top_k": 2000, "top_p": 0.95, "min_p": 0.001},
    ALL,
]
CASES = [("few", case) for case in [*SCORES, ALL]] + [("wide", case) for case in WIDE]


def processed(case: dict[str, Any], logits: np.ndarray, prompts: np.ndarray) -> np.ndarray:
    """transformers' own distribution; refuses a threshold that rounding could move."""
    names = {"logit_bias", "eos"}
    settings = {key: value for key, value in case.items() if key not in names}
    if "logit_bias" in case:
        settings["sequence_bias"] = [[[token], value] for token, value in case["logit_bias"]]
    config = GenerationConfig(do_sample=True, **{"top_k": 0, **settings})
    config._eos_token_tensor = torch.tensor(case["eos"]) if "eos" in case else None
    mixin = GenerationMixin()
    mixin.config = PretrainedConfig()
    processors = mixin._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=prompts.shape[1] - NEW,
        logits_processor=LogitsProcessorList(),
        device="cpu",
    )

    def run(dtype):
        ids, scores = torch.from_numpy(prompts), torch.from_numpy(logits).to(dtype)
        for processor in processors:
            before = scores
            scores = processor(ids, scores)
            if "Warper" in type(processor).__name__:
                check(processor, before)
        return scores

    def check(processor, scores):
        p = np.sort(torch.softmax(scores.double(), -1).numpy(), axis=-1)
        gap = np.inf
        if hasattr(processor, "top_p"):
            gap = np.abs(np.cumsum(p, axis=-1) - (1 - processor.top_p)).min()
        if hasattr(processor, "min_p") and processor.min_p < 1:
            gap = np.abs(p[p < p.max()] / p.max() - processor.min_p).min()
        if gap < MARGIN:
            raise SystemExit(f"{case}: {type(processor).__name__} is {gap:.1e} from a tie")

    found, exact = run(torch.float32), run(torch.float64)
    p = torch.softmax(found, -1)
    error = (p - torch.softmax(exact, -1)).abs().max()
    if not torch.equal(found.isinf(), exact.isinf()) or error > ROUNDING:
        raise SystemExit(f"{case}: float32 is {error:.1e} from float64")
    return p.numpy()


def main() -> None:
    rng = np.random.default_rng(0)
    scores = {"few": rng.normal(size=(3, 101)) * 3, "wide": rng.normal(size=(1, 5000)) * 2.5}
    prompts = {name: rng.integers(0, 101, (len(x), 12)) for name, x in scores.items()}
    scores = {name: x.astype(np.float32) for name, x in scores.items()}
    for name, x in scores.items():
        assert all(len(set(row)) == len(row) for row in x.tolist()), f"ties in {name}"
    found = {f"p{i}": processed(c, scores[n], prompts[n]) for i, (n, c) in enumerate(CASES)}
    arrays: dict[str, Any] = {"cases": np.asarray(json.dumps(CASES)), "new": np.asarray(NEW)}
    for name in scores:
        arrays |= {f"{name}_scores": scores[name], f"{name}_prompts": prompts[name]}
    arrays |= found
    np.savez_compressed(HERE / "processing.npz", **arrays)
    kept = [int((found[f"p{i}"] > 0).sum(1).max()) for i in range(len(CASES))]
    print(f"{len(CASES)} cases, tokens kept: {kept}")


if __name__ == "__main__":
    main()
