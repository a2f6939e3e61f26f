# SPDX-License-Identifier: Apache-2.0
"""A loop that goes on after the others have finished: what takes several workers is not made of one."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import together
from torch import nn

import orchestra
from orchestra.runs.facts import facts_of

RATE, TOGETHER, ALONE = 0.5, 3, 4


@pytest.mark.parametrize("consistency", ["backupworkers(b=0)", "ksync(k=2)", "kasync(k=2)"])
def test_gradients_of_a_worker_that_is_left_alone_are_dropped(consistency: str, tmp_path: Path) -> None:
    """Two workers make an update; the second has more steps than the first."""

    def call() -> Any:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        with contextlib.suppress(SystemExit):  # of the server
            model, optimizer = orchestra.prepare(
                model, torch.optim.SGD(model.parameters(), lr=RATE), strategy=f"ps(consistency={consistency})",
                out=tmp_path / "run",
            )  # fmt: skip
            rank = optimizer.orchestra.rank
            steps = TOGETHER + (ALONE if rank == 1 else 0)
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.tensor([[100.0 if optimizer.orchestra.steps >= TOGETHER else 1.0]])).sum().backward()
                optimizer.step()
            optimizer.finish()
            return float(model.weight)
        return None

    outcomes = together(3, call)
    for outcome in outcomes:
        assert not outcome.kind, outcome.error
    found = [outcome.value for outcome in outcomes if outcome.value is not None]
    assert found == [-RATE * TOGETHER] * 2  # none of the gradients of 100 is in it
    assert facts_of(tmp_path / "run").dropped == ALONE
