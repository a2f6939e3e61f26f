# SPDX-License-Identifier: Apache-2.0
"""What a run tells while it goes on: to a function, to a file, to its log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.zoo import BATCH, events, paced, train

from orchestra import ASP, AllReduce, LocalSGD, ParameterServer, RunStatus, Steps, Strategy
from orchestra.runs.events import Stepped

STRATEGIES: list[Strategy[Any]] = [AllReduce(), LocalSGD(tau=3), ParameterServer(), ParameterServer(consistency=ASP())]
each = pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)


@each
def test_a_function_is_told_how_it_goes(strategy: Strategy[Any], tmp_path: Path) -> None:
    seen: list[RunStatus] = []
    train(strategy, tmp_path, workers=2, model=paced(0.05, 0.05), budget=Steps(8), progress=seen.append)
    begun = [now for now in seen if now.begun]
    assert begun
    assert [now.step for now in begun] == sorted(now.step for now in begun)
    last = begun[-1]
    assert (last.run, last.workers, last.servers, last.last_step) == (tmp_path, 2, strategy.layout.servers, 8)
    assert len(last.nodes) == 2 + strategy.layout.servers
    middle = next(now for now in begun if now.step >= 2)
    assert 2 * middle.step * BATCH <= middle.samples <= 16 * BATCH
    assert middle.loss is not None
    assert 0 < middle.nodes[0].compute <= middle.t


@each
def test_every_step_is_logged_once(strategy: Strategy[Any], tmp_path: Path) -> None:
    train(strategy, tmp_path, workers=2, budget=Steps(7))
    for worker in (0, 1):
        steps = [e.step for e in events(tmp_path, worker) if isinstance(e, Stepped)]
        assert steps == sorted(set(steps))
        assert steps[-1] == 7


@pytest.mark.parametrize("wish", [True, False, None])
def test_lines_where_there_is_no_terminal(
    wish: bool | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(AllReduce(), tmp_path, workers=2, budget=Steps(10), progress=wish)
    lines = [line for line in capsys.readouterr().err.splitlines() if "allreduce · 2 workers" in line]
    assert bool(lines) == bool(wish)
    if wish:
        assert "step 10/10" in lines[-1]
