# SPDX-License-Identifier: Apache-2.0
"""A comparison that an asynchronous strategy wins, and one that it loses: docs/figures/asynchronous.json.

    python -m scripts.asynchronous runs

The two differ in the network alone. Both are simulations with fixed seeds, so every machine gives the same figures;
each takes about two minutes. If `runs/fast` or `runs/slow` exists, it is taken as it is. docs/choosing.md quotes the
file.
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures" / "asynchronous.json"
COMMAND = (
    "orchestra compare digits --sim --workers 4 --network {} --compute-time lognormal:0.02,0.3 --straggler 1x8 "
    '--strategies "allreduce, slowmo, ps(consistency=asp)" --seeds 5'
)
NETWORKS = {"fast": "1gbit,0.1ms", "slow": "10mbit,1ms"}
SHOWN = ("strategy", "reached", "runs", "seconds_to_target", "speedup", "staleness_mean")


def figures(name: str, folder: Path) -> dict[str, Any]:
    """Return the figures of one comparison for the page; run it if its folder does not exist."""
    command, out = COMMAND.format(NETWORKS[name]), folder / name
    if not out.exists():
        words = [*shlex.split(command)[1:], "--out", str(out), "--quiet"]
        subprocess.run([sys.executable, "-m", "orchestra", *words], check=True)
    table = json.loads((out / "table.json").read_text(encoding="utf-8"))
    return {"command": command, "rows": [_row(row) for row in table["rows"]]}


def _row(row: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a strategy; those until the target are means over its runs."""
    until = [outcome["until"] for outcome in row["outcomes"]]
    means = {kind: statistics.fmean(one[kind] for one in until) for kind in ("compute", "communicate", "wait")}
    samples = statistics.fmean(one["samples"] for one in until)
    rate = statistics.fmean(one["samples"] / one["seconds"] for one in until)
    low, high = row["speedup_interval"] or (None, None)
    ends = {"speedup_from": low, "speedup_to": high}
    return {name: row[name] for name in SHOWN} | ends | means | {"samples": samples, "samples_per_second": rate}


def main() -> None:
    """Write the file."""
    folder = Path(sys.argv[1])
    found = {"made_by": "python -m scripts.asynchronous runs"} | {name: figures(name, folder) for name in NETWORKS}
    FIGURES.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
