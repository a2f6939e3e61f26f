# SPDX-License-Identifier: Apache-2.0
"""`orchestra recommend`: rehearse the catalogue on a cluster one describes, and say which strategy to take, and why.

rung 0          every candidate of the catalogue, one seed; a run may take `_PATIENCE` times the best so far
rung 1, 2, ...  the faster half of them, twice as many seeds, until few are left
last            the first two again, on half and on twice the bandwidth: is it still the same one?
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestra.cli import again, concluding, sources, summary
from orchestra.cli import compare as racing
from orchestra.cli import options as o
from orchestra.cli.options import Options
from orchestra.errors import ConfigError, Problem

if TYPE_CHECKING:
    from orchestra.cli.table import Outcome, Row, Table

_PATIENCE = 3.0  # times the best so far that a run may take
_FEW = 3  # candidates that are not halved any more

Network = Annotated[
    str, typer.Option(metavar="RATE[,LATENCY]", help="The network between the machines, such as 50mbit or 1gbit,0.5ms.")
]
Straggler = Annotated[
    str | None, typer.Option(metavar="NxF", help="N of the workers are F times slower than the others: 1x5.")
]
Candidates = Annotated[
    str | None, typer.Option("--strategies", "-s", metavar="A,B,C", help="Only these. Default: the whole catalogue.")
]
Seeds = Annotated[int, typer.Option(metavar="K", help="Runs of each candidate in the last rung.")]


def recommend(
    context: typer.Context, recipe: racing.Name, network: Network, workers: o.Workers = None,
    straggler: Straggler = None, delay: o.Delay = None, target: racing.Goal = None, strategies: Candidates = None,
    seeds: Seeds = 4, epochs: o.Epochs = None, batch: o.Batch = None, lr: o.Lr = None, optimizer: o.Optimizer = None,
    out: o.Out = None, json_: o.Json = False, quiet: o.Quiet = False,
) -> None:  # fmt: skip
    """Say which strategy to take on a cluster you describe, and why: all are rehearsed there, in virtual time.

    Every strategy of the catalogue runs with several values of its main knob. The slower half is left out again and
    again, while those that stay are run with more seeds. Delays are those of one machine if you measured it:
    --delay FILE from `orchestra probe`.

    For example:

      orchestra recommend digits --network 50mbit --workers 16 --straggler 1x5
      orchestra recommend digits --network 1gbit,0.5ms -n 8 --delay "lognormal:0.02,0.3" --target accuracy=0.9
    """
    if straggler is not None:
        delay = f"{delay or o.DELAY} slow:{straggler}"
    shared = Options(
        workers=workers if workers is not None else 4, epochs=epochs, batch=batch, lr=lr, optimizer=optimizer,
        sim=True, network=network if "," in network else f"{network},0.5ms", delay=delay,
    )  # fmt: skip
    if seeds < 1:
        raise ConfigError([Problem("seeds", seeds, "must be at least 1")])
    source = sources.find(recipe)
    texts, unfit = _fit(o.split_strategies(strategies) if strategies else _catalogue(), shared)
    if not texts:
        raise ConfigError([Problem("strategies", text, why) for text, why in unfit.items()])
    race = racing.prepare(source, texts, shared, seeds, target, out)
    race = dataclasses.replace(race, shared=dataclasses.replace(shared, target=_text(race.target)))
    again.keep(context.obj, race.out)
    ladder = Ladder(race, seeds, quiet=quiet)
    ladder.climb()
    advice = Advice(ladder, unfit)
    concluding.save(advice.table, race.out)
    advice.tell(as_json=json_, quiet=quiet)
    if not advice.reached:
        raise typer.Exit(1)


def _text(target: Any) -> str:
    return f"{target.metric}={target.value:g}"


def _catalogue() -> list[str]:
    """What is worth a try, as the strategies say."""
    from orchestra.strategies import STRATEGIES

    return [text for cls in STRATEGIES for text in cls.tries]


def _fit(texts: list[str], shared: Options) -> tuple[list[str], dict[str, str]]:
    """Those that can run there; of the others, why not."""
    from orchestra import checks, expression

    fit, unfit = [], {}
    for text in texts:
        try:
            workers = racing.options_for(text, shared).workers or 1
            problems = list(checks.check_strategy(expression.parse(text), workers, shared.clip))
        except ConfigError as error:
            problems = list(error.problems)
        if problems:
            unfit[text] = problems[0].message
        else:
            fit.append(text)
    return fit, unfit


class Ladder:
    """The race, rung by rung."""

    def __init__(self, race: racing.Race, seeds: int, *, quiet: bool) -> None:
        self.race, self.seeds, self.quiet = race, seeds, quiet
        self.outcomes: dict[str, list[Outcome]] = {strategy: [] for strategy in race.strategies}
        self.left = list(race.strategies)

    def climb(self) -> None:
        """Run until few are left, with as many seeds as were asked for."""
        done = 0
        while True:
            last = len(self.left) <= _FEW
            upto = self.seeds if last else min(self.seeds, max(1, 2 * done))
            for seed in range(done, upto):
                for i, strategy in enumerate(self.left):
                    self._run(strategy, seed, f"{i + 1}/{len(self.left)}")
            done = max(done, upto)
            if last:
                return
            ranked = [row.strategy for row in self.table(self.left).ranked]
            self.left = ranked[: max(_FEW, math.ceil(len(ranked) / 2))]

    def table(self, strategies: list[str] | None = None) -> Table:
        """What is known so far."""
        wanted = strategies or list(self.outcomes)
        return self.race.table({strategy: self.outcomes[strategy] for strategy in wanted})

    def _run(self, strategy: str, seed: int, place: str) -> None:
        best = min((row.time for row in self.table().rows if row.always), default=math.inf)
        race = self.race
        if math.isfinite(best):
            race = dataclasses.replace(race, shared=dataclasses.replace(race.shared, seconds=_PATIENCE * best))
        mark = f"[{place}] {strategy} · seed {seed}"
        outcome = race.run_one(strategy, seed, mark, quiet=self.quiet, first=False)
        self.outcomes[strategy].append(outcome)
        if not self.quiet:
            summary.say(f"{mark}: {race.told(outcome)}")


@dataclass
class Advice:
    """What to do, in words."""

    ladder: Ladder
    unfit: dict[str, str]

    def __post_init__(self) -> None:
        self.table = self.ladder.table()
        self.finalists = [row for row in self.ladder.table(self.ladder.left).ranked if row.always]
        self.elsewhere = list(_elsewhere(self.ladder, self.finalists[:2])) if len(self.finalists) > 1 else []

    @property
    def reached(self) -> bool:
        """Whether there is anything to recommend."""
        return bool(self.finalists)

    def words(self) -> list[str]:
        """The advice, why, and how sure it is."""
        table = self.table
        if not self.finalists:
            near = table.ranked[0]
            return [
                f"Nothing reached {table.goal}; {near.strategy} came closest with {table.best(near):.4g}. "
                "Give more --epochs, a nearer --target or another --lr."
            ]
        first = self.finalists[0]
        base = table.row("allreduce")
        said = [f"Take {first.strategy}: it reached {table.goal} after {first.time:.3g} virtual s{_spread(first)}."]
        if base is not None and base is not first and base.always:
            said.append(f"allreduce took {base.time:.3g} s, {base.time / first.time:.2f} times as long.")
        said += [*_why(first, base), *self._doubt(first)]
        return said

    def _doubt(self, first: Row) -> Iterator[str]:
        """How sure that is."""
        from orchestra.report.verdict import pairs

        if len(self.finalists) > 1:
            second = self.finalists[1]
            mine, other = pairs(self.table.marks, first.strategy, second.strategy, lambda mark: mark.seconds)
            slower = sum(b > a for a, b in zip(mine, other, strict=True))
            yield (
                f"{second.strategy} is next: {second.time:.3g} s, {second.time / first.time:.2f} times as long; it was "
                f"slower in {slower} of {len(mine)} pairs of runs with equal seeds"
                + ("." if mine and slower == len(mine) else ", so the two are as good as equal.")
            )
        for condition, winner in self.elsewhere:
            same = "still first" if winner == first.strategy else f"{winner} would be first"
            yield f"With {condition}, {same}."
        yield (
            "Rehearsed, not measured: the order of strategies that are far apart can be relied on, a few per cent "
            "between two cannot. Check with `orchestra compare` on the machines themselves."
        )

    def tell(self, *, as_json: bool, quiet: bool) -> None:
        """Print it."""
        words = self.words()
        if as_json:
            record = self.table.as_record() | {"advice": words, "unfit": self.unfit, "out": str(self.ladder.race.out)}
            summary.print_json(record | {"recommended": self.finalists[0].strategy if self.finalists else None})
            return
        concluding.show(self.table, [])
        console = summary.console_for(100)
        for sentence in words:
            console.print(sentence)
        if not quiet:
            left_out = "; ".join(f"{text} ({why})" for text, why in self.unfit.items())
            summary.say(f"\nnot tried: {left_out}" if left_out else "")
            summary.say(f"next: orchestra report {summary.nearby(self.ladder.race.out)}")


def _spread(row: Row) -> str:
    if len(row.times) < 2:
        return " (one seed)"
    low, high = row.interval
    return f" ({low:.3g} to {high:.3g} over {len(row.times)} seeds)"


def _why(first: Row, base: Row | None) -> Iterator[str]:
    """From where the time went."""
    shares = _shares(first)
    yield (
        f"Its workers compute {shares['compute']:.0%} of the time, send and receive {shares['communicate']:.0%} and "
        f"wait for others {shares['wait']:.0%}."
    )
    if base is None or base is first or not base.done:
        return
    theirs = _shares(base)
    steps = [(row, row.mean("steps") or 1) for row in (first, base)]
    mine, other = (row.traffic / count for row, count in steps)
    lost = max(("communicate", "wait"), key=lambda kind: theirs[kind] - shares[kind])
    if theirs[lost] - shares[lost] > 0.05:
        what = "sending and receiving" if lost == "communicate" else "waiting for the slowest"
        yield f"With allreduce they spend {theirs[lost]:.0%} of it {what}."
    if mine and mine < 0.8 * other:
        yield f"It moves {other / mine:.1f} times fewer bytes a step."
    stale = first.mean("staleness_mean")
    if stale:
        yield f"The price: gradients are {stale:.1f} updates old on average when they are used."


def _shares(row: Row) -> dict[str, float]:
    kinds = ("compute", "communicate", "wait")
    return {kind: sum(facts.share(kind) for facts in row.done) / max(1, len(row.done)) for kind in kinds}


def _elsewhere(ladder: Ladder, rows: list[Row]) -> Iterator[tuple[str, str]]:
    """Who would be first if the network were not as it is said to be."""
    from orchestra.cli.sweep import under

    race, rate = ladder.race, (ladder.race.shared.network or o.NETWORK).split(",")[0]
    for factor, words in ((0.5, "half the bandwidth"), (2.0, "twice the bandwidth")):
        shared = under(race.shared, (("bandwidth", _scaled(rate, factor)),))
        there = dataclasses.replace(race, shared=shared, out=race.out / words.replace(" ", "-"))
        found = {row.strategy: [there.run_one(row.strategy, 0, words, quiet=True, first=False)] for row in rows}
        ranked = there.table(found).ranked
        if ranked[0].always:
            yield words, ranked[0].strategy


def _scaled(rate: str, factor: float) -> str:
    digits = rate.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ/")
    return f"{float(digits) * factor:g}{rate[len(digits) :]}"
