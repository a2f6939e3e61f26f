# SPDX-License-Identifier: Apache-2.0
"""`orchestra compare`: run strategies against each other, for real or in virtual time."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestra.cli import assumed, candidates, claims, goals, in_lab, loop_runs, repeat, sources, streams, tuning
from orchestra.cli import options as o
from orchestra.cli.cluster_options import refuse_under_launcher
from orchestra.cli.concluding import conclude
from orchestra.cli.loop_runs import Loop
from orchestra.cli.options import Options
from orchestra.cli.race import Race, options_for
from orchestra.errors import ConfigError, Problem

if TYPE_CHECKING:
    from orchestra.recipes.recipe import Recipe

DEFAULT = "allreduce,ps,localsgd,slowmo"


Name = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|SCRIPT",
        help="A recipe, or a .py file with a RECIPE in it or that calls orchestra.train or orchestra.prepare.",
        show_default=False,
    ),
]
Strategies = Annotated[str, o.comparison("--strategies", "-s", metavar="A,B,C", help="Separated by commas.")]
Seeds = Annotated[int, o.comparison(metavar="K", help="Runs of each strategy, with seeds 0 to K-1.")]
Lab = Annotated[
    str | None,
    o.cluster(
        metavar="RATE,LATENCY",
        help="Run in a lab: a network of hosts on this machine, one for each node, such as 100mbit,1ms or "
        "1gbit,0.2ms,cpu=0.5. Needs root: see orchestra lab.",
    ),
]
Rates = Annotated[
    str | None,
    o.comparison(metavar="A,B,C", help="Learning rates to try. Default: rates around the recipe's own."),
]
Tune = Annotated[
    bool,
    o.comparison(
        "--tune/--no-tune",
        help="Tune each strategy first, with equally many tries for all: the learning rate, the main option unless you "
        "give it (localsgd then races as localsgd(tau=4), say), and the momentum of asynchronous ones. --lr also "
        "switches it off.",
    ),
]
TuneReal = Annotated[
    bool, o.comparison("--tune-real", help="Tune on real processes, as the comparison runs. Default: in simulation.")
]
Claims = Annotated[
    list[str] | None,
    o.comparison(
        "--assert",
        metavar="CLAIM",
        help='End with code 9 unless it holds: "slowmo.time < allreduce.time", "ps.bytes <= 0.5 * allreduce.bytes". '
        "Figures: time, seconds, bytes, wait, age, final, reached.",
    ),
]
Goal = Annotated[
    str | None,
    o.comparison(
        metavar="SCORE=VALUE",
        help="The score to reach. Default: the recipe's or the script's own; if it has none, found by a first run.",
    ),
]


def compare(
    context: typer.Context, recipe: Name, args: o.Args = None,
    strategies: Strategies = DEFAULT, seeds: Seeds = 3, target: Goal = None, tune: Tune = True, lrs: Rates = None,
    tune_real: TuneReal = False, asserted: Claims = None,
    batch: o.Batch = None, lr: o.Lr = None, optimizer: o.Optimizer = None, schedule: o.Schedule = None,
    clip: o.Clip = None, precision: o.Precision = None, partition: o.Spread = None, epochs: o.Epochs = None,
    workers: o.Workers = None, device: o.Device = None,
    compute_time: o.ComputeTime = None, straggler: o.Straggler = None, lab: Lab = None,
    sim: o.Sim = False, network: o.Network = None,
    out: o.Out = None, trace: o.Trace = False, json_: o.Json = False, quiet: o.Quiet = False,
) -> None:  # fmt: skip
    r"""Compare strategies on the same model, samples and seeds: which reaches a target first, and at what cost.

    First the learning rate of every strategy is tuned, and its main option if none is given, with equally many tries
    for all and on other seeds. Then every strategy runs with every seed. The strategies take turns, so that a machine
    that becomes slow affects all of them. Snapshots of the model are scored after training, so scoring takes no time
    from a strategy. Ratios above 1 are faster than the baseline: allreduce if it takes part, else the first strategy.

    A script that calls orchestra.train runs once, up to the first such call; the rest of it does not run. Each strategy
    then trains with the arguments of that call. A script with its own loop, which calls orchestra.prepare, runs as a
    whole for each strategy, in real processes; optimizer.orchestra.score(accuracy=...) reports its scores. If neither
    the script nor --target gives a target, a first run of the baseline finds one.

    For example:

      orchestra compare digits --strategies allreduce,localsgd --seeds 3
      orchestra compare train.py -s allreduce,localsgd -- --your arguments
      orchestra compare digits -n 4 -s "ps, ps(consistency=asp()), slowmo(tau=8)"
      orchestra compare digits --sim -n 16 --network 10mbit,1ms --straggler 1x5
      orchestra compare digits --lab 10mbit,1ms -n 3 -s allreduce,localsgd
      orchestra compare digits --sim -n 8 --lrs 0.02,0.05,0.1 \
          --assert "slowmo.time < allreduce.time"
    """
    refuse_under_launcher("compare")
    fixed = "--no-tune" if not tune else "--lr" if lr is not None else None
    if problems := [*tuning.contradicts("lrs", lrs, fixed), *tuning.contradicts("tune-real", tune_real or None, fixed)]:
        raise ConfigError(problems)
    source = sources.find(recipe, args or ())
    shared = Options(
        workers=workers, epochs=epochs, batch=batch, lr=lr,
        optimizer=optimizer, schedule=schedule, clip=clip, partition=partition, precision=precision,
        device=device, sim=sim or None, network=network, compute_time=compute_time,
        straggler=straggler, trace=trace or None,
    )  # fmt: skip
    race = prepare(source, o.split_strategies(strategies), shared, seeds, target, out, lab)
    rates = () if lrs is None else tuning.read(lrs, source)
    for text in asserted or []:
        claims.parse(text, race.strategies)  # refuse a claim that cannot be read before anything runs
    with repeat.kept(context.obj, race.out):
        race = goals.settle(race, quiet=quiet)
        if fixed is None:
            race = tuning.Tuning(race, seeds, rates, real=tune_real, quiet=quiet).run()
        else:
            race = dataclasses.replace(race, tuning=fixed)
        said = [claims.parse(text, race.strategies) for text in asserted or []]
        table = race.run(quiet=quiet)
    beside = partial(assumed.tell_measured, race)
    fair = race.fairness(table)
    conclude(table, race.out, as_json=json_, quiet=quiet, fair=fair, asserted=said, beside=beside)


def prepare(
    source: sources.Source,
    texts: list[str],
    shared: Options,
    seeds: int,
    target: str | None,
    out: Path | None,
    lab: str | None = None,
    verb: str = "compare",
) -> Race:
    """Check everything before anything runs, or raise a `ConfigError` with every problem."""
    from orchestra.worlds.shared_memory import fork_server

    if not shared.sim and lab is None and not source.holds_loop:
        fork_server.warm()
    from orchestra.engine import expression

    recipe, shared, problems = _read(source, texts, shared, lab)
    problems += [*_problems(texts, shared, seeds, out), *_unfit_for_lab(texts, shared, lab)]
    try:
        goal = goals.of_a_loop(target) if isinstance(recipe, Loop) else goals.choose(recipe, target)
        if lab is not None and goal.metric == loop_runs.TRAINING_LOSS:
            message = "the script itself runs there: give its train() an evaluate= and evaluation_data= to compare by"
            problems.append(Problem("lab", lab, message))
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    names = tuple(dict.fromkeys(expression.show(expression.parse(text)) for text in texts))
    out = out or _new_folder(source.label, verb)
    what = (source, recipe, names, shared, seeds, goal, out, lab, candidates.fixed(texts))
    return Race(*what, stream=None if isinstance(recipe, Loop) else streams.samples_of(recipe.data))


def _read(
    source: sources.Source, texts: list[str], shared: Options, lab: str | None
) -> tuple[Recipe | Loop, Options, list[Problem]]:
    """Return what is trained, with which options, and their problems."""
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
        for problem in found:  # problems of shared options would be repeated for every strategy
            if str(problem) not in seen:
                seen.add(str(problem))
                yield problem


def _unfit_for_lab(texts: list[str], shared: Options, lab: str | None) -> Iterator[Problem]:
    """Yield what cannot run in a lab."""
    from orchestra.engine import expression

    if lab is None:
        return
    yield from in_lab.problems_of(lab, shared.workers or 1)
    if shared.sim:
        yield Problem("lab", lab, "is real, --sim is not: choose one")
    for text in texts:
        with suppress(ConfigError):  # reported elsewhere
            layout = expression.parse(text).layout
            if layout.model_location == "shared" or (layout.servers and layout.colocated):
                yield Problem("strategies", text, "needs several nodes on one machine; a lab has a host for each")


def _endless(recipe: Recipe, shared: Options) -> Iterator[Problem]:
    """Yield a problem if the script's end is unknown in samples: it ends by seconds, or in a stream without length."""
    if shared.epochs is None and math.isnan(recipe.epochs):
        message = "the script ends by seconds, a target or steps of a stream: give the number of passes over the data"
        yield Problem("epochs", None, message)


def _new_folder(label: str, verb: str) -> Path:
    stem = f"{time.strftime('%Y-%m-%d-%H%M%S')}-{verb}-{label}"
    return next(p for i in range(1, 1000) if not (p := Path("runs") / (stem + (f"-{i}" if i > 1 else ""))).exists())
