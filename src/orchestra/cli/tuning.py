# SPDX-License-Identifier: Apache-2.0
"""A learning rate for every contestant of a comparison: the same candidates for all, with a seed apart."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from typing import TYPE_CHECKING

from orchestra.budget import lower_is_better
from orchestra.cli import summary
from orchestra.errors import ConfigError, Problem

if TYPE_CHECKING:
    from orchestra.cli.compare import Race
    from orchestra.cli.table import Outcome


def read(text: str) -> tuple[float, ...]:
    """Rates between commas. Raises a `ConfigError`."""
    try:
        rates = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        rates = ()
    if len(rates) < 2 or len(set(rates)) < len(rates) or not all(0 < rate < math.inf for rate in rates):
        raise ConfigError([Problem("lrs", text, "must be two or more different rates above 0: 0.02,0.05,0.1")])
    return rates


def tune(race: Race, rates: tuple[float, ...], *, quiet: bool) -> Race:
    """The same race, every strategy with its best rate; what was tried is kept in tuning.json."""
    sign = 1 if lower_is_better(race.target.metric) else -1
    seed, folder = race.seeds, race.out / "tuning"
    chosen: dict[str, float] = {}
    record: dict[str, dict[str, float | None]] = {}
    for number, strategy in enumerate(race.strategies):
        tried: dict[float, Outcome] = {}
        for rate in rates:
            attempt = dataclasses.replace(race, rates={strategy: rate}, out=folder / f"lr-{rate:g}")
            mark = f"tuning [{number + 1}/{len(race.strategies)}] {strategy} · lr {rate:g}"
            tried[rate] = attempt.run_one(strategy, seed, mark, quiet=quiet, first=False)
            if not quiet:
                summary.say(f"{mark}: {race.told(tried[rate])}")

        def key(rate: float, tried: dict[float, Outcome] = tried) -> tuple[float, float]:
            found = tried[rate]
            near = math.inf if found.best is None else sign * found.best
            return (math.inf if found.seconds is None else found.seconds, near)

        if all(found.best is None for found in tried.values()):
            why = next((found.failed for found in tried.values() if found.failed), "nothing was scored")
            given = ",".join(f"{rate:g}" for rate in rates)
            raise ConfigError([Problem("lrs", given, f"with none of them does {strategy} come to a score: {why}")])
        chosen[strategy] = min(rates, key=key)
        record[strategy] = {f"{rate:g}": tried[rate].seconds for rate in rates}
    shutil.rmtree(folder, ignore_errors=True)
    race.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"seed": seed, "chosen": chosen, "seconds_to_target": record}, indent=1)
    (race.out / "tuning.json").write_text(text + "\n", encoding="utf-8")
    return dataclasses.replace(race, rates=chosen, tries=len(rates))
