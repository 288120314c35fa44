"""Two processes of four devices are one program: decoding, training, a lost process, resuming.

generate  both give a single device's tokens; the first alone prints
cluster   the same where a Slurm step's environment says who is where
worker    training as a single device's; kill -9 of the second: the first ends within a minute
frozen    the run goes on from its checkpoint; the second is stopped, its sockets open: likewise
leader    goes on again; kill -9 of the first: the second ends likewise
four      the run goes on on four devices of one process; the whole curve is the single device's

On loopback, CPU, with tiny-kimi in float32. The last line is PASS or FAIL.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
UPDATES, EVERY, TOLERANCE, MOST_SECONDS = 40, 5, 1e-4, 60
TRAIN = (
    *("--train.updates", str(UPDATES), "--train.save-every", str(EVERY), "--train.batch", "4"),
    *("--train.length", "32", "--train.steps", "3", "--train.held-out", "0.1"),
)
PROMPTS = ("def read(path):\n", "class Row:\n    def __init__(self", "import os\n\n\ndef main(")


def said(what: str, passed: bool) -> bool:
    """A line of the verdict."""
    print(f"{what}: {'PASS' if passed else 'FAIL'}", flush=True)
    return passed


def start(words: list[str], devices: int, folder: Path, name: str, **more: str) -> subprocess.Popen:
    """One process of the command line, its output in files of the folder; `more` environment."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | more
    out, err = ((folder / f"{name}.{kind}").open("w") for kind in ("out", "err"))
    return subprocess.Popen(
        [sys.executable, "-m", "eagle3_jax", *words, "--json"], env=env, stdout=out, stderr=err
    )


def pair(words: list[str], folder: Path, slurm: bool = False) -> list[subprocess.Popen]:
    """Both processes, which find each other by addresses or by a Slurm step's environment."""
    mesh = ["--mesh.data", "2", "--mesh.expert", "4"]
    if slurm:
        step = {
            "SLURM_JOB_ID": str(random.randrange(4096)),  # jax's port follows from it
            "SLURM_STEP_NODELIST": "127.0.0.1",
            "SLURM_STEP_NUM_NODES": "1",
            "SLURM_NTASKS": "2",
        }
        each = [step | {"SLURM_PROCID": i, "SLURM_LOCALID": i} for i in ("0", "1")]
        words = [*words, *mesh, "--processes.cluster"]
        return [start(words, 4, folder, f"{words[0]}{i}", **own) for i, own in enumerate(each)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = [*mesh, "--processes.count", "2"]
    together += ["--processes.coordinator", f"127.0.0.1:{port}", "--processes.index"]
    return [start([*words, *together, str(i)], 4, folder, f"{words[0]}{i}") for i in (0, 1)]


def curve(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and held-out loss by update, as far as the log has them."""
    log = run / "log.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return {row["update"]: (row["loss"], row["held_out_loss"]) for row in rows}


def lose(
    victim: int, words: list[str], run: Path, folder: Path, by: signal.Signals = signal.SIGKILL
) -> bool:
    """Signal one of two training processes after its next checkpoint; whether the other ends."""
    before = len(curve(run))
    both = pair(words, folder)
    while len(curve(run)) == before and all(one.poll() is None for one in both):
        time.sleep(0.05)
    both[victim].send_signal(by)
    clock, other = time.perf_counter(), both[1 - victim]
    try:
        status = other.wait(MOST_SECONDS)
    except subprocess.TimeoutExpired:
        status = None
        other.kill()
    seconds = time.perf_counter() - clock
    both[victim].kill()
    text = (folder / f"train{1 - victim}.err").read_text()
    cause = [
        line for line in text.splitlines() if "lost or failed" in line or "Terminating" in line
    ]
    done = max(curve(run))
    print(f"  {by.name} after update {done}; the other ended with {status} after {seconds:.1f} s")
    print(f"  {' '.join(cause)[:160]}", flush=True)
    who = ("first", "second")[victim]
    what = "killed" if by == signal.SIGKILL else "frozen"
    return said(f"the {who} {what}: the other ends", status not in (None, 0) and bool(cause))


def decode(folder: Path) -> bool:
    """Tokens of two processes and of a single device."""
    words = ["decode", *PROMPTS, "--raw", "--dtype", "float32", "--max-new-tokens", "48"]
    alone = start(words, 1, folder, "alone")
    alone.wait()
    passed = True
    for slurm in (False, True):
        for process in pair(words, folder, slurm):
            process.wait()
        said_by = [(folder / f"{name}.out").read_text() for name in ("alone", "decode0", "decode1")]
        how = "in a Slurm step" if slurm else "by addresses"
        if not all(said_by[:2]):
            print((folder / "alone.err").read_text(), (folder / "decode0.err").read_text())
            passed &= said(f"{how} both generate what a single device does", False)
            continue
        tokens = [[row["tokens"] for row in json.loads(text)["rows"]] for text in said_by[:2]]
        passed &= said(f"{how} both generate what a single device does", tokens[0] == tokens[1])
        passed &= said("the second prints nothing", not said_by[2])
    return passed


def main() -> int:
    """Run the parts; 0 where all pass."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng, data = random.Random(0), folder / "data.jsonl"
        with data.open("w") as file:
            for i in range(60):
                first, step, length = (
                    rng.randrange(900),
                    rng.randrange(1, 9),
                    rng.randrange(60, 120),
                )
                tokens = [(first + step * k) % 1000 + 2 for k in range(length)]
                row = {"id": str(i), "tokens": tokens, "loss": [[5, length]], "temperature": 0.0}
                file.write(json.dumps(row) + "\n")
        passed = decode(folder)

        words = ["train", "--verifier", "tiny-kimi", "--data", str(data), *TRAIN, "--run"]
        single, run = folder / "single", folder / "run"
        start([*words, str(single)], 1, folder, "single").wait()
        passed &= lose(1, [*words, str(run)], run, folder)
        passed &= lose(1, [*words, str(run), "--resume"], run, folder, signal.SIGSTOP)
        passed &= lose(0, [*words, str(run), "--resume"], run, folder)
        four = [*words, str(run), "--resume", "--mesh.data", "2", "--mesh.expert", "2"]
        status = start(four, 4, folder, "four").wait()
        if status:
            print((folder / "four.err").read_text())
        passed &= said("goes on on four devices", status == 0)
        want, found = curve(single), curve(run)
        apart = [
            abs(a - b) for k in want for a, b in zip(want[k], found.get(k, (9, 9)), strict=True)
        ]
        print(f"  losses of {len(want)} checkpoints, at most {max(apart):.1e} apart")
        passed &= said("the curve is a single device's", max(apart) <= TOLERANCE)
    print("PASS" if passed else "FAIL")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
