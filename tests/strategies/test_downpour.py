# SPDX-License-Identifier: Apache-2.0
"""Downpour with intervals of one is the asynchronous server; with longer ones nothing that was pushed is lost."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.strategies.points import START, end_of, slope, walk
from tests.zoo import assert_close, assert_same, ended, momentum, plain, sgd, simulate, train

from orchestra import ASP, Downpour, Local, ParameterServer, Simulated, Steps
from orchestra.model.flat_optimizer import Factory

adagrad: Factory = partial(torch.optim.Adagrad, lr=0.02)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("optimizer", [momentum, adagrad], ids=["momentum", "adagrad"])
def test_with_intervals_of_one_it_is_the_asynchronous_server(servers: int, optimizer: Factory, tmp_path: Path) -> None:
    """Bit for bit, second for second and version for version, in every order of events."""
    for ties in (None, 1, 2):
        world = Simulated(workers=3, network="10mbit,1ms,10us", compute_time="lognormal:0.05,0.5", ties=ties)
        one, other = (
            train(strategy, tmp_path / f"{type(strategy).__name__}-{ties}", cluster=world, optimizer=optimizer,
                  budget=Steps(12))
            for strategy in (Downpour(servers=servers), ParameterServer(consistency=ASP(), servers=servers))
        )  # fmt: skip
        assert_same(one.model, other.model)
        assert one.summary.seconds == other.summary.seconds
        assert one.summary.staleness_counts == other.summary.staleness_counts
        assert one.summary.sent_total == other.summary.sent_total


def falling(epochs: float) -> float:
    return 1 / (1 + epochs)


@pytest.mark.parametrize(("n_push", "n_fetch"), [(3, 3), (2, 4), (1, 5), (50, 50)])
def test_one_worker_with_plain_sgd_is_sgd(n_push: int, n_fetch: int, tmp_path: Path) -> None:
    """The server takes the very steps that the worker took by itself; the rate may fall only between two pushes."""
    schedule = falling if n_push == 1 else None
    given = {"optimizer": sgd, "schedule": schedule}
    result = simulate(Downpour(n_push=n_push, n_fetch=n_fetch), tmp_path, workers=1, budget=Steps(20), **given)
    assert_close(result.model, plain(steps=20, **given))  # type: ignore[arg-type]


@pytest.mark.parametrize(("n_push", "n_fetch"), [(1, 1), (3, 2), (2, 3), (4, 4), (3, 100), (100, 3)])
@pytest.mark.parametrize("world", ["real", "simulated"])
def test_every_gradient_reaches_the_servers_once(n_push: int, n_fetch: int, world: str, tmp_path: Path) -> None:
    workers, steps = 3, 7
    cluster = (
        Local(workers=workers) if world == "real" else Simulated(workers=workers, compute_time="lognormal:0.05,0.5")
    )
    strategy = Downpour(n_push=n_push, n_fetch=n_fetch)
    result = walk(strategy, tmp_path, slope, lr=0.5, steps=steps, cluster=cluster)
    assert end_of(result) == START - 0.5 * workers * steps
    assert ended(tmp_path, workers).samples == result.summary.samples


@pytest.mark.parametrize("n_fetch", [2, 1000])
def test_what_was_pushed_before_a_checkpoint_is_in_it(n_fetch: int, tmp_path: Path) -> None:
    """Workers that do not wait for answers save while their pushes lie unread at the server."""
    workers, steps, out = 2, 40, tmp_path / "run"
    given: dict[str, Any] = {"cluster": Local(workers=workers), "checkpoint_every": Steps(1)}
    for budget in (steps // 2, steps):
        result = walk(Downpour(n_fetch=n_fetch), out, slope, lr=0.5, steps=budget, resume=budget == steps, **given)
    assert end_of(result) == START - 0.5 * workers * steps


def test_staleness_counts_versions_since_the_fetch(tmp_path: Path) -> None:
    """Two workers in turn that fetch with every second push: each push misses the other's since, and its own."""
    result = walk(Downpour(n_fetch=2), tmp_path, slope, lr=0.5, steps=8, workers=2)
    first, later = {0: 1, 1: 1, 2: 1, 3: 1}, {1: 6, 3: 6}
    counts = {n: first.get(n, 0) + later.get(n, 0) for n in first | later}
    assert result.summary.staleness_counts == counts
