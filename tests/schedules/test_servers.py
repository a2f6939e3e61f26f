# SPDX-License-Identifier: Apache-2.0
"""A schedule has one meaning everywhere: samples dealt, in epochs, on workers, on servers and in the log."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.cases import few
from tests.processes import together
from tests.zoo import BATCH, COUNT, assert_same, events, make_data, plain, train
from torch import Tensor

from orchestra import (
    ASP,
    AllReduce,
    AtShare,
    Attached,
    BackupWorkers,
    BoundedDelay,
    Downpour,
    Epochs,
    KAsync,
    KBatchSync,
    KSync,
    ParameterServer,
    Polynomial,
    Simulated,
    Steps,
    Strategy,
    StrategySwitch,
)
from orchestra.engine.checkpoint import newest
from orchestra.engine.expression import show
from orchestra.runs.events import Stepped
from orchestra.strategies.parameter_server.consistency import Consistency

WORKERS, RATE = 3, 0.01
FALLING = Polynomial(epochs=2.5, power=1)
BAD = 40  # a sample whose loss is NaN: the gradient of its mini-batch is skipped


class Recording(torch.optim.SGD):
    """Plain SGD that keeps the factor on its learning rate of every step. Where there are servers, only they step."""

    rates: list[float]

    def step(self, closure: Any = None) -> Any:
        self.rates += [group["lr"] / RATE for group in self.param_groups]
        return super().step(closure)


def recording(rates: list[float]) -> Any:
    made = type("Recorded", (Recording,), {"rates": rates})
    return partial(made, lr=RATE)


def with_a_bad_sample() -> tuple[Tensor, Tensor]:
    x, y = make_data()
    y[BAD] = 1e6
    return x, y


def loss(output: Tensor, target: Tensor) -> Tensor:
    value = F.mse_loss(output, target.clamp(max=10))
    return value * torch.nan if bool((target > 1e5).any()) else value


LOCKSTEP = [
    ParameterServer(),
    ParameterServer(servers=2),
    ParameterServer(consistency=BoundedDelay(tau=0)),
    ParameterServer(consistency=BackupWorkers(b=0)),
    ParameterServer(consistency=KSync(k=WORKERS)),
    ParameterServer(consistency=KAsync(k=WORKERS)),
    ParameterServer(pieces=3),
    StrategySwitch(first=AllReduce(), then=ParameterServer(), when=AtShare(share=0.4), scale=1.0),
    StrategySwitch(first=ParameterServer(), then=AllReduce(), when=AtShare(share=0.4), scale=1.0),
]


@pytest.mark.parametrize("strategy", few(LOCKSTEP, [LOCKSTEP[0], LOCKSTEP[1], LOCKSTEP[7]]), ids=show)
def test_a_skipped_gradient_leaves_servers_and_all_reduce_equal(strategy: Strategy[Any], tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "schedule": FALLING, "budget": Epochs(2), "data": with_a_bad_sample, "loss": loss, "workers": WORKERS,
    }  # fmt: skip
    expected = train(AllReduce(), tmp_path / "allreduce", **given)
    assert expected.summary.skipped == 2
    real = train(strategy, tmp_path / "real", **given)
    assert_same(real.model, expected.model)
    virtual = train(strategy, tmp_path / "virtual", **given | {"cluster": Simulated(workers=WORKERS)})
    assert_same(virtual.model, expected.model)


def test_a_skipped_gradient_leaves_servers_and_all_reduce_equal_over_sockets(tmp_path: Path) -> None:
    given: dict[str, Any] = {"schedule": FALLING, "budget": Epochs(2), "data": with_a_bad_sample, "loss": loss}
    expected = train(AllReduce(), tmp_path / "allreduce", workers=2, **given)

    def call() -> Any:
        return train(ParameterServer(), tmp_path / "ps", cluster=Attached(patience=20), **given).model.state_dict()

    for outcome in together(3, call):
        assert not outcome.kind, outcome.error
        state: dict[str, Tensor] = outcome.value
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.model.state_dict().items())


def rates_of(strategy: Strategy[Any], out: Path, **given: Any) -> tuple[list[float], list[float]]:
    """Factors on the rate of the servers' steps, and those in the log of worker 0."""
    rates: list[float] = []
    cluster = Simulated(workers=4, compute_time="lognormal:0.05,0.2")
    asked: dict[str, Any] = {"schedule": FALLING, "budget": Epochs(2), "cluster": cluster} | given
    train(strategy, out, optimizer=recording(rates), **asked)
    return rates, [e.lr / RATE for e in events(out, 0) if isinstance(e, Stepped)]


@pytest.mark.parametrize(
    "consistency", [KSync(k=1), KSync(k=2), KBatchSync(k=2), BackupWorkers(b=2), KAsync(k=2), ASP()], ids=repr
)
def test_the_rate_on_servers_ends_where_the_log_ends(consistency: Consistency, tmp_path: Path) -> None:
    served, told = rates_of(ParameterServer(consistency=consistency), tmp_path)
    step = 4 * BATCH / COUNT / 2.5  # what the factor falls by in a step of all workers
    assert told[0] == 1.0
    assert served[0] > 1 - step
    assert served[-1] == pytest.approx(told[-1], abs=1.01 * step)
    assert served == sorted(served, reverse=True)


def test_a_worker_that_has_finished_counts_with_its_last_progress(tmp_path: Path) -> None:
    """Three workers are done when the fourth has made a tenth of its steps."""
    slow = Simulated(workers=4, compute_time="constant:0.01 slow:1x10")
    served, _ = rates_of(ParameterServer(consistency=ASP()), tmp_path, cluster=slow)
    last = (2 * COUNT - COUNT % (4 * BATCH)) / COUNT  # epochs dealt before the last mini-batches
    assert served[-1] == pytest.approx(FALLING(last))
    after_the_others = served[-8:]
    assert after_the_others == sorted(after_the_others, reverse=True)
    assert after_the_others[0] < FALLING(1.5)  # three of four are at the end


def test_schedules_with_one_worker_equal_plain_training(tmp_path: Path) -> None:
    for strategy in (ParameterServer(consistency=ASP()), ParameterServer(consistency=KSync(k=1)), Downpour()):
        found = train(
            strategy, tmp_path / type(strategy).__name__ / show(strategy), cluster=Simulated(workers=1),
            schedule=FALLING, budget=Steps(30), optimizer=partial(torch.optim.SGD, lr=0.05),
        )  # fmt: skip
        expected = plain(steps=30, schedule=FALLING, optimizer=partial(torch.optim.SGD, lr=0.05))
        torch.testing.assert_close([*found.model.parameters()], [*expected.parameters()], rtol=2e-6, atol=2e-6)


class Writing(torch.optim.SGD):
    """Plain SGD that writes the factor on its learning rate into a file at every step."""

    path: Path

    def step(self, closure: Any = None) -> Any:
        with self.path.open("a") as file:
            file.write(f"{self.param_groups[0]['lr'] / RATE}\n")
        return super().step(closure)


def test_a_resumed_server_knows_how_far_the_workers_are(tmp_path: Path) -> None:
    """What a server was told is part of a checkpoint: it must not go back to the rates of the beginning."""
    rates, out, strategy = tmp_path / "rates", tmp_path / "run", ParameterServer(consistency=ASP())
    given: dict[str, Any] = {
        "workers": WORKERS, "schedule": FALLING, "checkpoint_every": Steps(4), "batch": 3,
        "optimizer": partial(type("Written", (Writing,), {"path": rates}), lr=RATE),
    }  # fmt: skip
    train(strategy, out, budget=Steps(14), **given)
    saved, _ = newest(out / "checkpoints")
    _, known = saved.node(WORKERS)["progress"]
    assert known == {worker: saved.node(worker)["progress"][0] for worker in range(WORKERS)}
    assert min(known.values()) > 0
    rates.unlink()
    train(strategy, out, budget=Steps(20), resume=True, **given)
    assert max(map(float, rates.read_text().split())) <= FALLING(min(known.values()))
