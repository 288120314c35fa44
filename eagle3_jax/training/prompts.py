"""Prompt files: JSONL rows of prompts, of turns, or of messages."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.contracts import RequestError

WANTED = (
    'expected {"turns": [text, …]}, {"prompt": text}, or {"messages": [{"role", "content"}, …]} '
    "that end with the user's"
)


@dataclasses.dataclass(frozen=True)
class PromptRow:
    """A row of a prompt file.

    Attributes:
        id: names it; a hash of its text where the row has none.
        turns: the user's, in order; every one is answered before the next is asked.
        before: messages, each a role and a content, that precede the first turn.
        path: its file.
        line: its line there.
    """

    id: str
    turns: tuple[str, ...]
    before: tuple[tuple[str, str], ...]
    path: Path
    line: int

    @property
    def where(self) -> str:
        """File and line."""
        return f"{self.path} line {self.line}"

    @property
    def text(self) -> str:
        """What is asked, without what makes no difference: white space, upper and lower case."""
        return _normal(self.before, self.turns)


def _normal(before: Sequence[tuple[str, str]], turns: Sequence[str]) -> str:
    messages = [*before, *(("user", turn) for turn in turns)]
    return "\n".join(f"{role}: {' '.join(text.split())}".casefold() for role, text in messages)


def read_prompt_rows(path: Path) -> list[PromptRow]:
    """The rows of a JSONL file.

    A row is `{"turns": [text, …]}`, `{"prompt": text}`, or a conversation that ends with the user's
    message, `{"messages": [{"role", "content"}, …]}` (or `"conversations"`), each with an `"id"`
    where it has one.

    Raises:
        RequestError: the file cannot be read, a row is something else, or there is none; rows are
            named by their line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"prompts {path} cannot be read: {reason}") from None
    rows = [_row(line, path, number) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise RequestError(f"prompts {path} holds no row")
    return rows


def _row(line: str, path: Path, number: int) -> PromptRow:
    where = f"{path} line {number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where} is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise RequestError(f"{where} has {type(row).__name__}; {WANTED}")
    before: list[tuple[str, str]] = []
    if "turns" in row:
        turns = row["turns"]
    elif "prompt" in row:
        turns = [row["prompt"]]
    elif "messages" in row or "conversations" in row:
        before = _messages(row.get("messages", row.get("conversations")), where)
        turns = [before.pop()[1]]
    else:
        raise RequestError(f"{where} has the keys {sorted(row)}; {WANTED}")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise RequestError(f"{where}: turns must be a list of texts, at least one; {WANTED}")
    if not all(turns):
        raise RequestError(f"{where} has an empty text: there is no token to continue from")
    id = row.get("id")
    if id is None:
        id = hashlib.sha256(_normal(before, turns).encode()).hexdigest()[:16]
    elif isinstance(id, bool) or not isinstance(id, (str, int)):
        raise RequestError(f"{where}: id must be a text or a whole number; found {ascii(id)[:80]}")
    return PromptRow(str(id), tuple(turns), tuple(before), path, number)


def _messages(messages: Any, where: str) -> list[tuple[str, str]]:
    """Role and content of each; the last is the user's."""
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"{where}: messages must be a list, at least one; {WANTED}")
    out = []
    for message in messages:
        role, content = (
            (message.get("role"), message.get("content")) if isinstance(message, dict) else (0, 0)
        )
        if not isinstance(role, str) or not isinstance(content, str):
            raise RequestError(
                f"{where}: a message is a role and a content, both texts; found "
                f"{ascii(message)[:80]}"
            )
        out.append((role, content))
    if out[-1][0] != "user":
        raise RequestError(
            f"{where} ends with a message of {ascii(out[-1][0])}; the last must be the user's, "
            "which is answered"
        )
    return out


def unique(rows: Sequence[PromptRow]) -> list[PromptRow]:
    """The rows whose text none before them has; white space and case make no difference.

    Raises:
        RequestError: two texts have one id.
    """
    by_id: dict[str, PromptRow] = {}
    texts: set[str] = set()
    out = []
    for row in rows:
        text = row.text
        other = by_id.setdefault(row.id, row)
        if other.text != text:
            raise RequestError(
                f"{row.where} has the id {row.id!r} of {other.where} and another text; give each "
                "its own id"
            )
        if text not in texts:
            texts.add(text)
            out.append(row)
    return out
