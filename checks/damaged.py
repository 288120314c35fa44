"""Damaged model folders are refused in one line, or load right; none takes 30 s or 2 GiB.

A tiny Llama and a tiny DeepSeek, as one file and as shards, are damaged in every way below, one way
at a time, and loaded in a process of their own. A case is right where `load_verifier` raises one
line of a LoadError or UnsupportedError, or where it gives the undamaged model's arrays.
"""

import argparse
import collections
import concurrent.futures
import concurrent.futures.process
import functools
import json
import multiprocessing
import os
import resource
import runpy
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from checkpoints.tensors import read_tensors, write_tensors
from eagle3_jax.contracts import LoadError, UnsupportedError
from eagle3_jax.load import load_verifier
from eagle3_jax.states import arrays_of
from eagle3_jax.testing import tiny_tokenizer

MODELS = {"llama": "llama3", "deepseek": "deepseek_a"}
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = tuple(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3))
MOST_SECONDS, MOST_BYTES, MOST_SPACE = 30, 2 << 30, 16 << 30

Damage = Callable[[Path], object]


class Case(NamedTuple):
    """One damage: its kind and name, the folder it is done to, and what does it."""

    kind: str
    name: str
    base: str
    damage: Damage


class Outcome(NamedTuple):
    """What loading gave: a refusal, or nothing; whether that is right; what it took."""

    said: str
    right: bool
    seconds: float
    peak: int


def write_bases(root: Path) -> None:
    """Four undamaged folders: two models, as one file and as shards."""
    tiny = runpy.run_path(str(Path(__file__).parents[1] / "tests" / "golden" / "tiny_models.py"))
    for model, name in MODELS.items():
        whole = tiny["write_folder"](name, root / f"{model} whole")
        tensors = read_tensors(whole / WHOLE)
        sharded = Path(shutil.copytree(whole, root / f"{model} sharded"))
        (sharded / WHOLE).unlink()
        named = {key: SHARDS[i % 3] for i, key in enumerate(sorted(tensors))}
        for shard in SHARDS:
            write_tensors(sharded / shard, {k: tensors[k] for k in named if named[k] == shard})
        (sharded / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": named}))


# Damages. Each takes the folder; files are given by name.


def replace(file: str, content: bytes) -> Damage:
    return lambda folder: folder.joinpath(file).write_bytes(content)


def remove(*files: str) -> Damage:
    return lambda folder: [(folder / file).unlink() for file in files]


def instead(file: str, make: Callable[[Path], Any]) -> Damage:
    """Something else in place of a file."""

    def damage(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        make(folder / file)

    return damage


def edit(file: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def edit_json(file: str, change: Callable[[dict[str, Any]], Any]) -> Damage:
    """A change to a JSON file's content, in place."""

    def damage(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))

    return damage


def edit_header(file: str, change: Callable[[dict[str, Any]], Any]) -> Damage:
    """A change to a safetensors header, with its length set right."""

    def changed(data: bytes) -> bytes:
        end = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:end])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[end:]

    return edit(file, changed)


def edit_tensors(file: str, change: Callable[[dict[str, np.ndarray]], Any]) -> Damage:
    """A change to the tensors of a file, which is whole afterwards."""

    def damage(folder: Path) -> None:
        tensors = {name: x.copy() for name, x in read_tensors(folder / file).items()}
        change(tensors)
        write_tensors(folder / file, tensors)

    return damage


def files() -> Iterator[tuple[str, str, Damage]]:
    """Files that are gone, or are something else: name, folder's form, damage."""
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    contents = {
        "empty": b"",
        "binary junk": np.random.RandomState(0).bytes(5000),
        "a web page": b"<!DOCTYPE html><html><body>Not found</body></html>" * 9,
        "a large-file pointer": pointer,
        "a byte order mark": b"\xef\xbb\xbf{}",
    }
    others = {
        "a directory": Path.mkdir,
        "a loop of links": lambda path: path.symlink_to(path.name),
        "a link to nowhere": lambda path: path.symlink_to("nowhere"),
        "a pipe": os.mkfifo,
    }
    for form, file in (("whole", "config.json"), ("whole", WHOLE), ("sharded", INDEX)):
        yield f"{file} missing", form, remove(file)
        for what, content in contents.items():
            yield f"{file}: {what}", form, replace(file, content)
        for what, make in others.items():
            yield f"{file}: {what}", form, instead(file, make)
    yield "pickled weights", "whole", lambda folder: (folder / WHOLE).rename(folder / "model.bin")
    yield "other names", "whole", lambda folder: (folder / WHOLE).rename(folder / "x.safetensors")


def bytes_of_weights() -> Iterator[tuple[str, str, Damage]]:
    """Headers and data of a safetensors file: name, folder's form, damage."""

    def length(value: int) -> Callable[[bytes], bytes]:
        return lambda data: struct.pack("<Q", value) + data[8:]

    def cut(share: float) -> Callable[[bytes], bytes]:
        return lambda data: data[: int(share * len(data))]

    for value in (0, 1, 100, 10**6, 10**9, 2**40, 2**63, 2**64 - 1):
        yield f"header of {value} bytes", "whole", edit(WHOLE, length(value))
    for share in (0.001, 0.01, 0.02, 0.1, 0.5, 0.9, 0.999):
        for form, file in (("whole", WHOLE), ("sharded", SHARDS[1])):
            yield f"{file} cut at {share:.1%}", form, edit(file, cut(share))
    yield "last byte gone", "whole", edit(WHOLE, lambda data: data[:-1])
    yield "a byte too many", "whole", edit(WHOLE, lambda data: data + b"x")
    nested = b"[" * 10**5 + b"]" * 10**5
    deep = struct.pack("<Q", len(nested)) + nested
    yield "header nested deeply", "whole", replace(WHOLE, deep)

    def first(**changes) -> Callable[[dict[str, Any]], None]:
        return lambda header: header["model.norm.weight"].update(changes)

    headers: dict[str, Callable[[dict[str, Any]], Any]] = {
        "shape negative": first(shape=[-64]),
        "shape absurd": first(shape=[10**18, 10**18]),
        "shape of text": first(shape="64"),
        "shape missing": lambda header: header["model.norm.weight"].pop("shape"),
        "offsets beyond": first(data_offsets=[0, 10**12]),
        "offsets reversed": first(data_offsets=[256, 0]),
        "offsets shared": first(data_offsets=[0, 256]),
        "dtype unknown": first(dtype="F99"),
        "dtype of another width": first(dtype="BF16"),
        "dtype of the same width": first(dtype="I32"),
        "no tensors": dict.clear,
        "name with a newline": lambda header: header.update(
            {"a\nb\u2028\ud800": header.pop("model.norm.weight")}
        ),
        "name of letters that few fonts have": lambda header: header.update(
            {"größe.\U0001f600": header.pop("model.norm.weight")}
        ),
    }
    for what, change in headers.items():
        yield f"header: {what}", "whole", edit_header(WHOLE, change)


def tensors() -> Iterator[tuple[str, str, Damage]]:
    """Files that are whole and hold other tensors: name, folder's form, damage."""
    norm = "model.norm.weight"
    kernel = "model.layers.0.mlp.gate_proj.weight"

    def put(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Damage:
        return edit_tensors(WHOLE, lambda held: held.update({name: change(held[name])}))

    def number(value: float) -> Callable[[np.ndarray], np.ndarray]:
        return lambda x: np.where(np.arange(x.size) == 3, np.float32(value), x)

    kinds = (np.int64, np.int8, np.uint16, np.float64, np.bool_, np.complex64)
    for kind in (*kinds, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2):
        yield f"{np.dtype(kind)}", "whole", put(norm, lambda x, kind=kind: x.astype(kind))
    for value in (np.nan, np.inf, -np.inf):
        yield f"holds {value}", "whole", put(norm, number(value))
    yield "transposed", "whole", put(kernel, np.transpose)
    yield "a row short", "whole", put(kernel, lambda x: x[:-1])
    yield "an axis more", "whole", put(kernel, lambda x: x[None])
    yield "empty", "whole", put(kernel, lambda x: x[:0])
    yield "missing", "whole", edit_tensors(WHOLE, lambda held: held.pop(norm))
    yield (
        "only one left",
        "whole",
        edit_tensors(WHOLE, lambda held: [held.pop(name) for name in list(held) if name != norm]),
    )
    yield "extra", "whole", edit_tensors(WHOLE, lambda held: held.update(extra=held[norm]))
    yield (
        "extra layer",
        "whole",
        edit_tensors(
            WHOLE, lambda held: held.update({"model.layers.99.mlp.up_proj.weight": held[kernel]})
        ),
    )
    yield (
        "another prefix",
        "whole",
        edit_tensors(
            WHOLE, lambda held: [held.update({f"module.{k}": held.pop(k)}) for k in list(held)]
        ),
    )


def indices() -> Iterator[tuple[str, str, Damage]]:
    """Indices and shards that disagree: name, folder's form, damage."""
    norm = "model.norm.weight"

    def named(change: Callable[[dict[str, Any]], Any]) -> Damage:
        return edit_json(INDEX, lambda index: change(index["weight_map"]))

    def twice(folder: Path) -> None:
        held = {k: v for shard in SHARDS for k, v in read_tensors(folder / shard).items()}
        for shard in SHARDS:
            write_tensors(folder / shard, {norm: held[norm], **read_tensors(folder / shard)})

    def key_twice(text: bytes) -> bytes:
        return text.replace(b'"weight_map": {', b'"weight_map": {"model.norm.weight": "x", ')

    for shard in SHARDS:
        yield f"{shard} missing", "sharded", remove(shard)
    yield "two shards missing", "sharded", remove(*SHARDS[:2])
    yield "a shard empty", "sharded", replace(SHARDS[0], b"")
    yield "a shard twice", "sharded", lambda f: shutil.copy(f / SHARDS[0], f / SHARDS[1])
    yield "a tensor in every shard", "sharded", twice
    yield "a shard's tensor gone", "sharded", edit_tensors(SHARDS[0], dict.popitem)
    yield "a file that is not there", "sharded", named(lambda m: m.update({norm: "x"}))
    yield (
        "another shard",
        "sharded",
        named(lambda m: m.update({norm: next(shard for shard in SHARDS if shard != m[norm])})),
    )
    yield "a tensor not named", "sharded", named(lambda m: m.pop(norm))
    yield "a tensor that is not there", "sharded", named(lambda m: m.update(extra=SHARDS[0]))
    for file in ("../config.json", "/etc/hostname", "", ".", 3, None, [SHARDS[0]], "a\nb", "\0"):
        yield f"file {file!r}", "sharded", named(lambda m, file=file: m.update({norm: file}))
    yield "a key twice", "sharded", edit(INDEX, key_twice)
    for value in (None, [], {}, "x", 3):
        yield (
            f"weight_map {value!r}",
            "sharded",
            edit_json(INDEX, lambda index, value=value: index.update(weight_map=value)),
        )
    yield "nested deeply", "sharded", replace(INDEX, b'{"weight_map":' * 10**5)
    yield "cut", "sharded", edit(INDEX, lambda text: text[: len(text) // 2])


def config_values(config: dict[str, Any]) -> Iterator[tuple[str, str, Damage]]:
    """Each number of config.json as something else: name, folder's form, damage."""
    odd = (-1, 0, 10**9, 10**18, 0.5, float("nan"), "64", [64], None, {"a": {"b": 1}}, True)
    for key, value in config.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        yield f"{key} missing", "whole", edit_json("config.json", lambda c, key=key: c.pop(key))
        for other in odd:
            yield (
                f"{key} {other!r}",
                "whole",
                edit_json("config.json", lambda c, key=key, other=other: c.update({key: other})),
            )


def config_others() -> Iterator[tuple[str, str, Damage]]:
    """The rest of config.json: name, folder's form, damage."""
    changes = {
        "model_type": (None, "", "gpt2", 3, ["llama"], {}),
        "rope_scaling": ("yarn", [], 3, {"type": "yarn"}, {"rope_type": "x", "factor": 2}),
        "rope_parameters": ({"rope_type": "linear"}, {"rope_type": 3}, {"rope_theta": -1.0}),
        "quantization_config": ({"quant_method": "fp8"}, {}, "int4"),
        "hidden_act": ("gelu", 3),
        "eos_token_id": ("x", [1, "x"], -5, 10**18, [[1]], 1.5),
        "tie_word_embeddings": ("no", 3),
        "torch_dtype": (3, "float99"),
    }
    for key, values in changes.items():
        for value in values:
            yield (
                f"{key} {value!r}",
                "whole",
                edit_json("config.json", lambda c, key=key, value=value: c.update({key: value})),
            )
    yield (
        "a key twice",
        "whole",
        edit("config.json", lambda text: text.replace(b"{", b'{"vocab_size": 7,', 1)),
    )
    yield "nested deeply", "whole", replace("config.json", b'{"a":' * 10**5)
    yield "a list", "whole", replace("config.json", b"[]")
    yield (
        "a number of 10,000 digits",
        "whole",
        edit(
            "config.json",
            lambda text: text.replace(b"{", b'{"vocab_size":' + b"9" * 10**4 + b",", 1),
        ),
    )
    yield "cut", "whole", edit("config.json", lambda text: text[: len(text) // 2])


def text_files() -> Iterator[tuple[str, str, Damage]]:
    """Tokenizer, template and generation settings: name, folder's form, damage."""

    def beside(name: str, content: bytes) -> Damage:
        def damage(folder: Path) -> None:
            (folder / "tokenizer.json").write_text(tiny_tokenizer()._backend.to_str())
            (folder / name).write_bytes(content)

        return damage

    contents = (b"", b"{", b"[]", b"3", b"\xff\xfe\x00", b"[" * 10**5, b'{"a": NaN}')
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        for content in contents:
            yield f"{name}: {content[:10]!r}", "whole", beside(name, content)
        yield f"{name}: a directory", "whole", instead(name, Path.mkdir)
    for content in (b"{%", b"{{ a", b"\xff", b"{% for %}", b"{{" + b"(" * 9999):
        name = "chat_template.jinja"
        yield f"{name}: {content[:10]!r}", "whole", beside(name, content)
    for ends in ("[]", '"x"', "-1", "[1, null]", '{"a": 1}', "1e999"):
        content = f'{{"eos_token_id": {ends}}}'.encode()
        yield f"eos_token_id {ends}", "whole", replace("generation_config.json", content)


def cases(root: Path) -> list[Case]:
    """Every damage of every model."""
    found = []
    for model in MODELS:
        config = json.loads((root / f"{model} whole" / "config.json").read_text())
        kinds = {
            "files": files(),
            "bytes of weights": bytes_of_weights(),
            "tensors": tensors(),
            "index and shards": indices(),
            "numbers of config.json": config_values(config),
            "rest of config.json": config_others(),
            "tokenizer, generation": text_files(),
        }
        for kind, damages in kinds.items():
            for name, form, damage in damages:
                found.append(Case(kind, f"{model}: {name}", f"{model} {form}", damage))
    return found


# In the process that loads.


def limit_space() -> None:
    """No more address space than a runaway load would want."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_SPACE, MOST_SPACE))


@functools.cache
def wanted(base: str) -> dict[str, np.ndarray]:
    """The arrays of an undamaged folder."""
    return {name: np.asarray(x) for name, x in arrays_of(load_verifier(base, "float32")).items()}


def attempt(folder: str, base: str) -> Outcome:
    """Load one damaged folder, and compare with the undamaged one where it loads."""
    arrays = wanted(base)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clock, said, right = time.perf_counter(), "", False
    try:
        found = arrays_of(load_verifier(folder, "float32"))
        right = found.keys() == arrays.keys() and all(
            np.array_equal(found[name], value) for name, value in arrays.items()
        )
    except (LoadError, UnsupportedError) as error:
        said = str(error)
        right = "\n" not in said and len(said) < 2000
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - clock
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    return Outcome(said, right, seconds, grown * (1 if sys.platform == "darwin" else 1024))


class Loader:
    """A process that loads folders; a new one follows one that crashed or hung."""

    def __init__(self):
        self._pool = None

    def __call__(self, folder: Path, base: Path) -> Outcome:
        """What loading the folder gave."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = concurrent.futures.ProcessPoolExecutor(
                1, mp_context=context, initializer=limit_space
            )
            self._pool.submit(wanted, str(base)).result()
        try:
            future = self._pool.submit(attempt, str(folder), str(base))
            return future.result(timeout=2 * MOST_SECONDS)
        except (TimeoutError, concurrent.futures.process.BrokenProcessPool) as error:
            for process in self._pool._processes.values():
                process.kill()
            self._pool = None
            return Outcome(f"{type(error).__name__} of the process", False, 2.0 * MOST_SECONDS, 0)


def main() -> int:
    """Print a line a kind of damage; 0 where every case is right, in time and in memory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", action="store_true", help="print every case and its line")
    args = parser.parse_args()
    outcomes: dict[str, list[tuple[str, Outcome]]] = collections.defaultdict(list)
    load = Loader()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_bases(root)
        for case in cases(root):
            folder = Path(shutil.copytree(root / case.base, root / "model"))
            case.damage(folder)
            outcome = load(folder, root / case.base)
            shutil.rmtree(folder)
            outcomes[case.kind].append((case.name, outcome))
            if args.messages:
                print(f"{case.kind} | {case.name} | {outcome.said or 'loads'}", flush=True)
    columns = ("cases", "refused", "loaded", "wrong", "slowest s", "most MiB")
    print(f"{'damage':24}", *(f"{column:>9}" for column in columns))
    for kind, found in outcomes.items():
        print(f"{kind:24}", *(f"{cell:>9}" for cell in row([each for _, each in found])))
    every = [pair for found in outcomes.values() for pair in found]
    bad = [
        (name, each)
        for name, each in every
        if not each.right or each.seconds > MOST_SECONDS or each.peak > MOST_BYTES
    ]
    for name, each in bad:
        print(
            f"  {name}: {each.seconds:.1f} s, {each.peak >> 20} MiB, {each.said or 'loads wrong'}"
        )
    print("some of the lines:")
    for _, found in outcomes.items():
        print(f"  {next(each.said for _, each in found[1:] if each.said)}")
    print(f"{len(every)} damaged folders, {len(bad)} wrong: {'FAIL' if bad else 'PASS'}")
    return 1 if bad else 0


def row(found: list[Outcome]) -> list[str]:
    """The table's cells of one kind of damage."""
    right = [each for each in found if each.right]
    return [
        str(len(found)),
        str(sum(bool(each.said) for each in right)),
        str(sum(not each.said for each in right)),
        str(len(found) - len(right)),
        f"{max(each.seconds for each in found):.1f}",
        str(max(each.peak for each in found) >> 20),
    ]


if __name__ == "__main__":
    sys.exit(main())
