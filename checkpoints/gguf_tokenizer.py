"""The tokenizer in a GGUF file's metadata: byte-level BPE, as the model's tokenizer.json has it.

A file names its pre-tokenizer (`tokenizer.ggml.pre`) and does not spell it out. Only names whose
splitting is known exactly are read; a near miss gives other tokens for some texts and no error.
"""

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from checkpoints.tensors import one_line
from eagle3_jax.contracts import LoadError
from eagle3_jax.templates import check_template
from eagle3_jax.tokenizer import Tokenizer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 splits text."""

PRE = {
    "gpt-2": "gpt-2",
    "smollm": "smollm",
    "llama-bpe": "llama-bpe",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
}
"""Names of pre-tokenizers in files, and which of the three known ones each means.

Source: llama.cpp `llama-vocab.cpp`. smollm isolates digits before GPT-2's splitting; transformers
5.24 leaves that out when it reads a GGUF, and then differs from SmolLM2's own tokenizer.json where
two or more spaces or newlines stand before a digit.
"""

CONTROL, USER_DEFINED = 3, 4
"""Values of `tokenizer.ggml.token_type` for tokens that are matched whole in a text."""

NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""What chat templates call a token, and what the file does."""


def read_tokenizer(metadata: dict[str, Any]) -> tuple[Tokenizer | None, str | None]:
    """The tokenizer, or None and why there is none.

    Raises:
        LoadError: it is of a known kind, and damaged.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model is None:
        return None, "its file holds no tokenizer"
    if model != "gpt2":
        return None, f"its tokenizer is of kind {said(model)}; only byte-level BPE (gpt2) is read"
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str) or pre not in PRE:
        known = ", ".join(PRE)
        return None, f"its pre-tokenizer {said(pre)} is not among those known exactly: {known}"
    return _byte_level(metadata, PRE[pre]), None


def token_list(metadata: dict[str, Any]) -> list[str]:
    """The vocabulary in order of id; empty where the file has none.

    Raises:
        LoadError: it is no list of distinct texts.
    """
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    if not _texts(tokens):
        raise LoadError("tokenizer.ggml.tokens is no list of texts")
    if len(set(tokens)) < len(tokens):
        raise LoadError("tokenizer.ggml.tokens holds the same token twice; expected distinct ones")
    return tokens


def token_id(metadata: dict[str, Any], name: str, vocab_size: int) -> int | None:
    """A special token's id by the file's name for it (`bos`, `eos`, `eot`), None where absent.

    Raises:
        LoadError: it is outside the vocabulary.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is not None and not (type(value) is int and 0 <= value < vocab_size):
        raise LoadError(
            f"{key} is {said(value)}; expected an id below the vocabulary's {vocab_size}"
        )
    return value


def _byte_level(metadata: dict[str, Any], pre: str) -> Tokenizer:
    tokens = token_list(metadata)
    merges = metadata.get("tokenizer.ggml.merges", [])
    if not _texts(merges) or any(merge.count(" ") != 1 for merge in merges):
        raise LoadError("tokenizer.ggml.merges is no list of pairs, each with one space between")
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in merges]
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise LoadError(f"tokenizer.ggml.token_type does not match the {len(tokens)} tokens")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        # Llama 3 takes a piece that is a token as it is, whether or not merges lead to it.
        model = models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe")
    except Exception as error:
        raise LoadError(f"tokenizer.ggml.merges do not fit the tokens: {one_line(error)}") from None
    backend = tokenizers.Tokenizer(model)
    space = bool(metadata.get("tokenizer.ggml.add_space_prefix", False))
    split = {
        "gpt-2": [],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "llama-bpe": [pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated")],
    }[pre]
    level = pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=pre != "llama-bpe")
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    backend.add_tokens(added)

    ids = {name: token_id(metadata, key, len(tokens)) for name, key in NAMED.items()}
    special = {name: tokens[i] for name, i in ids.items() if i is not None}
    before = ["bos"] if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") else []
    after = ["eos"] if metadata.get("tokenizer.ggml.add_eos_token", False) else []
    for name in before + after:
        if name not in special:
            raise LoadError(f"tokenizer.ggml.add_{name}_token is set, {name}_token_id is missing")
    if before or after:
        try:
            backend.post_processor = processors.TemplateProcessing(
                single=[special[n] for n in before] + ["$A"] + [special[n] for n in after],
                special_tokens=[(special[n], ids[n]) for n in {*before, *after}],
            )
        except Exception as error:
            raise LoadError(f"special tokens cannot be added to text: {one_line(error)}") from None
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        if not isinstance(template, str):
            raise LoadError("tokenizer.chat_template is no text")
        check_template(template, "tokenizer.chat_template")
    return Tokenizer(
        backend.to_str(), template, {f"{name}_token": token for name, token in special.items()}
    )


def said(value: Any) -> str:
    """A metadata value for a message: in one line, cut where it is long."""
    return one_line(repr(value), 60)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
