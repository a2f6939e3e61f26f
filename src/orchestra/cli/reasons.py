# SPDX-License-Identifier: Apache-2.0
"""Why a strategy is the one to take: where the time of its workers went, beside that of all-reduce, in words."""

from __future__ import annotations

from collections.abc import Iterator

from orchestra.cli.table import StrategyRow


def where_the_time_went(first: StrategyRow, base: StrategyRow | None) -> Iterator[str]:
    """What its workers did with their time, and what those of the baseline did."""
    shares = _shares(first)
    yield (
        f"Its workers compute {shares['compute']:.0%} of the time, send and receive {shares['communicate']:.0%} and "
        f"wait for others {shares['wait']:.0%}."
    )
    if base is None or not base.done:
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


def _shares(row: StrategyRow) -> dict[str, float]:
    kinds = ("compute", "communicate", "wait")
    return {kind: sum(facts.share(kind) for facts in row.done) / max(1, len(row.done)) for kind in kinds}
