# SPDX-License-Identifier: Apache-2.0
"""The figures of `orchestra demo`: the rates that it uses, and what its race on the slow cluster came to.

    python -m scripts.demo runs

Write docs/figures/demo.json. The rates are those that the tuned comparison below finds for the demo's slow cluster;
src/orchestra/cli/demo.py holds them, and a test compares. Tuning takes minutes, the demo two minutes at most. If
`runs/demo-tuning` or `runs/demo` exists, it is taken as it is.
"""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures" / "demo.json"
TUNING = (
    "orchestra compare digits --sim --workers 4 --network 10mbit,1ms --compute-time lognormal:0.02,0.3 --straggler 1x4 "
    '--strategies "allreduce, ps, ps(consistency=asp), localsgd, slowmo" --seeds 3'
)
SHOWN = ("strategy", "reached", "runs", "seconds_to_target", "speedup", "final")


def orchestra(command: str, out: Path) -> Path:
    """Run a command of orchestra into a folder that does not exist yet."""
    if not out.exists():
        words = [*shlex.split(command)[1:], "--out", str(out), "--quiet"]
        subprocess.run([sys.executable, "-m", "orchestra", *words], check=True)
    return out


def ranking(race: Path) -> list[dict[str, Any]]:
    """Return what the table of a race says of each strategy, in its order."""
    rows = json.loads((race / "table.json").read_text(encoding="utf-8"))["rows"]
    return [{name: row[name] for name in SHOWN} for row in rows]


def rates(tuned: Path) -> dict[str, float]:
    """Return the learning rate that tuning chose for each strategy."""
    chosen = json.loads((tuned / "tuning.json").read_text(encoding="utf-8"))["chosen"]
    return {name: setting["lr"] for name, setting in chosen.items()}


def write(folder: Path) -> list[str]:
    """Write the file; return the order of the strategies on the slow cluster."""
    tuned, demo = orchestra(TUNING, folder / "demo-tuning"), orchestra("orchestra demo", folder / "demo")
    found: dict[str, Any] = {
        "made_by": "python -m scripts.demo runs",
        "tuned_by": TUNING,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rates": rates(tuned),
        "slow": ranking(demo / "slow"),
    }
    FIGURES.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return [row["strategy"] for row in found["slow"]]


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
