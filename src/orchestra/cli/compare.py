# SPDX-License-Identifier: Apache-2.0
"""`orchestra compare`: run strategies against each other, for real or in virtual time."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestra import progress
from orchestra.cli import in_lab, sources, summary
from orchestra.cli import options as o
from orchestra.cli.options import Options
from orchestra.cli.worlds import is_solo
from orchestra.errors import ConfigError, Interrupted, OrchestraError, Problem, WorkerFailed, nearest

if TYPE_CHECKING:
    from orchestra.budget import Target
    from orchestra.cli.table import Outcome, Table
    from orchestra.recipe import Recipe

_SNAPSHOTS = 40  # of a run: how finely the time to the target is told
_WIDE = 125  # columns of a terminal that takes the table with its long headings
DEFAULT = "allreduce,ps,localsgd,slowmo"


Name = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe, or a .py file with a RECIPE in it.", show_default=False)
]
Strategies = Annotated[str, typer.Option("--strategies", "-s", metavar="A,B,C", help="Expressions, between commas.")]
Seeds = Annotated[int, typer.Option(metavar="K", help="Runs of each strategy, with seeds 0 to K-1.")]
Lab = Annotated[
    str | None,
    typer.Option(
        metavar="RATE,LATENCY",
        help="Run each in a network of hosts on this machine, one for each node, such as 100mbit,1ms or "
        "1gbit,0.2ms,cpu=0.5. Needs root: see orchestra lab.",
    ),
]
Goal = Annotated[
    str | None, typer.Option(metavar="SCORE=VALUE", help="The test score to race to. Default: the recipe's own.")
]


def compare(
    recipe: Name, strategies: Strategies = DEFAULT, workers: o.Workers = None, seeds: Seeds = 1,
    epochs: o.Epochs = None, target: Goal = None, batch: o.Batch = None, lr: o.Lr = None,
    optimizer: o.Optimizer = None, schedule: o.Schedule = None, clip: o.Clip = None,
    partition: o.Spread = None, precision: o.Precision = None, device: o.Device = None, sim: o.Sim = False,
    network: o.Network = None, delay: o.Delay = None, lab: Lab = None, out: o.Out = None, json_: o.Json = False,
    quiet: o.Quiet = False,
) -> None:  # fmt: skip
    """Race strategies to a target on the same model, samples and seeds, and print who won and what it cost.

    Every strategy runs with every seed; the seeds take turns, so that a machine that slows down slows all alike. The
    model is set aside 40 times in a run and scored afterwards: scoring costs no strategy any time. Ratios above 1 are
    faster than the baseline, which is allreduce if it takes part, else the first named.

    For example:

      orchestra compare digits --strategies allreduce,localsgd --seeds 3
      orchestra compare digits -n 4 -s "ps, ps(consistency=asp()), slowmo(tau=8)"
      orchestra compare mnist-lenet --epochs 2 --partition dirichlet:0.3
      orchestra compare digits --sim -n 16 --network 10mbit,1ms --delay "lognormal:0.02,0.3 slow:1x5"
      orchestra compare digits --lab 10mbit,1ms -n 3 -s allreduce,localsgd
    """
    source = sources.find(recipe)
    shared = Options(
        workers=workers if workers is not None else 2, epochs=epochs, batch=batch, lr=lr,
        optimizer=optimizer, schedule=schedule, clip=clip, partition=partition, precision=precision,
        device=device, sim=sim or None, network=network, delay=delay,
    )  # fmt: skip
    race = prepare(source, o.split_strategies(strategies), shared, seeds, target, out, lab)
    table = race.run(quiet=quiet)
    conclude(table, race.out, as_json=json_, quiet=quiet)


@dataclass(frozen=True)
class Race:
    """Everything is checked; nothing has run yet."""

    source: sources.Source
    recipe: Recipe
    strategies: tuple[str, ...]
    shared: Options
    seeds: int
    target: Target
    out: Path
    lab: str | None = None  # the network that each runs in

    @property
    def epochs(self) -> float:
        """How long each run is."""
        return self.shared.epochs if self.shared.epochs is not None else self.recipe.epochs

    def run(self, *, quiet: bool) -> Table:
        """Run all, seed after seed, and put the table together. Ctrl-C ends with the table of what is done."""
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
                conclude(self.table(outcomes), self.out, as_json=False, quiet=quiet)
            raise
        return self.table(outcomes)

    def run_one(self, strategy: str, seed: int, mark: str, *, quiet: bool, first: bool) -> Outcome:
        """One run; if it fails, that is its outcome, but for mistakes in the very first."""
        from orchestra import expression
        from orchestra.budget import Epochs
        from orchestra.cli.table import Outcome, judge

        folder = self.out / _slug(strategy) / f"seed{seed}"
        chosen = options_for(strategy, self.shared, seed=seed, out=str(folder))
        note = {"recipe": self.source.name, "args": [], "options": chosen.given()}
        try:
            if self.lab is not None:
                nodes = (chosen.workers or 1) + expression.parse(strategy).servers
                chosen = dataclasses.replace(chosen, evaluate_every=self.epochs / _SNAPSHOTS)
                in_lab.run(str(self.source.path or self.source.name), chosen, nodes, self.lab)
                return judge(folder, seed, self.target)
            with progress.choose(quiet=quiet, title=mark) as display:
                sources.train_recipe(
                    self.recipe,
                    chosen.changes(),
                    evaluate_every=Epochs(self.epochs / _SNAPSHOTS),
                    progress=display,
                    note=note,
                )
        except Interrupted:
            raise
        except OrchestraError as error:
            if first and isinstance(error, ConfigError):
                raise  # nothing has run: better to say so than to fail as often as there are runs
            return Outcome(seed, folder, failed=_reason(error))
        return judge(folder, seed, self.target)

    def told(self, outcome: Outcome) -> str:
        """How a run went, in a line."""
        if outcome.facts is None:
            return f"failed: {outcome.failed}"
        unit = "virtual s" if outcome.facts.virtual else "s"
        name, total = self.target.metric, f"{outcome.facts.seconds:.2f} {unit} in all"
        total += f"; {outcome.facts.missing}" if outcome.facts.missing else ""
        if outcome.seconds is None:
            return f"{name} {self.target.value:g} not reached, best {outcome.best:.4g}; {total}"
        return f"{name} {self.target.value:g} after {outcome.seconds:.2f} {unit}; {total}, final {outcome.final:.4g}"

    def table(self, outcomes: dict[str, list[Outcome]]) -> Table:
        """The figures of the runs so far."""
        from orchestra import expression
        from orchestra.cli.table import Row, Table

        rows = [
            Row(text, options_for(text, self.shared).workers or 1, expression.parse(text).servers, tuple(found))
            for text, found in outcomes.items()
            if found
        ]
        baseline = "allreduce" if "allreduce" in self.strategies else self.strategies[0]
        workers = self.shared.workers or 2
        what = (self.recipe.name, self.target, workers, self.seeds, self.epochs, baseline, tuple(rows))
        return Table(*what, world=self._world())

    def _world(self) -> str:
        """Where it takes place, if that is not here."""
        if self.lab is not None:
            return f"in a laboratory: {self.lab}"
        if not self.shared.sim:
            return ""
        delay = self.shared.delay or o.DELAY
        return f"virtual seconds: network {self.shared.network or o.NETWORK}, delay {delay}"


def prepare(
    source: sources.Source,
    texts: list[str],
    shared: Options,
    seeds: int,
    target: str | None,
    out: Path | None,
    lab: str | None = None,
) -> Race:
    """Check all that can be checked before anything runs; raises a `ConfigError` with every problem."""
    from orchestra.launch import forkserver

    if not source.holds_recipe:
        why = "defines no RECIPE = orchestra.Recipe(...), which compare needs"
        raise ConfigError([Problem("recipe", source.name, why)])
    if not shared.sim and lab is None:
        forkserver.warm()
    from orchestra import expression

    recipe = sources.load(source)
    problems = [*_problems(texts, shared, seeds, out), *_unfit_for_lab(texts, shared, lab)]
    try:
        goal = o.read_target(target or recipe.target)
        problems += _unknown_score(recipe, goal)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    names = tuple(dict.fromkeys(expression.show(expression.parse(text)) for text in texts))
    return Race(source, recipe, names, shared, seeds, goal, out or _new_folder(source.label), lab)


def _problems(texts: list[str], shared: Options, seeds: int, out: Path | None) -> Iterator[Problem]:
    from orchestra import checks, expression

    if not texts:
        yield Problem("strategies", "", f"name at least one, e.g. {DEFAULT}")
    if seeds < 1:
        yield Problem("seeds", seeds, "must be at least 1")
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        yield Problem("out", str(out), "is not an empty folder: choose a new one")
    seen: set[str] = set()
    for text in texts:
        chosen = options_for(text, shared)
        try:
            cluster = chosen.changes()["cluster"](None)
            found = [
                *cluster.problems(),
                *checks.check_strategy(expression.parse(text), chosen.workers or 1, shared.clip),
            ]
        except ConfigError as error:
            found = [*error.problems]
        for problem in found:  # those of shared options would be told again for every strategy
            if str(problem) not in seen:
                seen.add(str(problem))
                yield problem


def _unfit_for_lab(texts: list[str], shared: Options, lab: str | None) -> Iterator[Problem]:
    """What cannot be run in a laboratory."""
    from orchestra import expression

    if lab is None:
        return
    yield from in_lab.problems_of(lab, shared.workers or 1)
    if shared.sim:
        yield Problem("lab", lab, "is real, --sim is not: choose one")
    for text in texts:
        with suppress(ConfigError):  # told elsewhere
            strategy = expression.parse(text)
            if strategy.model_at == "shared" or (strategy.servers and strategy.colocated):
                yield Problem("strategies", text, "needs several nodes on one machine; a lab has a host for each")


def _unknown_score(recipe: Recipe, goal: Target) -> list[Problem]:
    """Score the model as it is before training: a target that evaluate does not know would never be reached."""
    scores = recipe.evaluate(recipe.model(), recipe.evaluation_data())
    if goal.metric in scores:
        return []
    return [Problem("target", goal.metric, f"is no score of this recipe; {nearest(goal.metric, scores)}")]


def options_for(strategy: str, shared: Options, **more: Any) -> Options:
    """The options of one run. A strategy that runs alone has one worker."""
    alone = {"workers": 1} if is_solo(strategy) else {}
    return Options(**shared.given() | {"strategy": strategy} | alone | more)


def _reason(error: OrchestraError) -> str:
    text = error.traceback if isinstance(error, WorkerFailed) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if isinstance(error, WorkerFailed) else " ".join(lines)


def _slug(text: str) -> str:
    return "-".join(filter(None, "".join(c if c.isalnum() or c == "." else " " for c in text).split()))


def _new_folder(label: str) -> Path:
    stem = f"{time.strftime('%Y-%m-%d-%H%M%S')}-compare-{label}"
    return next(p for i in range(1, 1000) if not (p := Path("runs") / (stem + (f"-{i}" if i > 1 else ""))).exists())


def conclude(table: Table, out: Path, *, as_json: bool, quiet: bool) -> None:
    """Save the table, print it with what was learned, and fail if a run failed."""
    record = save(table, out)
    if as_json:
        summary.print_json(record)
    else:
        show(table, record["learned"])
        if not quiet:
            summary.say(f"\nsaved: {summary.nearby(out)}/table.md and table.json")
            summary.say(
                f"next: orchestra report {summary.nearby(out)} · orchestra explain "
                + table.ranked[0].strategy.split("(")[0]
            )
    if any(row.failures for row in table.rows):
        raise typer.Exit(1)


def save(table: Table, out: Path) -> dict[str, Any]:
    """Write the table, and what was learned, to the folder of the runs; gives all of it."""
    from orchestra.cli.table import verdict

    virtual = any(facts.virtual for row in table.rows for facts in row.done)
    words = verdict(table, None if virtual else len(os.sched_getaffinity(0)))
    record = table.as_record() | {"learned": words, "out": str(out)}
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(summary.finite(record), indent=1, ensure_ascii=False)
    (out / "table.json").write_text(text + "\n", encoding="utf-8")
    (out / "table.md").write_text(table.markdown() + "\n" + " ".join(words) + "\n", encoding="utf-8")
    return record


def show(table: Table, words: list[str]) -> None:
    """Print the table, and what was learned."""
    from rich.table import Table as Grid

    console = summary.console_for(80 if sys.stdout.isatty() else 200)
    narrow = console.width < _WIDE
    grid = Grid(box=None, pad_edge=False, header_style="bold", padding=(0, 1 if narrow else 2, 0, 0))
    for i, heading in enumerate(table.columns(narrow=narrow)):
        # Only the time may be broken into lines, between words.
        grid.add_column(heading, justify="left" if i in (0, 3) else "right", no_wrap=i != 3, overflow="fold")
    for row in table.ranked:
        grid.add_row(*table.cells(row, narrow=narrow))
    console.print(f"\n{table.heading}\n", style="bold")
    console.print(grid)
    if narrow:
        console.print(
            f"runs: reached · ratio: speed, {table.baseline} = 1 · MB: of a worker · stale: mean/max", style="dim"
        )
    else:
        console.print(f"\n{table.legend}", style="dim")
    for note in table.notes():
        console.print(note)
    console.print()
    for sentence in words:
        console.print(sentence)
