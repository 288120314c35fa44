"""Plain decoding of SmolLM2 is at least twice as fast as transformers', float32, greedy.

The same GGUF file, the same prompts token for token, as many new tokens, one row. Transformers runs
in a process of its own, which answers requests over a pipe and sleeps in between; the two decode in
turn, prompt by prompt, so that the machine's noise falls on both. Decoding alone leaves out reading
the prompt: here by the library's own count, there by the time from the first new token to the last.

    plain_speed.py --oracle PYTHON [--prompts FILE] [--count 8] [--new 64]

`--oracle` is the Python of an environment with transformers (tests/golden/README.md says which).
The figure is the ratio of the speeds of decoding, over all prompts. The last line is PASS or FAIL.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import eagle3_jax as e3
from checkpoints.gguf import find_smollm2
from eagle3_jax.generation import encode_prompt

LEAST = 2.0

ORACLE = """
import json, sys, time
import torch, transformers

folder, name, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(threads)
transformers.utils.logging.disable_progress_bar()
model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, gguf_file=name, dtype=torch.float32
).eval()


class Clock(transformers.generation.streamers.BaseStreamer):
    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass


print("ready", flush=True)
for line in sys.stdin:
    ids, new = json.loads(line)
    prompt, clock = torch.tensor([ids]), Clock()
    start = time.perf_counter()
    with torch.no_grad():
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            use_cache=True,
            max_new_tokens=new,
            pad_token_id=0,
            streamer=clock,
        )
    whole = time.perf_counter() - start
    # The prompt comes first, then every new token.
    print(json.dumps([out[0, len(ids):].tolist(), clock.times[-1] - clock.times[1], whole]),
          flush=True)
"""


def main() -> int:
    """Print a line a prompt and both speeds; 0 where the ratio is reached."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--oracle", metavar="PYTHON", required=True)
    parser.add_argument(
        "--prompts",
        type=Path,
        default=Path(__file__).parents[2] / "shared/data/eval/mt_bench.jsonl",
        help="JSONL rows with a list `turns`; the first one is asked",
    )
    parser.add_argument("--count", type=int, default=8, help="prompts")
    parser.add_argument("--new", type=int, default=64, help="new tokens a prompt")
    arguments = parser.parse_args()

    gguf = find_smollm2()
    command = [arguments.oracle, "-c", ORACLE, gguf.parent, gguf.name, str(os.cpu_count())]
    pipe = subprocess.PIPE
    child = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert child.stdin is not None and child.stdout is not None

    def answer() -> str:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise SystemExit(f"plain_speed: error: {arguments.oracle} ended; see its message above")
        return line

    def theirs(ids: list[int]) -> tuple[list[int], float, float]:
        assert child.stdin is not None
        print(json.dumps([ids, arguments.new]), file=child.stdin, flush=True)
        return tuple(json.loads(answer()))

    verifier = e3.load_verifier("smollm2", dtype="float32")

    def ours(ids: list[int]) -> tuple[list[int], float, float]:
        clock = time.perf_counter()
        out = e3.generate(
            verifier, None, [ids], max_new_tokens=arguments.new, rows=1, capacity=1024
        )
        whole = time.perf_counter() - clock
        return out.tokens[0], out.stats.seconds, whole

    while answer().strip() != "ready":
        pass
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()[: arguments.count]
    prompts = [encode_prompt(verifier, json.loads(line)["turns"][0]) for line in lines]
    for side in (ours, theirs):
        side(prompts[0])
    seconds, tokens, same = [[0.0, 0.0], [0.0, 0.0]], [[0, 0], [0, 0]], 0
    for index, ids in enumerate(prompts):
        found = ours(ids), theirs(ids)
        same += found[0][0] == found[1][0]
        for side, (new, decoding, whole) in enumerate(found):
            # The first new token comes with the prompt's reading.
            for part, (spent, count) in enumerate(((decoding, len(new) - 1), (whole, len(new)))):
                seconds[side][part] += spent
                tokens[side][part] += count
        print(
            f"prompt {index}: {len(ids)} + {len(found[0][0])} tokens, decoding "
            f"{found[0][1]:.2f} s, transformers {found[1][1]:.2f} s",
            flush=True,
        )
    child.stdin.close()
    child.wait()
    speeds = [
        [n / s for n, s in zip(*side, strict=True)] for side in zip(tokens, seconds, strict=True)
    ]
    for part, name in enumerate(("decoding", "end to end")):
        here, there = speeds[0][part], speeds[1][part]
        print(
            f"{name:10} {here:6.1f} tokens/s, transformers {there:6.1f}: ratio {here / there:.2f}"
        )
    ratio = speeds[0][0] / speeds[1][0]
    print(
        f"{same} of {len(prompts)} texts the same; ratio {ratio:.2f} (at least {LEAST} wanted): "
        f"{'PASS' if ratio >= LEAST else 'FAIL'}"
    )
    return 0 if ratio >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
