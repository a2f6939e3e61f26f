# SPDX-License-Identifier: Apache-2.0
"""What a comparison teaches, in words, and how far it can be trusted: pure functions of its table."""

from __future__ import annotations

from collections.abc import Sequence

from orchestra.cli.table import Row, Table
from orchestra.words import plural, size

_CHANCE = 0.05  # what is less likely than this counts as a difference


def verdict(table: Table, cores: int | None) -> list[str]:
    """What was learned, and how far it can be trusted: one sentence or two each."""
    winners = [row for row in table.ranked if row.always]
    said = [_winner(table, winners)] if winners else [_nobody(table)]
    if winners:
        if winners[0].workers + winners[0].servers == 1 and table.workers > 1:
            said.append("That is one process alone: here this model is too small for company to pay.")
        said += [*_traffic(table, winners[0]), *_doubt(table, winners), *_told_apart(table)]
    said += _missed(table)
    crowded = [row for row in table.rows if row.done and cores and row.workers + row.servers > cores]
    if crowded and cores:
        most = max(row.workers + row.servers for row in crowded)
        said.append(
            f"Up to {most} processes shared {plural(cores, 'core')}, so waiting for a core counts as waiting: "
            "on machines of their own the order may differ."
        )
    return said


def _nobody(table: Table) -> str:
    near = next((row for row in table.ranked if row.done), None)
    if near is None:
        return "Every run failed: there is nothing to compare."
    closest = f"{near.strategy} came closest with {table.best(near):.4g}"
    return f"Nothing reached {table.goal} in every run; {closest}. Give more --epochs or a nearer --target."


def _winner(table: Table, winners: Sequence[Row]) -> str:
    first, base = winners[0], table.row(table.baseline)
    text = f"{first.strategy} reached {table.goal} first, after {first.time:.2f} s"
    if base is None or not base.always:
        return f"{text}; {table.baseline} did not always reach it."
    if first is not base:
        return f"{text}: {base.time / first.time:.2f} times as fast as {base.strategy} ({base.time:.2f} s)."
    if len(winners) == 1:
        return f"{text}."
    second = winners[1]
    return (
        f"{text}; {second.strategy} followed after {second.time:.2f} s, {second.time / first.time:.2f} times as long."
    )


def _traffic(table: Table, first: Row) -> list[str]:
    """What it cost in bytes."""
    frugal = min((row for row in table.rows if row.done and row.total), key=lambda row: row.total, default=None)
    base = table.row(table.baseline)
    found = []
    if base is not None and base.done and first is not base and base.total and first.total:
        found.append(
            f"Between all its nodes {size(first.total)} were sent, with {table.baseline} {size(base.total)}: "
            f"{_times(first.total / base.total)}."
        )
    if frugal is not None and frugal is not base and frugal.total < 0.95 * first.total:
        found.append(f"{frugal.strategy} sent least: {size(frugal.total)}.")
    return found


def _times(ratio: float) -> str:
    if 0.95 < ratio < 1.05:
        return "about the same"
    return f"{ratio:.1f} times as much" if ratio > 1 else f"{1 / ratio:.1f} times less"


def _doubt(table: Table, winners: Sequence[Row]) -> list[str]:
    """Say so where a lead is no larger than what chance or the snapshots' spacing explains."""
    first, base = winners[0], table.row(table.baseline)
    rivals = [winners[1]] if len(winners) > 1 else []
    if base is not None and base.always and base is not first and base not in rivals:
        rivals.append(base)
    found = []
    for rival in rivals:
        if first.time > rival.since:
            found.append(f"Its lead over {rival.strategy} is less than one snapshot of the model: a tie.")
        elif table.seeds > 1 and first.interval[1] >= rival.interval[0]:
            found.append(f"Its lead over {rival.strategy} lies within the spread of the seeds: as good as a tie.")
    if table.seeds == 1:
        found.append("One seed only: small differences may be chance. Use --seeds 3 or more before you believe them.")
    return found


def _told_apart(table: Table) -> list[str]:
    """Which differences from the baseline are more than chance."""
    tested = {name: found for name, found in table.against.items() if found.p is not None and found.speed is not None}
    if not tested:
        return []
    faster = [n for n, a in tested.items() if a.p is not None and a.p < _CHANCE and a.speed and a.speed.value > 1]
    slower = [n for n, a in tested.items() if a.p is not None and a.p < _CHANCE and a.speed and a.speed.value < 1]
    alike = [name for name in tested if name not in (*faster, *slower)]
    parts = [
        f"{', '.join(names)} {words}"
        for names, words in ((faster, "faster"), (slower, "slower"), (alike, "not to be told apart"))
        if names
    ]
    return [
        f"Beside {table.baseline}, seed by seed: {'; '.join(parts)} (5 % level, corrected for {len(tested)} tests)."
    ]


def _missed(table: Table) -> list[str]:
    found = []
    for row in table.ranked:
        if row.always or not row.done:
            continue
        text = f"{row.strategy} missed the target in {plural(len(row.outcomes) - len(row.times), 'run')}"
        text += f" (best {table.target.metric} {table.best(row):.4g})"
        stale = row.mean("staleness_mean")
        hint = f"; its gradients were {stale:.1f} updates old on average: a smaller --lr may help it" if stale else ""
        found.append(f"{text}{hint}.")
    return found
