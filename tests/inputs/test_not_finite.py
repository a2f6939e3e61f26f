# SPDX-License-Identifier: Apache-2.0
"""Gradients that are not finite: skipped, counted, never averaged into peers; the run is given up after too many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.inputs.sick import Lopsided, Sick, sickness
from tests.laws.examples import CERTAIN, each_of, first_phase, in_processes, workers_for
from tests.zoo import (
    assert_close,
    classifier,
    events,
    flat,
    make_classes,
    make_data,
    plain,
    train,
)
from torch import Tensor, nn

from orchestra import AllReduce, Epochs, Local, Simulated, Steps, Strategy
from orchestra.errors import Diverged
from orchestra.runs.events import Skipped, Stepped

STEADY = [s for s in CERTAIN if not s.layout.promotes]  # each worker keeps its samples to the end


def virtual(strategy: Strategy[Any]) -> Simulated:
    return Simulated(workers=workers_for(strategy), compute_time="lognormal:0.05,0.3", numerics="real")


def processes(strategy: Strategy[Any]) -> Local:
    return Local(workers=workers_for(strategy), patience=20)


def sick(value: float, steps: Sequence[int], rank: int, size: int) -> Callable[[], nn.Module]:
    """A model that gives `value` to worker `rank` in these steps."""
    return lambda: Sick(value, *(sickness(rank, step, size=size) for step in steps))


@each_of(STEADY)
def test_one_bad_step_is_skipped_and_counted(strategy: Strategy[Any], tmp_path: Path) -> None:
    check_that_it_is_skipped(strategy, virtual(strategy), tmp_path)


@in_processes(STEADY, of=first_phase)
def test_one_bad_step_is_skipped_and_counted_in_processes(strategy: Strategy[Any], tmp_path: Path) -> None:
    check_that_it_is_skipped(strategy, processes(strategy), tmp_path)


def check_that_it_is_skipped(strategy: Strategy[Any], cluster: Local | Simulated, out: Path) -> None:
    value = (float("nan"), float("inf"), 1e38)[CERTAIN.index(strategy) % 3]
    victim = cluster.workers - 1
    result = train(strategy, out, cluster=cluster, model=sick(value, (1, 3), victim, cluster.workers))
    assert bool(torch.isfinite(flat(result.model)).all())
    assert result.summary.skipped == 2
    skipped = [e for e in events(out, victim) if isinstance(e, Skipped)]
    assert [(e.step, e.in_a_row) for e in skipped] == [(2, 1), (4, 1)]
    losses = {e.step: e.loss for e in events(out, victim) if isinstance(e, Stepped)}
    assert [step for step, loss in losses.items() if loss is None] == [2, 4]
    for healthy in range(victim):
        assert not [e for e in events(out, healthy) if isinstance(e, Skipped)]


@each_of(STEADY)
def test_too_many_bad_steps_in_a_row_end_the_run(strategy: Strategy[Any], tmp_path: Path) -> None:
    check_that_it_is_given_up(strategy, virtual(strategy), tmp_path)


@in_processes(STEADY, of=first_phase)
def test_too_many_bad_steps_in_a_row_end_the_run_in_processes(strategy: Strategy[Any], tmp_path: Path) -> None:
    check_that_it_is_given_up(strategy, processes(strategy), tmp_path)


def check_that_it_is_given_up(strategy: Strategy[Any], cluster: Local | Simulated, out: Path) -> None:
    with pytest.raises(Diverged, match=r"worker 0: .* 3 times in a row, last at step 4") as caught:
        train(strategy, out, cluster=cluster, model=sick(float("nan"), (1, 2, 3), 0, cluster.workers), tolerate=3)
    assert caught.value.exit_code == 5


def test_bad_steps_with_good_ones_in_between_do_not_end_the_run(tmp_path: Path) -> None:
    traps = [sickness(0, step, size=2) for step in (0, 1, 3, 4)]
    result = train(
        AllReduce(), tmp_path, workers=2, model=lambda: Sick(float("nan"), *traps), tolerate=3, budget=Steps(7)
    )
    assert result.summary.skipped == 4


def test_the_others_go_on_as_if_it_had_no_samples(tmp_path: Path) -> None:
    """What is left is the mean over the healthy ones, weighted by their samples."""
    trap = sickness(1, 0, size=2)
    got = train(AllReduce(), tmp_path, workers=2, model=lambda: Sick(float("nan"), trap), budget=Steps(1)).model

    def healthy_batch() -> tuple[Tensor, Tensor]:
        from tests.zoo import BATCH, SEED

        from orchestra.data.feed import IndexedFeed

        chosen = IndexedFeed(make_data(), batch=BATCH, seed=SEED, rank=0, size=2).indices(0, 0)
        x, y = make_data()
        return x[chosen], y[chosen]

    expected = plain(data=healthy_batch, batch=6, steps=1)
    torch.testing.assert_close([*got.parameters()], [*expected.parameters()])


def test_a_step_without_any_finite_gradient_changes_nothing(tmp_path: Path) -> None:
    traps = [sickness(rank, 2, size=2) for rank in range(2)]
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


@each_of(CERTAIN)
def test_a_worker_without_samples_takes_part(strategy: Strategy[Any], tmp_path: Path) -> None:
    check_empty_shard(strategy, virtual(strategy), tmp_path)


@in_processes(CERTAIN, of=first_phase)
def test_a_worker_without_samples_takes_part_in_processes(strategy: Strategy[Any], tmp_path: Path) -> None:
    check_empty_shard(strategy, processes(strategy), tmp_path)


def check_empty_shard(strategy: Strategy[Any], cluster: Local | Simulated, out: Path) -> None:
    """Almost everything lies with one worker."""
    sizes = [len(s) for s in Lopsided().shards(make_classes()[1], cluster.workers, 0)]
    assert sizes[-1] == 0 or cluster.workers == 1
    result = train(
        strategy,
        out,
        data=make_classes,
        model=classifier,
        loss=nn.functional.cross_entropy,
        partition=Lopsided(),
        budget=Steps(4),
        cluster=cluster,
    )
    assert bool(torch.isfinite(flat(result.model)).all())
    assert result.summary.skipped == 0
