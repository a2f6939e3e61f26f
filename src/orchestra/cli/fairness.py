# SPDX-License-Identifier: Apache-2.0
"""Checks that a comparison is fair, read from the folders of its runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestra.runs.budget import words
from orchestra.runs.reading import object_in, own_budget

if TYPE_CHECKING:
    from orchestra.cli.race import Race
    from orchestra.cli.table import Table

AT_EDGE = "at the edge of the rates tried"


@dataclass(frozen=True)
class Point:
    """One condition of fairness."""

    what: str
    fair: bool | None  # None: not every run has the value
    how: str

    def __str__(self) -> str:
        if self.fair is None:
            return f"{self.what} not checked: not every run has the value, or none ended"
        return f"{'same' if self.fair else 'NOT THE SAME'} {self.what}: {self.how}"


def examine(table: Table) -> list[str]:
    """Return the points in words."""
    runs = [outcome for row in table.rows for outcome in row.outcomes if outcome.facts is not None]
    found = [str(point) for point in _points([(run.seed, object_in(run.run / "config.json")) for run in runs])]
    nodes = sorted({row.workers + row.servers for row in table.rows})
    counted = str(nodes[0]) if len(nodes) == 1 else f"{nodes[0]} to {nodes[-1]}"
    return [*found, f"all nodes counted: {counted}, servers included; see the column"]


def _points(configs: list[tuple[int, dict[str, Any]]]) -> Iterator[Point]:
    def by_seed(*keys: str) -> bool | None:
        seeds = {seed for seed, _ in configs}
        return _all([_equal([c.get(key) for s, c in configs if s == seed]) for seed in seeds for key in keys])

    yield Point("initial parameters", by_seed("initial"), "equal sums for equal seeds")
    samples = by_seed("samples", "data", "partition", "seed", "batch")
    how = "a sum of some, their number, partition, batch of a worker and seed of the order, for equal seeds"
    yield Point("samples", samples, how)
    everyone = [config for _, config in configs]
    budgets = [_text(own_budget(config), words) for config in everyone]
    yield Point("budget", _equal(budgets), "; ".join(sorted({*filter(None, budgets)})) or "the loop's own")
    families = [_text(config.get("optimizer"), _family) for config in everyone]
    yield Point("optimizer", _equal(families), ", ".join(sorted({*filter(None, families)})))


def _text(value: Any, of: Callable[[Any], str]) -> str | None:
    return None if value is None else of(value)


def _equal(values: list[Any]) -> bool | None:
    """Return whether all values are equal; a difference counts even where others are missing."""
    known = [value for value in values if value is not None]
    if any(value != known[0] for value in known):
        return False
    return True if known and len(known) == len(values) else None


def _all(answers: list[bool | None]) -> bool | None:
    return False if False in answers else None if None in answers or not answers else True


def _family(optimizer: Any) -> str:
    return str(optimizer).partition(" ")[0]


def rates(race: Race, names: Iterable[str] | None = None) -> str:
    """Return whether the strategies were tuned, how, and with which result: of all, or of those named."""
    if not race.settings:
        which = "the recipe's own" if race.shared.lr is None else f"{race.shared.lr:g}"
        why = f" ({race.tuning})" if race.tuning else ""
        return f"untuned{why}: the learning rate is {which} for all; with tuning, the order may differ"
    each = "; ".join(
        f"{name} {race.settings[name]}{f' ({AT_EDGE})' if name in race.edges else ''}"
        for name in names or race.settings
        if name in race.settings
    )
    return f"tuned {race.tuning}, each the best of {race.tries} tries, on seeds that no run of it uses: {each}"
