# SPDX-License-Identifier: Apache-2.0
"""Is a step slower than with other sources of orchestra, such as an earlier commit's?

    git worktree add /tmp/old COMMIT
    python -m benchmarks.old_new --old /tmp/old

Both run at the same time of day, in turns. Each side has the benchmarks of its own sources.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import Outcome, interleave, machine, quiet_parent
from benchmarks.groups import Ours

CASES = (  # workload, strategy, workers, steps of a turn, dropped ones
    ("mlp10m", "allreduce", 2, 14, 2),
    ("lenet", "allreduce", 2, 80, 10),
    ("lenet", "ps(consistency=asp())", 2, 80, 10),
)
MOST = 1.03


def measure(old: Path, rounds: int) -> Outcome:
    """Every case, old and new in turns."""
    outcome = Outcome(
        "A step with these sources and with others",
        f"{rounds} rounds, in each of which both take a turn. Milliseconds of a step: median of the rounds' medians "
        "(least to most). New against old: the median of the ratios, round by round.",
    )
    rows, ratios = [], []
    for workload, strategy, workers, steps, dropped in CASES:
        with (
            Ours(workload, strategy, workers, steps) as now,
            Ours(workload, strategy, workers, steps, root=old) as before,
        ):
            sides: dict[str, Callable[[], list[float]]] = {
                "new": functools.partial(now.steps, warmup=dropped),
                "old": functools.partial(before.steps, warmup=dropped),
            }
            turns = interleave(sides, rounds)
        result = turns.by(statistics.median)
        ratio = result.ratio("new", "old")
        ratios.append(ratio.median)
        rows.append([f"{workload}, {strategy}", result["new"].show(2, 1e3), result["old"].show(2, 1e3), ratio.show(3)])
        outcome.say(f"{workload}, {strategy}: {turns.disturbance()}")
    outcome.table(["step", "new, ms", "old, ms", "new against old"], rows)
    outcome.goal(f"no step takes more than {MOST} times as long", max(ratios) <= MOST)
    return outcome


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, metavar="FOLDER", help="a checkout of the other sources")
    parser.add_argument("--rounds", type=int, default=20, help="how often both take a turn")
    chosen = parser.parse_args()
    quiet_parent()
    print(machine())
    described = ["git", "-C", str(chosen.old), "describe", "--always", "--exclude=*"]
    commit = subprocess.run(described, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()
    print(f"old: {commit or 'unknown'}", end="\n\n")
    print(measure(chosen.old.resolve(), chosen.rounds))


if __name__ == "__main__":
    main()
