# SPDX-License-Identifier: Apache-2.0
"""What a comparison wrote to its table.json that the folders of its runs do not hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from orchestra.runs.budget import Target
from orchestra.runs.reading import NONSENSE, object_in

_NAMED = 3  # folders at most


@dataclass(frozen=True)
class Failure:
    """A run that failed."""

    folder: Path
    strategy: str
    seed: int
    why: str


@dataclass(frozen=True)
class Comparison:
    """The target of a comparison, its verdict and its failed runs."""

    folder: Path
    target: Target
    learned: tuple[str, ...]  # the verdict's sentence first
    fairness: tuple[str, ...]
    failures: tuple[Failure, ...]


def _comparison(folder: Path, found: dict[str, Any]) -> Comparison | None:
    """Return the comparison in the table of a folder; None if there is none that can be read."""
    if (target := _target(found)) is None:
        return None
    return Comparison(
        folder=folder,
        target=target,
        learned=_texts(found.get("learned")),
        fairness=_texts(found.get("fairness")),
        failures=tuple(_failures(folder, found.get("rows"))),
    )


def _target(found: dict[str, Any]) -> Target | None:
    with contextlib.suppress(*NONSENSE):
        return Target(str(found["target"]["metric"]), float(found["target"]["value"]))
    return None


def _notes(run: Path) -> Iterator[dict[str, Any]]:
    """Yield the target and the baseline from a run's note and from its budget."""
    config = object_in(run / "config.json")
    note, budget = config.get("note"), config.get("budget")
    yield note["race"] if isinstance(note, dict) and isinstance(note.get("race"), dict) else {}
    for part in map(str, budget if isinstance(budget, list) else ()):
        metric, _, value = part.removeprefix("target=").rpartition(":")
        yield {"target": {"metric": metric, "value": value}} if part.startswith("target=") else {}


class ComparisonFiles:
    """The comparisons to which the runs at and below some folders belong."""

    def __init__(self, paths: Sequence[Path], runs: Sequence[Path]) -> None:
        def inside(folder: Path) -> bool:
            return any(folder.is_relative_to(path) for path in paths)

        written = {folder: object_in(folder / "table.json") for folder in dict.fromkeys(r.parent.parent for r in runs)}
        every = [found for folder, table in written.items() if (found := _comparison(folder, table)) is not None]
        self.target: Target | None = None
        self.baseline: str | None = None
        for note in chain(written.values(), (note for run in runs for note in _notes(run))):
            self.target = self.target or _target(note)
            if self.baseline is None and isinstance(name := note.get("baseline"), str):
                self.baseline = name
            if self.target is not None and self.baseline is not None:
                break
        self.failures = {f.folder: f for race in every for f in race.failures if inside(f.folder)}
        self._every = every if len(every) == len(written) and all(inside(race.folder) for race in every) else []

    def whole(self, target: Target | None) -> Comparison | None:
        """Return the one comparison to which all runs belong, if it had this target.

        Of several, such as those of a sweep, it has the points of fairness alone.
        """
        if not self._every or any(race.target != target for race in self._every):
            return None
        if len(self._every) == 1:
            return self._every[0]
        return replace(self._every[0], learned=(), fairness=(*_points(self._every),), failures=())


def _points(races: Sequence[Comparison]) -> Iterator[str]:
    """Yield points of fairness; one that does not hold for all comparisons begins with the folders of those it does."""
    for point in dict.fromkeys(point for race in races for point in race.fairness):
        names = [race.folder.name for race in races if point in race.fairness]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        yield point if len(names) == len(races) else f"{', '.join(names[:_NAMED])}{more}: {point}"


def _failures(folder: Path, rows: Any) -> Iterator[Failure]:
    for row in _objects(rows):
        for outcome in _objects(row.get("outcomes")):
            match row.get("strategy"), outcome:
                case str(strategy), {"seed": int(seed), "run": str(run), "failed": str(why)}:
                    # The path relative to this folder: comparisons are moved from one machine to another.
                    yield Failure(folder.joinpath(*Path(run).parts[-2:]), strategy, seed, why)


def _objects(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()
