# SPDX-License-Identifier: Apache-2.0
"""Successive halving of candidates.

rung 0          every candidate, one seed; given up after `_PATIENCE` times the best so far
rung 1, 2, ...  the faster half of them, twice as many seeds, until few are left
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from orchestra.cli import summary
from orchestra.cli.race import Race

if TYPE_CHECKING:
    from orchestra.cli.table import Outcome, Table

_PATIENCE = 3.0  # times the best so far that a run may take
_FEW = 3  # candidates at which halving ends
# mean share of its epochs that a run of the catalogue uses before it reaches the target or is given up
USUAL_SHARE = 0.4
GIVEN_UP = f"given up after {_PATIENCE:g} x the best"


def rungs(candidates: int, seeds: int) -> Iterator[tuple[int, range]]:
    """Yield how many candidates run in each rung, and with which seeds."""
    done = 0
    while candidates > _FEW:
        upto = min(seeds, max(1, 2 * done))
        yield candidates, range(done, upto)
        done, candidates = upto, max(_FEW, math.ceil(candidates / 2))
    yield candidates, range(done, seeds)


def runs(candidates: int, seeds: int, race: Race) -> int:
    """Return the runs in all, at most: those of the rungs, and of two candidates on other networks."""
    elsewhere = 2 * 2 * seeds if race.shared.sim and candidates > 1 else 0
    return elsewhere + sum(count * len(more) for count, more in rungs(candidates, seeds))


class SuccessiveHalving:
    """The race in rungs, each with half of the candidates of the one before."""

    def __init__(self, race: Race, seeds: int, *, quiet: bool) -> None:
        self.race, self.seeds, self.quiet = race, seeds, quiet
        self.outcomes: dict[str, list[Outcome]] = {strategy: [] for strategy in race.strategies}
        self.left = list(race.strategies)

    def climb(self) -> None:
        """Run all rungs."""
        for count, more in rungs(len(self.left), self.seeds):
            if count < len(self.left):
                self.left = [row.strategy for row in self.table(self.left).ranked][:count]
            for seed in more:
                for i, strategy in enumerate(self.left):
                    self._run(strategy, seed, f"{i + 1}/{count}")

    def table(self, strategies: list[str] | None = None) -> Table:
        """Return the table so far."""
        wanted = strategies or list(self.outcomes)
        return self.race.table({strategy: self.outcomes[strategy] for strategy in wanted})

    def _run(self, strategy: str, seed: int, place: str) -> None:
        best = min((row.time for row in self.table().rows if row.always), default=math.inf)
        race = self.race
        if math.isfinite(best):
            race = dataclasses.replace(race, patience=_PATIENCE * best)
        self.outcomes[strategy].append(self.run_one(race, strategy, seed, place))

    def run_one(self, race: Race, strategy: str, seed: int, place: str) -> Outcome:
        """Run one candidate once, and print a line on it."""
        mark = f"[{place}] {strategy} · seed {seed}"
        outcome = race.run_one(strategy, seed, mark, quiet=self.quiet, first=False)
        if not self.quiet:
            given_up = f"{GIVEN_UP}; " if is_given_up(outcome) else ""
            summary.say(f"{mark}: {given_up}{race.told(outcome)}")
        return outcome


def is_given_up(outcome: Outcome) -> bool:
    """Return whether a run was stopped because others had been faster."""
    return outcome.seconds is None and outcome.facts is not None and outcome.facts.stopped_by == "seconds"
