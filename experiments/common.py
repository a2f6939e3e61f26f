# SPDX-License-Identifier: Apache-2.0
"""What studies share: variants times seeds, figures with their spread, and claims that hold or do not.

    study = Study("Does it?", folder=Path(__file__).parent)
    study.run({"plain": partial(train, k=1), "large": partial(train, k=8)}, seeds=range(5))     seed -> figures
    study.expect("large is worse", study["large", "accuracy"].mean < study["plain", "accuracy"].mean)
    raise SystemExit(study.conclude())

A figure that is a number is summarised over the seeds; anything else (a curve) is only saved.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import orchestra
from orchestra.cli.sources import arguments
from orchestra.engine.checkpoint import write_text
from orchestra.errors import Diverged
from orchestra.recipes.recipe import Recipe
from orchestra.runs.events import Scored
from orchestra.runs.facts import scores_of

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Spread:
    """A figure over the seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """The mean."""
        return statistics.fmean(self.values)

    @property
    def deviation(self) -> float:
        """From seed to seed; zero of a single one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.deviation:.2g} ({min(self.values):.4g} to {max(self.values):.4g})"


@dataclass(frozen=True)
class Claim:
    """Something that was expected, whether it held, and by which figures."""

    words: str
    holds: bool
    figures: dict[str, float]

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        return f"{'holds' if self.holds else 'FAILS'}: {self.words}" + (f" ({figures})" if figures else "")


@dataclass
class Study:
    """The rows of a study, one for each variant and seed, and what was expected of them."""

    title: str
    folder: Path  # where results.json goes
    rows: list[dict[str, Any]] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)

    def run(
        self, variants: Mapping[str, Callable[[int], Figures]], seeds: Iterable[int], diverged: Figures | None = None
    ) -> None:
        """Take the figures of every variant with every seed. Those of a run that diverged are given beforehand."""
        for seed in seeds:
            for name, measure in variants.items():
                try:
                    figures = measure(seed)
                except Diverged:
                    if diverged is None:
                        raise
                    figures = diverged
                row = {"variant": name, "seed": seed, **figures}
                self.rows.append(row)
                shown = ", ".join(f"{key} {row[key]:.4g}" for key in _numbers(row))
                print(f"{name} · seed {seed}: {shown}", file=sys.stderr, flush=True)

    def __getitem__(self, key: tuple[str, str]) -> Spread:
        """Return a figure of a variant, over the seeds."""
        variant, figure = key
        return Spread(tuple(float(row[figure]) for row in self.rows if row["variant"] == variant))

    def expect(self, words: str, holds: bool, **figures: float) -> None:
        """Note whether something that was expected holds."""
        self.claims.append(Claim(words, bool(holds), figures))

    def table(self, figures: tuple[str, ...] | None = None) -> str:
        """Mean, deviation and range of some figures, or all, as Markdown: one table for variants that have the same."""
        alike: dict[tuple[str, ...], dict[str, None]] = {}
        for row in self.rows:
            alike.setdefault(figures or self._numbers_of(row["variant"]), {})[row["variant"]] = None
        lines: list[str] = []
        for shown, variants in alike.items():
            lines += ["", f"| {' | '.join(['variant', *shown])} |", "|---" * (1 + len(shown)) + "|"]
            lines += [f"| {' | '.join([v, *(str(self[v, f]) for f in shown)])} |" for v in variants]
        return "\n".join(lines[1:])

    def _numbers_of(self, variant: str) -> tuple[str, ...]:
        """Return the figures that all runs of a variant have."""
        every = [_numbers(row) for row in self.rows if row["variant"] == variant]
        return tuple(figure for figure in every[0] if all(figure in figures for figures in every))

    def conclude(self) -> int:
        """Save results.json atomically; print the table and the claims. Return 1 if a claim fails, else 0."""
        record = {
            "title": self.title,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "claims": [vars(claim) for claim in self.claims],
            "rows": self.rows,
        }
        self.folder.mkdir(parents=True, exist_ok=True)  # minutes of work must not be lost for want of a folder
        write_text(self.folder / "results.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        print("\n".join([f"\n{self.title}\n", self.table(), "", *map(str, self.claims)]))
        return 0 if all(claim.holds for claim in self.claims) else 1


def options(
    doc: str | None, *, seeds: int, devices: Sequence[str] = (), argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Parse the options of every study: the number of `seeds`, and the folder of `results.json` (`out`)."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=seeds, help=f"runs of each variant (default: {seeds})")
    parser.add_argument("--out", type=Path, help="folder for results.json (default: beside the study)")
    if devices:
        parser.add_argument("--device", choices=devices, default=devices[0], help="where gradients are taken")
    asked = parser.parse_args(argv)
    if asked.seeds < 2:
        parser.error("--seeds must be at least 2: a single run has no spread")
    return asked


@contextmanager
def running(recipe: Recipe, **given: Any) -> Iterator[orchestra.Result]:
    """Train a recipe with some arguments of `train` replaced; yield the result while its run folder exists."""
    with tempfile.TemporaryDirectory() as folder:
        asked = arguments(recipe) | {"out": Path(folder) / "run", "progress": False} | given
        yield orchestra.train(**asked)


def train(recipe: Recipe, **given: Any) -> tuple[orchestra.Result, list[Scored]]:
    """Train a recipe, with other arguments of `train` than its own: the result, and its scores in the order taken.

    The first are those of the initial model, the last those of the final one. The run folder is gone afterwards.
    """
    with running(recipe, **given) as result:
        return result, scores_of(result.run)


def _numbers(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the figures of a row that can be summarised."""
    return tuple(key for key, value in row.items() if key != "seed" and isinstance(value, int | float))
