# SPDX-License-Identifier: Apache-2.0
"""Why a strategy was faster: from made-up figures."""

from __future__ import annotations

from dataclasses import replace

from tests.cli.test_table import row, table

from orchestra.cli import reasons
from orchestra.cli.lessons import verdict
from orchestra.cli.table import StrategyRow
from orchestra.report.until import Until
from orchestra.runs import reading

BUSY, BLOCKED = (0.95, 0.03, 0.02, 0.0), (0.34, 0.01, 0.65, 0.0)


def spent(found: StrategyRow, samples: float, shares: tuple[float, float, float, float]) -> StrategyRow:
    """The same row, each run of which needed so many samples."""
    done = (replace(o, until=Until(o.seconds or 9.0, samples, *shares)) for o in found.outcomes)
    return replace(found, outcomes=tuple(done))


def test_an_asynchronous_strategy_wins_because_its_workers_do_not_wait() -> None:
    asp = spent(row("ps(consistency=asp)", 2.0, 2.0, stale=2.3), 1200, BUSY)
    made = replace(
        table(spent(row("allreduce", 8.0, 8.0), 1000, BLOCKED), asp),
        settings={"ps(consistency=asp)": "lr 0.2, momentum 0"},
    )
    said = reasons.why(made, asp)
    assert said == [
        "In these runs ps(consistency=asp) was faster than allreduce because until the target it went through 4.8 "
        "times as many samples a second, though it needed 1.2 times as many samples. Of the time until then its "
        "workers spent 95% computing (34% with allreduce) and 2% waiting for others (65%).",
        "Gradients of ps(consistency=asp) were 2.3 updates old on average when they were used; tuning chose lr 0.2, "
        "momentum 0 for it.",
    ]
    words = verdict(made, cores=8)
    assert all(text in words for text in said)
    assert [reading.harmless(text) for text in said] == said  # longer texts would be cut on the page


def test_an_asynchronous_strategy_that_lost_is_explained_beside_the_winner() -> None:
    first = spent(row("slowmo", 2.0, sent=1e5), 1000, BUSY)
    asp = spent(row("ps(consistency=asp)", 3.0, stale=2.3), 2000, (0.4, 0.4, 0.2, 0.0))
    base, *more = reasons.why(table(spent(row("allreduce", 2.5), 1250, BUSY), first, asp), first)
    assert "faster than allreduce because it needed 0.8 times as many samples until the target, and" in base
    assert "went through about as many samples a second." in base
    said = " ".join(more)
    assert "faster than ps(consistency=asp) because it needed 0.5 times as many samples" in said
    assert "though it went through 0.75 times as many samples a second" in said
    assert "For each sample slowmo sends and receives 10.0 times fewer bytes than ps(consistency=asp)." in said
    assert "Gradients of ps(consistency=asp) were 2.3 updates old" in said


def test_only_seeds_with_which_both_reached_the_target_are_compared() -> None:
    """The only run of the rival that reached the target was as fast: no reason is given for a lead it has not."""
    first = spent(row("localsgd", 4.0, 8.0), 800, BUSY)
    assert reasons.why(table(spent(row("allreduce", 4.0, None), 800, BUSY), first), first) == []
    never = spent(row("allreduce", None, None), 2000, BLOCKED)
    (said,) = reasons.why(table(never, first), first)
    assert (
        "It reached the target with 40% of the samples that allreduce used in a whole run without reaching it." in said
    )


def test_of_a_tie_none_is_called_faster() -> None:
    first = spent(row("localsgd", 4.0, 4.0, sent=1e5), 800, BUSY)
    made = table(spent(row("allreduce", 4.05, 4.05), 1000, BLOCKED), first)
    assert verdict(made, cores=8)[0].startswith("localsgd and allreduce are tied")
    (said,) = reasons.why(made, first)
    assert "localsgd went through 0.81 times as many samples a second as allreduce, and needed 0.8 times" in said
    assert "faster" not in said


def test_without_figures_there_is_no_reason() -> None:
    first = row("localsgd", 2.0)
    assert reasons.why(table(row("allreduce", 4.0), first), first) == []
    assert reasons.why(table(first), first) == []


def test_a_strategy_whose_samples_were_used_up_sooner_is_named() -> None:
    """A run takes 9 s here."""
    words = " ".join(verdict(table(row("allreduce", 12.0), row("localsgd", None), row("ps", 13.0)), cores=8))
    assert "Before allreduce reached the target, localsgd (after 9 s) had used up all samples of the run." in words
    words = " ".join(verdict(table(row("allreduce", 8.0), row("localsgd", None)), cores=8))
    assert "used up" not in words
