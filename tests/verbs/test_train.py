"""`eagle3 train`: its JSON object, and the drafter that it writes."""

import json
from pathlib import Path

import numpy as np

from checkpoints.tensors import read_json
from tests import command_line

pair, run = command_line.pair, command_line.run


def test_train(run, tmp_path):
    rng = np.random.default_rng(0)
    rows = [
        {"id": str(i), "tokens": rng.integers(2, 64, 30).tolist(), "loss": [[5, 30]]}
        for i in range(8)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("train", "--data", data, "--run", tmp_path / "run", "--boundaries", 1, 2, 3)
    small = {"updates": 2, "batch": 1, "length": 16, "steps": 2, "save-every": 2, "held-out": 0}
    flags = [word for key, value in small.items() for word in (f"--train.{key}", value)]
    status, out, err = run(*words, *flags, "--drafter.width", 24, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert set(found) == {
        *("run", "checkpoint", "tokens", "accept_length", "loss"),
        *("accuracy_by_step", "tokens_per_second"),
    }
    manifest = read_json(Path(found["checkpoint"]) / "manifest.json")
    assert manifest["config"]["width"] == 24 and manifest["features"]["boundaries"] == [1, 2, 3]
