# SPDX-License-Identifier: Apache-2.0
"""The findings of a comparison in sentences, and how far they can be trusted: pure functions of its table."""

from __future__ import annotations

from orchestra.cli import reasons, ties
from orchestra.cli.table import StrategyRow, Table
from orchestra.formatting import listed, plural, size
from orchestra.report.verdict import CHANCE, judge


def verdict(table: Table, cores: int | None) -> list[str]:
    """Return the findings and their limits, a sentence or two each; the first is that of the report."""
    if not any(row.done for row in table.rows):
        return ["Every run failed: there is nothing to compare."]
    judged = judge(table.marks, table.target, table.target.metric, table.unit, table.baseline)
    said, winners = [judged.sentence], [row for row in table.ranked if row.always]
    if not winners and all(row.unlearned for row in table.rows if row.done):
        said.append(f"{_rates(table, 'other')}.")
    elif not winners:
        said.append(train_longer(table))
    elif winners[0].workers + winners[0].servers == 1 and table.workers > 1:
        said.append(f"{winners[0].strategy} is one process: this model is too small to gain from more workers here.")
    tied = [row for row in winners if row.strategy in judged.tied]
    said += ties.advice(tied)
    if winners:
        first = ties.choose(tied)[0] if len(tied) > 1 else winners[0]
        said += [*reasons.why(table, first), *_cut_short(table, first), *_traffic(table, first)]
    said += [*judged.doubts, *_told_apart(table), *_stale(table), *([table.assumes] if table.assumes else [])]
    crowded = [row for row in table.rows if row.done and cores and row.workers + row.servers > cores]
    if crowded and cores:
        most = max(row.workers + row.servers for row in crowded)
        said.append(
            f"Up to {most} processes shared {plural(cores, 'core')}, so waiting for a core counts as waiting: "
            "on machines of their own the order may differ."
        )
    return said


def train_longer(table: Table) -> str:
    """Return the advice where nothing reached the target in every run."""
    longer = "Train longer in the script, or give" if table.is_loop else "Give more --epochs or"
    return f"{longer} a nearer --target."


def _rates(table: Table, which: str) -> str:
    """Return how to try other rates: --lr would switch tuning off, and the rate of a loop is its own."""
    if table.is_loop:
        return f"Set {'another' if which == 'other' else f'a {which}'} learning rate in the script"
    if table.tuned:
        return f"Give {which} rates to tune with: --lrs"
    return f"Give {'another' if which == 'other' else f'a {which}'} --lr"


def _cut_short(table: Table, first: StrategyRow) -> list[str]:
    """Return which strategies used up their samples before the first one reached the target."""
    rows = [row for row in table.rows if row.done and not row.times and row.unlearned is None]
    found = [f"{row.strategy} (after {row.seconds:.3g} {table.unit})" for row in rows if row.seconds < first.time]
    if not found or table.stops:
        return []
    return [
        f"Before {first.strategy} reached the target, {listed(found)} had used up all samples of the run. With more "
        "epochs the order may be another."
    ]


def _traffic(table: Table, first: StrategyRow) -> list[str]:
    """Return the cost in bytes."""
    frugal = min((row for row in table.rows if row.done and row.total), key=lambda row: row.total, default=None)
    base = table.row(table.baseline)
    found = []
    if base is not None and base.done and first is not base and base.total and first.total:
        found.append(
            f"Between all its nodes {first.strategy} sent {size(first.total)}, {table.baseline} {size(base.total)}: "
            f"{_times(first.total / base.total)}."
        )
    if frugal is not None and frugal is not base and frugal.total < 0.95 * first.total:
        found.append(f"{frugal.strategy} sent least: {size(frugal.total)}.")
    return found


def _times(ratio: float) -> str:
    if 0.95 < ratio < 1.05:
        return "about the same"
    return f"{ratio:.1f} times as much" if ratio > 1 else f"{1 / ratio:.1f} times less"


def _told_apart(table: Table) -> list[str]:
    """Return which differences from the baseline are larger than chance."""
    tested = {name: found for name, found in table.against.items() if found.p is not None and found.speed is not None}
    if not tested:
        return []
    faster = [n for n, a in tested.items() if a.p is not None and a.p < CHANCE and a.speed and a.speed.value > 1]
    slower = [n for n, a in tested.items() if a.p is not None and a.p < CHANCE and a.speed and a.speed.value < 1]
    alike = [name for name in tested if name not in (*faster, *slower)]
    parts = [
        f"{', '.join(names)} {words}"
        for names, words in ((faster, "faster"), (slower, "slower"), (alike, "not to be told apart"))
        if names
    ]
    level = f"5 % level{f', corrected for {len(tested)} tests' if len(tested) > 1 else ''}"
    return [f"Beside {table.baseline}, seed by seed: {'; '.join(parts)} ({level})."]


def _stale(table: Table) -> list[str]:
    """Return what may have kept strategies from the target."""
    missed = [
        (row, row.mean("staleness_mean"))
        for row in table.ranked
        if row.done and not row.always and row.unlearned is None  # which is reported already
    ]
    return [
        f"With {row.strategy} gradients were {stale:.1f} updates old on average, for which a smaller learning rate may "
        f"be needed. {_rates(table, 'smaller')}."
        for row, stale in missed
        if stale
    ]
