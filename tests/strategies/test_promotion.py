# SPDX-License-Identifier: Apache-2.0
"""Servers promoted from workers at a switch: who trains afterwards, on what, for how long, and how it is saved."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.zoo import (
    BATCH,
    COUNT,
    INPUTS,
    SEED,
    Dicey,
    Trap,
    assert_close,
    assert_same,
    die_after,
    ended,
    events,
    make_classes,
    make_data,
    make_model,
    momentum,
    press_ctrl_c,
    simulate,
    train,
    trapped,
)
from torch import nn
from torch.utils.data import IterableDataset

from orchestra import (
    ASP,
    BSP,
    SSP,
    AtShare,
    ConfigError,
    Epochs,
    Local,
    ParameterServer,
    RunStatus,
    Simulated,
    Steps,
    StrategySwitch,
)
from orchestra.data.feed import IndexedFeed
from orchestra.data.partitions import LabelSorted
from orchestra.data.random_state import seed_everything
from orchestra.engine import checkpoint
from orchestra.errors import Interrupted, WorkerLost
from orchestra.runs.events import Logged, Stepped
from orchestra.runs.facts import scores_of
from orchestra.strategies.parameter_server.consistency import Consistency

WORKERS = 4
MANY = partial(make_data, 3 * COUNT)  # so that a single epoch is long enough: what a trap waits for comes once
CONSISTENCIES = [BSP(), ASP(), SSP(staleness=1)]


def promoting(consistency: Consistency, servers: int = 1, share: float = 0.4) -> StrategySwitch:
    then = ParameterServer(consistency=consistency, servers=servers)
    return StrategySwitch(then=then, when=AtShare(share=share), promote=True)


def worlds() -> list[Any]:
    return [Local(workers=WORKERS, patience=20), Simulated(workers=WORKERS, compute_time="lognormal:0.05,0.5")]


every_world = pytest.mark.parametrize("cluster", worlds(), ids=["local", "simulated"])


def trap_after_switch(rank: int, step: int, action: Callable[[], object]) -> Trap:
    """Sprung by worker `rank` so many steps after a switch at step 2 that left one worker less."""
    feed = IndexedFeed(MANY(), batch=BATCH, seed=SEED, rank=rank, size=WORKERS)
    feed.seek(0, 2)
    feed.deal_to(range(WORKERS - 1))
    return Trap(feed.indices(0, step)[0], action)


def test_promotion_trains_on_all_samples_with_fewer_and_fewer_at_once(tmp_path: Path) -> None:
    """As one process would do it: batches of four workers, then of three; the rate falls with the mini-batch."""
    steps, switch = 12, 5
    result = simulate(promoting(BSP()), tmp_path / "run", workers=WORKERS, budget=Steps(steps))
    seed_everything(SEED)
    module, samples = make_model(), make_data()
    feeds = [IndexedFeed(samples, batch=BATCH, seed=SEED, rank=r, size=WORKERS) for r in range(WORKERS)]
    per_epoch = feeds[0].steps_per_epoch or 0
    inner, done = momentum([*module.parameters()]), 0
    while feeds[0].epochs * per_epoch < steps:
        taken = [pieces for pieces, count in (feed.next() for feed in feeds) if count]
        inputs, target = (torch.cat(column) for column in zip(*taken, strict=True))
        inner.zero_grad()
        torch.autograd.backward(F.mse_loss(module(inputs), target))
        inner.step()
        done += 1
        if done == switch:
            feeds = feeds[:-1]
            for feed in feeds:
                feed.deal_to(range(len(feeds)))
            inner.param_groups[0]["lr"] *= 3 / 4
    assert result.summary.steps == done > steps
    assert_close(result.model, module)


@every_world
@pytest.mark.parametrize("consistency", CONSISTENCIES, ids=repr)
def test_an_epoch_is_still_every_sample_once(cluster: Any, consistency: Consistency, tmp_path: Path) -> None:
    result = train(promoting(consistency, servers=2), tmp_path, cluster=cluster, budget=Epochs(3))
    assert result.summary.samples == 3 * COUNT
    assert result.summary.happened is not None
    steps = [[e for e in events(tmp_path, node) if isinstance(e, Stepped)] for node in range(WORKERS)]
    at = result.summary.happened[0]
    assert [rows[-1].step for rows in steps[2:]] == [at, at]  # they made way
    assert min(rows[-1].step for rows in steps[:2]) == result.summary.steps > at
    assert all(rows[-1].epoch == 3 for rows in steps[:2])


@pytest.mark.parametrize("numerics", ["real", "off"])
@pytest.mark.parametrize("steps", [27, 30, 32, 54])
def test_as_many_samples_as_all_would_have_used(steps: int, numerics: Any, tmp_path: Path) -> None:
    """27/49 · 49 is less than 27 in floating point."""
    cluster = Simulated(workers=WORKERS, numerics=numerics)
    data = partial(make_data, 196)
    strategy = promoting(BSP(), servers=2, share=0.5)
    result = train(strategy, tmp_path, cluster=cluster, data=data, batch=1, budget=Steps(steps))
    assert result.summary.samples == WORKERS * steps


def test_real_and_virtual_are_the_same(tmp_path: Path) -> None:
    models = [
        train(promoting(BSP(), servers=2), tmp_path / str(i), cluster=cluster, budget=Epochs(2)).model
        for i, cluster in enumerate(worlds())
    ]
    assert_same(*models)


def test_shards_of_those_who_leave_go_to_the_others(tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": make_classes, "loss": F.cross_entropy, "partition": LabelSorted()}
    model = partial(nn.Linear, INPUTS, 3)
    result = simulate(promoting(ASP()), tmp_path, workers=WORKERS, model=model, budget=Epochs(2), **given)
    assert result.summary.samples == 2 * COUNT


def test_what_is_handed_over_stays_on_the_machine(tmp_path: Path) -> None:
    """At the switch nothing but the count of samples passes the network."""
    simulate(promoting(BSP(), servers=2, share=0.5), tmp_path / "a", workers=WORKERS, budget=Steps(4))
    numel = sum(p.numel() for p in make_model().parameters())
    size = 4 * numel
    sent = [ended(tmp_path / "a", node).sent for node in range(WORKERS)]
    mean, count = 2 * 2 * 3 * size, 2 * 3 * 8  # two steps of reduce-scatter and all-gather, and a number
    later = [ended(tmp_path / "a", node).step - 2 for node in range(2)]
    assert sum(sent) == mean + count + sum(later) * size


@pytest.mark.parametrize("consistency", CONSISTENCIES, ids=repr)
def test_stopped_by_ctrl_c_after_it_and_resumed(consistency: Consistency, tmp_path: Path) -> None:
    strategy, out = promoting(consistency, share=0.15), tmp_path / "run"
    given: dict[str, Any] = {"workers": WORKERS, "data": MANY, "budget": Epochs(1)}
    pressed = trap_after_switch(0, 1, partial(press_ctrl_c, os.getpid()))
    # The others take a long step as well: they might run ahead to the end.
    waiting = [trap_after_switch(rank, 1, partial(time.sleep, 0.3)) for rank in (1, 2)]
    with pytest.raises(Interrupted, match="A checkpoint of step"):
        train(strategy, out, model=trapped(pressed, *waiting, model=Dicey), **given)
    saved, _ = checkpoint.newest(out / "checkpoints")
    assert saved.step >= 4
    assert len(saved.manifest["files"]) == WORKERS + 1
    resumed = train(strategy, out, model=trapped(model=Dicey), resume=True, **given)
    never = train(strategy, tmp_path / "never", model=trapped(model=Dicey), **given)
    assert resumed.summary.samples == never.summary.samples == 3 * COUNT
    assert resumed.summary.steps == never.summary.steps
    if strategy.layout.updates.synchronous:
        assert_same(resumed.model, never.model)


@pytest.mark.parametrize("consistency", CONSISTENCIES, ids=repr)
def test_stopped_by_a_death_after_it_and_resumed(consistency: Consistency, tmp_path: Path) -> None:
    strategy, out = promoting(consistency, share=0.15), tmp_path / "run"
    given: dict[str, Any] = {"workers": WORKERS, "data": MANY, "budget": Epochs(1), "checkpoint_every": Steps(4)}
    death = trap_after_switch(0, 2, partial(die_after, out / "checkpoints" / "step-00000004"))
    with pytest.raises(WorkerLost):
        train(strategy, out, model=trapped(death, model=Dicey), **given)
    assert checkpoint.newest(out / "checkpoints")[0].step == 4
    resumed = train(strategy, out, model=trapped(model=Dicey), resume=True, **given)
    never = train(strategy, tmp_path / "never", model=trapped(model=Dicey), **given)
    assert resumed.summary.samples == never.summary.samples == 3 * COUNT
    if strategy.layout.updates.synchronous:
        assert_same(resumed.model, never.model)


@every_world
def test_models_are_set_aside_and_scored_at_equal_samples(cluster: Any, tmp_path: Path) -> None:
    """With buffers, of which those who left have none to give."""

    def error(model: nn.Module, data: Any) -> float:
        inputs, target = data
        return float(F.mse_loss(model(inputs), target))

    train(
        promoting(BSP()), tmp_path, cluster=cluster, model=Dicey, budget=Epochs(4), evaluate=error,
        evaluation_data=make_data, evaluate_every=Epochs(1),
    )  # fmt: skip
    assert [score.samples for score in scores_of(tmp_path)][:5] == [0, COUNT, 2 * COUNT, 3 * COUNT, 4 * COUNT]


def test_the_schedule_goes_on_by_samples(tmp_path: Path) -> None:
    def falling(epochs: float) -> float:
        return 1 / (1 + epochs)

    simulate(promoting(BSP()), tmp_path, workers=WORKERS, budget=Epochs(3), schedule=falling)
    for node in range(WORKERS - 1):
        last = [e for e in events(tmp_path, node) if isinstance(e, Stepped)][-1]
        assert last.lr == pytest.approx(0.02 * falling(3 - 11 / COUNT) * 3 / 4, rel=0.02)


def test_what_is_shown_on_the_way_ends_where_it_should(tmp_path: Path) -> None:
    seen: list[RunStatus] = []
    train(promoting(BSP()), tmp_path, workers=WORKERS, budget=Steps(10), progress=seen.append)
    steps = [p.step for p in seen if p.begun]
    assert steps == sorted(steps)
    assert steps[-1] == seen[-1].last_step == 10


def test_workers_that_left_are_marked(tmp_path: Path) -> None:
    result = simulate(promoting(ASP(), servers=2), tmp_path, workers=WORKERS, budget=Steps(10))
    left = [
        node
        for node in range(WORKERS + 2)
        if any(isinstance(e, Logged) and e.name == "retired" for e in events(tmp_path, node))
    ]
    assert left == [2, 3]
    assert result.summary.happened is not None
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["servers"] == 2


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        ("switch(first=ps, then=ps, promote=True)", "a first strategy without servers"),
        ("switch(then=localsgd, promote=True)", "a second with some"),
        ("switch(then=ps(servers=4), promote=True)", "would leave none of 4 workers"),
        ("switch(then=ps(consistency=ksync(k=4)), promote=True)", "more than the 3 workers"),
    ],
)
def test_what_makes_no_sense_is_refused(strategy: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        simulate(strategy, tmp_path, workers=WORKERS)


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(*make_data(), strict=True)


def test_a_stream_cannot_be_divided_again(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot give the samples of a stream"):
        simulate(promoting(ASP()), tmp_path, workers=WORKERS, data=Stream)
