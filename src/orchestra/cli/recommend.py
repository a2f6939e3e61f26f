# SPDX-License-Identifier: Apache-2.0
"""`orchestra recommend`: simulate the catalogue on a described cluster, and recommend a strategy, with reasons.

rungs           successive halving of the catalogue: see halving
last            the first two again with all seeds, on half and on twice the bandwidth: is it still the same one?
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestra.cli import assumed, concluding, described, goals, loop_runs, repeat, sources, summary
from orchestra.cli import compare as racing
from orchestra.cli import options as o
from orchestra.cli.halving import GIVEN_UP, USUAL_SHARE, SuccessiveHalving, is_given_up, runs
from orchestra.cli.options import Options
from orchestra.cli.race import Race, options_for
from orchestra.cli.tuning import Tuning
from orchestra.errors import ConfigError, Problem
from orchestra.formatting import plural
from orchestra.report import escaping

if TYPE_CHECKING:
    from orchestra.cli.table import Outcome, StrategyRow, Table

_ERROR, _ERROR_OF_A_TENTH = (
    0.062,
    0.259,
)  # of a step, from rates and latencies alone: benchmarks/results/lab_prediction-2-cores.md

Network = Annotated[
    str | None,
    o.cluster(
        metavar="RATE[,LATENCY]",
        help="The network between the machines, such as 50mbit or 1gbit,0.5ms. Required, except for a script with its "
        "own loop, which runs on this machine.",
    ),
]
Candidates = Annotated[
    str | None, o.comparison("--strategies", "-s", metavar="A,B,C", help="Only these. Default: the whole catalogue.")
]
Seeds = Annotated[int, o.comparison(metavar="K", help="Seeds of each candidate in the last round.")]


def recommend(
    context: typer.Context, recipe: racing.Name, args: o.Args = None,
    network: Network = None, workers: o.Workers = None,
    compute_time: o.ComputeTime = None, straggler: o.Straggler = None,
    strategies: Candidates = None, seeds: Seeds = 4, target: racing.Goal = None, tune: racing.Tune = True,
    batch: o.Batch = None, lr: o.Lr = None, optimizer: o.Optimizer = None, epochs: o.Epochs = None,
    out: o.Out = None, json_: o.Json = False, quiet: o.Quiet = False,
) -> None:  # fmt: skip
    """Recommend a strategy for a cluster that you describe, and say why: all are simulated there, in virtual time.

    Every strategy of the catalogue is simulated with several values of its main option. Each is tuned with equally many
    tries: the learning rate, for asynchronous strategies also the momentum, and for strategies that you name also the
    main option, unless you give it. In each round the slower half is dropped, and the others run with more seeds.
    `orchestra probe` measures the compute times of a machine; pass its file: --compute-time FILE.

    A script with its own loop cannot be simulated: its candidates run on this machine, in real time, to their end.

    For example:

      orchestra recommend digits --network 50mbit --workers 16 --straggler 1x5
      orchestra recommend digits --network 1gbit,0.5ms -n 8 --target accuracy=0.9
      orchestra recommend loop.py -n 2 -s "allreduce,localsgd,slowmo,ps"
    """
    source = sources.find(recipe, args or ())
    usual = 2 if source.holds_loop else 4
    shared = Options(
        workers=workers if workers is not None else usual, epochs=epochs, batch=batch, lr=lr, optimizer=optimizer,
        sim=None if source.holds_loop else True, network=described.network(network, source),
        compute_time=compute_time, straggler=straggler,
    )  # fmt: skip
    if seeds < 1:
        raise ConfigError([Problem("seeds", seeds, "must be at least 1")])
    listed = o.split_strategies(strategies) if strategies else _catalogue()
    texts, unfit = _fit(listed, shared, loop=source.holds_loop)
    if not texts:
        raise ConfigError([Problem("strategies", text, why) for text, why in unfit.items()])
    race = racing.prepare(source, texts, shared, seeds, target, out, verb="recommend")
    with repeat.kept(context.obj, race.out):
        race = goals.settle(race, quiet=quiet)
    if not strategies:  # the catalogue has several values of each main option
        race = dataclasses.replace(race, fixed=frozenset(race.strategies))
    if shared.sim:  # the same budget for all; a slow one may be given up earlier
        shared = dataclasses.replace(race.shared, epochs=race.epochs, target=_text(race.target))
        race = dataclasses.replace(race, shared=shared)
    fixed = "--no-tune" if not tune else "--lr" if lr is not None else None
    race = _tuned(race, seeds, quiet=quiet) if fixed is None else dataclasses.replace(race, tuning=fixed)
    ladder = SuccessiveHalving(race, seeds, quiet=quiet)
    ladder.climb()
    advice = Advice(ladder, unfit)
    advice.save()
    advice.save_page()
    advice.tell(as_json=json_, quiet=quiet)
    if not advice.reached:
        raise typer.Exit(1)


def _tuned(race: Race, seeds: int, *, quiet: bool) -> Race:
    worth = runs(len(race.strategies), seeds, race) / len(race.strategies)
    return Tuning(race, worth, quiet=quiet, share_of_epochs=USUAL_SHARE if race.shared.sim else 1.0).run()


def _text(target: Any) -> str:
    return f"{target.metric}={target.value:g}"


def _catalogue() -> list[str]:
    """Return the candidates of the catalogue."""
    from orchestra.strategies.catalogue import rows

    return [text for row in rows() for text in row.search_space]


def _fit(texts: list[str], shared: Options, *, loop: bool = False) -> tuple[list[str], dict[str, str]]:
    """Return the strategies that can run on the cluster, and for the others why not."""
    from orchestra.engine import checks, expression

    fit, unfit = [], {}
    for text in texts:
        try:
            workers = options_for(text, shared).workers or 1
            problems = list(checks.check_strategy(expression.parse(text), workers, shared.clip))
            problems += loop_runs.misfits([text]) if loop else []
        except ConfigError as error:
            problems = list(error.problems)
        if problems:
            unfit[text] = problems[0].message
        else:
            fit.append(text)
    return fit, unfit


@dataclass
class Advice:
    """The recommendation, in words."""

    ladder: SuccessiveHalving
    unfit: dict[str, str]

    def __post_init__(self) -> None:
        from orchestra.cli import ties

        ladder, self.all = self.ladder, self.ladder.table()
        table = ladder.table(ladder.left)
        # Candidates that were dropped after few seeds are not ranked among those with all seeds.
        baseline = table.baseline if table.baseline in ladder.left else table.ranked[0].strategy
        self.table = dataclasses.replace(table, baseline=baseline)
        others = [row for row in self.all.ranked if row.strategy not in ladder.left]
        self.others = sorted(others, key=lambda row: -len(row.outcomes))
        self.finalists, self.tied = ties.arranged(self.table)
        simulated = ladder.race.shared.sim and len(self.finalists) > 1
        self.elsewhere = [*_elsewhere(ladder, self.finalists[:2])] if simulated else []

    @property
    def reached(self) -> bool:
        """Whether there is a strategy to recommend."""
        return bool(self.finalists)

    def words(self) -> list[str]:
        """Return the recommendation, its reasons, and its uncertainty."""
        from orchestra.cli import lessons, ties

        table = self.table
        if not self.finalists:
            near = table.ranked[0]
            how = f"came closest with {table.best(near):.4g}"
            if near.times:
                how = f"did in {len(near.times)} of {len(near.outcomes)}"
            advice = lessons.train_longer(table)
            return [f"Nothing reached {table.goal} in every run; {near.strategy} {how}. {advice}"]
        first = self.finalists[0]
        base = self.all.row("allreduce") if first.strategy != "allreduce" else None
        said = [f"Take {first.strategy}: it reached {table.goal} after {first.time:.3g} {table.unit}{_spread(first)}."]
        said = [ties.recommended(self.tied, table.goal, table.unit)] if self.tied else said
        if first.strategy in self.ladder.race.settings:
            said.append(f"Run it with the tuned setting: {self.ladder.race.settings[first.strategy]}.")
        if base is not None and base.strategy not in self.ladder.left:
            lead = _lead(self.all, first.strategy, base.strategy) if base.always else None
            said.append(f"allreduce took {lead}." if lead else f"allreduce {_missed(self.all, base)}.")
        from orchestra.cli.reasons import why

        return [*said, *why(self.all, first), *self._doubt(first)]

    def _doubt(self, first: StrategyRow) -> Iterator[str]:
        """Yield how certain the recommendation is."""
        if others := [row for row in self.finalists[1:] if row not in self.tied]:
            lead = _lead(self.table, first.strategy, others[0].strategy)
            yield f"{others[0].strategy} is next: it took {lead or 'as long'}."
        yield from (f"{row.strategy} {_missed(self.table, row)}." for row in self.table.ranked if not row.always)
        yield from self.elsewhere
        if not self.ladder.race.shared.sim:
            yield (
                "Measured on this machine, which all processes share: on separate machines, with a network between "
                "them, the order may differ. Check with `orchestra launch --hosts FILE -- run ...` there."
            )
            return
        if self.table.assumes:
            yield self.table.assumes
        yield (
            "Simulated, not measured: between hosts of a lab, the step time predicted from rates and latencies alone "
            f"had a median error of {_ERROR:.0%}, and of more than {_ERROR_OF_A_TENTH:.0%} in one case of ten. "
            "Smaller differences are undecided: check with `orchestra compare` on the machines themselves."
        )

    def left_out(self) -> list[str]:
        """Return the candidates dropped before the last rung, with their last results."""
        return [
            f"{row.strategy}: "
            + (f"{row.time:.3g} s" if row.always else _missed(self.all, row))
            + f" ({plural(len(row.outcomes), 'seed')})"
            for row in self.others
        ]

    def record(self) -> dict[str, Any]:
        """Return all figures, down to single runs; the candidates of the last rung come first."""
        found = self.all.as_record()
        missed = [row for row in self.table.ranked if not row.always]
        place = {row.strategy: i for i, row in enumerate([*self.finalists, *missed, *self.others])}
        found["rows"].sort(key=lambda row: place[row["strategy"]])
        return found | {
            "recommended": self.finalists[0].strategy if self.finalists else None,
            "tied": [row.strategy for row in self.tied],
            "advice": self.words(),
            "learned": self.words(),
            "fairness": self.ladder.race.fairness(self.table),
            "given_up": {
                row.strategy: seeds
                for row in self.all.rows
                if (seeds := [outcome.seed for outcome in row.outcomes if is_given_up(outcome)])
            },
            "unfit": self.unfit,
            "out": str(self.ladder.race.out),
        }

    def save(self) -> None:
        """Write the recommendation to the folder of the runs."""
        from orchestra.engine import checkpoint

        out, left_out = self.ladder.race.out, "".join(f"\n- {escaping.markdown(line)}" for line in self.left_out())
        record = json.dumps(summary.finite(self.record()), indent=1, ensure_ascii=False)
        checkpoint.write_text(out / "table.json", record + "\n")
        text = f"{self.table.markdown()}\n{escaping.markdown(' '.join(self.words()))}\n"
        fair = "".join(f"\n- {escaping.markdown(point)}" for point in self.ladder.race.fairness(self.table))
        left_out = f"\nLeft out earlier:\n{left_out}\n" if left_out else ""
        checkpoint.write_text(out / "table.md", f"{text}{fair}\n{left_out}")

    def save_page(self) -> None:
        """Write the page: the report of the last rung, with the words of the recommendation."""
        from orchestra.engine import checkpoint
        from orchestra.report import model, page

        folders = [row.outcomes[0].run.parent for row in self.table.ranked if row.done]
        if not folders:
            return
        found = model.build(folders, target=self.table.target)
        first, *why = self.words()
        if self.others:
            why.append(f"Left out earlier: {'; '.join(self.left_out())}.")
        found["verdict"]["sentence"] = first
        found |= {"why": why, "fairness": self.ladder.race.fairness(self.table)}
        checkpoint.write_text(self.ladder.race.out / concluding.PAGE, page.write(found))

    def command(self) -> str:
        """Return the command that trains as recommended."""
        race, first = self.ladder.race, self.finalists[0].strategy
        source, setting = race.source, race.settings.get(first)
        chosen = options_for(first, dataclasses.replace(race.shared, epochs=None))
        given: dict[str, Any] = {
            "-s": first,
            "-n": chosen.workers,
            "--batch": chosen.batch,
            "--optimizer": chosen.optimizer,
        }
        given |= {"--lr": chosen.lr} if race.shared.lr is not None else {}
        if setting is not None and math.isnan(setting.rate):
            given |= {"--lr-factor": f"{setting.factor:.3g}"} if setting.factor != 1 else {}
        elif setting is not None:
            given |= {
                "--lr": f"{setting.rate:.3g}",
                "--momentum": None if setting.momentum is None else f"{setting.momentum:g}",
            }
        if race.epochs != race.recipe.epochs and not math.isnan(race.epochs):
            given["--epochs"] = f"{race.epochs:g}"
        words = [f"{name} {shlex.quote(str(value))}" for name, value in given.items() if value is not None]
        what = source.name if source.path is None else summary.nearby(source.path)
        args = f" -- {shlex.join(source.args)}" if source.args else ""
        return f"orchestra run {shlex.quote(what)} {' '.join(words)}{args}"

    def tell(self, *, as_json: bool, quiet: bool) -> None:
        """Print the recommendation."""
        if as_json:
            summary.print_json(self.record())
            return
        concluding.show(self.table, [], self.ladder.race.fairness(self.table))
        console = concluding.console_of_table()
        if self.others:
            console.print("\nleft out earlier: " + "; ".join(self.left_out()), style="dim")
        first, *more = self.words()
        console.print(f"\n{first}\n")
        for sentence in more:
            console.print(sentence)
        if not quiet:
            assumed.tell_measured(self.ladder.race)
            unfit = "; ".join(f"{text} ({why})" for text, why in self.unfit.items())
            summary.say(f"\nnot tried: {unfit}" if unfit else "")
            out = summary.nearby(self.ladder.race.out)
            summary.say(f"saved: {out}/{concluding.PAGE}, table.md and table.json\nnext: open {out}/{concluding.PAGE}")
            if self.reached:
                summary.say(f"  or  {self.command()}")


def _lead(table: Table, first: str, other: str) -> str | None:
    """Return how many times as long another took, seed by seed; None unless both always reached the target."""
    from orchestra.report.verdict import interval, is_useless, lead

    e = lead(table.marks, first, other)
    if e is None:
        return None
    unsure = ", which may be chance" if e.includes(1.0) and not is_useless(e) else ""
    return f"{e.value:.2f} times as long ({interval(e)}{unsure})"


def _missed(table: Table, row: StrategyRow) -> str:
    """Return the result of a candidate that did not always reach the target."""
    if not row.done:
        return "failed"
    if not row.times and row.unlearned is not None:
        return row.unlearned
    runs, missed = len(row.outcomes), len(row.outcomes) - len(row.times)
    how = f"was {GIVEN_UP}" if any(map(is_given_up, row.outcomes)) else "did not reach the target"
    often = f" in {missed} of {runs} runs" if runs > 1 else ""
    return f"{how}{often}, {table.target.metric} {table.best(row):.4g}"


def _spread(row: StrategyRow) -> str:
    if len(row.times) < 2:
        return " (one seed)"
    low, high = row.interval
    return f" ({low:.3g} to {high:.3g} over {len(row.times)} seeds)"


def _elsewhere(ladder: SuccessiveHalving, rows: list[StrategyRow]) -> Iterator[str]:
    """Yield which candidate is first on other networks. These runs are not kept: their cluster is another one."""
    from orchestra.cli.sweep import under

    race, rate = ladder.race, (ladder.race.shared.network or o.NETWORK).split(",")[0]
    aside = race.out / "elsewhere"
    try:
        for factor, words in ((0.5, "half the bandwidth"), (2.0, "twice the bandwidth")):
            shared = under(race.shared, (("bandwidth", _scaled(rate, factor)),))
            there = dataclasses.replace(race, shared=shared, out=aside / words.replace(" ", "-"))
            found: dict[str, list[Outcome]] = {row.strategy: [] for row in rows}
            for seed, row in itertools.product(range(ladder.seeds), rows):
                found[row.strategy].append(ladder.run_one(there, row.strategy, seed, words))
            yield f"With {words}, {_first(there.table(found))}."
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _first(table: Table) -> str:
    """Return which of two candidates is first, and by how much."""
    from orchestra.report.verdict import tied

    first, second = table.ranked
    if not first.always:
        return "neither reaches the target in every run"
    if len(tied(table.marks, table.target)) > 1:
        return f"{first.strategy} and {second.strategy} are tied"
    lead = _lead(table, first.strategy, second.strategy)
    return f"{first.strategy} is first: {second.strategy} " + (f"took {lead}" if lead else _missed(table, second))


def _scaled(rate: str, factor: float) -> str:
    digits = rate.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ/")
    return f"{float(digits) * factor:g}{rate[len(digits) :]}"
