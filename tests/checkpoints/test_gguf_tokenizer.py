"""Tokenizers of GGUF files: the ids of the tokenizer itself, added tokens, what is refused."""

import json
import runpy
from pathlib import Path

import pytest

from checkpoints.gguf_tokenizer import read_tokenizer
from eagle3_jax.contracts import LoadError

GOLDEN = Path(__file__).parents[1] / "golden"
TOKENIZERS = json.loads((GOLDEN / "gguf" / "tokenizers.json").read_text(encoding="utf-8"))
TEXTS = runpy.run_path(str(GOLDEN / "texts.py"))["TEXTS"]
BOS = "<|im_start|>"


def metadata_of(pre):
    """What a file holds of a tiny tokenizer, and its ids for the texts."""
    held = TOKENIZERS[pre]
    fields = ("tokens", "token_type", "merges")
    metadata = {f"tokenizer.ggml.{name}": held[name] for name in fields}
    metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
    return metadata | {"tokenizer.ggml.bos_token_id": 0}, held["ids"]


@pytest.mark.parametrize("pre", sorted(TOKENIZERS))
def test_texts_encode_as_the_tokenizer_itself_does(pre):
    """Ids by the tokenizer that the metadata was written from; and the text comes back."""
    metadata, ids = metadata_of(pre)
    tokenizer, why = read_tokenizer(metadata)
    assert tokenizer is not None and why is None
    for text, wanted in zip(TEXTS, ids, strict=True):
        assert tokenizer.encode(text) == wanted, text
        if "<|im_" not in text:
            assert tokenizer.decode(wanted) == text


def test_added_tokens_are_matched_whole_and_only_control_tokens_hidden():
    metadata, _ = metadata_of("smollm")
    tokenizer, _ = read_tokenizer(metadata)
    assert tokenizer is not None
    think = tokenizer.token_id("<think>")
    assert tokenizer.encode(f"{BOS}a<think>") == [0, *tokenizer.encode("a"), think]
    assert tokenizer.decode([0, think]) == "<think>"
    assert tokenizer.special == {"bos_token": BOS}


@pytest.mark.parametrize(
    ("pre", "flags", "before", "after"),
    [
        ("smollm", {}, [], []),
        ("smollm", {"add_bos_token": True}, [0], []),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, [0], [1]),
        ("llama-bpe", {}, [0], []),
        ("llama-bpe", {"add_bos_token": False}, [], []),
    ],
)
def test_what_is_added_to_plain_text(pre, flags, before, after):
    """By the file's flags; without them Llama 3 begins with its token, and others do not."""
    metadata, _ = metadata_of(pre)
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in flags.items()}
    tokenizer, _ = read_tokenizer(metadata | {"tokenizer.ggml.eos_token_id": 1})
    assert tokenizer is not None
    assert tokenizer.encode("ab", special=True) == [*before, *tokenizer.encode("ab"), *after]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model": None}, "holds no tokenizer"),
        ({"model": "llama"}, "of kind 'llama'; only byte-level BPE"),
        ({"pre": "tekken"}, "its pre-tokenizer 'tekken' is not among those known exactly"),
        ({"pre": None}, "its pre-tokenizer 'default' is not among"),
    ],
)
def test_tokenizers_of_another_kind_are_left_out_with_a_reason(change, why):
    metadata, _ = metadata_of("smollm")
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in change.items()}
    metadata = {key: value for key, value in metadata.items() if value is not None}
    tokenizer, reason = read_tokenizer(metadata)
    assert tokenizer is None and reason is not None and why in reason


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"ggml.merges": ["a b c"]}, "no list of pairs"),
        ({"ggml.merges": [1, 2]}, "no list of pairs"),
        ({"ggml.merges": ["q zzz"]}, "do not fit the tokens"),
        ({"ggml.tokens": [1, 2]}, "no list of texts"),
        ({"ggml.token_type": [1]}, "does not match the 422 tokens"),
        ({"ggml.add_eos_token": True}, "eos_token_id is missing"),
        ({"ggml.bos_token_id": -1}, "tokenizer.ggml.bos_token_id is -1"),
        ({"chat_template": ["a"]}, "chat_template is no text"),
        ({"chat_template": "{% if %}"}, "chat_template holds no chat template"),
    ],
)
def test_damaged_tokenizers_are_refused(change, why):
    metadata, _ = metadata_of("smollm")
    metadata |= {f"tokenizer.{name}": value for name, value in change.items()}
    with pytest.raises(LoadError, match=why) as error:
        read_tokenizer(metadata)
    assert "\n" not in str(error.value)
