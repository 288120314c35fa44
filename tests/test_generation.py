"""Prompts to token ids: text, messages and token lists, and what is no prompt."""

import json
from pathlib import Path

import jax
import pytest

from eagle3_jax import testing
from eagle3_jax.contracts import RequestError
from eagle3_jax.generation import encode_prompt
from eagle3_jax.tokenizer import Tokenizer
from eagle3_jax.verifier import Verifier

GOLDEN = json.loads((Path(__file__).parent / "golden" / "templates.json").read_text())
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
JSON = GOLDEN["tokenizer.json"]
BOS = 0


def verifier(template: str | None, **changes) -> Verifier:
    """A tiny model whose tokenizer begins plain text with a token of its own."""
    config = testing.tiny_verifier("llama", vocab_size=128, **changes).config
    tokenizer = Tokenizer(JSON, template, {"bos_token": "<|bos|>"})
    return Verifier(config, jax.random.key(0), "tiny", tokenizer)


BASE, CHAT = verifier(None), verifier(TEMPLATE, image_tokens=(5,))
PLAIN = Tokenizer(JSON)


def test_plain_text_gets_the_special_tokens_and_a_chat_its_own():
    plain = [BOS, *PLAIN.encode("ab")]
    assert encode_prompt(BASE, "ab") == encode_prompt(CHAT, "ab", raw=True) == plain
    assert encode_prompt(CHAT, "ab") == [BOS, *PLAIN.encode("[ab]")]


def test_messages_and_parts():
    parts = [{"type": "text", "text": "a"}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": parts}]
    text = f"[a][{parts}]"
    assert encode_prompt(CHAT, messages) == [BOS, *PLAIN.encode(text)]
    assert encode_prompt(CHAT, [3, 4]) == [3, 4]


@pytest.mark.parametrize(
    ("part", "what"),
    [
        ({"type": "image", "image": "x.png"}, "an image"),
        ({"type": "image_url", "image_url": {"url": "x"}}, "an image"),
        ({"type": "input_audio"}, "an audio"),
        ({"type": "video"}, "a video"),
        ({"type": "document"}, "a document part"),
        ({"url": "x"}, "a ? part"),
    ],
)
def test_anything_but_text_is_refused(part, what):
    messages = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, part]}]
    with pytest.raises(RequestError, match="^tiny takes text only; the prompt holds") as caught:
        encode_prompt(CHAT, messages)
    assert str(caught.value).endswith(what)


@pytest.mark.parametrize("prompt", [[1, 2, 5], "<|message|>"])
def test_the_place_of_an_image_is_refused(prompt):
    with pytest.raises(RequestError, match=r"holds an image \(token 5 at position \d\)"):
        encode_prompt(CHAT, prompt)
    assert encode_prompt(BASE, [1, 2, 5]) == [1, 2, 5]


def test_what_is_no_message():
    messages = [{"role": "user", "content": ["a"]}]
    with pytest.raises(RequestError, match="^messages are dictionaries of a role and a content"):
        encode_prompt(CHAT, messages)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([128], "token 128 is outside"),
        ([{"role": "user", "content": "a"}], "no chat template"),
    ],
)
def test_what_is_no_prompt(prompt, said):
    with pytest.raises(RequestError, match=said):
        encode_prompt(BASE, prompt)


def test_without_a_tokenizer_the_reason_is_given():
    config = testing.tiny_verifier("llama").config
    bare = Verifier(config, jax.random.key(0), "tiny", None, "its tokenizer is odd")
    with pytest.raises(RequestError) as caught:
        encode_prompt(bare, "ab")
    said = "the verifier tiny cannot read text: its tokenizer is odd; pass prompts as token lists"
    assert str(caught.value) == said
