"""A tokenizer and chat template read from files; hashable, so that a module can carry it."""

import hashlib
import os
from pathlib import Path
from typing import Any

import tokenizers

from checkpoints.tensors import one_line, read_json, read_text, some
from eagle3_jax.contracts import LoadError, RequestError
from eagle3_jax.templates import check_template, render

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
SPECIAL += ("mask_token",)
"""Names under which every chat template may find a special token."""

OTHER_TOKENIZERS = {
    "tiktoken.model": "its tokenizer is a tiktoken file (tiktoken.model), which is not supported",
    "tokenizer.model": "its tokenizer is a sentencepiece file (tokenizer.model), which is not "
    "supported",
}
"""Why there is no tokenizer, by the file that holds it where there is no tokenizer.json."""


class Tokenizer:
    """A `tokenizer.json` of the tokenizers library, and a jinja2 chat template where there is one.

    Two tokenizers are equal where their fingerprints are.

    Args:
        json: content of `tokenizer.json`.
        template: the chat template, or None.
        special: special tokens by the name that templates use (`bos_token`, `eos_token`).

    Raises:
        LoadError: `json` is no tokenizer.
    """

    def __init__(
        self, json: str, template: str | None = None, special: dict[str, str] | None = None
    ):
        self.template = template
        self.special = dict(special or {})
        try:
            self.fingerprint = hashlib.sha256(json.encode()).hexdigest()[:16]
            self._backend = tokenizers.Tokenizer.from_str(json)
        except Exception as error:
            raise LoadError(f"tokenizer.json cannot be read: {one_line(error)}") from None
        # Files may carry the settings of a training run; a prompt is neither cut nor filled up.
        self._backend.no_truncation()
        self._backend.no_padding()

    def __eq__(self, other):
        mine = (self.fingerprint, self.template)
        return isinstance(other, Tokenizer) and mine == (other.fingerprint, other.template)

    def __hash__(self):
        return hash((self.fingerprint, self.template))

    @classmethod
    def from_file(cls, path: Path, template: str | None = None, special=None) -> "Tokenizer":
        """Read a `tokenizer.json`.

        Raises:
            LoadError: it is missing or no tokenizer.
        """
        return cls(read_text(path), template, special)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: special tokens written in it become what they stand for.
            special: add what the tokenizer's own post-processor adds to plain text, such as a
                beginning of text. Chat templates write that themselves.

        Raises:
            RequestError: the text cannot be encoded.
        """
        try:
            return self._backend.encode(text, add_special_tokens=special).ids
        except Exception as error:
            raise RequestError(f"the text cannot be encoded: {one_line(error)}") from None

    def decode(self, ids) -> str:
        """The text of token ids; special tokens are left out."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of one token by its text, None where there is none."""
        return self._backend.token_to_id(token)

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a conversation by the chat template.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        if self.template is None:
            raise RequestError("this model has no chat template; pass plain text or token lists")
        return render(self.template, messages, add_generation_prompt, self.special)

    def chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation through the chat template.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        return self.encode(self.render(messages, add_generation_prompt))


def read_tokenizer(folder: Path) -> tuple[Tokenizer | None, str | None]:
    """The tokenizer of a Hugging Face folder, and where there is none the reason.

    Raises:
        LoadError: one of its files is damaged; the message names it.
    """
    path = folder / "tokenizer.json"
    if not os.path.lexists(path):
        reasons = [why for name, why in OTHER_TOKENIZERS.items() if (folder / name).is_file()]
        return None, (reasons or ["it has no tokenizer.json"])[0]
    settings = _read_if_there(folder / "tokenizer_config.json")
    template, source = _template(folder, settings)
    if template is not None:
        check_template(template, source)
    return Tokenizer.from_file(path, template, _special(folder, settings)), None


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if os.path.lexists(path) else {}


def _template(folder: Path, settings: dict[str, Any]) -> tuple[str | None, str]:
    """The chat template and the file it is from; a file of its own goes before the settings."""
    own = folder / "chat_template.jinja"
    if os.path.lexists(own):
        return read_text(own), own.name
    where, found = "tokenizer_config.json", settings.get("chat_template")
    if found is None:
        where = "chat_template.json"
        found = _read_if_there(folder / where).get("chat_template")
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        found = {each.get("name"): each.get("template") for each in found}
    if isinstance(found, dict):
        if "default" not in found:
            raise LoadError(
                f"{folder / where} has the chat templates {some(map(str, found))}; expected one "
                "that is called default, put the one to use into chat_template.jinja"
            )
        found = found["default"]
    if found is not None and not isinstance(found, str):
        raise LoadError(
            f"{folder / where}: chat_template is {type(found).__name__}; expected a text, or a "
            "list of names and templates"
        )
    return found, where


def _special(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Special tokens by name; older folders have them in a file of their own."""
    if "added_tokens_decoder" not in settings:
        settings = {**settings, **_read_if_there(folder / "special_tokens_map.json")}
    special = {}
    for key, token in settings.items():
        content = token.get("content") if isinstance(token, dict) else token
        if key in SPECIAL and token is not None and not isinstance(content, str):
            raise LoadError(
                f"{folder / 'tokenizer_config.json'}: {key} is {some([str(token)])}; expected a "
                "token's text"
            )
        if key.endswith("_token") and isinstance(content, str):
            special[key] = content
    return special
