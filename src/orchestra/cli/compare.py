# SPDX-License-Identifier: Apache-2.0
"""`orchestra compare`: run strategies against each other, for real or in virtual time."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestra.cli import candidates, claims, fairness, goals, in_lab, loop_runs, repeat, sources, summary, tuning
from orchestra.cli import options as o
from orchestra.cli.cluster_options import is_solo, refuse_under_launcher
from orchestra.cli.concluding import conclude
from orchestra.cli.loop_runs import Loop
from orchestra.cli.options import Options
from orchestra.errors import ConfigError, Interrupted, OrchestraError, Problem, WorkerFailed
from orchestra.runs import progress

if TYPE_CHECKING:
    from orchestra.cli.candidates import Setting
    from orchestra.cli.table import Outcome, Table
    from orchestra.recipes.recipe import Recipe
    from orchestra.runs.budget import Target

_SNAPSHOTS = 40  # of a run: how finely the time to the target is told
DEFAULT = "allreduce,ps,localsgd,slowmo"


Name = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|SCRIPT",
        help="A recipe, or a .py file with a RECIPE in it or that calls orchestra.train or orchestra.prepare.",
        show_default=False,
    ),
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
Rates = Annotated[
    str | None,
    typer.Option(metavar="A,B,C", help="Learning rates to try, in place of those around the recipe's own."),
]
Tune = Annotated[
    bool,
    typer.Option(
        "--tune/--no-tune",
        help="Find the learning rate of each strategy first, and the momentum of asynchronous ones, with equally many "
        "tries for all. --lr switches it off as well.",
    ),
]
TuneReal = Annotated[
    bool, typer.Option("--tune-real", help="Tune on real processes, as the race runs. Default: in simulation.")
]
Claims = Annotated[
    list[str] | None,
    typer.Option(
        "--assert",
        metavar="CLAIM",
        help='End with code 9 unless it holds: "slowmo.time < allreduce.time", "ps.bytes <= 0.5 * allreduce.bytes". '
        "Figures: time, seconds, bytes, wait, age, final, reached.",
    ),
]
Goal = Annotated[
    str | None,
    typer.Option(
        metavar="SCORE=VALUE",
        help="The score to race to. Default: the recipe's or the script's own; if it has none, found by a first run.",
    ),
]


def compare(
    context: typer.Context, recipe: Name, args: o.Args = None, strategies: Strategies = DEFAULT,
    workers: o.Workers = None, seeds: Seeds = 3,
    epochs: o.Epochs = None, target: Goal = None, batch: o.Batch = None, lr: o.Lr = None,
    optimizer: o.Optimizer = None, schedule: o.Schedule = None, clip: o.Clip = None,
    partition: o.Spread = None, precision: o.Precision = None, device: o.Device = None, sim: o.Sim = False,
    network: o.Network = None, delay: o.Delay = None, lab: Lab = None, tune: Tune = True, lrs: Rates = None,
    tune_real: TuneReal = False, asserted: Claims = None,
    trace: o.Trace = False, out: o.Out = None, json_: o.Json = False, quiet: o.Quiet = False,
) -> None:  # fmt: skip
    """Race strategies to a target on the same model, samples and seeds, and print which won and what it cost.

    First the learning rate of every strategy is tuned, and its main option where none is given, with equally many tries
    for all and on other seeds. Then every strategy runs with every seed; the seeds take turns, so that a machine that
    slows down slows all alike. The model is set aside 40 times in a run and scored afterwards: scoring costs no
    strategy any time. Ratios above 1 are faster than the baseline, which is allreduce if it takes part, else the first
    named.

    A script that calls orchestra.train runs once, up to its first such call; what comes after it does not run. Each
    strategy then trains with the arguments of that call. A script with a loop of its own, under orchestra.prepare, runs
    as a whole for each strategy, in real processes: optimizer.orchestra.score(accuracy=...) tells its scores. Where
    neither the script nor --target names a target, a first run of the baseline finds one.

    For example:

      orchestra compare digits --strategies allreduce,localsgd --seeds 3
      orchestra compare train.py --strategies allreduce,localsgd -- --your arguments
      orchestra compare digits -n 4 -s "ps, ps(consistency=asp()), slowmo(tau=8)"
      orchestra compare digits --sim -n 16 --network 10mbit,1ms --delay "lognormal:0.02,0.3 slow:1x5"
      orchestra compare digits --lab 10mbit,1ms -n 3 -s allreduce,localsgd
      orchestra compare digits --sim -n 8 --seeds 5 --lrs 0.02,0.05,0.1 --assert "slowmo.time < allreduce.time"
    """
    refuse_under_launcher("compare")
    source = sources.find(recipe, args or ())
    shared = Options(
        workers=workers, epochs=epochs, batch=batch, lr=lr,
        optimizer=optimizer, schedule=schedule, clip=clip, partition=partition, precision=precision,
        device=device, sim=sim or None, network=network, delay=delay, trace=trace or None,
    )  # fmt: skip
    race = prepare(source, o.split_strategies(strategies), shared, seeds, target, out, lab)
    rates = () if lrs is None else tuning.read(lrs, source)
    for text in asserted or []:
        claims.parse(text, race.strategies)  # what cannot be understood is refused before anything runs
    repeat.keep(context.obj, race.out)
    race = goals.settle(race, quiet=quiet)
    if rates or (tune and lr is None):
        race = tuning.Tuning(race, seeds, rates, real=tune_real, quiet=quiet).run()
    said = [claims.parse(text, race.strategies) for text in asserted or []]
    table = race.run(quiet=quiet)
    conclude(table, race.out, as_json=json_, quiet=quiet, fair=race.fairness(table), asserted=said)


@dataclass(frozen=True)
class Race:
    """Everything is checked; nothing has run yet."""

    source: sources.Source
    recipe: Recipe | Loop
    strategies: tuple[str, ...]
    shared: Options
    seeds: int
    target: Target
    out: Path
    lab: str | None = None  # the network that each runs in
    fixed: frozenset[str] = frozenset()  # strategies of which the main option was given
    settings: Mapping[str, Setting] = field(default_factory=dict)  # what they run with, as tuned
    tries: int = 0  # of each, before
    snapshots: int = _SNAPSHOTS  # of a run
    patience: float | None = None  # seconds after which a run is given up

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
                table = self.table(outcomes)
                conclude(table, self.out, as_json=False, quiet=quiet, fair=self.fairness(table))
            raise
        return self.table(outcomes)

    def run_one(self, strategy: str, seed: int, mark: str, *, quiet: bool, first: bool) -> Outcome:
        """One run; if it fails, that is its outcome, but for mistakes in the very first."""
        from orchestra.cli.table import Outcome, judge
        from orchestra.engine import expression, warnings
        from orchestra.runs.budget import Epochs

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
                if not self.source.holds_recipe:  # a script may have other ends
                    chosen = dataclasses.replace(chosen, epochs=self.epochs)
                in_lab.run(str(self.source.path or self.source.name), chosen, nodes, self.lab, self.source.args)
                return judge(folder, seed, self.target)
            known = warnings.silent() if strategy in self.settings else nullcontext()
            with progress.choose(quiet=quiet, title=mark) as display, known:
                sources.train_recipe(
                    self.recipe,
                    chosen.changes(),
                    evaluate_every=Epochs(self.epochs / self.snapshots),
                    score_afterwards=True,
                    progress=display,
                    note=about | {"args": list(self.source.args)},
                )
        except Interrupted:
            raise
        except OrchestraError as error:
            if first and isinstance(error, ConfigError):
                raise  # nothing has run: better to say so than to fail as often as there are runs
            return Outcome(seed, folder, failed=_reason(error))
        return judge(folder, seed, self.target)

    def like(self, tuned: Race) -> Race:
        """The same race, every strategy with its setting in another."""
        return dataclasses.replace(self, strategies=tuned.strategies, settings=tuned.settings, tries=tuned.tries)

    def options_of(self, strategy: str, seed: int) -> Options:
        """The options of one run, but for its folder."""
        tuned = self.settings[strategy].options if strategy in self.settings else {}
        limit = {} if self.patience is None else {"seconds": self.patience}
        return options_for(strategy, self.shared, seed=seed, **tuned, **limit)

    def about(self) -> dict[str, Any]:
        """What is noted of it with each run, for whoever looks before there is a table."""
        from orchestra.report.verdict import baseline_of

        target = {"metric": self.target.metric, "value": self.target.value}
        return {"target": target, "baseline": baseline_of(self.strategies)}

    def told(self, outcome: Outcome) -> str:
        """How a run went, in a line."""
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
        """The figures of the runs so far."""
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
        return Table(*what, self._world(), self.shared.target is not None, bool(self.settings), self.settings)

    def fairness(self, table: Table) -> list[str]:
        """What all had in common, as the folders of the runs say."""
        return fairness.examine(table, self.settings, self.tries, self.shared.lr)

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
    from orchestra.worlds.shared_memory import fork_server

    if not shared.sim and lab is None and not source.holds_loop:
        fork_server.warm()
    from orchestra.engine import expression

    recipe, shared, problems = _read(source, texts, shared, lab)
    problems += [*_problems(texts, shared, seeds, out), *_unfit_for_lab(texts, shared, lab)]
    try:
        goal = goals.of_a_loop(target) if isinstance(recipe, Loop) else goals.choose(recipe, target)
        if lab is not None and goal.metric == loop_runs.TRAINING_LOSS:
            message = "the script itself runs there, and gives train() no evaluate= and evaluation_data= to compare by"
            problems.append(Problem("lab", lab, message))
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    names = tuple(dict.fromkeys(expression.show(expression.parse(text)) for text in texts))
    return Race(
        source, recipe, names, shared, seeds, goal, out or _new_folder(source.label), lab, candidates.fixed(texts)
    )


def _read(
    source: sources.Source, texts: list[str], shared: Options, lab: str | None
) -> tuple[Recipe | Loop, Options, list[Problem]]:
    """What is trained, with which options, and which of them cannot be."""
    if source.holds_loop:
        if problems := [*loop_runs.problems_of(source, shared, lab)]:
            raise ConfigError([*problems, *loop_runs.misfits(texts)])
        workers = shared.workers if shared.workers is not None else 2
        return Loop(source.label), dataclasses.replace(shared, workers=workers), loop_runs.misfits(texts)
    from orchestra.cli import scripts

    recipe = sources.load(source)
    shared = scripts.placed(recipe, shared)
    return recipe, shared, [*_endless(recipe, shared)]


def _problems(texts: list[str], shared: Options, seeds: int, out: Path | None) -> Iterator[Problem]:
    from orchestra.engine import checks, expression

    if not texts:
        yield Problem("strategies", "", f"name at least one, e.g. {DEFAULT}")
    if seeds < 1:
        yield Problem("seeds", seeds, "must be at least 1")
    if out is not None and repeat.is_taken(out):
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
    from orchestra.engine import expression

    if lab is None:
        return
    yield from in_lab.problems_of(lab, shared.workers or 1)
    if shared.sim:
        yield Problem("lab", lab, "is real, --sim is not: choose one")
    for text in texts:
        with suppress(ConfigError):  # told elsewhere
            layout = expression.parse(text).layout
            if layout.model_location == "shared" or (layout.servers and layout.colocated):
                yield Problem("strategies", text, "needs several nodes on one machine; a lab has a host for each")


def _endless(recipe: Recipe, shared: Options) -> Iterator[Problem]:
    """A script whose end cannot be told in samples: seconds are what is compared, and a stream has no length."""
    if shared.epochs is None and math.isnan(recipe.epochs):
        message = (
            "the script ends by seconds, a target or steps of a stream: say how many passes over the data each has"
        )
        yield Problem("epochs", None, message)


def options_for(strategy: str, shared: Options, **more: Any) -> Options:
    """The options of one run. A strategy that runs alone has one worker, and a machine that is not slow."""
    alone: dict[str, Any] = {"workers": 1} if is_solo(strategy) else {}
    slow = re.search(r"\s*\bslow:(\d+)x\S+", shared.delay or "")
    if alone and slow is not None and int(slow[1]) < (shared.workers or 1):
        alone["delay"] = (shared.delay or "").replace(slow[0], "")
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
