# SPDX-License-Identifier: Apache-2.0
"""How long tuning will take, from the time of a few steps."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from orchestra.cli import sources
from orchestra.cli.loop_runs import Loop
from orchestra.runs.reading import object_in

if TYPE_CHECKING:
    from orchestra.cli.race import Race

_MEASURED = (8, 128)  # steps from which the time of an epoch is estimated: more where the first take too short a time
_ENOUGH = 1.0  # seconds that can be told from the noise


def seconds_of_an_epoch(race: Race) -> float:
    """Seconds of this machine that one epoch takes in simulation: measured on a few steps of one worker."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        _seconds_of(race, 1, out / "first")  # the first run of a process takes longer
        one = _seconds_of(race, 1, out / "one")
        for steps in _MEASURED:
            took = _seconds_of(race, 1 + steps, out / str(steps)) - one
            if took >= _ENOUGH:
                break
        config = object_in(out / "one" / "config.json")
    samples = race.stream or int(str(config.get("data")).partition(" ")[0])
    return samples / int(config["batch"]) * max(0.0, took) / steps


def _seconds_of(race: Race, steps: int, out: Path) -> float:
    assert not isinstance(race.recipe, Loop)
    few = dataclasses.replace(
        race.shared, strategy="solo", workers=1, steps=steps, epochs=None, target=None, sim=True, compute_time=None,
        straggler=None, network=None, trace=None, out=str(out),
    )  # fmt: skip
    began = time.perf_counter()
    sources.train_recipe(race.recipe, few.changes(), evaluate=None, evaluation_data=None)
    return time.perf_counter() - began
