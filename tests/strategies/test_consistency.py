# SPDX-License-Identifier: Apache-2.0
"""What the papers say of their consistencies: identities, bounds, what is late."""

from __future__ import annotations

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zoo import BATCH, adam, assert_close, assert_same, events, make_data, momentum, sgd, simulate, train
from torch import Tensor, nn

from orchestra import (
    ASP,
    SSP,
    BackupWorkers,
    BoundedDelay,
    ConfigError,
    DelayCompensated,
    Epochs,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    LabelSorted,
    Local,
    ParameterServer,
    Simulated,
    SoftSync,
    StalenessAware,
    Steps,
)
from orchestra.cli.summary import describe
from orchestra.engine.compute_times import Exponential
from orchestra.model.flat_optimizer import Factory
from orchestra.runs.events import Logged
from orchestra.strategies.parameter_server.consistency import Consistency
from orchestra.worlds.simulated.networks import Host, Network

WORKERS = 3
FREE = Network(hosts=(Host(up=1e18, down=1e18),))  # messages take no time
EVEN = partial(make_data, 12 * WORKERS * BATCH)  # a full mini-batch for everyone in every step
JITTER = "lognormal:0.05,0.5"


def served(consistency: Consistency, out: Path, *, workers: int = WORKERS, servers: int = 1, **more: Any) -> Any:
    """A simulated run with one consistency."""
    world: dict[str, Any] = {k: more.pop(k) for k in ("network", "compute_time", "numerics", "ties") if k in more}
    cluster = Simulated(workers=workers, **dict[str, Any]({"network": "100mbit,1ms", "compute_time": JITTER} | world))
    corrected: dict[str, Any] = {k: more.pop(k) for k in ("correction",) if k in more}
    strategy = ParameterServer(consistency=consistency, servers=servers, **corrected)
    return train(strategy, out, cluster=cluster, **dict[str, Any]({"budget": Steps(10), "data": EVEN} | more))


def logged(run: Path, node: int, name: str) -> list[float]:
    return [e.value for e in events(run, node) if isinstance(e, Logged) and e.name == name]


# Identities.

BULK = [BoundedDelay(tau=0), BackupWorkers(b=0), KSync(k=WORKERS), KAsync(k=WORKERS)]


@pytest.mark.parametrize("optimizer", [momentum, adam], ids=["momentum", "adam"])
@pytest.mark.parametrize("consistency", BULK, ids=repr)
def test_waiting_for_all_workers_is_bulk_synchronous(
    consistency: Consistency, optimizer: Factory, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"workers": WORKERS, "optimizer": optimizer, "budget": Steps(12)}
    bulk = simulate(ParameterServer(servers=2), tmp_path / "bulk", **given)
    real = simulate(ParameterServer(consistency=consistency, servers=2), tmp_path / "real", **given)
    assert_same(real.model, bulk.model)
    virtual = served(consistency, tmp_path / "virtual", servers=2, data=make_data, **given)
    assert_same(virtual.model, bulk.model)


def test_no_staleness_allowed_is_bulk_synchronous_for_plain_sgd(tmp_path: Path) -> None:
    stale = served(SSP(staleness=0), tmp_path / "ssp", servers=2, optimizer=sgd)
    given: dict[str, Any] = {"workers": WORKERS, "optimizer": sgd, "data": EVEN, "budget": Steps(10)}
    assert_close(stale.model, simulate(ParameterServer(), tmp_path / "bulk", **given).model)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(
    ("consistency", "correction"),
    [
        (KAsync(k=1), {}),
        (KBatchAsync(k=1), {}),
        (SoftSync(n=WORKERS), {}),
        (SSP(staleness=10**6), {}),
        (ASP(), {"correction": DelayCompensated(lam=0.0)}),
        (ASP(), {"correction": DelayCompensated(lam=0.0, adaptive=True)}),
    ],
    ids=lambda part: repr(part)[:40],
)
def test_waiting_for_no_worker_is_asynchronous(
    consistency: Consistency, correction: dict[str, Any], servers: int, tmp_path: Path
) -> None:
    optimizer: Factory = momentum
    if isinstance(consistency, SSP):  # whose pushes count an N-th
        optimizer = partial(torch.optim.SGD, lr=0.02 * WORKERS, momentum=0.9)
    found = served(consistency, tmp_path / "found", servers=servers, optimizer=optimizer, **correction)
    asynchronous = served(ASP(), tmp_path / "asp", servers=servers, optimizer=momentum)
    assert (assert_close if isinstance(consistency, SSP) else assert_same)(found.model, asynchronous.model) is None
    assert found.summary.staleness_counts == asynchronous.summary.staleness_counts


# Bounds.


@pytest.mark.parametrize("schedules", [10, pytest.param(1000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("s", [0, 1, 3])
def test_clocks_are_never_further_apart_than_allowed(s: int, schedules: int, tmp_path: Path) -> None:
    widest = 0.0
    for seed in range(schedules):
        out = tmp_path / str(seed)
        served(
            SSP(staleness=s),
            out,
            workers=4,
            compute_time="pareto:0.01,1.2 slow:1x4",
            ties=seed,
            numerics="off",
            seed=seed,
        )
        widest = max(widest, *logged(out, 4, "gap"))
        shutil.rmtree(out)
    assert widest == s  # reached, and never passed


@pytest.mark.parametrize("tau", [0, 1, 3])
def test_no_iteration_is_further_behind_than_the_bound(tau: int, tmp_path: Path) -> None:
    served(BoundedDelay(tau=tau), tmp_path, workers=4, compute_time="pareto:0.01,1.2 slow:1x4", budget=Steps(40))
    stale = logged(tmp_path, 4, "staleness")
    assert max(stale) == tau
    assert len(stale) == 4 * 40  # every gradient was used


def test_waiting_falls_with_the_bound(tmp_path: Path) -> None:
    waited = [
        served(BoundedDelay(tau=t), tmp_path / str(t), workers=4, budget=Steps(60), numerics="off").summary.share(
            "wait"
        )
        for t in (0, 1, 2, 4, 8)
    ]
    assert waited == sorted(waited, reverse=True)
    assert waited[-1] < waited[0] / 3


# The first K: the time of an update.

P, ROUNDS, SCALE = 6, 600, 0.02


def harmonic(n: int) -> float:
    return sum(1 / i for i in range(1, n + 1))


def time_of_an_update(consistency: Consistency, pushes: int, tmp_path: Path) -> float:
    """Seconds, over the first updates, before anybody is done."""
    world: dict[str, Any] = {"compute_time": Exponential(0.0, SCALE), "network": FREE, "numerics": "off", "workers": P}
    served(consistency, tmp_path, budget=Steps(ROUNDS), data=partial(make_data, 360), **world)
    t = [e.t for e in events(tmp_path, P) if isinstance(e, Logged) and e.name == "staleness"][::pushes]
    t = t[: max(ROUNDS // 2, len(t) // 2)]
    return (t[-1] - t[0]) / (len(t) - 1)


@pytest.mark.parametrize("k", [1, 3, 6])
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (KSync, lambda k: harmonic(P) - harmonic(P - k)),
        (KAsync, lambda k: harmonic(P) - harmonic(P - k)),
        (KBatchSync, lambda k: k / P),
        (KBatchAsync, lambda k: k / P),
    ],
    ids=["k-sync", "k-async", "k-batch-sync", "k-batch-async"],
)
def test_the_time_of_an_update(make: Any, expected: Any, k: int, tmp_path: Path) -> None:
    """As Dutta et al. have it for exponential times, within four standard errors."""
    mean = time_of_an_update(make(k=k), k, tmp_path) / SCALE
    spread = math.sqrt(k) / P if "Batch" in make.__name__ else math.sqrt(sum(1 / (P - i) ** 2 for i in range(k)))
    assert mean == pytest.approx(expected(k), abs=4 * spread / math.sqrt(ROUNDS / 2))


@pytest.mark.parametrize("b", [0, 1, 3])
def test_the_time_of_a_step_with_backup_workers(b: int, tmp_path: Path) -> None:
    """Late workers end what they do: no faster than the N-th of N + b, yet faster than the last of N."""
    update = partial(time_of_an_update, tmp_path=tmp_path)
    n, seconds = P - b, update(BackupWorkers(b=b), P - b) / SCALE
    assert 0.95 * (harmonic(P) - harmonic(b)) < seconds < 1.05 * harmonic(n)
    assert bool(logged(tmp_path, P, "late")) == (b > 0)


# What is late.


def test_who_is_always_slow_is_not_heard_but_counted(tmp_path: Path) -> None:
    """A step of worker 0 takes longer than all steps of the others; when they have left, it cannot make a group."""
    result = served(BackupWorkers(b=1), tmp_path, compute_time="constant:0.1 slow:1x100", budget=Steps(5), network=FREE)
    assert logged(tmp_path, WORKERS, "late") == [5]  # versions behind
    assert len(logged(tmp_path, WORKERS, "staleness")) == 2 * 5
    assert result.summary.dropped == 4
    assert result.summary.steps == 5


def test_who_is_always_slow_is_cancelled(tmp_path: Path) -> None:
    served(KSync(k=2), tmp_path, compute_time="constant:0.1 slow:1x100", budget=Steps(5), network=FREE)
    assert len(logged(tmp_path, 0, "abandoned")) == 5
    assert len(logged(tmp_path, WORKERS, "staleness")) == 2 * 5


# The rule holds to the end.

SLOW = "constant:0.01 slow:1x40"


def labelled() -> tuple[Tensor, Tensor]:
    """Four classes, each a cloud around its own corner."""
    generator = torch.Generator().manual_seed(5)
    y = torch.arange(4).repeat(100)
    corners = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]])
    return corners[y] + torch.randn(400, 2, generator=generator), y


def accuracy_of(model: nn.Module) -> float:
    x, y = labelled()
    return float((model(x).argmax(1) == y).float().mean())


@pytest.mark.parametrize("consistency", [BackupWorkers(b=1), KAsync(k=3)], ids=repr)
@pytest.mark.parametrize("world", ["simulated", "local"])
def test_a_straggler_alone_makes_no_update(consistency: Consistency, world: str, tmp_path: Path) -> None:
    """Each worker has one class. After the others have left, a class alone would undo what was learned of theirs."""
    steps = 40
    cluster: Any = (
        Simulated(workers=4, compute_time=SLOW, network=FREE) if world == "simulated"
        else Local(workers=4, compute_time=SLOW, patience=20)
    )  # fmt: skip
    strategy = ParameterServer(consistency=consistency)
    result = train(
        strategy, tmp_path, cluster=cluster, model=partial(nn.Linear, 2, 4), data=labelled, batch=5,
        loss=nn.functional.cross_entropy, optimizer=partial(torch.optim.SGD, lr=1.0), budget=Steps(steps),
        partition=LabelSorted(),
    )  # fmt: skip
    assert accuracy_of(result.model) > 0.53  # 0.46 where every gradient of the straggler is an update
    applied = len(logged(tmp_path, 4, "staleness"))
    late, dropped = len(logged(tmp_path, 4, "late")), result.summary.dropped
    assert applied % 3 == 0  # every update is of three
    assert applied + late + dropped == 4 * steps  # every gradient is counted once
    assert dropped > 0
    assert result.summary.steps == steps
    assert "gradients dropped: too few workers were left" in describe(tmp_path, result.summary)


@pytest.mark.parametrize("k", [4, 7])
@pytest.mark.parametrize("make", [KBatchAsync, KBatchSync])
def test_a_group_that_is_not_complete_at_the_end_is_dropped(make: Any, k: int, tmp_path: Path) -> None:
    """Three workers of ten steps have thirty gradients, which K does not divide."""
    result = served(make(k=k), tmp_path, compute_time="constant:0.01", network=FREE)
    late = len(logged(tmp_path, WORKERS, "late"))
    late += sum(len(logged(tmp_path, worker, "abandoned")) for worker in range(WORKERS))
    assert result.summary.dropped == (30 - late) % k
    assert len(logged(tmp_path, WORKERS, "staleness")) == 30 - late - result.summary.dropped
    assert make is KBatchSync or result.summary.dropped > 0


@pytest.mark.parametrize("consistency", BULK, ids=repr)
def test_a_ragged_end_is_still_bulk_synchronous(consistency: Consistency, tmp_path: Path) -> None:
    """101 samples for three workers: the last mini-batches are smaller, or empty, and none is dropped."""
    given: dict[str, Any] = {"workers": WORKERS, "budget": Epochs(2), "data": partial(make_data, 101)}
    bulk = simulate(ParameterServer(), tmp_path / "bulk", **given)
    found = served(consistency, tmp_path / "found", compute_time="lognormal:0.05,0.5 slow:1x10", **given)
    assert_same(found.model, bulk.model)
    assert found.summary.dropped == 0


def test_no_gradients_of_a_single_worker_are_dropped(tmp_path: Path) -> None:
    for consistency in (BackupWorkers(b=0), KSync(k=1), KAsync(k=1), KBatchSync(k=1), KBatchAsync(k=1), SoftSync(n=1)):
        found = served(consistency, tmp_path / repr(consistency), workers=1)
        assert found.summary.dropped == 0
        assert found.summary.samples == 10 * BATCH


def test_a_cancelled_worker_stops_in_the_middle(tmp_path: Path) -> None:
    result = served(KSync(k=1), tmp_path, compute_time="constant:0.1 slow:1x50", budget=Steps(8), network=FREE)
    assert result.summary.seconds == pytest.approx(0.8, rel=1e-6)


@pytest.mark.timed
def test_a_cancelled_worker_stops_sleeping(tmp_path: Path) -> None:
    """For real: without that the run would last forty seconds."""
    cluster = Local(workers=2, compute_time="constant:0.05 slow:1x100", patience=20)
    result = train(ParameterServer(consistency=KSync(k=1)), tmp_path, cluster=cluster, budget=Steps(8))
    assert result.summary.seconds < 20
    assert len(logged(tmp_path, 0, "abandoned")) == 8


# Corrections.


class Bowl(nn.Module):
    """One parameter w with loss a (w − sample)²/2, so that g = a (w − sample)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.w - x


def half_square(difference: Tensor, target: Tensor) -> Tensor:
    return (difference**2).mean() / 2


def zeros() -> tuple[Tensor, Tensor]:
    return torch.zeros(64, 1), torch.zeros(64, 1)


@pytest.mark.parametrize("adaptive", [False, True])
def test_delay_compensation_step_by_step(adaptive: bool, tmp_path: Path) -> None:
    """Two workers of speeds 1 and 2 by hand: worker 1 pushes at 1, 2, 3, ..., worker 0 at 2.5, 5, ..."""
    lam, lr, rho = (2.0, 0.1, 0.95) if adaptive else (0.5, 0.1, 0.95)
    result = served(
        ASP(), tmp_path, workers=2, correction=DelayCompensated(lam=lam, adaptive=adaptive, rho=rho),
        compute_time="constant:1 slow:1x2.5", network=FREE, model=Bowl, loss=half_square, data=zeros, batch=1,
        optimizer=partial(torch.optim.SGD, lr=lr), budget=Steps(4),
    )  # fmt: skip
    w, ms, read = 1.0, 0.0, [1.0, 1.0]
    for worker in (1, 1, 0, 1, 1, 0, 0, 0):  # at 1, 2, 2.5, 3, 4, 5, 7.5, 10
        g = read[worker]
        ms = rho * ms + (1 - rho) * g * g
        scale = lam / math.sqrt(ms + 1e-7) if adaptive else lam
        w -= lr * (g + scale * g * g * (w - read[worker]))
        read[worker] = w
    assert result.model.w.item() == pytest.approx(w, rel=1e-5)


def test_the_learning_rate_is_divided_by_staleness(tmp_path: Path) -> None:
    result = served(
        ASP(), tmp_path, workers=2, correction=StalenessAware(), compute_time="constant:1 slow:1x2.5", network=FREE,
        model=Bowl, loss=half_square, data=zeros, batch=1, optimizer=partial(torch.optim.SGD, lr=0.1), budget=Steps(4),
    )  # fmt: skip
    w, read = 1.0, [(1.0, 0), (1.0, 0)]
    for version, worker in enumerate((1, 1, 0, 1, 1, 0, 0, 0)):
        g, seen = read[worker]
        w -= 0.1 * g / max(1, version - seen)
        read[worker] = (w, version + 1)
    assert result.model.w.item() == pytest.approx(w, rel=1e-5)


# What makes no sense is refused.


@pytest.mark.parametrize(
    ("strategy", "complaint"),
    [
        ("ps(consistency=ksync(k=4))", "is more than the 3 workers"),
        ("ps(consistency=kasync(k=9))", "is more than the 3 workers"),
        ("ps(consistency=kasync(k=2), servers=2)", "several would choose different ones"),
        ("ps(consistency=ksync(k=2), servers=2)", "several would choose different ones"),
        ("ps(consistency=backupworkers(b=1), servers=2)", "several would choose different ones"),
        ("ps(consistency=softsync(n=4))", "is more than the 3 workers"),
        ("ps(consistency=backupworkers(b=3))", "must be less than the 3 workers"),
        ("ps(consistency=ssp(staleness=-1))", "must be at least 0"),
        ("ps(correction=delaycompensated())", "of which there are none"),
    ],
)
def test_what_makes_no_sense_is_refused(strategy: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        simulate(strategy, tmp_path, workers=WORKERS, budget=Steps(1))


def test_a_correction_comes_before_a_push_is_divided(tmp_path: Path) -> None:
    """SSP that never waits is ASP with N times the rate, whatever corrects its gradients."""
    given: dict[str, Any] = {
        "cluster": Simulated(workers=2, compute_time="constant:1 slow:1x2.5", network=FREE),
        "model": Bowl, "loss": half_square, "data": zeros, "batch": 1, "budget": Steps(4),
    }  # fmt: skip
    found = [
        train(
            ParameterServer(consistency=consistency, correction=DelayCompensated(lam=0.5)),
            tmp_path / str(lr), optimizer=partial(torch.optim.SGD, lr=lr), **given,
        ).model
        for consistency, lr in ((SSP(staleness=100), 0.2), (ASP(), 0.1))
    ]  # fmt: skip
    assert_close(*found)
