# SPDX-License-Identifier: Apache-2.0
"""The table of `compare`, and its notes: pure functions of the runs' figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from orchestra.formatting import plural
from orchestra.report import escaping
from orchestra.report.results import RunResult, achieved, standing, unlearned_of
from orchestra.report.statistics import Estimate, median_interval
from orchestra.report.until import Until, until
from orchestra.report.verdict import Against, against_baseline, goal, is_useless
from orchestra.runs.budget import Target, lower_is_better
from orchestra.runs.facts import Facts, events_of, facts_of, scores_of


@dataclass(frozen=True)
class Outcome:
    """One run, or why there is none."""

    seed: int
    run: Path
    seconds: float | None = None  # to the target
    since: float = 0.0  # the target was not yet reached at this time: the true time is between the two
    best: float | None = None
    final: float | None = None
    facts: Facts | None = None
    failed: str | None = None
    until: Until | None = None  # what its workers did until the target, or until the end


def judge(run: Path, seed: int, target: Target) -> Outcome:
    """Read a complete run."""
    events, scores = events_of(run), scores_of(run)
    facts, found = facts_of(run, events, scores), achieved(scores, target)
    moment = facts.seconds if found.seconds is None else found.seconds
    return Outcome(seed, run, facts=facts, **asdict(found), until=until(events, facts.workers, moment))


@dataclass(frozen=True)
class StrategyRow:
    """All runs of one strategy."""

    strategy: str
    workers: int
    servers: int
    outcomes: tuple[Outcome, ...]

    @property
    def marks(self) -> list[RunResult]:
        """The results of its runs."""
        return [
            RunResult(
                self.strategy,
                "",
                o.seed,
                o.seconds,
                o.since,
                o.best,
                o.final,
                failed=o.failed is not None,
                unlearned=None if o.facts is None else o.facts.unlearned,
            )
            for o in self.outcomes
        ]

    @property
    def done(self) -> list[Facts]:
        """The figures of the runs that ended."""
        return [o.facts for o in self.outcomes if o.facts is not None]

    @property
    def incomplete(self) -> list[Outcome]:
        """The runs in which what defines the strategy did not happen."""
        return [o for o in self.outcomes if o.facts is not None and o.facts.missing is not None]

    @property
    def unlearned(self) -> str | None:
        """How many runs did not learn, and the possible reason."""
        return unlearned_of(self.marks)

    @property
    def failures(self) -> list[Outcome]:
        """The runs that failed."""
        return [o for o in self.outcomes if o.failed is not None]

    @cached_property
    def times(self) -> list[float]:
        """Seconds to the target, of the runs that reached it, in order of size."""
        return sorted(o.seconds for o in self.outcomes if o.seconds is not None)

    @property
    def always(self) -> bool:
        """Whether every run reached the target: only then is there a time to rank by."""
        return bool(self.outcomes) and len(self.times) == len(self.outcomes)

    @property
    def time(self) -> float:
        """Median seconds to the target."""
        return statistics.median(self.times) if self.times else math.inf

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the median, from order statistics; with less than six runs, the least and the most."""
        return median_interval(self.times)

    def mean(self, figure: str) -> float | None:
        """Return the mean of a figure over the runs."""
        found = [getattr(facts, figure) for facts in self.done]
        found = [value for value in found if value is not None]
        return statistics.fmean(found) if found else None

    @property
    def seconds(self) -> float:
        """Mean seconds of a whole run, whether it reached the target or not."""
        return self.mean("seconds") or 0.0

    @property
    def traffic(self) -> float:
        """Bytes that a worker sent and received."""
        return (self.mean("sent_per_worker") or 0.0) + (self.mean("received_per_worker") or 0.0)

    @property
    def total(self) -> float:
        """Bytes sent between all nodes, servers included."""
        return self.mean("sent_total") or 0.0

    @property
    def wait(self) -> float:
        """The workers' share of time spent waiting."""
        return statistics.fmean([facts.share("wait") for facts in self.done] or [math.nan])

    @property
    def final(self) -> float:
        """Mean score at the end."""
        return statistics.fmean([o.final for o in self.outcomes if o.final is not None] or [math.nan])


@dataclass(frozen=True)
class Table:
    """The outcome of a race."""

    recipe: str
    target: Target
    workers: int
    seeds: int
    epochs: float
    baseline: str
    rows: tuple[StrategyRow, ...]
    world: str = ""  # the cluster, if not this machine
    stops: bool = False  # runs end at the target
    tuned: bool = False  # each strategy runs with the learning rate that was best for it
    settings: Mapping[str, object] = field(default_factory=dict)  # what tuning found
    assumes: str = ""  # what a simulation assumes without having been told

    @property
    def is_loop(self) -> bool:
        """Whether the runs were of a script with its own loop, which decides how long to train and at which rate."""
        return math.isnan(self.epochs)

    @property
    def ranked(self) -> list[StrategyRow]:
        """The rows by time, in the order of the page."""
        return sorted(self.rows, key=lambda row: standing(row.marks, self.target))

    @property
    def tuning(self) -> str:
        """Whether the strategies were tuned, in a word."""
        return "tuned" if self.tuned else "untuned"

    def row(self, strategy: str) -> StrategyRow | None:
        """Return the row of a strategy."""
        return next((row for row in self.rows if row.strategy == strategy), None)

    def best(self, row: StrategyRow) -> float:
        """Return the best score of the runs that missed the target, or of all if none did."""
        outcomes = [o for o in row.outcomes if o.seconds is None] or row.outcomes
        values = [o.best for o in outcomes if o.best is not None]
        return (min if lower_is_better(self.target.metric) else max)(values, default=math.nan)

    @property
    def goal(self) -> str:
        """The target in words."""
        return goal(self.target)

    @property
    def aim(self) -> str:
        """The target, with the data that it is a score on."""
        named = self.target.metric.lower().startswith(("train", "val", "test", "eval"))
        return self.goal if named else f"test {self.goal}"

    @cached_property
    def marks(self) -> list[RunResult]:
        """The results of all runs."""
        return [mark for row in self.rows for mark in row.marks]

    @property
    def unit(self) -> str:
        """The unit of the times."""
        return "virtual s" if any(facts.virtual for row in self.rows for facts in row.done) else "s"

    @cached_property
    def against(self) -> dict[str, Against]:
        """Every strategy against the baseline, seed by seed."""
        return {found.strategy: found for found in against_baseline(self.marks, self.baseline)}

    def speed(self, strategy: str) -> Estimate | None:
        """Return how many times as fast as the baseline a strategy is."""
        found = self.against.get(strategy)
        return None if found is None else found.speed

    # For people.

    @property
    def heading(self) -> str:
        """The recipe, target and settings of the comparison."""
        upto = "until the target, at most " if self.stops else ""
        return (
            f"{self.recipe} · target {self.aim} · {plural(self.workers, 'worker')} · "
            f"{plural(self.seeds, 'seed')}"
            + ("" if self.is_loop else f" · {upto}{plural(self.epochs, 'epoch')}")
            + f" · {self.tuning}"
            + (f" · {self.world}" if self.world else "")
        )

    def columns(self, *, narrow: bool = False) -> list[str]:
        """Return the headings of the columns, short ones for a small terminal."""
        if narrow:
            return ["strategy", "nodes", "runs", "time to target", "ratio", "total", "MB", "wait", "age", "final"]
        metric = f"final {self.target.metric}"
        against = f"vs {self.baseline}"
        figures = ["MB/worker", "wait", "age (updates)", metric]
        return ["strategy", "nodes", "reached", "time to target", against, "total time", *figures]

    def cells(self, row: StrategyRow, *, narrow: bool = False) -> list[str]:
        """Return one line of the table."""
        base = self.row(self.baseline)
        speed = self.speed(row.strategy)
        ratio = "-" if speed is None else f"{speed.value:.2f}x"
        if row is base and row.always:
            ratio = "1.00x"
        if speed is not None and speed.low is not None and not is_useless(speed) and not narrow:
            ratio += f" [{speed.low:.2f}, {speed.high:.2f}]"
        stale = row.mean("staleness_mean")
        most = max((facts.staleness_max or 0 for facts in row.done), default=0)
        return [
            row.strategy
            + (" (alone)" if row.workers == 1 and self.workers > 1 else "")
            + ("!" if row.incomplete else ""),
            str(row.workers + row.servers),
            f"{len(row.times)}/{len(row.outcomes)}",
            self._time(row, narrow=narrow),
            ratio,
            f"{row.seconds:.2f}{'' if narrow else ' s'}" if row.done else "-",
            f"{row.traffic / 1e6:.1f}" if row.done else "-",
            f"{row.wait:.0%}" if row.done else "-",
            "-" if stale is None else f"{stale:.1f}/{most}" if narrow else f"{stale:.1f} (max {most})",
            f"{row.final:.4g}{' ‡' if row.unlearned else ''}" if row.done else "-",
        ]

    def _time(self, row: StrategyRow, *, narrow: bool) -> str:
        if not row.times and row.unlearned is not None:
            return row.unlearned.partition(" (")[0] if narrow else row.unlearned
        if not row.times:
            return "failed" if not row.done else f"not reached (best {self.best(row):.4g})"
        text = f"{row.time:.2f} s"
        if len(row.times) > 1:
            low, high = row.interval
            text += f" [{low:.2f}, {high:.2f}]"
        return text if row.always else f"{text} *"

    @property
    def legend(self) -> str:
        """What the columns mean."""
        spread = "" if self.seeds == 1 else " [95 % interval]" if self.seeds > 5 else " [least, most]"
        ratio = "" if self.seeds == 1 else f"vs {self.baseline}: geometric mean over seeds [95 % interval]. "
        whole = "until the target, or until it was given up" if self.stops else "of a whole run, past the target"
        return (
            f"time to target: median{spread}. {ratio}Other columns: means. nodes: workers and servers. "
            f"total time: {whole}. MB/worker: sent and received. "
            "wait: share of the workers' time spent waiting for others. age: of gradients, updates made "
            "between a worker's pull and its push."
        )

    def markdown(self) -> str:
        """Return the table for a document."""
        body = escaping.table([self.columns(), *(self.cells(row) for row in self.ranked)])
        heading, *prose = map(escaping.markdown, (self.heading, self.legend, *self.notes()))
        return "\n\n".join([heading, body, *prose]) + "\n"

    def notes(self) -> list[str]:
        """Return notes on runs that missed the target, failed, or were incomplete."""
        found = []
        for row in self.ranked:
            if row.times and not row.always:
                missed = len(row.outcomes) - len(row.times)
                found.append(
                    f"* {row.strategy} did not reach the target in {missed} of {len(row.outcomes)} runs: not ranked."
                )
            found += [f"‡ {row.strategy} {row.unlearned}."] if row.unlearned is not None else []
            found += [f"{row.strategy}, seed {o.seed}, failed: {o.failed}" for o in row.failures]
            found += [f"! {row.strategy}, seed {o.seed}: {o.facts.missing}." for o in row.incomplete if o.facts]
        return found

    # For programs.

    def as_record(self) -> dict[str, Any]:
        """Return all figures, down to single runs."""
        return {
            "recipe": self.recipe,
            "target": {"metric": self.target.metric, "value": self.target.value},
            "workers": self.workers,
            "seeds": self.seeds,
            "epochs": self.epochs,
            "baseline": self.baseline,
            "tuned": self.tuned,
            "rows": [self._record(row) for row in self.ranked],
        }

    def _record(self, row: StrategyRow) -> dict[str, Any]:
        base = self.row(self.baseline)
        return {
            "strategy": row.strategy,
            "nodes": row.workers + row.servers,
            "workers": row.workers,
            "servers": row.servers,
            "reached": len(row.times),
            "runs": len(row.outcomes),
            "seconds_to_target": row.time if row.times else None,
            "interval": list(row.interval) if row.times else None,
            "speedup_interval": None if (e := self.speed(row.strategy)) is None or e.low is None else [e.low, e.high],
            "p": found.p if (found := self.against.get(row.strategy)) is not None else None,
            "speedup": e.value if (e := self.speed(row.strategy)) is not None else 1.0 if row is base else None,
            "seconds": row.seconds if row.done else None,
            "bytes_per_worker": row.traffic if row.done else None,
            "wait": row.wait if row.done else None,
            "staleness_mean": row.mean("staleness_mean"),
            "staleness_max": max((f.staleness_max for f in row.done if f.staleness_max is not None), default=None),
            "best": self.best(row),
            "final": row.final,
            "unlearned": row.unlearned,
            "outcomes": [_outcome(o) for o in row.outcomes],
        }


def _outcome(o: Outcome) -> dict[str, Any]:
    figures = None if o.facts is None else o.facts.as_dict()
    return {
        "seed": o.seed, "run": str(o.run), "seconds_to_target": o.seconds, "best": o.best, "final": o.final,
        "failed": o.failed, "until": None if o.until is None else asdict(o.until), "summary": figures,
    }  # fmt: skip
