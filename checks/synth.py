"""`eagle3 synth` killed three times and started again writes the rows of an undisturbed run.

Prompts are windows of the standard library's source, some with a second turn. The command runs
once undisturbed; then it is killed with SIGKILL at random moments of its writing, started again,
and let through at last. After every other kill the last line is torn, as a crash of the machine
would leave it. Every row must be there once and be the same.
ARGS="--verifier smollm2 --conversations 24" takes another model.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any


def write_prompts(path: Path, count: int, chance: random.Random) -> None:
    """A prompt file of so many conversations, a few duplicates, and one prompt that is too long."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))

    def window(length: int) -> str:
        text = chance.choice(sources).read_text(encoding="utf-8")
        start = chance.randrange(max(len(text) - length, 1))
        return text[start : start + length] or "def"

    rows: list[dict[str, Any]] = []
    for i in range(count):
        turns = [window(chance.randrange(40, 200)) for _ in range(1 + (i % 4 == 0))]
        rows.append({"id": f"row-{i}", "turns": turns})
    rows += [{"turns": row["turns"]} for row in rows[:5]]
    rows.append({"prompt": "x = 1\n" * 5000})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of an output, in its order; a broken line at the end is left out."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def main() -> int:
    """Print a line a run; 0 where the rows are the same."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verifier", default="tiny-kimi")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)

    with tempfile.TemporaryDirectory() as folder:
        prompts, whole, out = (Path(folder) / f"{name}.jsonl" for name in ("p", "whole", "out"))
        write_prompts(prompts, args.conversations, chance)
        words = ["--verifier", args.verifier, "--dtype", args.dtype, "--rows", str(args.rows)]
        words += ["--max-new-tokens", str(args.new), "--length", str(3 * args.new + 384)]
        words += ["--prompts", str(prompts), "--json", "--out"]

        def start(out: Path) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "eagle3_jax", "synth", *words, str(out)]
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

        def through(out: Path) -> dict[str, Any]:
            process = start(out)
            said = process.communicate()[0]
            if process.returncode:
                raise SystemExit(f"eagle3 synth ended with status {process.returncode}")
            return json.loads(said)

        undisturbed = through(whole)
        print(f"undisturbed: {undisturbed}", flush=True)
        writing = undisturbed["tokens"] / undisturbed["tokens_per_second"]
        for kill in range(args.kills):
            before = len(rows_of(out))
            process = start(out)
            while len(rows_of(out)) == before and process.poll() is None:
                time.sleep(0.05)
            time.sleep(chance.uniform(0, writing / (args.kills + 1)))
            alive = process.poll() is None
            process.send_signal(signal.SIGKILL)
            process.wait()
            held = out.read_bytes()
            torn = chance.randrange(1, 40) if kill % 2 == 0 else 0
            out.write_bytes(held[: len(held) - torn])
            written = held.count(b"\n") - before
            print(f"killed after {written} rows more; {torn} bytes torn off", flush=True)
            if not alive:
                raise SystemExit("it was through before it could be killed; give --conversations")
        print(f"started again: {through(out)}", flush=True)
        wanted, found = rows_of(whole), rows_of(out)

    by_id = {row["id"]: row for row in found}
    lost = [row["id"] for row in wanted if row["id"] not in by_id]
    other = [row["id"] for row in wanted if row["id"] in by_id and by_id[row["id"]] != row]
    twice = len(found) - len(by_id)
    right = len(wanted) == args.conversations and not (lost or other or twice)
    print(
        f"{len(wanted)} rows of {args.conversations}: {len(lost)} lost, {twice} twice, "
        f"{len(other)} not the same {other[:5]}"
    )
    print("PASS" if right and len(found) == len(wanted) else "FAIL")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
