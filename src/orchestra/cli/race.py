# SPDX-License-Identifier: Apache-2.0
"""A race of strategies to a target: the options of each, one run, and all runs."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestra.cli import assumed, fairness, in_lab, loop_runs, sources, summary
from orchestra.cli import options as o
from orchestra.cli.cluster_options import is_solo
from orchestra.cli.concluding import conclude
from orchestra.cli.loop_runs import Loop
from orchestra.cli.options import Options
from orchestra.errors import ConfigError, Interrupted, OrchestraError, WorkerFailed
from orchestra.runs import progress

if TYPE_CHECKING:
    from orchestra.cli.candidates import Setting
    from orchestra.cli.table import Outcome, Table
    from orchestra.recipes.recipe import Recipe
    from orchestra.runs.budget import Epochs, Steps, Target

_SNAPSHOTS = 40  # of a run: the resolution of the time to the target


@dataclass(frozen=True)
class Race:
    """A comparison whose settings are checked, and which has not run yet."""

    source: sources.Source
    recipe: Recipe | Loop
    strategies: tuple[str, ...]
    shared: Options
    seeds: int
    target: Target
    out: Path
    lab: str | None = None  # the network of each run
    fixed: frozenset[str] = frozenset()  # strategies whose main option was given
    settings: Mapping[str, Setting] = field(default_factory=dict)  # the tuned settings
    tries: int = 0  # of each strategy, in tuning
    tuning: str = ""  # how they were tuned, or why they were not
    edges: frozenset[str] = frozenset()  # strategies whose best rate is the smallest or largest that was tried
    took: float | None = None  # seconds of a first run
    chosen_target: str = ""  # how the target was found, if none was given
    snapshots: int = _SNAPSHOTS  # of a run
    patience: float | None = None  # seconds after which a run is given up
    stream: float | None = None  # samples in a pass over the data, if that has no index

    @property
    def epochs(self) -> float:
        """The length of each run."""
        return self.shared.epochs if self.shared.epochs is not None else self.recipe.epochs

    def run(self, *, quiet: bool) -> Table:
        """Run all strategies, seed after seed, and return the table. Ctrl-C ends with the table of the runs so far."""
        outcomes: dict[str, list[Outcome]] = {strategy: [] for strategy in self.strategies}
        plan = [(seed, strategy) for seed in range(self.seeds) for strategy in self.strategies]
        try:
            for i, (seed, strategy) in enumerate(plan):
                mark = f"[{i + 1}/{len(plan)}] {strategy} · seed {seed}"
                outcome = self.run_one(strategy, seed, mark, quiet=quiet, first=i == 0)
                outcomes[strategy].append(outcome)
                if not quiet:
                    summary.say(f"{mark}: {self.told(outcome)}")
        except Interrupted:
            if any(outcomes.values()):
                table = self.table(outcomes)
                conclude(table, self.out, as_json=False, quiet=quiet, fair=self.fairness(table))
            raise
        return self.table(outcomes)

    def run_one(self, strategy: str, seed: int, mark: str, *, quiet: bool, first: bool) -> Outcome:
        """Run one strategy once. A failure is an outcome, except a `ConfigError` of the first run, which is raised."""
        from orchestra.cli.table import Outcome, judge
        from orchestra.engine import expression, warnings

        folder = self.out / _slug(strategy) / f"seed{seed}"
        chosen = dataclasses.replace(self.options_of(strategy, seed), out=str(folder))
        about = {"recipe": self.source.name, "options": chosen.given(), "patience": self.patience, "race": self.about()}
        try:
            if isinstance(self.recipe, Loop):
                loop_runs.run(self.source, chosen, self.target)
                return judge(folder, seed, self.target)
            if self.lab is not None:
                nodes = (chosen.workers or 1) + expression.parse(strategy).layout.servers
                chosen = dataclasses.replace(chosen, evaluate_every=self.epochs / self.snapshots, score_afterwards=True)
                if not self.source.holds_recipe:  # a script may have another budget
                    chosen = dataclasses.replace(chosen, epochs=self.epochs)
                in_lab.run(str(self.source.path or self.source.name), chosen, nodes, self.lab, self.source.args)
                return judge(folder, seed, self.target)
            warned = warnings.once(momentum_tuned=strategy in self.settings)
            with progress.choose(quiet=quiet, title=mark) as display, warned:
                sources.train_recipe(
                    self.recipe,
                    chosen.changes(),
                    evaluate_every=self._every(strategy),
                    score_afterwards=True,
                    progress=display,
                    note=about | {"args": list(self.source.args)},
                )
        except Interrupted:
            raise
        except OrchestraError as error:
            if first and isinstance(error, ConfigError):
                raise  # nothing has run yet, and all runs would fail alike
            return Outcome(seed, folder, failed=_reason(error))
        return judge(folder, seed, self.target)

    def like(self, tuned: Race) -> Race:
        """Return the same race with the settings of another one."""
        return dataclasses.replace(
            self, strategies=tuned.strategies, settings=tuned.settings, tries=tuned.tries, tuning=tuned.tuning,
            edges=tuned.edges,
        )  # fmt: skip

    def options_of(self, strategy: str, seed: int) -> Options:
        """Return the options of one run, without its folder."""
        tuned = self.settings[strategy].options if strategy in self.settings else {}
        limit = {} if self.patience is None else {"seconds": self.patience}
        chosen = options_for(strategy, self.shared, seed=seed, **tuned, **limit)
        if chosen.epochs is None or chosen.epochs % 1 == 0 or (steps := self._steps(strategy, chosen.epochs)) is None:
            return chosen
        return dataclasses.replace(chosen, epochs=None, steps=steps)  # the end of a run in a stream is a whole pass

    def _steps(self, strategy: str, epochs: float) -> int | None:
        """Return epochs of a stream as steps of a worker; None if it has no end, or the data has an index."""
        if self.stream is None or isinstance(self.recipe, Loop) or math.isinf(self.stream):
            return None
        workers = options_for(strategy, self.shared).workers or 2
        return max(1, math.ceil(epochs * self.stream / (workers * (self.shared.batch or self.recipe.batch)) - 1e-9))

    def _every(self, strategy: str) -> Epochs | Steps:
        """Return the interval between two scores of a run."""
        from orchestra.runs.budget import Epochs, Steps

        steps = self._steps(strategy, self.epochs / self.snapshots)
        return Epochs(self.epochs / self.snapshots) if steps is None else Steps(steps)

    def about(self) -> dict[str, Any]:
        """Return what each run notes of the race, for readers before there is a table."""
        from orchestra.report.verdict import baseline_of

        target = {"metric": self.target.metric, "value": self.target.value}
        return {"target": target, "baseline": baseline_of(self.strategies), "straggler": self.shared.straggler}

    def told(self, outcome: Outcome) -> str:
        """Return the outcome of a run, in a line."""
        if outcome.facts is None:
            return f"failed: {outcome.failed}"
        unit = "virtual s" if outcome.facts.virtual else "s"
        name, total = self.target.metric, f"{outcome.facts.seconds:.2f} {unit} in all"
        total += "".join(f"; {text}" for text in (outcome.facts.missing, outcome.facts.unlearned) if text)
        if outcome.seconds is None:
            best = "no score is a number" if outcome.best is None else f"best {outcome.best:.4g}"
            return f"{name} {self.target.value:g} not reached, {best}; {total}"
        return f"{name} {self.target.value:g} after {outcome.seconds:.2f} {unit}; {total}, final {outcome.final:.4g}"

    def table(self, outcomes: dict[str, list[Outcome]]) -> Table:
        """Return the table of the runs so far."""
        from orchestra.cli.table import StrategyRow, Table
        from orchestra.engine import expression
        from orchestra.report.verdict import baseline_of

        servers = {text: expression.parse(text).layout.servers for text in outcomes}
        rows = [
            StrategyRow(text, options_for(text, self.shared).workers or 1, servers[text], tuple(found))
            for text, found in outcomes.items()
            if found
        ]
        baseline = baseline_of([row.strategy for row in rows] or self.strategies)
        workers = self.shared.workers or 2
        what = (self.recipe.name, self.target, workers, self.seeds, self.epochs, baseline, tuple(rows))
        return Table(
            *what, self._world(), self.shared.target is not None, bool(self.settings), self.settings, assumed.of(self)
        )

    def fairness(self, table: Table) -> list[str]:
        """Return what all runs had in common, read from their folders."""
        target = [self.chosen_target] if self.chosen_target else []
        return [*fairness.examine(table), *target, fairness.rates(self, [row.strategy for row in table.rows])]

    def _world(self) -> str:
        """Return the cluster in words, if it is not local processes."""
        if self.lab is not None:
            return f"in a lab: {self.lab}"
        if not self.shared.sim:
            return ""
        slow = "" if self.shared.straggler is None else f", straggler {self.shared.straggler}"
        time = self.shared.compute_time or o.COMPUTE_TIME
        return f"virtual seconds: network {self.shared.network or o.NETWORK}, compute time {time}{slow}"


def options_for(strategy: str, shared: Options, **more: Any) -> Options:
    """Return the options of one run. `Solo` has one worker, whose machine is slow only if all are."""
    alone = _of_one_worker(shared) if is_solo(strategy) else {}
    return Options(**shared.given() | {"strategy": strategy} | alone | more)


def _of_one_worker(shared: Options) -> dict[str, Any]:
    """Return the options that differ with one worker."""
    workers = shared.workers or 1

    def on_one(slow: re.Match[str]) -> str:
        return f"1x{slow[2] if int(slow[1]) >= workers else 1}"

    return {
        "workers": 1,
        "straggler": re.sub(r"^(\d+)x(.+)", on_one, shared.straggler or "") or None,
        "compute_time": re.sub(r"(?<=\bslow:)(\d+)x(\S+)", on_one, shared.compute_time or "") or None,
    }


def _reason(error: OrchestraError) -> str:
    text = error.traceback if isinstance(error, WorkerFailed) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if isinstance(error, WorkerFailed) else " ".join(lines)


def _slug(text: str) -> str:
    return "-".join(filter(None, "".join(c if c.isalnum() or c == "." else " " for c in text).split()))
