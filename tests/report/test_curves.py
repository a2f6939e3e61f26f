# SPDX-License-Identifier: Apache-2.0
"""Columns of numbers: nothing is lost that matters, and nothing grows with the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.report.folders import SIZE, make_run

from orchestra.report import curves
from orchestra.runs import reading
from orchestra.runs.events import Logged, NodeEnded, Scored


@pytest.fixture
def run(tmp_path: Path) -> reading.RunRecord:
    return reading.load(make_run(tmp_path / "run", workers=3, steps=500))


def test_totals_end_where_the_nodes_ended(run: reading.RunRecord) -> None:
    steps = curves.StepColumns(run.events)
    ended = [e for e in run.events if isinstance(e, NodeEnded)]
    assert steps.total("samples")[-1] == sum(e.samples for e in ended)
    assert steps.traffic()[-1] == sum(e.sent + e.received for e in ended) / 3
    assert (np.diff(steps["t"]) >= 0).all()


def test_the_training_loss_is_in_buckets_whose_mean_is_the_mean(run: reading.RunRecord) -> None:
    steps = curves.StepColumns(run.events)
    told = curves.training(steps)
    assert len(told["loss"]) == curves.BUCKETS
    sizes = np.diff(np.unique(np.linspace(0, 1500, curves.BUCKETS + 1).astype(int)))
    assert np.average(told["loss"], weights=sizes) == pytest.approx(float(np.mean(steps["loss"])), rel=1e-4)
    assert min(told["low"]) == pytest.approx(2 / 500)
    assert max(told["high"]) == 2.0
    assert told["samples"][-1] == 3 * 8 * 500
    assert told["bytes"][-1] == pytest.approx(2 * 500 * SIZE)


def test_a_score_knows_how_many_bytes_had_been_sent(run: reading.RunRecord) -> None:
    steps = curves.StepColumns(run.events)
    told = curves.scored([Scored(25.0, 250, 1, 1, {"accuracy": 0.5})], steps)
    assert told["bytes"] == [pytest.approx(2 * 250 * SIZE, rel=0.01)]
    after = curves.scored([Scored(60.0, 500, 1, 1, {"accuracy": 0.5})], steps)
    assert after["bytes"] == [2 * 500 * SIZE]


def test_what_nodes_say_of_one_step_is_one_point() -> None:
    said = [
        Logged(step + 0.1 * node, node, step, "consensus", 10.0 * step + node) for node in (0, 2) for step in (2, 1)
    ]
    assert curves.logged(said, ["consensus"]) == {"consensus": {"t": [1.1, 2.1], "value": [11.0, 21.0]}}


def test_thinning_keeps_ends_and_extremes() -> None:
    x = np.arange(100_000.0)
    y = np.sin(x / 1000)
    y[12_345], y[77_777] = 9.0, -9.0
    y[-3], y[-2] = 8.0, -8.0  # the end itself is no extreme
    kept = curves.thinned(x, y)
    assert len(kept) <= curves.MOST
    assert {0, 12_345, 77_777, 99_999} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()
    assert curves.thinned(x[:10], y[:10]).tolist() == list(range(10))


@pytest.mark.parametrize("most", [7, 100, 10_000])
def test_a_lane_adds_up_however_many_steps_are_put_together(run: reading.RunRecord, most: int) -> None:
    for lane in curves.lanes(curves.StepColumns(run.events), most):
        assert len(lane["t"]) <= most
        assert lane["together"] == max(1, -(-500 // most))
        assert sum(lane["t"]) == 50_000_000
        assert sum(lane["compute"]) == 25_000_000
        assert abs(sum(lane["compute"]) + sum(lane["wait"]) + sum(lane["communicate"]) - sum(lane["t"])) <= 2


def test_quantiles_of_steps(run: reading.RunRecord) -> None:
    for worker in curves.step_times(curves.StepColumns(run.events)):
        assert worker["count"] == 500
        assert worker["seconds"] == pytest.approx([0.1] * curves.QUANTILES)


def test_a_run_without_steps_has_empty_curves() -> None:
    steps = curves.StepColumns([])
    assert curves.training(steps)["loss"] == []
    assert curves.lanes(steps, 10) == []
    assert curves.scored([], steps)["t"] == []
