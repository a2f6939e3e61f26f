# SPDX-License-Identifier: Apache-2.0
"""The time of a step that a simulated comparison assumes where no option gives it.

What is saved says only the assumption: the time of a step on this machine is printed, and saved nowhere.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.cli import options as o
from orchestra.cli import sources, summary
from orchestra.cli.loop_runs import Loop
from orchestra.errors import OrchestraError

if TYPE_CHECKING:
    from orchestra.cli.race import Race

_STEPS, _WARM_UP, _SECONDS = 100, 10, 1.0  # of the measurement


def of(race: Race) -> str:
    """Return the assumption in a sentence; empty if a time was given, or the runs are real."""
    if not _is_assumed(race):
        return ""
    seconds, source = float(o.COMPUTE_TIME.partition(":")[2]), race.source
    what = source.name if source.path is None else source.path.name
    return (
        f"The simulation assumes {1e3 * seconds:g} ms for a step of each worker, since no --compute-time was given. "
        f"With other times another strategy may be first. Measure yours with `orchestra probe {what}`."
    )


def tell_measured(race: Race) -> None:
    """Print the time of a step on this machine, if a time was assumed."""
    if not _is_assumed(race):
        return
    with suppress(OrchestraError):  # the comparison is done, and what it saved does not need this
        seconds = _seconds_of_a_step(race)
        summary.say(
            f"\non this machine a step takes about {1e3 * seconds:.2g} ms: --compute-time constant:{seconds:.2g} "
            "assumes that"
        )


def _is_assumed(race: Race) -> bool:
    from orchestra.clusters.simulated import Simulated

    own = race.recipe.more.get("cluster")
    given = race.shared.compute_time is not None or (isinstance(own, Simulated) and own.compute_time is not None)
    return bool(race.shared.sim) and not given


def _seconds_of_a_step(race: Race) -> float:
    """Measure a step of one worker with one thread: as `orchestra probe` does, but shorter."""
    from orchestra.clusters.local import Local
    from orchestra.clusters.simulated import recorded
    from orchestra.engine import warnings

    assert not isinstance(race.recipe, Loop)
    cluster = Local(workers=1, threads=1, device=race.shared.device or "cpu")  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory(prefix="orchestra-step-") as folder, warnings.silent():
        own = {"strategy": "solo", "workers": 1, "steps": _STEPS, "seconds": _SECONDS, "out": str(Path(folder) / "run")}
        of_a_cluster = dict.fromkeys(("sim", "network", "compute_time", "straggler", "target", "epochs", "trace"))
        chosen = dataclasses.replace(race.shared, **of_a_cluster | own)
        changes = chosen.changes() | {"cluster": lambda old: cluster}
        sources.train_recipe(race.recipe, changes, evaluate=None, evaluation_data=None)
        (times,) = recorded(Path(folder) / "run").times
    return statistics.median(times[_WARM_UP:] or times)
