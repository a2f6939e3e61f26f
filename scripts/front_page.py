# SPDX-License-Identifier: Apache-2.0
"""The figures of the front page: run its comparison, tuned and untuned, and write docs/figures/front_page.json.

    python -m scripts.front_page runs

Both are simulations with fixed seeds, so every machine gives the same figures; they take minutes. If `runs/comparison`
or `runs/untuned` exists, it is taken as it is. README.md and docs/index.md quote the file, and a test compares them.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures" / "front_page.json"
COMMAND = (
    "orchestra compare digits --sim --workers 4 --network 20mbit,1ms --compute-time lognormal:0.02,0.3 --straggler 1x3 "
    '--strategies "allreduce, ps, ps(consistency=asp), localsgd, slowmo" --seeds 5 --target accuracy=0.9'
)
SHOWN = ("strategy", "reached", "runs", "seconds_to_target", "interval", "speedup", "speedup_interval", "final")


def compared(folder: Path) -> Path:
    """Return the folder of the comparison; run it, and the untuned one beside it, if they do not exist."""
    for name, more in (("comparison", []), ("untuned", ["--no-tune"])):
        if not (folder / name).exists():
            words = [*shlex.split(COMMAND)[1:], *more, "--out", str(folder / name), "--quiet"]
            subprocess.run([sys.executable, "-m", "orchestra", *words], check=True)
    return folder / "comparison"


def figures(comparison: Path) -> dict[str, Any]:
    """Return the figures of a comparison for the front page."""
    table, untuned = (
        json.loads((folder / "table.json").read_text(encoding="utf-8"))
        for folder in (comparison, comparison.with_name("untuned"))
    )
    tuned = json.loads((comparison / "tuning.json").read_text(encoding="utf-8"))["chosen"]
    (tries,) = re.findall(r"each the best of (\d+) tries", "\n".join(table["fairness"]))
    return {
        "made_by": "python -m scripts.front_page runs",
        "command": COMMAND,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "verdict": table["learned"][0],
        "tries": int(tries),
        "rows": [
            {name: row[name] for name in SHOWN}
            | {"lr": tuned[row["strategy"]]["lr"], "momentum": tuned[row["strategy"]]["momentum"]}
            for row in table["rows"]
        ],
        "untuned": [{name: row[name] for name in SHOWN} for row in untuned["rows"]],
    }


def write(comparison: Path) -> str:
    """Write the file; gives the verdict."""
    found = figures(comparison)
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return str(found["verdict"])


if __name__ == "__main__":
    print(write(compared(Path(sys.argv[1]))))
