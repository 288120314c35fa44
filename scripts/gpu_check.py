"""What only a GPU can show: kernels right and fast, the loop right on them, copies, training.

scripts/gpu_check.sh runs it. Every part stands alone: one that fails is in the table with its
reason, and the others still run. `--dry` takes CPU, interpreted kernels and tiny shapes, and says
nothing of speed. The last line is PASS or FAIL; results.json and table.txt lie in the folder --out.
"""

import argparse
import collections
import dataclasses
import functools
import json
import secrets
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kernels_pallas
from kernels_pallas.shapes import CONTEXTS, NODES, SHAPES, Shape

TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3, "float32": 1e-5}
"""Largest difference over the largest value: what the inputs' own rounding allows."""

WANTED_BANDWIDTH, WANTED_RATIO = 0.8, 2.0
"""At 32k context and 16 slots: of the measured copy bandwidth, and over the XLA form."""

LAYERS = 4
"""Of the caches that are timed: walked in turn, so that L2 holds none of them."""

CALLS = 32
"""Of a timed program, in one loop of known length, which costs no host transfer."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        what: the claim.
        passed: None where there is nothing to pass.
        figures: what was measured.
    """

    what: str
    passed: bool | None
    figures: dict[str, Any]


def device(dry: bool, seed: int) -> Iterator[Line]:
    """What this is run on, and the bandwidth of a plain copy."""
    del seed
    first = jax.devices()[0]
    figures = {
        "device": first.device_kind,
        "capability": str(getattr(first, "compute_capability", "none")),
        "jax": jax.__version__,
        "python": sys.version.split()[0],
    }
    yield Line(
        "a device that runs the kernels",
        kernels_pallas.available("mosaic_gpu") is None or dry,
        figures,
    )
    if not dry:
        yield Line("copy bandwidth", None, {"GB/s": copy_bandwidth() / 1e9})


@functools.cache
def copy_bandwidth() -> float:
    """Bytes a second that a large copy reads and writes."""
    x = jnp.zeros((1 << 29,), jnp.bfloat16)
    copy = jax.jit(lambda x: x + jnp.bfloat16(1))
    copy(x).block_until_ready()
    took = []
    for _ in range(8):
        began = time.perf_counter()
        copy(x).block_until_ready()
        took.append(time.perf_counter() - began)
    return 2 * x.nbytes / min(took)


def spread(x: Any, wanted: np.ndarray) -> float:
    """Largest difference over the largest value; infinite where something is no number."""
    found = np.asarray(x, np.float64)
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.max(np.abs(found - wanted)) / max(np.max(np.abs(wanted)), 1e-30))


TINY = {
    "tiny, grouped": (Shape(4, 2, 32, 16, window=40, sinks=True), 3, 128),
    "tiny, latent": (Shape(2, 1, 48, 32, latent=True), 4, 128),
}
"""(shape, nodes, context) of a dry run."""


def named(dry: bool) -> Iterator[tuple[str, Shape, int, int]]:
    """(name, shape, nodes, context): few nodes on short contexts, and all that is timed."""
    if dry:
        yield from ((name, *each) for name, each in TINY.items())
        return
    for name, shape in SHAPES.items():
        for nodes, context in ((NODES[0], CONTEXTS[0]), (15, 32768), (NODES[-1], CONTEXTS[1])):
            yield f"{name}, {nodes} nodes, {context // 1024}k", shape, nodes, context


def inputs(shape: Shape, nodes: int, context: int, dtype: str, seed: int, layers: int = 1) -> dict:
    """A call's arrays: normal numbers, a random tree, everything that the window allows seen."""
    rng = np.random.default_rng(seed)
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    w, (first, last) = nodes + 1, shape.limits(context)
    ancestors = np.eye(w, dtype=bool)
    for slot in range(1, w):
        ancestors[slot] |= ancestors[rng.integers(slot)]
    exact = {
        "layer": jnp.zeros((), jnp.int32),
        "lo": jnp.full((1, 1, w), first, jnp.int32),
        "hi": jnp.full((1, 1), last, jnp.int32),
        "ancestors": jnp.asarray(ancestors[None]),
    }
    out = {}
    for name, each in shape.arguments(nodes, context, jnp.dtype(dtype)).items():
        sizes = (layers, *each.shape[1:]) if name in ("keys", "values", "latents") else each.shape
        out[name] = exact.get(name)
        if out[name] is None:
            out[name] = jax.random.normal(next(keys), sizes, each.dtype)
    return out


@functools.partial(jax.jit, static_argnames=("shape", "backend"))
def attend(shape: Shape, given: dict, backend: str) -> jax.Array:
    """One call."""
    return shape.call(given, backend=backend)


def kernels_against_references(dry: bool, seed: int) -> Iterator[Line]:
    """Every named shape against the naive form in float32 of the same rounded inputs."""
    backend = "mosaic_gpu_interpret" if dry else "mosaic_gpu"
    for name, shape, nodes, context in named(dry):
        for dtype in ("bfloat16", "float32"):
            given = inputs(shape, nodes, context, dtype, seed)
            wide = {key: widened(x) for key, x in given.items()}
            wanted = np.asarray(attend(shape, wide, "reference"), np.float64)
            error = spread(attend(shape, given, backend), wanted)
            yield Line(f"{name}, {dtype}", error < TOLERANCE[dtype], {"error": error})


def widened(x: Any) -> Any:
    """Floating-point numbers in float32; others as they are."""
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def walks(dry: bool, seed: int) -> Iterator[Line]:
    """Random trees of 64 slots, walked by the kernel and by the reference."""
    backend = "mosaic_gpu_interpret" if dry else "mosaic_gpu"
    rng = np.random.default_rng(seed)
    b, w = (2, 9) if dry else (64, 64)
    parents = np.zeros((b, w), np.int32)
    agreed = np.zeros((b, w), bool)
    for row in range(b):
        for slot in range(1, w):
            parents[row, slot] = slot - 1 if rng.random() < 0.7 else rng.integers(slot)
        for slot in range(w):
            children = np.flatnonzero(parents[row, 1:] == slot) + 1
            if len(children):
                agreed[row, rng.choice(children)] = True
    given = agreed, parents, rng.integers(1000, size=(b, w), dtype=np.int32)
    walk = jax.jit(kernels_pallas.tree_walk, static_argnames=("max_depth", "backend"))
    found, wanted = (
        jax.device_get(walk(*given, max_depth=w - 1, backend=each))
        for each in (backend, "reference")
    )
    same = all((a == b).all() for a, b in zip(found, wanted, strict=True))
    yield Line("tree_walk", same, {"rows": b, "slots": w})


def seconds(shape: Shape, backend: str, given: dict[str, Any]) -> float:
    """Of one call, the median of several loops of `CALLS` that walk the cache's layers in turn."""

    @jax.jit
    def calls(given):
        def once(i, q):
            out = shape.call(given | {"q": q, "layer": i % LAYERS}, backend=backend)
            return q.at[(0,) * q.ndim].add(0 * out[(0,) * out.ndim].astype(q.dtype))

        return jax.lax.fori_loop(0, CALLS, once, given["q"])

    calls(given).block_until_ready()
    took = []
    for _ in range(5):
        began = time.perf_counter()
        calls(given).block_until_ready()
        took.append((time.perf_counter() - began) / CALLS)
    return sorted(took)[len(took) // 2]


def speed(dry: bool, seed: int) -> Iterator[Line]:
    """Achieved over copy bandwidth (least possible bytes over time), and time over the XLA form."""
    if dry:
        yield Line("speed", None, {"dry": "not measured"})
        return
    for name, shape, nodes, context in named(dry):
        given = inputs(shape, nodes, context, "bfloat16", seed, LAYERS)
        mine = seconds(shape, "mosaic_gpu", given)
        other = seconds(shape, "xla", given)
        share = shape.cost(nodes, context).least / mine / copy_bandwidth()
        wanted = context == 32768 and shape.window is None
        passed = share >= WANTED_BANDWIDTH and other / mine >= WANTED_RATIO if wanted else None
        figures = {"us": mine * 1e6, "xla us": other * 1e6, "bandwidth": share}
        yield Line(f"speed, {name}", passed, figures | {"over xla": other / mine})


def same_tokens(dry: bool, seed: int) -> Iterator[Line]:
    """Speculation with kernels gives plain decoding's tokens, in float32."""
    import eagle3_jax as e3

    verifier = e3.load_verifier("tiny-kimi")
    drafter = e3.load_drafter("tiny-kimi", verifier)
    rng, rows = np.random.default_rng(seed), 1 if dry else 3
    prompts = [rng.integers(verifier.config.vocab_size, size=12).tolist() for _ in range(rows)]
    new = 4 if dry else 200
    plain = e3.generate(verifier, None, prompts, max_new_tokens=new, rows=rows)
    backend = "mosaic_gpu_interpret" if dry else "mosaic_gpu"
    tree = e3.Speculation(depth=3, topk=3, nodes=7)
    for name, shape, kernels in (
        ("chain, xla", None, "xla"),
        ("tree, xla", tree, "xla"),
        ("chain, kernels", None, backend),
        ("tree, kernels", tree, backend),
    ):
        if dry and name == "chain, kernels":
            continue  # the tree takes the same road, and interpreting it is slow
        out = e3.generate(
            verifier, drafter, prompts, max_new_tokens=new, rows=rows, speculation=shape,
            kernels=kernels,
        )  # fmt: skip
        yield Line(
            f"speculation equals plain, {name}",
            out.tokens == plain.tokens,
            {
                "accept_length": out.stats.accept_length,
                "tokens/s": out.stats.tokens_per_second,
                "plain tokens/s": plain.stats.tokens_per_second,
            },
        )


def copies(dry: bool, seed: int) -> Iterator[Line]:
    """Device-to-host copies while the loop runs, out of a profile of two lengths."""
    if dry:
        return
    import eagle3_jax as e3

    verifier = e3.load_verifier("tiny-kimi")
    drafter = e3.load_drafter("tiny-kimi", verifier)
    prompt = np.random.default_rng(seed).integers(verifier.config.vocab_size, size=12).tolist()

    def counted(new: int) -> tuple[int, int]:
        """(device-to-host copies, cycles) of a generation, compiled before."""
        go = functools.partial(
            e3.generate, verifier, drafter, [prompt], max_new_tokens=new, capacity=1024
        )
        go()
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                stats = go().stats
            (file,) = Path(folder).rglob("*.xplane.pb")
            planes = jax.profiler.ProfileData.from_file(str(file)).planes
            names = collections.Counter(
                event.name
                for plane in planes
                if "GPU" in plane.name or "gpu" in plane.name
                for line in plane.lines
                for event in line.events
            )
        found = sum(n for name, n in names.items() if "d2h" in name.lower().replace("to", "2"))
        return found, stats.cycles

    (short, few), (long, many) = counted(50), counted(400)
    each = (long - short) / max(many - few, 1)
    # What the expert loop (a read a layer) or the loop's own condition would cost shows here.
    figures = {"copies": long, "cycles": many, "a cycle": each}
    yield Line("device-to-host copies a cycle", each <= 1.05, figures)


def training(dry: bool, seed: int) -> Iterator[Line]:
    """A drafter learns tiny-kimi's own answers: loss falls, rows a second."""
    import eagle3_jax as e3
    from eagle3_jax.training.trainer import TrainConfig, train

    verifier = e3.load_verifier("tiny-kimi")
    rng = np.random.default_rng(seed)
    count, new, updates = (8, 24, 2) if dry else (64, 200, 200)
    prompts = [rng.integers(verifier.config.vocab_size, size=8).tolist() for _ in range(count)]
    out = e3.generate(verifier, None, prompts, max_new_tokens=new, rows=count)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "rows.jsonl")
        rows = (
            {"id": str(i), "tokens": p + t, "loss": [[len(p), len(p) + len(t)]], "temperature": 0.0}
            for i, (p, t) in enumerate(zip(prompts, out.tokens, strict=True))
        )
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        config = TrainConfig(updates=updates, batch=4, length=64, save_every=updates)
        found = train(verifier, data, Path(folder, "run"), config)
    figures = {key: found[key] for key in ("loss", "accept_length", "tokens_per_second")}
    yield Line("training", bool(np.isfinite(found["loss"])), figures)


PARTS: tuple[Callable[[bool, int], Iterator[Line]], ...] = (
    device,
    walks,
    kernels_against_references,
    same_tokens,
    copies,
    speed,
    training,
)


def shown(line: Line) -> str:
    """A line of the table."""
    verdict = {True: "PASS", False: "FAIL", None: ""}[line.passed]
    figures = "  ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in line.figures.items()
    )
    return f"{line.what:44} {verdict:5} {figures}"


def main() -> int:
    """Run every part; 0 where none failed."""
    parser = argparse.ArgumentParser(description="what only a GPU can show; see gpu_check.sh")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--dry", action="store_true", help="on CPU, kernels interpreted")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**31), help="of the inputs")
    args = parser.parse_args()
    lines: list[Line] = []
    began = time.perf_counter()
    print(f"seed {args.seed}", flush=True)
    for part in PARTS:
        try:
            for line in part(args.dry, args.seed):
                lines.append(line)
                print(shown(line), flush=True)
        except Exception as error:  # the other parts still tell what they can
            traceback.print_exc()
            name = getattr(part, "__name__", "part")
            lines.append(Line(name, False, {"error": f"{type(error).__name__}: {error}"[:200]}))
            print(shown(lines[-1]), flush=True)
    took = time.perf_counter() - began
    table = "\n".join(map(shown, lines))
    passed = all(line.passed is not False for line in lines)
    last = f"{'dry run, ' if args.dry else ''}{took:.0f} s: {'PASS' if passed else 'FAIL'}"
    (args.out / "table.txt").write_text(f"{table}\n{last}\n", encoding="utf-8")
    found = {"seed": args.seed, "seconds": took, "lines": [dataclasses.asdict(x) for x in lines]}
    (args.out / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"\n{table}\n{last}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
