"""Corpus and tokenizer of tiny-kimi: the running interpreter's own standard library.

    python corpus.py --out FOLDER

writes ``tokenizer.json``, ``train.npy``, ``heldout.npy`` and ``meta.json`` into FOLDER.
Both arrays are flat uint16 streams: for each file ``<|bos|>``, its tokens, ``<|eos|>``.
"""

from __future__ import annotations

import argparse
import json
import platform
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, EOS = "<|bos|>", "<|eos|>"
BOS_ID, EOS_ID = 0, 1
VOCAB_SIZE = 1024
HELDOUT_PERCENT = 4
MAX_BYTES = 400_000
MIN_HELDOUT_BYTES = 3_000

_SKIP_PARTS = {"site-packages", "dist-packages", "__pycache__", "idle_test", "pydoc_data"}
_SKIP_PREFIXES = (
    "lib2to3/tests/",
    "test/test_lib2to3/data/",
    "test/encoded_modules/",
    "encodings/cp",
    "config-",
    "_sysconfigdata",
)

_UNFAIR = {"locale.py", "_compat_pickle.py", "lzma.py", "tokenize.py"}

# Line breaks with the indentation that follows; words; single digits; punctuation; spaces.
# A word or a run of punctuation may carry one leading space.
_PIECES = (
    r"[\r\n]+[ \t]*"
    r"| ?[\p{L}\p{M}_]+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}_]+"
    r"|[^\S\r\n]+(?![^\s\p{N}])"
    r"|[^\S\r\n]+"
)


def _is_data(name: str, text: str) -> bool:
    """Whether a file is mostly a table: long lines, many digits, or a generated code page."""
    if name.endswith("_data.py"):
        return True
    if name.startswith("encodings/") and ("decoding_table" in text or "decoding_map" in text):
        return True
    if max(map(len, text.splitlines()), default=0) > 400:
        return True
    return sum(map(text.count, "0123456789")) > 0.12 * len(text)


def read(path: Path) -> str:
    """The text of a file, line breaks untouched."""
    return path.read_bytes().decode("utf-8")


@cache
def _sources() -> tuple[tuple[str, Path], ...]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        name = relative.as_posix()
        if _SKIP_PARTS.intersection(relative.parts) or name.startswith(_SKIP_PREFIXES):
            continue
        if not path.is_file() or not 0 < path.stat().st_size <= MAX_BYTES:
            continue
        try:
            text = read(path)
        except UnicodeDecodeError:
            continue
        if not _is_data(name, text):
            found.append((name, path))
    return tuple(sorted(found))


def source_files() -> list[tuple[str, Path]]:
    """Every usable source file of the standard library as (relative name, path), sorted."""
    return list(_sources())


def split(relative_name: str) -> str:
    """``"train"`` or ``"heldout"``, fixed by a hash of the relative posix path."""
    bucket = zlib.crc32(relative_name.encode("utf-8")) % 100
    return "heldout" if bucket < HELDOUT_PERCENT else "train"


def train_files() -> list[tuple[str, Path]]:
    """The files to train on, ``test/`` included."""
    return [(name, path) for name, path in source_files() if split(name) == "train"]


def heldout_files() -> list[tuple[str, Path]]:
    """The files to measure on: held out, outside ``test/`` and at least 3 kB long."""
    return [
        (name, path)
        for name, path in source_files()
        if split(name) == "heldout"
        and not name.startswith("test/")
        and path.stat().st_size >= MIN_HELDOUT_BYTES
    ]


def heldout_prompts(encode: Callable[[str], list[int]], count: int, length: int) -> list[list[int]]:
    """Token windows of held-out files, the files in turn, at places fixed by their names.

    Left out are files that are mostly tables, or that repeat a file trained on.

    Args:
        encode: text to token ids.
        count: how many windows.
        length: tokens of each.
    """
    files = []
    for name, path in heldout_files():
        if name not in _UNFAIR:
            tokens = encode(read(path))
            if len(tokens) > 2 * length:
                files.append((name, tokens))
    out = []
    for i in range(count):
        name, tokens = files[i % len(files)]
        rng = np.random.default_rng((zlib.crc32(name.encode()), i // len(files)))
        at = int(rng.integers(0, len(tokens) - length))
        out.append(tokens[at : at + length])
    return out


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A lossless byte-level BPE for Python source; ids 0 and 1 are bos and eos."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if (tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)) != (BOS_ID, EOS_ID):
        raise RuntimeError("the special tokens did not get ids 0 and 1")
    return tokenizer


def encode_stream(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[np.ndarray, list[int]]:
    """All texts as one uint16 stream, and each text's length in it (bos and eos counted)."""
    if tokenizer.get_vocab_size() > 1 << 16:
        raise ValueError("the vocabulary does not fit uint16")
    parts = []
    for start in range(0, len(texts), 64):
        for encoding in tokenizer.encode_batch(texts[start : start + 64]):
            parts.append(np.array([BOS_ID, *encoding.ids, EOS_ID], dtype=np.uint16))
    stream = np.concatenate(parts) if parts else np.zeros(0, np.uint16)
    return stream, [len(part) for part in parts]


def build(out: Path, vocab_size: int = VOCAB_SIZE) -> dict:
    """Train the tokenizer, encode both splits, write everything to ``out``; returns the meta."""
    out.mkdir(parents=True, exist_ok=True)
    splits = {"train": train_files(), "heldout": heldout_files()}
    texts = {key: [read(path) for _, path in files] for key, files in splits.items()}
    tokenizer = train_tokenizer(texts["train"], vocab_size)
    tokenizer.save(str(out / "tokenizer.json"))
    meta = {
        "python": platform.python_version(),
        "vocab_size": tokenizer.get_vocab_size(),
        "bos_id": BOS_ID,
        "eos_id": EOS_ID,
    }
    for key, files in splits.items():
        stream, lengths = encode_stream(tokenizer, texts[key])
        np.save(out / f"{key}.npy", stream)
        characters = sum(map(len, texts[key]))
        meta[key] = {
            "files": len(files),
            "characters": characters,
            "tokens": len(stream),
            "chars_per_token": round(characters / max(1, len(stream) - 2 * len(files)), 4),
            "lengths": {name: n for (name, _), n in zip(files, lengths, strict=True)},
        }
    (out / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    return meta


def main() -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(description="Build the corpus and tokenizer of tiny-kimi.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    args = parser.parse_args()
    meta = build(args.out, args.vocab_size)
    for key in ("train", "heldout"):
        print(key, {name: value for name, value in meta[key].items() if name != "lengths"})


if __name__ == "__main__":
    main()
