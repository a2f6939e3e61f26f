# SPDX-License-Identifier: Apache-2.0
"""`orchestra sweep`: which strategy is first under which conditions."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestra.cli import compare as racing
from orchestra.cli import concluding, fairness, goals, repeat, sources, summary, tuning
from orchestra.cli import options as o
from orchestra.cli.cluster_options import refuse_under_launcher
from orchestra.cli.options import Options
from orchestra.cli.race import Race
from orchestra.errors import ConfigError, Problem, nearest
from orchestra.formatting import plural
from orchestra.report import escaping

if TYPE_CHECKING:
    from orchestra.cli.table import StrategyRow, Table

Grid = Annotated[
    list[str],
    o.comparison(
        metavar="AXIS=A,B,C",
        help="Values to try; several axes are crossed. bandwidth, latency (with --sim), straggler (1x5), "
        "workers, batch, lr.",
    ),
]
Values = tuple[tuple[str, str], ...]  # the value of each axis in a condition
TuneEach = Annotated[bool, o.comparison("--tune-each", help="Tune under each condition. Default: under the first one.")]


def sweep(
    context: typer.Context, recipe: racing.Name, grid: Grid, args: o.Args = None,
    strategies: racing.Strategies = racing.DEFAULT, seeds: racing.Seeds = 1, target: racing.Goal = None,
    tune: racing.Tune = True, tune_each: TuneEach = False, tune_real: racing.TuneReal = False,
    batch: o.Batch = None, lr: o.Lr = None, optimizer: o.Optimizer = None, schedule: o.Schedule = None,
    clip: o.Clip = None, partition: o.Spread = None, epochs: o.Epochs = None,
    workers: o.Workers = None, device: o.Device = None,
    compute_time: o.ComputeTime = None, straggler: o.Straggler = None,
    sim: o.Sim = False, network: o.Network = None,
    out: o.Out = None, json_: o.Json = False, quiet: o.Quiet = False,
) -> None:  # fmt: skip
    r"""Compare strategies under every condition of a grid, and print which is first in each.

    Each condition is a comparison as `orchestra compare` makes it, in its own folder. The table has a row for each
    strategy and a column for each condition, with the seconds to the target. The first of each column is marked, or
    several if they are tied. Learning rates are tuned once for each strategy, under the first condition, as `compare`
    does. Scripts run as in `orchestra compare`; for a script with its own loop only the workers can vary.

    For example:

      orchestra sweep digits --sim -n 8 --grid bandwidth=10mbit,1gbit \
          --grid straggler=1x1,1x5
      orchestra sweep digits --sim --grid workers=2,4,8,16 -s allreduce,ps,slowmo
    """
    refuse_under_launcher("sweep")
    axes = [_axis(text) for text in grid]
    base = Options(
        workers=workers, epochs=epochs, batch=batch, lr=lr,
        optimizer=optimizer, schedule=schedule, clip=clip, partition=partition, device=device,
        sim=sim or None, network=network, compute_time=compute_time, straggler=straggler,
    )  # fmt: skip
    fixed = "--no-tune" if not tune else "--lr" if lr is not None else "--grid lr=..." if "lr" in dict(axes) else None
    if problems := [*_problems(axes, sim, network, out), *tuning.contradicts("tune-each", tune_each or None, fixed)]:
        raise ConfigError(problems)
    source, texts = sources.find(recipe, args or ()), o.split_strategies(strategies)
    folder = out or Path("runs") / f"{time.strftime('%Y-%m-%d-%H%M%S')}-sweep-{source.label}"
    races = [
        (values, racing.prepare(source, texts, under(base, values), seeds, target, folder / _slug(values)))
        for values in _conditions(axes)
    ]
    with repeat.kept(context.obj, folder):
        settled = goals.settle(races[0][1], quiet=quiet)  # one target for all conditions
    found = settled.chosen_target
    races = [
        (values, replace(race, target=settled.target, chosen_target=found, tuning=fixed or ""))
        for values, race in races
    ]
    if not tune_each and fixed is None:
        races = _tuned_once(races, folder, real=tune_real, quiet=quiet)
    best = partial(_tuned, real=tune_real, quiet=quiet) if tune_each else lambda race: race
    _conclude(_run(races, folder, best, quiet=quiet), folder, as_json=json_, quiet=quiet)


def _tuned(race: Race, *, real: bool, quiet: bool) -> Race:
    return tuning.Tuning(race, race.seeds, real=real, quiet=quiet).run()


def _run(
    races: list[tuple[Values, Race]], folder: Path, best: Callable[[Race], Race], *, quiet: bool
) -> list[Condition]:
    """Run one comparison after the other; Ctrl-C keeps the table of those that are done."""
    found: list[Condition] = []
    try:
        for values, race in races:
            if not quiet:
                summary.say(f"condition {len(found) + 1} of {len(races)}: {_words(values)}")
            tuned = best(race)
            table = tuned.run(quiet=quiet)
            concluding.save(table, race.out, tuned.fairness(table))
            found.append(Condition(values, table, fairness.rates(tuned)))
    except KeyboardInterrupt:
        _stopped(found, folder)
        raise
    return found


def _tuned_once(
    races: list[tuple[Values, Race]], folder: Path, *, real: bool, quiet: bool
) -> list[tuple[Values, Race]]:
    """Return the same races, each strategy with its best setting under the first condition."""
    first = replace(races[0][1], out=folder)
    tuned = tuning.Tuning(first, first.seeds * len(races), real=real, quiet=quiet).run()
    return [(values, race.like(tuned)) for values, race in races]


def _stopped(found: list[Condition], folder: Path) -> None:
    """Save the comparisons that are done."""
    if found:
        _save(found, folder)
        summary.say(f"{plural(len(found), 'condition')} done, in {summary.nearby(folder)}/sweep.md")


# Axes.


def _axis(text: str) -> tuple[str, list[str]]:
    name, _, values = text.partition("=")
    return name.strip(), [value.strip() for value in values.split(",") if value.strip()]


def _problems(axes: list[tuple[str, list[str]]], sim: bool, network: str | None, out: Path | None) -> Iterator[Problem]:
    if out is not None and repeat.is_taken(out):
        yield Problem("out", str(out), "is not empty: choose a new folder")
    seen: set[str] = set()
    for name, values in axes:
        if name not in _AXES:
            yield Problem("grid", name, f"is not an axis; {nearest(name, _AXES)}")
        elif name in ("bandwidth", "latency") and not sim:
            yield Problem("grid", name, "needs --sim: the network of this machine cannot be changed")
        elif name in ("bandwidth", "latency") and (network or "").split(" ")[0].endswith((".json", ".yaml", ".yml")):
            yield Problem("grid", name, f"needs a network such as {o.NETWORK}, not a file: {network}")
        if len(set(values)) < len(values):
            yield Problem("grid", f"{name}={','.join(values)}", "names a value twice")
        if name in seen:
            yield Problem("grid", name, "is given twice: put its values in one list")
        seen.add(name)
        if not values:
            yield Problem("grid", f"{name}=", "needs values, e.g. straggler=1x1,1x5")
        for value in values if name in ("workers", "batch") else []:
            if not value.isdigit() or int(value) < 1:
                yield Problem("grid", f"{name}={value}", "must be a whole number of at least 1")
        for value in values if name in ("straggler", "lr") else []:
            if not _is_positive(value.rpartition("x")[2] if name == "straggler" else value):
                yield Problem("grid", f"{name}={value}", "must be a finite number above 0")


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _conditions(axes: list[tuple[str, list[str]]]) -> Iterator[Values]:
    for values in itertools.product(*(values for _, values in axes)):
        yield tuple(zip((name for name, _ in axes), values, strict=True))


def under(base: Options, values: Values) -> Options:
    """Return the options of one condition."""
    for name, value in values:
        base = _AXES[name](base, value)
    return base


def _bandwidth(base: Options, value: str) -> Options:
    first, *more = (base.network or o.NETWORK).split()
    return replace(base, network=" ".join([",".join([value, *first.split(",")[1:]]), *more]))


def _latency(base: Options, value: str) -> Options:
    first, *more = (base.network or o.NETWORK).split()
    rate, _, *rest = [*first.split(","), "0s"][: max(2, first.count(",") + 1)]
    return replace(base, network=" ".join([",".join([rate, value, *rest]), *more]))


def _straggler(base: Options, value: str) -> Options:
    return replace(base, straggler=value if "x" in value else f"1x{value}")


_AXES: dict[str, Callable[[Options, str], Options]] = {
    "bandwidth": _bandwidth,
    "latency": _latency,
    "straggler": _straggler,
    "workers": lambda base, value: replace(base, workers=int(value)),
    "batch": lambda base, value: replace(base, batch=int(value)),
    "lr": lambda base, value: replace(base, lr=float(value)),
}


def _words(values: Values) -> str:
    return ", ".join(f"{name} {value}" for name, value in values)


def _slug(values: Values) -> str:
    return "-".join(f"{name}-{value}" for name, value in values)


# The outcome.


@dataclass(frozen=True)
class Condition:
    """One comparison of the sweep."""

    values: Values
    table: Table
    rates: str = ""  # whether they were tuned, and what was found

    @cached_property
    def first(self) -> list[str]:
        """The strategies that always reached the target and are first or tied with the first."""
        from orchestra.report.verdict import firsts

        return firsts(self.table.marks, self.table.target)

    def cell(self, strategy: str) -> str:
        """Return the seconds to the target, marked if the strategy is first."""
        row = self.table.row(strategy)
        if row is not None and not row.times and row.unlearned is not None:
            return row.unlearned.partition(" (")[0]
        if row is None or not row.times:
            return "not reached" if row is not None and row.done else "failed"
        incomplete = " !" if row.incomplete else ""
        return _seconds(row) + incomplete + (" ◂" if strategy in self.first else "")


def _seconds(row: StrategyRow) -> str:
    missed = "" if row.always else f" ({len(row.times)}/{len(row.outcomes)})"
    return f"{row.time:.3g} s{missed}"


def _save(found: list[Condition], out: Path) -> dict[str, Any]:
    """Write the table and all figures, and return the figures."""
    head, rows = _cells(found)
    rates = "".join(f"\n- {escaping.markdown(text)}" for text in _rates(found))
    text = f"{escaping.markdown(_title(found))}\n\n{escaping.table([head, *rows])}\n{rates}\n"
    record: dict[str, Any] = {
        "recipe": found[0].table.recipe,
        "rates": _rates(found),
        "conditions": [
            {"values": dict(c.values), "first": c.first, "table": c.table.as_record()} for c in found
        ],
        "out": str(out),
    }  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    (out / "sweep.md").write_text(text, encoding="utf-8")
    (out / "sweep.json").write_text(json.dumps(summary.finite(record), indent=1), encoding="utf-8")
    if any(row.done for condition in found for row in condition.table.rows):
        concluding.write_page(out, found[0].table.target)
    return record


def _rates(found: list[Condition]) -> list[str]:
    """Whether strategies were tuned, and what was found: in a line for all conditions, or one for each."""
    alike = [*dict.fromkeys(condition.rates for condition in found)]
    return alike if len(alike) == 1 else [f"{_words(condition.values)}: {condition.rates}" for condition in found]


def _title(found: list[Condition]) -> str:
    table = found[0].table
    virtual = "virtual " if table.world else ""
    tie = ", several: a tie" if any(len(condition.first) > 1 for condition in found) else ""
    return f"{table.recipe} · {virtual}seconds to {table.aim}, {table.tuning}; ◂ first under that condition{tie}"


def _cells(found: list[Condition]) -> tuple[list[str], list[list[str]]]:
    head = ["strategy", *(" · ".join(f"{name} {value}" for name, value in c.values) for c in found)]
    strategies = [row.strategy for row in found[0].table.rows]
    return head, [[strategy, *(condition.cell(strategy) for condition in found)] for strategy in strategies]


def _conclude(found: list[Condition], out: Path, *, as_json: bool, quiet: bool) -> None:
    """Save everything, print the table, and fail if a run failed."""
    record = _save(found, out)
    _print(found, out, record, as_json=as_json, quiet=quiet)
    if any(row.failures for condition in found for row in condition.table.rows):
        raise typer.Exit(1)


def _print(found: list[Condition], out: Path, record: dict[str, Any], *, as_json: bool, quiet: bool) -> None:
    from rich.table import Table as Grid

    head, rows = _cells(found)
    if as_json:
        summary.print_json(record)
        return
    console = summary.console_for(20 + 16 * len(head))
    table = Grid(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for i, heading in enumerate(head):
        table.add_column(heading, justify="left" if i == 0 else "right", no_wrap=i == 0, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(f"\n{_title(found)}\n", style="bold")
    console.print(table)
    for sentence in _learned(found):
        console.print(sentence)
    console.print("\n" + "\n".join(_rates(found)), style="dim", markup=False)
    if not quiet:
        where = summary.nearby(out)
        summary.say(f"\nsaved: {where}/{concluding.PAGE}, sweep.md and sweep.json")
        summary.say(f"next: open {where}/{concluding.PAGE}")


def _learned(found: list[Condition]) -> list[str]:
    incomplete = {row.strategy for c in found for row in c.table.rows if row.incomplete}
    alone = [f"! {strategy} never did what defines it: figures of its first part alone." for strategy in incomplete]
    return [*_verdict(found), *sorted(alone)]


def _verdict(found: list[Condition]) -> list[str]:
    """Return the verdict of the report on the same runs."""
    from orchestra.report.verdict import judge

    table = found[0].table
    marks = [replace(mark, condition=_words(c.values)) for c in found for mark in c.table.marks]
    judged = judge(marks, table.target, table.target.metric, table.unit, table.baseline)
    missed = not any(c.first for c in found)
    return ["", judged.sentence, *judged.doubts, *(["Give more --epochs or a nearer --target."] if missed else [])]
