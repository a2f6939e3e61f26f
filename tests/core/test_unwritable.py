# SPDX-License-Identifier: Apache-2.0
"""A disk that does not take what a run wants to keep: the training goes on, and the run says so."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.core.test_scoring import SCORED
from tests.zoo import make_model, press_ctrl_c, train
from torch import nn

from orchestra import ASP, AllReduce, LocalSGD, ParameterServer, Steps, Strategy
from orchestra.engine.checkpoint import write_tree
from orchestra.errors import Interrupted
from orchestra.runs.events import EventLog, Saved, read
from orchestra.runs.facts import scores_of

STRATEGIES: list[Strategy[Any]] = [AllReduce(), LocalSGD(tau=2), ParameterServer(), ParameterServer(consistency=ASP())]
each = pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)


def obstructing(path: Path) -> Callable[[], nn.Module]:
    """A model whose making, in a worker, puts a file where a folder should go: no user may make one there."""
    here = os.getpid()

    def make() -> nn.Module:
        if os.getpid() != here:
            path.write_text("in the way")
        return make_model()

    return make


def warnings_of(run: Path) -> str:
    return "\n".join(json.loads((run / "ending.json").read_text())["warnings"])


@each
def test_no_place_for_checkpoints(strategy: Strategy[Any], tmp_path: Path) -> None:
    model = obstructing(tmp_path / "checkpoints")
    result = train(strategy, tmp_path, workers=2, model=model, budget=Steps(5), checkpoint_every=Steps(2))
    assert result.summary.steps == 5
    assert "could not save" in warnings_of(tmp_path)


@pytest.mark.parametrize("numbers", [1, 100_000])
def test_a_full_disk_is_told_as_such(full_disk: Path, numbers: int) -> None:
    with pytest.raises(OSError, match="No space left"):
        write_tree(full_disk, {"x": torch.zeros(numbers)})


def test_events_wait_for_room_on_the_disk(tmp_path: Path, full_disk: Path) -> None:
    complaints: list[OSError] = []
    with EventLog(full_disk, complaints.append) as log:
        log.write(Saved(1.0, 0, 2))
        log.flush()
        assert complaints
        log._file.close()
        log._file = (tmp_path / "events-0.jsonl").open("ab", buffering=0)
        log.write(Saved(2.0, 0, 3))
    assert [*read(tmp_path / "events-0.jsonl")] == [Saved(1.0, 0, 2), Saved(2.0, 0, 3)]


@each
def test_no_place_for_snapshots(strategy: Strategy[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = obstructing(tmp_path / "snapshots")
    result = train(strategy, tmp_path, workers=2, model=model, budget=Steps(5), evaluate_every=Steps(2), **SCORED)
    assert result.summary.steps == 5
    first = next(
        line for line in warnings_of(tmp_path).splitlines() if "could not write its part of a snapshot" in line
    )
    assert first in capfd.readouterr().err  # at once, not only at the end
    scores = scores_of(tmp_path)
    assert scores[0].step == 0
    assert result.metrics == scores[-1].metrics


def test_ctrl_c_without_a_place_for_checkpoints_says_so(tmp_path: Path) -> None:
    def press(watch: Any) -> None:
        if watch.nodes[0].step >= 1 and not (tmp_path / "pressed").exists():
            (tmp_path / "pressed").touch()
            press_ctrl_c(os.getpid())

    with pytest.raises(Interrupted, match="No checkpoint was written"):
        train(
            AllReduce(), tmp_path / "run", workers=2, model=obstructing(tmp_path / "run" / "checkpoints"),
            budget=Steps(1_000_000), progress=press,
        )  # fmt: skip
