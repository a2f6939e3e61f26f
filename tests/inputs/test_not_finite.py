# SPDX-License-Identifier: Apache-2.0
"""Gradients that are not finite: skipped, counted, never averaged into peers; the run is given up after too many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.laws.examples import CERTAIN, in_processes, workers_for
from tests.zoo import (
    Trap,
    assert_close,
    classifier,
    events,
    flat,
    make_classes,
    make_data,
    make_model,
    plain,
    train,
)
from torch import Tensor, nn

from orchestra import AllReduce, Dirichlet, Epochs, Steps, Strategy
from orchestra.errors import Diverged
from orchestra.runs.events import Skipped, Stepped

every = in_processes(CERTAIN)
steady = in_processes([s for s in CERTAIN if not s.layout.promotes])  # each keeps its samples to the end


class Sick(nn.Module):
    """Gives `value` instead of an answer when a trap springs."""

    def __init__(self, value: float, *traps: Trap) -> None:
        super().__init__()
        self.inner = make_model()
        self.value = value
        self.traps = traps

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y * self.value if any([trap.meet(x) for trap in self.traps]) else y  # each must see every batch


def nothing() -> None:
    pass


@steady
def test_one_bad_step_is_skipped_and_counted(strategy: Strategy[Any], tmp_path: Path) -> None:
    workers = workers_for(strategy)
    value = (float("nan"), float("inf"), 1e38)[CERTAIN.index(strategy) % 3]
    victim = workers - 1
    traps = [Trap.at(victim, 1, nothing, size=workers), Trap.at(victim, 3, nothing, size=workers)]
    result = train(strategy, tmp_path, workers=workers, model=lambda: Sick(value, *traps))
    assert bool(torch.isfinite(flat(result.model)).all())
    assert result.summary.skipped == 2
    skipped = [e for e in events(tmp_path, victim) if isinstance(e, Skipped)]
    assert [(e.step, e.in_a_row) for e in skipped] == [(2, 1), (4, 1)]
    losses = {e.step: e.loss for e in events(tmp_path, victim) if isinstance(e, Stepped)}
    assert [step for step, loss in losses.items() if loss is None] == [2, 4]
    for healthy in range(workers - 1):
        assert not [e for e in events(tmp_path, healthy) if isinstance(e, Skipped)]


@steady
def test_too_many_in_a_row_end_the_run(strategy: Strategy[Any], tmp_path: Path) -> None:
    workers = workers_for(strategy)
    traps = [Trap.at(0, step, nothing, size=workers) for step in (1, 2, 3)]
    with pytest.raises(Diverged, match=r"worker 0: .* 3 times in a row, last at step 4") as caught:
        train(strategy, tmp_path, workers=workers, model=lambda: Sick(float("nan"), *traps), tolerate=3)
    assert caught.value.exit_code == 5


def test_enough_in_between_is_tolerated(tmp_path: Path) -> None:
    traps = [Trap.at(0, step, nothing, size=2) for step in (0, 1, 3, 4)]
    result = train(
        AllReduce(), tmp_path, workers=2, model=lambda: Sick(float("nan"), *traps), tolerate=3, budget=Steps(7)
    )
    assert result.summary.skipped == 4


def test_the_others_go_on_as_if_it_had_no_samples(tmp_path: Path) -> None:
    """What is left is the mean over the healthy ones, weighted by their samples."""
    trap = Trap.at(1, 0, nothing, size=2)
    got = train(AllReduce(), tmp_path, workers=2, model=lambda: Sick(float("nan"), trap), budget=Steps(1)).model

    def healthy_batch() -> tuple[Tensor, Tensor]:
        from tests.zoo import BATCH, SEED

        from orchestra.data.feed import IndexedFeed

        chosen = IndexedFeed(make_data(), batch=BATCH, seed=SEED, rank=0, size=2).indices(0, 0)
        x, y = make_data()
        return x[chosen], y[chosen]

    expected = plain(data=healthy_batch, batch=6, steps=1)
    torch.testing.assert_close([*got.parameters()], [*expected.parameters()])


def test_a_step_in_which_nobody_is_healthy_changes_nothing(tmp_path: Path) -> None:
    traps = [Trap.at(rank, 2, nothing, size=2) for rank in range(2)]
    sick = train(AllReduce(), tmp_path / "sick", workers=2, model=lambda: Sick(float("nan"), *traps), budget=Steps(3))
    short = train(AllReduce(), tmp_path / "short", workers=2, model=lambda: Sick(float("nan")), budget=Steps(2))
    assert_close(sick.model, short.model, tolerance=0)


def test_a_learning_rate_that_blows_up_ends_with_exit_code_5(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="Lower the learning rate"):
        train(
            AllReduce(),
            tmp_path,
            workers=2,
            optimizer=lambda params: torch.optim.SGD(params, lr=1e5),
            budget=Epochs(20),
            tolerate=3,
        )


@every
def test_a_worker_without_samples_takes_part(strategy: Strategy[Any], tmp_path: Path) -> None:
    """An empty shard: almost everything lies with one worker."""
    workers = workers_for(strategy)
    data = make_classes()
    sizes = [len(s) for s in Lopsided().shards(data[1], workers, 0)]
    assert sizes[-1] == 0 or workers == 1
    result = train(
        strategy,
        tmp_path,
        workers=workers,
        data=make_classes,
        model=classifier,
        loss=nn.functional.cross_entropy,
        partition=Lopsided(),
        budget=Steps(4),
        cluster=_patient(workers),
    )
    assert bool(torch.isfinite(flat(result.model)).all())
    assert result.summary.skipped == 0


class Lopsided(Dirichlet):
    """The last worker holds nothing."""

    def shards(self, labels: Tensor, size: int, seed: int) -> list[Tensor]:
        order = torch.arange(len(labels))
        holders = max(1, size - 1)
        return [*order.tensor_split(holders), *([order[:0]] * (size - holders))]


def _patient(workers: int) -> Any:
    from orchestra import Local

    return Local(workers=workers, patience=5)
