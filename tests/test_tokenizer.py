"""The tokenizer read from files, its chat template, and what it refuses."""

import numpy as np
import pytest
import tokenizers

from eagle3_jax import testing
from eagle3_jax.contracts import LoadError, RequestError
from eagle3_jax.tokenizer import Tokenizer

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
    assert Tokenizer(backend.to_str()).encode("ab") == PLAIN.encode("ab")


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


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% for %}", "{{ a.b.c }}"])
def test_a_template_that_fails_refuses_the_messages(template):
    with pytest.raises(RequestError, match="template refused the messages"):
        Tokenizer(JSON, template).chat(MESSAGES)


def test_templates_cannot_reach_the_machine():
    """They come with downloaded models, so they run in a sandbox."""
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(RequestError):
        Tokenizer(JSON, escape).chat(MESSAGES)


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
    with pytest.raises(LoadError, match="tokenizer.json cannot be read"):
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
