"""Training rows that are learned from beyond their answers: prompts too, but for the system text.

python examples/smollm2/whole_rows.py rows.jsonl whole.jsonl
"""

import json
import os
import sys
from pathlib import Path

SYSTEM = 20
"""Tokens that every text of the chat template begins with."""


def main(rows: str, out: str) -> None:
    """Write the rows of one file with another loss span."""
    beside = Path(f"{out}.part")
    with open(rows, encoding="utf-8") as source, beside.open("w", encoding="utf-8") as file:
        for line in source:
            row = json.loads(line)
            row["loss"] = [[min(SYSTEM, len(row["tokens"]) - 1), len(row["tokens"])]]
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
    os.replace(beside, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
