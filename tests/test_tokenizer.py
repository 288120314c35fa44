"""The tokenizer read from files, its chat template, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from eagle3_jax import testing
from eagle3_jax.contracts import LoadError, RequestError
from eagle3_jax.tokenizer import Tokenizer, read_tokenizer

TEMPLATE = (
    "{% for message in messages %}"
    "{{ bos_token }}{{ message.role[:1] }}: {{ message.content }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}a: {% endif %}"
)
PLAIN = testing.tiny_tokenizer()
JSON = PLAIN._backend.to_str()
CHAT = Tokenizer(JSON, TEMPLATE, {"bos_token": "<|bos|>"})
MESSAGES = [{"role": "user", "content": "def f(x):"}]


def test_text_there_and_back():
    text = "def f(x):\n    x = 1"
    ids = PLAIN.encode(text)
    assert len(ids) == len(text) and all(2 <= i < 64 for i in ids)
    assert PLAIN.decode(ids) == text
    assert ids[:3] == [PLAIN.token_id(c) for c in "def"]


def test_special_tokens_are_neither_added_nor_shown():
    assert PLAIN.encode("") == []
    assert PLAIN.decode([0, *PLAIN.encode("ab"), 1]) == "ab"
    assert PLAIN.encode("<|eos|>a") == [1, *PLAIN.encode("a")]
    assert (PLAIN.token_id("<|eos|>"), PLAIN.token_id("nothing")) == (1, None)


def test_a_tokenizer_that_would_add_special_tokens_adds_none():
    """Templates write them; a second beginning of text would change what the model sees."""
    backend = tokenizers.Tokenizer.from_str(JSON)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", 0)]
    )
    assert backend.encode("ab").ids[0] == 0
    mine = Tokenizer(backend.to_str())
    assert mine.encode("ab") == PLAIN.encode("ab")
    assert mine.encode("ab", special=True) == [0, *PLAIN.encode("ab")]
    assert PLAIN.encode("ab", special=True) == PLAIN.encode("ab")


def test_settings_of_a_training_run_do_not_cut_prompts():
    backend = tokenizers.Tokenizer.from_str(JSON)
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    assert Tokenizer(backend.to_str()).encode("abcdef") == PLAIN.encode("abcdef")


def test_a_text_that_is_none_is_refused():
    with pytest.raises(RequestError, match="the text cannot be encoded"):
        PLAIN.encode("a\ud800")


def test_ids_may_be_any_sequence():
    ids = PLAIN.encode("abc")
    assert PLAIN.decode(np.asarray(ids, np.int32)) == PLAIN.decode(tuple(ids)) == "abc"


def test_chat_goes_through_the_template():
    ids = CHAT.chat(MESSAGES)
    assert ids == [0, *PLAIN.encode("u: def f(x):\na: ")]
    shorter = CHAT.chat(MESSAGES, add_generation_prompt=False)
    assert ids[: len(shorter)] == shorter and len(ids) == len(shorter) + 3


def test_chat_without_a_template_is_refused():
    with pytest.raises(RequestError, match="no chat template"):
        PLAIN.chat(MESSAGES)


def test_equality_is_that_of_content():
    """Tokenizers are static parts of a compiled program: equal ones must not compile twice."""
    same = testing.tiny_tokenizer()
    assert same == PLAIN and hash(same) == hash(PLAIN) and same is not PLAIN
    assert CHAT != PLAIN and CHAT.fingerprint == PLAIN.fingerprint
    other = Tokenizer(JSON.replace('"q":18', '"Q":18', 1))
    assert other != PLAIN and other.fingerprint != PLAIN.fingerprint
    assert PLAIN != "tokenizer"


def test_files(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(LoadError, match="tokenizer.json is missing"):
        Tokenizer.from_file(path)
    path.write_text(JSON)
    assert Tokenizer.from_file(path) == PLAIN
    assert Tokenizer.from_file(path, TEMPLATE, {"bos_token": "<|bos|>"}).chat(MESSAGES)[0] == 0
    path.write_text(JSON[:200])
    with pytest.raises(LoadError, match="tokenizer.json cannot be read"):
        Tokenizer.from_file(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LoadError, match="tokenizer.json cannot be read"):
        Tokenizer.from_file(path)


def write(folder: Path, **files) -> None:
    """Files by name; `tokenizer.json` comes with them, and what is no text is written as JSON."""
    for name, content in {"tokenizer_json": JSON, **files}.items():
        text = content if isinstance(content, str) else json.dumps(content)
        stem, _, ending = name.rpartition("_")
        (folder / f"{stem}.{ending}").write_text(text)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, None),
        ({"tokenizer_config_json": {}}, None),
        ({"tokenizer_config_json": {"chat_template": "a"}}, "a"),
        ({"tokenizer_config_json": {"chat_template": "a"}, "chat_template_jinja": "b"}, "b"),
        ({"chat_template_json": {"chat_template": "c"}}, "c"),
        ({"tokenizer_config_json": {"chat_template": {"default": "d", "rag": "e"}}}, "d"),
        (
            {
                "tokenizer_config_json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "f"},
                        {"name": "default", "template": "g"},
                    ]
                }
            },
            "g",
        ),
    ],
)
def test_places_of_a_template(tmp_path, files, text):
    write(tmp_path, **files)
    tokenizer, why = read_tokenizer(tmp_path)
    assert tokenizer is not None and tokenizer.template == text and why is None


def test_special_tokens_by_name(tmp_path):
    """Those of the older file count only where the newer one keeps none of its own."""
    settings = {"bos_token": {"content": "<s>"}, "pad_token": None, "image_token": "<i>", "x": "y"}
    older = {"bos_token": "<b>", "eos_token": {"content": "<e>"}}
    write(tmp_path, tokenizer_config_json=settings, special_tokens_map_json=older)
    tokenizer, _ = read_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.special == {"bos_token": "<b>", "eos_token": "<e>", "image_token": "<i>"}
    write(tmp_path, tokenizer_config_json={**settings, "added_tokens_decoder": {}})
    tokenizer, _ = read_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.special == {"bos_token": "<s>", "image_token": "<i>"}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tokenizer_json": ""}, "tokenizer.json cannot be read: "),
        ({"tokenizer_json": "[" * 100_000}, "tokenizer.json cannot be read: "),
        ({"tokenizer_json": JSON[:200]}, "tokenizer.json cannot be read: "),
        ({"tokenizer_json": {"model": {}}}, "tokenizer.json cannot be read: "),
        ({"tokenizer_config_json": "{"}, "tokenizer_config.json is no JSON file"),
        ({"tokenizer_config_json": {"bos_token": 3}}, "tokenizer_config.json: bos_token is 3"),
        ({"tokenizer_config_json": {"bos_token": {"a": 1}}}, "tokenizer_config.json: bos_token"),
        ({"special_tokens_map_json": [1]}, "special_tokens_map.json holds list"),
        ({"tokenizer_config_json": {"chat_template": 3}}, "chat_template is int; expected a text"),
        ({"tokenizer_config_json": {"chat_template": [3]}}, "chat_template is list"),
        (
            {"tokenizer_config_json": {"chat_template": [{"name": "rag"}]}},
            "templates rag; expected",
        ),
        ({"tokenizer_config_json": {"chat_template": "{%"}}, "config.json holds no chat template"),
        ({"chat_template_jinja": "{% for %}"}, "chat_template.jinja holds no chat template"),
        ({"chat_template_jinja": "{{" + "(" * 9999}, "chat_template.jinja holds no chat template"),
        ({"chat_template_json": {"chat_template": 1}}, "chat_template.json: chat_template is int"),
    ],
)
def test_damaged_files_are_named(tmp_path, files, said):
    write(tmp_path, **files)
    with pytest.raises(LoadError) as caught:
        read_tokenizer(tmp_path)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("tiktoken.model", "its tokenizer is a tiktoken file (tiktoken.model), which is not"),
        ("tokenizer.model", "its tokenizer is a sentencepiece file (tokenizer.model), which is"),
        ("vocab.json", "it has no tokenizer.json"),
    ],
)
def test_why_there_is_no_tokenizer(tmp_path, name, why):
    (tmp_path / name).write_bytes(b"x")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    tokenizer, reason = read_tokenizer(tmp_path)
    assert tokenizer is None and reason is not None and reason.startswith(why)
