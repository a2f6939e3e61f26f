# SPDX-License-Identifier: Apache-2.0
"""Scores on the progress line while the run goes on, and the bar of what is scored at the end."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.core.test_scoring import SCORED
from tests.processes import together
from tests.waiting import wait_until
from tests.zoo import Trap, flat, make_data, train, trapped
from torch import nn

from orchestra import AllReduce, Attached, Local, LocalSGD, Steps, Strategy
from orchestra.runs import progress


def size(model: nn.Module, data: Any) -> float:
    """Looks at no sample: that would spring the trap."""
    return float(flat(model).norm())


class Noted(progress.PlainScreen):
    """Writes its lines to a file, whichever process shows them."""

    every = 0.05

    def __init__(self, path: Path) -> None:
        super().__init__(alone=True)
        self.path = path

    def tell(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(text + "\n")


def shows_scores(path: Path) -> bool:
    """Whether a line of a run that goes on has scores."""
    return path.exists() and bool(re.search(r"  step [1-7]/10  .* test size \S+ ", path.read_text()))


@pytest.mark.parametrize("attached", [False, True], ids=["local", "attached"])
@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(tau=2)], ids=lambda s: type(s).__name__)
def test_scores_are_on_the_progress_line_while_the_run_goes_on(
    strategy: Strategy[Any], attached: bool, tmp_path: Path
) -> None:
    """Without a target. Worker 1 waits in its seventh of ten steps until the scores of a snapshot are shown."""
    wait = Trap.at(1, 6, partial(wait_until, partial(shows_scores, tmp_path / "shown")), size=2)

    def call() -> None:
        wait.parent = -1 if attached else wait.parent  # the workers are the processes that make the call
        display = progress.Display(Noted(tmp_path / "shown"))
        cluster = Attached(patience=300) if attached else Local(workers=2, patience=300)
        train(strategy, tmp_path / "run", cluster=cluster, model=trapped(wait), budget=Steps(10), progress=display,
              evaluate=size, evaluation_data=make_data, evaluate_every=Steps(1))  # fmt: skip

    if attached:
        outcomes = together(2, call)
        assert not any(outcome.kind for outcome in outcomes), outcomes
    else:
        call()
    assert shows_scores(tmp_path / "shown")


def test_scoring_at_the_end_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_QUICK", 0.0)
    monkeypatch.setattr(progress.PlainScreen, "every", 0.0)

    def lines_of(out: str) -> list[str]:
        train(AllReduce(), tmp_path / out, workers=2, budget=Steps(4), evaluate_every=Steps(1), score_afterwards=True,
              progress=True, **SCORED)  # fmt: skip
        return [line for line in capfd.readouterr().err.splitlines() if line.startswith("scoring ")]

    assert lines_of("into a file") == ["scoring 4 snapshots"]
    monkeypatch.setattr(progress.PlainScreen, "redraws", True)
    lines = lines_of("on a terminal")
    assert [line.rpartition("  ")[2] for line in lines] == ["0 of 4", "1 of 4", "2 of 4", "3 of 4"]
    assert lines[2].count("━") == lines[2].count("─") == 15


def test_what_is_quick_needs_no_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress.PlainScreen, "every", 60.0)
    train(AllReduce(), tmp_path, workers=2, budget=Steps(4), evaluate_every=Steps(1), score_afterwards=True,
          progress=True, **SCORED)  # fmt: skip
    assert "scoring " not in capfd.readouterr().err
