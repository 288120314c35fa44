"""Training rows: JSONL to packed batches, in an order that a resumed run repeats."""

import dataclasses
import json
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int

from eagle3_jax.contracts import RequestError


@dataclasses.dataclass(frozen=True)
class Document:
    """One training row.

    Attributes:
        id: names it; the split into training and held-out rows goes by it.
        tokens: verifier ids.
        learn: which tokens, as the ones predicted, are learned from.
    """

    id: str
    tokens: Int[np.ndarray, " t"]
    learn: Bool[np.ndarray, " t"]


def read_documents(path: Path, vocab_size: int) -> list[Document]:
    """The rows of a JSONL file: `{"id", "tokens": [ids], "loss": [[start, stop], …]}`.

    Raises:
        RequestError: names the line and what is wrong with it.
    """
    documents = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"training data {path} cannot be read: {reason}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            tokens = np.asarray(row["tokens"], np.int32)
            learn = np.zeros(len(tokens), bool)
            for start, stop in row["loss"]:
                if not 0 <= start < stop <= len(tokens):
                    raise ValueError(f"loss span [{start}, {stop}] outside 0 to {len(tokens)}")
                learn[start:stop] = True
            if tokens.ndim != 1 or not len(tokens):
                raise ValueError("tokens must be a list of ids")
            if tokens.min() < 0 or tokens.max() >= vocab_size:
                raise ValueError(f"a token is outside the verifier's vocabulary of {vocab_size}")
            documents.append(Document(str(row["id"]), tokens, learn))
        except KeyError as error:
            raise RequestError(f"{path} line {number}: the key {error} is missing") from None
        except (ValueError, TypeError) as error:
            raise RequestError(f"{path} line {number}: {error}") from None
    if not documents:
        raise RequestError(f"training data {path} holds no rows")
    return documents


def split(documents: list[Document], held_out: float) -> tuple[list[Document], list[Document]]:
    """Training and held-out rows, by a hash of each row's id, so that both stay as data grows."""

    def is_held(document: Document) -> bool:
        return zlib.crc32(document.id.encode()) % 10000 < held_out * 10000

    return (
        [d for d in documents if not is_held(d)],
        [d for d in documents if is_held(d)],
    )


class Packed:
    """Documents laid end to end and cut into rows of equal length, which every epoch reorders.

    The k-th row is the same whoever asks and whenever, so a resumed run goes on where it stopped. A
    document cut by a row's end goes on in the next row as a document of its own.

    Args:
        documents: at least `length` tokens in all.
        length: tokens of a row.
        seed: of the documents' order and the rows'.
        limit: rows used, the first ones; None is all.

    Attributes:
        tokens: of every row, [rows length].
        starts: document starts, likewise.
        learn: what is learned, likewise.
        rows: how many are used, the first ones.

    Raises:
        RequestError: too few tokens for one row.
    """

    def __init__(self, documents: list[Document], length: int, seed: int, limit: int | None = None):
        count = sum(len(document.tokens) for document in documents)
        rows = count // length
        if not rows:
            raise RequestError(
                f"{count} training tokens are too few for one row of {length}; give more data or a "
                "smaller length"
            )
        order = np.random.default_rng(seed).permutation(len(documents))
        chosen = [documents[i] for i in order]
        sizes = np.array([len(document.tokens) for document in chosen])
        first = np.repeat(np.cumsum(sizes) - sizes, sizes)

        def cut(values):
            return values[: rows * length].reshape(rows, length)

        self.tokens = cut(np.concatenate([document.tokens for document in chosen]))
        self.learn = cut(np.concatenate([document.learn for document in chosen]))
        begin = np.arange(len(self.tokens), dtype=np.int64)[:, None] * length
        self.starts = np.maximum(cut(first) - begin, 0).astype(np.int32)
        self.seed = seed
        self.rows = rows if limit is None else min(rows, limit)
        self._epoch, self._order = -1, np.arange(0)

    def number(self, k: int) -> int:
        """Which row comes k-th."""
        epoch, index = divmod(k, self.rows)
        if epoch != self._epoch:
            self._order = np.random.default_rng((self.seed, epoch)).permutation(self.rows)
            self._epoch = epoch
        return int(self._order[index])

    def numbers(self, first: int, count: int, batch: int) -> Int[np.ndarray, "n b"]:
        """Which rows make up `count` batches from the `first` on."""
        rows = range(first * batch, (first + count) * batch)
        return np.asarray([self.number(k) for k in rows]).reshape(count, batch)

    def batches(self, first: int, count: int, batch: int):
        """`count` batches from the `first` on: tokens, starts and what is learned, [n b t]."""
        numbers = self.numbers(first, count, batch)
        return self.tokens[numbers], self.starts[numbers], self.learn[numbers]
