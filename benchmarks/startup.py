# SPDX-License-Identifier: Apache-2.0
"""How long until something happens: importing the package, and the first step of a run."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.common import ROOT, Outcome, interleave, main, scratch

# Notes when training began by the run's own clock, and adds the first step of worker 0.
_OBSERVED = """
import json, sys
from pathlib import Path
from orchestra.worlds.shared_memory.coordinator import LocalCoordinator
end = LocalCoordinator._end
def observed(self, *rest):
    global began
    began = self.arena.clock[0]
    return end(self, *rest)
LocalCoordinator._end = observed
{action}
first = next(e for e in map(json.loads, open(Path(sys.argv[1]) / "events-0.jsonl")) if e["event"] == "stepped")
print("first step at", began + first["t"])
"""
_SCRIPT = """
import orchestra
from orchestra.recipes.images import DIGITS as r
orchestra.train(model=r.model, data=r.data, loss=r.loss, optimizer=r.optimizer, batch=r.batch, evaluate=r.evaluate,
    evaluation_data=r.evaluation_data, cluster=orchestra.Local(workers=4), budget=orchestra.Steps(20), out=sys.argv[1])
"""
_COMMAND = """
from orchestra.cli import main
out, sys.argv = sys.argv, ["orchestra", "run", "digits", "--workers", "4", "--steps", "20", "--out", sys.argv[1]]
try:
    main()
except SystemExit as ended:
    assert not ended.code, ended.code
sys.argv = out
"""


def measure(rounds: int) -> Outcome:
    """Imports and first steps."""
    outcome = Outcome(
        "Start-up",
        f"{rounds} rounds, each of new processes, files in the page cache; seconds, median (least to most). The first "
        "step is that of worker 0, by the system's monotonic clock, from the moment the program was started.",
    )
    turns = interleave(
        {
            "import torch": lambda: _import("import torch"),
            "import torch, orchestra": lambda: _import("import torch, orchestra"),
            "the same, and orchestra.train": lambda: _import("import torch, orchestra; orchestra.train"),
            "script: digits, 4 workers, to the first step": lambda: _first_step(_SCRIPT),
            "orchestra run digits --workers 4, to the first step": lambda: _first_step(_COMMAND),
        },
        rounds,
    )
    result = turns.by(min)
    outcome.table(["what", "seconds"], [[name, f.show(2)] for name, f in result.figures.items()])
    outcome.say(turns.disturbance())
    extra = result.minus("the same, and orchestra.train", "import torch")
    outcome.say(
        "`import orchestra` loads its parts when they are first used. Beyond `import torch`: "
        f"{result.minus('import torch, orchestra', 'import torch').show(2)} s, with all that `train` needs "
        f"{extra.show(2)} s."
    )
    outcome.goal("import in less than 0.3 s beyond torch", extra.median < 0.3, quiet=turns.quiet)
    first = [figure.median for name, figure in result.figures.items() if "first step" in name]
    outcome.goal("first step within 6 s", max(first) < 6, quiet=turns.quiet)
    return outcome


def _import(statement: str) -> list[float]:
    """Three imports in new processes."""
    return [_run([sys.executable, "-c", statement])[0] for _ in range(3)]


def _first_step(action: str) -> list[float]:
    with scratch() as folder:
        began = time.perf_counter()
        _, said = _run([sys.executable, "-c", _OBSERVED.format(action=action), str(folder / "run")])
    return [float(said.rpartition("first step at")[2]) - began]


def _run(command: list[str]) -> tuple[float, str]:
    path = os.pathsep.join(filter(None, sys.path))
    began = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, check=False
    )
    took = time.perf_counter() - began
    if done.returncode:
        raise RuntimeError(done.stderr)
    return took, done.stdout


if __name__ == "__main__":
    main(measure, rounds=5)
