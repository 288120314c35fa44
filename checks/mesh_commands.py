"""The commands over a mesh give what they give on one device: decode, eval, synth, train.

tiny-kimi on four forced CPU devices, (data, tensor, expert) = (2, 1, 2) and (1, 2, 2), in float32,
each command beside itself on one device: the same tokens and rows, the same accept lengths, and
losses of kept readings and of none within 1e-5. The last line is PASS or FAIL.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMPTS = [f"{what} of {n} trees." for what in ("Write a list", "def area") for n in range(1, 7)]
MESHES = {"one": [], "2,1,2": ["2", "1", "2"], "1,2,2": ["1", "2", "2"]}
MOST = 1e-5


def run(words: list[str], mesh: list[str]) -> Any:
    """What a command prints as JSON."""
    names = ("--mesh.data", "--mesh.tensor", "--mesh.expert")
    flags = [word for pair in zip(names, mesh, strict=False) for word in pair]
    devices = 4 if mesh else 1
    env = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-m", "eagle3_jax", *words, *flags, "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} over {mesh}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def rows_of(path: Path) -> list[Any]:
    """Rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def apart(a: list[float], b: list[float]) -> float:
    """The largest difference."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def main() -> int:
    """Print a line a command and mesh; 0 where all agree."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args()
    passed = True

    def said(what: str, fine: bool) -> None:
        nonlocal passed
        passed &= fine
        print(f"{what}: {'PASS' if fine else 'FAIL'}", flush=True)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
        found: dict[str, dict[str, Any]] = {}
        for mesh, sizes in MESHES.items():
            own = folder / mesh
            own.mkdir()
            pair = ["--verifier", "tiny-kimi", "--dtype", "float32"]
            both = [*pair, "--drafter", "tiny-kimi"]
            tree = ["--speculation.depth", "3", "--speculation.topk", "3"]
            tree += ["--speculation.nodes", "7"]
            decoded = run(["decode", *both, *tree, "--max-new-tokens", "40"], sizes)
            short = ["--max-new-tokens", "24", "--rows", "4"]
            evaluated = run(
                ["eval", *both, *tree, *short, "--no-speed", "--prompts", str(prompts)], sizes
            )
            out = own / "rows.jsonl"
            run(["synth", *pair, *short, "--prompts", str(prompts), "--out", str(out)], sizes)
            figures = {"decode": decoded, "eval": evaluated, "synth": rows_of(out)}
            learn = ["--data", str(folder / "one" / "rows.jsonl"), "--train.updates", "4"]
            learn += ["--train.batch", "4", "--train.length", "32", "--train.save-every", "2"]
            for way, more in (("train", []), ("kept", ["--readings", str(own / "kept")])):
                run(["train", *pair, *learn, *more, "--run", str(own / way)], sizes)
                figures[way] = [row["loss"] for row in rows_of(own / way / "log.jsonl")]
            found[mesh] = figures
        one = found.pop("one")
        for mesh, figures in found.items():
            tokens = [[row["tokens"] for row in each["decode"]["rows"]] for each in (one, figures)]
            said(f"decode ({mesh}) the same tokens", tokens[0] == tokens[1])
            lengths = [each["eval"]["mean"]["accept_length"] for each in (one, figures)]
            said(f"eval ({mesh}) accept lengths {lengths}", lengths[0] == lengths[1])
            said(f"synth ({mesh}) the same rows", one["synth"] == figures["synth"])
            for way in ("train", "kept"):
                most = apart(one[way], figures[way])
                said(f"{way} ({mesh}) losses apart by {most:.1e}", most <= MOST)
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
