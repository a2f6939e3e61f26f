# SPDX-License-Identifier: Apache-2.0
"""What makes a comparison fair, looked up in the folders of its runs, not taken for granted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestra.cli.table import Table


@dataclass(frozen=True)
class Point:
    """One condition of fairness."""

    what: str
    fair: bool
    how: str

    def __str__(self) -> str:
        return f"{'same' if self.fair else 'NOT THE SAME'} {self.what}: {self.how}"


def examine(table: Table, rates: Mapping[str, float | None], tries: int) -> list[str]:
    """The points, in words; those that do not hold say where."""
    runs = [outcome for row in table.rows for outcome in row.outcomes if outcome.facts is not None]
    found = [str(point) for point in _points([(run.seed, _config(run.run)) for run in runs])]
    nodes = sorted({row.workers + row.servers for row in table.rows})
    counted = str(nodes[0]) if len(nodes) == 1 else f"{nodes[0]} to {nodes[-1]}"
    found.append(f"all nodes counted: {counted}, servers included; see the column")
    return [*found, _rates(rates, tries)]


def _config(run: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((run / "config.json").read_text(encoding="utf-8"))
        return found
    except (OSError, ValueError):
        return {}


def _points(configs: list[tuple[int, dict[str, Any]]]) -> Iterator[Point]:
    def by_seed(key: str) -> bool:
        return all(len(_values((c for s, c in configs if s == seed), key)) == 1 for seed in {s for s, _ in configs})

    yield Point("initial parameters", by_seed("initial"), "equal sums for equal seeds")
    everyone = [config for _, config in configs]
    samples = ("data", "partition", "seed", "batch")
    equal = all(by_seed(key) for key in samples)
    yield Point("samples", equal, "data, partition, batch of a worker and order, for equal seeds")
    budgets = _values(everyone, "budget", " or ".join)
    yield Point("budget", len(budgets) == 1, "; ".join(sorted(budgets)))
    families = _values(everyone, "optimizer", _family)
    yield Point("optimizer", len(families) == 1, ", ".join(sorted(families)))


def _values(configs: Iterable[dict[str, Any]], key: str, of: Callable[[Any], Any] = lambda value: value) -> set[str]:
    return {json.dumps(of(config.get(key) or "")).strip('"') for config in configs}


def _family(optimizer: Any) -> str:
    return str(optimizer).partition(" ")[0]


def _rates(rates: Mapping[str, float | None], tries: int) -> str:
    if not any(rate is not None for rate in rates.values()):
        return "learning rate: the recipe's own for all, tuned for none (--lrs 0.02,0.05,0.1 would tune each)"
    if len(set(rates.values())) == 1:
        return f"learning rate: {next(iter(rates.values())):g} for all, {_after(tries)}"
    each = ", ".join(f"{strategy} {rate:g}" for strategy, rate in rates.items() if rate is not None)
    return f"learning rates: {each}; {_after(tries)}"


def _after(tries: int) -> str:
    return (
        "as given, tuned for none"
        if not tries
        else f"each the best of {tries} tries, with a seed that is not raced with"
    )
