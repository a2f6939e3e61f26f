# SPDX-License-Identifier: Apache-2.0
"""The table of `compare` and its words, and the display: from made-up figures."""

from __future__ import annotations

import io
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from orchestra.cli import concluding, sweep, ties
from orchestra.cli.lessons import verdict
from orchestra.cli.table import Outcome, StrategyRow, Table
from orchestra.runs.budget import Target
from orchestra.runs.facts import Facts
from orchestra.runs.progress import NodeLine, Picture, drawing, plain_line


def facts(strategy: str, *, sent: float = 1e6, stale: float | None = None) -> Facts:
    return Facts(
        strategy=strategy, workers=2, servers=0, seed=0, steps=10, samples=100, seconds=9.0, setup=0.1,
        samples_per_second=11.0, loss=0.1, metrics={"accuracy": 0.9}, sent_per_worker=sent, received_per_worker=sent,
        sent_total=int(2 * sent), shares=[], staleness_mean=stale,
        staleness_max=None if stale is None else 9, staleness_counts={}, skipped=0,
        stopped_by="budget", parameters=10,
    )  # fmt: skip


def row(
    strategy: str, *times: float | None, sent: float = 1e6, stale: float | None = None, gap: float = 0.1
) -> StrategyRow:
    def outcome(seed: int, t: float | None) -> Outcome:
        found = facts(strategy, sent=sent, stale=stale)
        if t is None:
            return Outcome(seed, Path(), best=0.8, final=0.8, facts=found)
        return Outcome(seed, Path(), seconds=t, since=t - gap, best=0.95, final=0.8, facts=found)

    return StrategyRow(strategy, 2, 0, tuple(outcome(seed, t) for seed, t in enumerate(times)))


def table(*rows: StrategyRow) -> Table:
    return Table("digits", Target("accuracy", 0.9), 2, len(rows[0].outcomes), 3.0, "allreduce", rows)


def test_a_clear_winner_is_named_with_its_price() -> None:
    made = table(row("allreduce", 4.0, 4.2), row("localsgd", 2.0, 2.1, sent=1e5))
    words = " ".join(verdict(made, cores=8))
    assert [r.strategy for r in made.ranked] == ["localsgd", "allreduce"]
    assert "localsgd reached accuracy ≥ 0.9 in 2.05 s, the median of 2 runs, 2.00 times as fast as allreduce" in words
    assert "10.0 times less" in words
    assert "tie" not in words


def test_a_lead_within_the_spread_may_be_chance() -> None:
    made = table(row("allreduce", 4.0, 6.0, 5.0), row("localsgd", 3.0, 6.5, 4.5), row("slowmo", 3.0, 6.7, 4.6))
    words = " ".join(verdict(made, cores=8))
    assert "which may be chance" in words
    assert words.startswith("localsgd and slowmo are tied: they reached accuracy ≥ 0.9 in 4.5 and 4.6 s")


def test_seeds_that_agree_are_known_to_a_snapshot() -> None:
    """Both seeds took half as long again: that one of them is harder for both does not matter."""
    words = " ".join(verdict(table(row("allreduce", 4.0, 6.0), row("localsgd", 3.0, 4.5)), cores=8))
    assert "1.33 times as fast as allreduce (95 % interval 1.17 to 1.52, 2 pairs of runs with equal seeds" in words
    assert "that differ by less than the time between snapshots" in words
    assert "chance" not in words
    assert "told apart" not in words  # nor is there a test of two
    coarse = " ".join(verdict(table(row("allreduce", 4.0, 6.0), row("localsgd", 3.0, 4.5, gap=1.0)), cores=8))
    assert "which may be chance" in coarse


def test_the_table_says_what_the_sentence_says() -> None:
    made = table(row("allreduce", 4.0, 6.0), row("localsgd", 3.0, 6.5))
    said = "1.11"
    assert f"{said} times as fast" in verdict(made, cores=8)[0]
    assert made.cells(made.rows[1])[4] == f"{said}x"  # two seeds that disagree have no interval worth the name
    assert made.cells(made.rows[0])[4] == "1.00x"
    assert [round(r["speedup"], 2) for r in made.as_record()["rows"]] == [1.11, 1.0]


def test_a_lead_within_a_snapshot_is_called_a_tie() -> None:
    words = " ".join(verdict(table(row("allreduce", 4.0), row("localsgd", 3.95, gap=0.1)), cores=8))
    assert "localsgd and allreduce are tied" in words
    assert "less than one snapshot" in words
    assert "take allreduce: it is the simplest, at about as many bytes" in words
    assert "One seed only" in words


def test_of_a_tie_the_simplest_or_else_the_cheapest_is_advised() -> None:
    def advised(*rows: StrategyRow) -> str:
        (found,) = [text for text in verdict(table(*rows), cores=8) if "take" in text]
        return found

    served = replace(row("ps", 3.95), servers=1)
    assert advised(row("allreduce", 4.0), served) == (
        "Of ps and allreduce, which are tied, take allreduce: it needs the fewest nodes, 2."
    )
    assert "take slowmo: it sends the fewest bytes between all nodes, " in advised(
        row("allreduce", 3.95), row("slowmo", 4.0, sent=1e5)
    )
    assert "take slowmo: of those with 2 nodes it sends the fewest bytes" in advised(
        served, row("slowmo", 4.0, sent=1e5), row("allreduce", 3.98)
    )
    assert "take localsgd(tau=4): it is the simplest" in advised(
        row("slowmo(tau=4)", 3.95), row("localsgd(tau=4)", 4.0)
    )
    assert not any("take" in text for text in verdict(table(row("allreduce", 4.0), row("slowmo", 2.0)), cores=8))


def test_what_missed_the_target_is_shown_and_not_ranked() -> None:
    made = table(row("allreduce", 4.0, 4.2), row("ps", None, None, stale=2.5), row("slowmo", 1.0, None))
    cells = {r.strategy: made.cells(r) for r in made.ranked}
    assert list(cells) == ["allreduce", "slowmo", "ps"]
    assert "not reached (best 0.8)" in cells["ps"]
    assert "1.00 s *" in cells["slowmo"]
    assert cells["slowmo"][4] == "-"
    assert "slowmo did not reach the target in 1 of 2 runs" in made.markdown()
    assert "2.5 updates old" in " ".join(verdict(made, cores=8))


def test_the_time_of_the_whole_run_is_told_also_where_the_target_was_missed() -> None:
    made = table(row("allreduce", 4.0), row("ps", None))
    total = made.columns().index("total time")
    assert [made.cells(r)[total] for r in made.ranked] == ["9.00 s", "9.00 s"]
    assert made.columns(narrow=True)[total] == "total"
    assert [r["seconds"] for r in made.as_record()["rows"]] == [9.0, 9.0]


def test_the_heading_says_epoch_or_epochs() -> None:
    assert table(row("allreduce", 4.0)).heading.endswith("· 3 epochs · untuned")
    assert replace(table(row("allreduce", 4.0)), epochs=1.0).heading.endswith("· 1 epoch · untuned")


def test_the_narrow_table_fits_a_small_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    concluding.show(table(row("allreduce", 4.0), row("ps(consistency=asp())", None, stale=2.5)), [])
    lines = re.sub("\x1b.*?m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80
    assert any("9.00" in line and "0.8" in line for line in lines)


def test_crowded_cores_are_admitted() -> None:
    assert "2 processes shared 1 core," in " ".join(verdict(table(row("allreduce", 1.0)), cores=1))


def test_the_interval_of_many_seeds_leaves_out_the_extremes() -> None:
    assert row("x", 1.0, 2.0, 3.0).interval == (1.0, 3.0)
    assert row("x", *map(float, range(1, 12))).interval == (2.0, 10.0)


def picture(nodes: int, real: float | None = None) -> Picture:
    lines = [NodeLine(f"worker {i}", 12_345, 0.5, 0.2, 0.3) for i in range(nodes)]
    figures = (12_345, 99_999, 0.12, 88.0, 0.5, 1e5, {"accuracy": 0.9})
    return Picture("slowmo(tau=8) · many workers", 12.0, real, *figures, lines)


def test_the_display_fits_a_small_terminal() -> None:
    console = Console(file=io.StringIO(), width=80, height=24, force_terminal=True)
    lines = console.render_lines(drawing(picture(64), 80, 24), pad=False)
    assert len(lines) <= 23
    assert max(sum(segment.cell_length for segment in line) for line in lines) <= 80
    text = drawing(picture(64), 80, 24).plain
    assert "wait  30%" in text
    assert "more nodes" in text


def test_the_plain_line() -> None:
    line = plain_line(picture(2))
    assert "\x1b" not in line
    assert "step 12,345/99,999" in line
    assert "compute 50%  communicate 20%  wait 30%" in line
    assert "1 min 28 s left" in line
    assert line.startswith("[   12.0 s]")


def test_a_simulation_has_two_clocks() -> None:
    shown = picture(2, real=3.5)
    assert plain_line(shown).startswith("[12.0 virtual s in 3.5 s]")
    assert "12.0 virtual s in 3.5 s" in drawing(shown, 80, 24).plain


def test_a_table_says_where_its_runs_end() -> None:
    made = table(row("allreduce", 5.0))
    assert made.heading.endswith("1 seed · 3 epochs · untuned")
    assert "total time: of a whole run, past the target." in made.legend
    short = replace(made, stops=True)
    assert short.heading.endswith("1 seed · until the target, at most 3 epochs · untuned")
    assert "total time: until the target, or until it was given up." in short.legend


def test_a_sweep_marks_all_that_may_have_been_first() -> None:
    tie = table(row("allreduce", 5.0, gap=1.0), row("ps", 4.5), row("localsgd", 6.0), row("slowmo", None))
    found = sweep.Condition((("batch", "8"),), tie)
    cells = [found.cell(strategy) for strategy in ("allreduce", "ps", "localsgd", "slowmo")]
    assert cells == ["5 s ◂", "4.5 s ◂", "6 s", "not reached"]
    assert sweep._title([found]).endswith("◂ first under that condition, several: a tie")
    alone = sweep.Condition((("batch", "9"),), table(row("allreduce", 5.0), row("ps", 4.5)))
    assert [alone.cell("allreduce"), alone.cell("ps")] == ["5 s", "4.5 s ◂"]
    assert sweep._title([alone]).endswith("◂ first under that condition")


def test_the_seconds_of_a_tie_are_those_of_the_runs() -> None:
    """A loop runs for real: its seconds are not virtual."""
    made = table(row("allreduce", 4.0), row("localsgd", 3.95))
    said = ties.recommended([*made.rows], made.goal, made.unit)
    assert said.endswith("They reached accuracy ≥ 0.9 after 4 and 3.95 s (one seed).")


def test_a_strategy_with_stale_gradients_is_advised_what_its_comparison_can_do() -> None:
    made = table(row("allreduce", 2.0, 2.0), row("ps(consistency=asp)", None, 2.0, stale=3.0))
    for changed, advice in (
        ({}, "Give a smaller --lr."),
        ({"tuned": True}, "Give smaller rates to tune with: --lrs."),
        ({"epochs": math.nan, "tuned": True}, "Set a smaller learning rate in the script."),
    ):
        words = " ".join(verdict(replace(made, **changed), cores=8))
        assert (
            f"gradients were 3.0 updates old on average, for which a smaller learning rate may be needed. {advice}"
            in (words)
        )
