"""A tokenizer and chat template read from files; hashable, so that a module can carry it."""

import functools
import hashlib
from pathlib import Path

import tokenizers

from eagle3_jax.contracts import LoadError, RequestError


class Tokenizer:
    """A `tokenizer.json` of the tokenizers library, and a jinja2 chat template where there is one.

    Two tokenizers are equal where their fingerprints are.

    Args:
        json: content of `tokenizer.json`.
        template: the chat template, or None.
        special: special tokens by the name that templates use (`bos_token`, `eos_token`).
    """

    def __init__(
        self, json: str, template: str | None = None, special: dict[str, str] | None = None
    ):
        self.fingerprint = hashlib.sha256(json.encode()).hexdigest()[:16]
        self.template = template
        self.special = dict(special or {})
        try:
            self._backend = tokenizers.Tokenizer.from_str(json)
        except Exception as error:
            raise LoadError(f"tokenizer.json cannot be read: {error}") from error

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
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LoadError(f"{path.name} cannot be read: {error}") from error
        return cls(text, template, special)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; no special token is added."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids) -> str:
        """The text of token ids; special tokens are left out."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of one token by its text, None where there is none."""
        return self._backend.token_to_id(token)

    def chat(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of a conversation through the chat template.

        Raises:
            RequestError: there is no template, or it refuses the messages.
        """
        if self.template is None:
            raise RequestError("this model has no chat template; pass plain text or token lists")
        try:
            text = _compiled(self.template).render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self.special
            )
        except Exception as error:
            raise RequestError(f"the chat template refused the messages: {error}") from error
        return self.encode(text)


@functools.cache
def _compiled(template: str):
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)
