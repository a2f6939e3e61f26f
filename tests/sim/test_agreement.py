# SPDX-License-Identifier: Apache-2.0
"""A simulation equals the real run in parameters and bytes, bit for bit; timing changes only what it should."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.laws.examples import workers_for
from tests.processes import together
from tests.zoo import (
    INPUTS,
    Dicey,
    assert_close,
    assert_same,
    events,
    make_data,
    make_large,
    make_model,
    momentum,
    train,
)

from orchestra import AllReduce, Attached, Layout, Local, LocalSGD, Seconds, Simulated, Steps, Strategy, Target
from orchestra.core.node import Node
from orchestra.engine.compute_times import RecordedTimes
from orchestra.errors import ConfigError, Deadlock, WorkerFailed
from orchestra.runs.events import Logged, Stepped
from orchestra.worlds.simulated.networks import Host, Network

S = Strategy[Any]


def simulated(strategy: S, out: Path, *, steps: int = 7, model: Any = None, **cluster: Any) -> Any:
    given = {} if model is None else {"model": model}
    world = Simulated(workers=workers_for(strategy), **cluster)
    return train(strategy, out, cluster=world, budget=Steps(steps), **given)


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples that are different whenever they are looked at."""

    def __init__(self) -> None:
        self.x, self.y = make_data()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i] + 0.1 * torch.randn(INPUTS), self.y[i]


def test_samples_are_drawn_with_the_numbers_of_their_worker(tmp_path: Path) -> None:
    results = [
        train("ps(consistency=asp())", tmp_path / numerics, data=Noisy, budget=Steps(7),
              cluster=Simulated(workers=3, compute_time="lognormal:0.05,0.5", numerics=numerics))
        for numerics in ("real", "batched")
    ]  # fmt: skip
    assert_close(results[0].model, results[1].model, tolerance=2e-5)


@pytest.mark.parametrize(
    ("strategy", "workers", "model", "chosen"),
    [
        ("ps(consistency=asp())", 8, make_model, "batched"),
        ("ps(consistency=asp())", 2, make_model, "real"),  # too few to pay
        ("ps(consistency=asp())", 8, make_large, "real"),  # too large to pay
        ("ps(consistency=asp())", 8, Dicey, "real"),  # cannot
        ("allreduce", 8, make_model, "real"),  # as real processes would, bit for bit
    ],
)
def test_gradients_are_taken_together_where_that_pays(
    strategy: str, workers: int, model: Any, chosen: str, tmp_path: Path
) -> None:
    train(strategy, tmp_path, cluster=Simulated(workers=workers), model=model, budget=Steps(1))
    assert json.loads((tmp_path / "config.json").read_text())["cluster"]["numerics"] == chosen


class Masked(torch.nn.Module):
    """Has a buffer that never changes."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        self.register_buffer("mask", torch.tensor([1.0, 0.0] * 3 + [1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x * self.mask)
        return y


def test_buffers_that_stay_the_same_do_no_harm(tmp_path: Path) -> None:
    both = [simulated(AllReduce(), tmp_path / n, model=Masked, numerics=n).model for n in ("real", "batched")]
    assert_close(*both, tolerance=2e-5)


def test_models_with_dice_or_buffers_are_not_taken_together(tmp_path: Path) -> None:
    for model in (Dicey, lambda: torch.nn.Sequential(torch.nn.Dropout(), make_model())):
        with pytest.raises(ConfigError, match='use "real"'):
            simulated(AllReduce(), tmp_path / "run", model=model, numerics="batched")


def test_asynchronous_staleness_is_what_timing_makes_it(tmp_path: Path) -> None:
    """Three equal workers in turn: each push is two updates old."""
    result = train("ps(consistency=asp())", tmp_path, cluster=Simulated(workers=3), budget=Steps(20))
    assert result.summary.staleness_max == 2
    assert result.summary.staleness_mean == pytest.approx(2, abs=0.2)


@dataclass(frozen=True, kw_only=True)
class Lending(Strategy[None]):
    """Worker 0 lends its vector, changes it as soon as it may, and worker 1 reads it late."""

    def init(self, node: Node) -> None:
        return None

    def step(self, node: Node, s: None) -> None:
        if node.rank == 0:
            node.x.fill_(1.0)
            lent = node.comm.start_send(1, node.x)
            node.comm.send(1, torch.zeros(1))
            lent.wait()
            node.log("free", node.now())
            node.x.fill_(2.0)
            node.comm.recv(1)
            node.gradient()
        else:
            message = node.comm.recv(0)
            node.gradient()
            node.log("read", float(message.x.mean()))
            node.log("free", node.now())
            node.comm.recv(0)  # from here on nothing refers to the first message
            node.comm.send(0, torch.zeros(1))


def test_what_is_lent_is_not_free_before_it_was_read(tmp_path: Path) -> None:
    train(Lending(), tmp_path, cluster=Simulated(workers=2, compute_time="constant:1"), budget=Steps(1))
    found = [{e.name: e.value for e in events(tmp_path, node) if isinstance(e, Logged)} for node in (0, 1)]
    assert found[1]["read"] == 1.0
    assert found[0]["free"] == found[1]["free"] >= 1.0


def test_like_a_run_that_took_place(tmp_path: Path) -> None:
    delay = "exponential:0.02,0.02"
    train("ps", tmp_path / "real", cluster=Local(workers=2, compute_time=delay), budget=Steps(8))
    cluster = Simulated.like(tmp_path / "real", network="1000gbit,0s")
    assert cluster.workers == 2
    train("ps", tmp_path / "again", cluster=cluster, budget=Steps(8))
    for worker in (0, 1):
        real, again = (
            [e.compute for e in events(tmp_path / run, worker) if isinstance(e, Stepped)] for run in ("real", "again")
        )
        assert again == pytest.approx(real, abs=1e-6 * 8)
    with pytest.raises(ConfigError, match="holds no events"):
        Simulated.like(tmp_path)


@pytest.mark.parametrize("optimizer", [momentum, partial(torch.optim.AdamW, lr=0.002)], ids=["momentum", "adamw"])
@pytest.mark.parametrize("workers", [3, 4])
def test_large_models_are_equal_in_all_worlds(workers: int, optimizer: Any, tmp_path: Path) -> None:
    """Where every worker updates a range of one x: in shared memory, over sockets and in virtual time."""
    given: dict[str, Any] = {"model": make_large, "optimizer": optimizer, "budget": Steps(4)}
    real = train(AllReduce(), tmp_path / "real", workers=workers, **given)
    virtual = train(AllReduce(), tmp_path / "virtual", cluster=Simulated(workers=workers), **given)
    assert_same(real.model, virtual.model)

    def call() -> Any:
        result = train(AllReduce(), tmp_path / "attached", cluster=Attached(patience=60), **given)
        return result.model.state_dict(), result.summary.sent_total

    for outcome in together(workers, call):
        assert not outcome.kind, outcome.error
        state, sent = outcome.value
        assert all(torch.equal(state[name], tensor) for name, tensor in virtual.model.state_dict().items())
        assert sent == virtual.summary.sent_total == real.summary.sent_total


@dataclass(frozen=True, kw_only=True)
class Odd(Strategy[Any]):
    """Meets the others when it begins, draws a number there, keeps its gradient, and averages without gradients."""

    def init(self, node: Node) -> Any:
        node.comm.mean_(node.x)
        return [float(torch.rand((), generator=node.rng)), node.g]

    def step(self, node: Node, s: Any) -> None:
        with torch.no_grad():
            node.comm.mean_(node.x)
        node.gradient()
        node.x.sub_(s[1], alpha=0.01 * s[0])
        node.comm.mean_(node.x)


def test_a_strategy_may_do_odd_things(tmp_path: Path) -> None:
    real = train(Odd(), tmp_path / "real", workers=3, budget=Steps(5))
    for numerics in ("real", "batched"):
        virtual = simulated(Odd(), tmp_path / f"{numerics} numbers", steps=5, numerics=numerics)
        assert_close(real.model, virtual.model, tolerance=1e-6 if numerics == "batched" else 0.0)
    assert torch.is_grad_enabled()


@dataclass(frozen=True, kw_only=True)
class Pushing(Strategy[None]):
    """Workers push and never ask for an answer."""

    layout = Layout(model_location="servers", servers=1)

    def init(self, node: Node) -> None:
        return None

    def step(self, node: Node, s: None) -> None:
        node.gradient()
        node.comm.send(node.comm.servers.members[0], node.g[:0])

    def serve(self, node: Node, s: None) -> None:
        node.log("came", sum(1 for _ in node.comm.inbox()))


def test_farewells_come_last_in_any_order(tmp_path: Path) -> None:
    for ties in range(20):
        simulated(Pushing(), tmp_path / str(ties), steps=2, ties=ties)
        assert [e.value for e in events(tmp_path / str(ties), 3) if isinstance(e, Logged)] == [6]


@dataclass(frozen=True, kw_only=True)
class Interrupting(Pushing):
    """The server sends while the workers average."""

    def step(self, node: Node, s: None) -> None:
        node.gradient()
        node.comm.mean_(node.x)
        node.comm.recv(node.comm.servers.members[0])
        node.comm.send(node.comm.servers.members[0], node.g[:1])

    def serve(self, node: Node, s: None) -> None:
        for worker in node.comm.workers.members:
            node.comm.send(worker, node.x)
        left = len(node.comm.workers)
        for message in node.comm.inbox():
            left -= 1
            if left >= 0:
                node.comm.send(message.source, node.x)


def test_other_traffic_slows_a_mean_down(tmp_path: Path) -> None:
    given: dict[str, Any] = {"network": "10kbit,1ms", "compute_time": "constant:0.001", "numerics": "off", "steps": 2}
    times = [
        simulated(Interrupting(), tmp_path / how, fidelity=how, **given).summary.seconds for how in ("auto", "flows")
    ]
    assert times[0] == times[1]


# How it ends.


def test_the_budget_that_was_spent_is_named(tmp_path: Path) -> None:
    result = train(AllReduce(), tmp_path, cluster=Simulated(workers=2), budget=Steps(5) | Seconds(1000))
    assert result.summary.stopped_by == "budget"


def test_seconds_are_virtual(tmp_path: Path) -> None:
    cluster = Simulated(workers=3, compute_time="constant:10")
    result = train(AllReduce(), tmp_path, cluster=cluster, budget=Seconds(95))
    assert result.summary.stopped_by == "seconds"
    assert result.summary.steps == 10
    assert result.summary.seconds == pytest.approx(100, rel=1e-3)


def test_a_target_ends_it_at_the_snapshot_that_reached_it(tmp_path: Path) -> None:
    calls: list[int] = []

    def score(model: torch.nn.Module, data: Any) -> float:
        calls.append(1)
        return float(len(calls))

    result = train(
        LocalSGD(tau=2), tmp_path, cluster=Simulated(workers=2), budget=Target("score", 3) | Steps(100),
        evaluate=score, evaluation_data=make_data, evaluate_every=Steps(4),
    )  # fmt: skip
    assert result.summary.stopped_by == "target"
    assert 8 <= result.summary.steps <= 10


@dataclass(frozen=True, kw_only=True)
class Silent(Strategy[None]):
    """Waits for a message that no worker sends."""

    def init(self, node: Node) -> None:
        return None

    def step(self, node: Node, s: None) -> None:
        node.comm.recv(1 - node.rank)


def test_a_deadlock_names_the_line_of_the_strategy(tmp_path: Path) -> None:
    line = r"worker 0 waits for a message from worker 1 \(test_agreement\.py:\d+, step\)"
    with pytest.raises(Deadlock, match=rf"at 0 s no node can continue:\n  {line}"):
        train(Silent(), tmp_path, cluster=Simulated(workers=2), budget=Steps(3) | Seconds(5000))


@dataclass(frozen=True, kw_only=True)
class Lost(Strategy[None]):
    """Sends to a node that does not exist, or to itself."""

    to: int = 99

    def init(self, node: Node) -> None:
        return None

    def step(self, node: Node, s: None) -> None:
        node.comm.send(self.to, node.x)


@pytest.mark.parametrize("to", [99, -1, 0])
def test_messages_to_no_other_node_are_refused(to: int, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match=f"cannot exchange messages with node {to}"):
        train(Lost(to=to), tmp_path, cluster=Simulated(workers=2), budget=Steps(1))


class Failing(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(INPUTS, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 4:
            raise ZeroDivisionError("on purpose")
        return super().forward(x)


def test_what_a_node_raises_comes_first(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="ZeroDivisionError: on purpose") as caught:
        train(AllReduce(), tmp_path, cluster=Simulated(workers=2), model=Failing, budget=Steps(10))
    assert str(caught.value).startswith("Traceback")


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"workers": 0}, "cluster.workers = 0"),
        ({"network": "fast"}, "'fast' is not a rate"),
        ({"network": "1gbit,5"}, "'5' is not a time"),
        ({"compute_time": "lognormal:1"}, "needs 2 numbers: average, sigma"),
        ({"compute_time": "lognormall:1,2"}, "did you mean 'lognormal'"),
        ({"compute_time": "constant:-1"}, "must be a finite number of at least 0"),
        ({"compute_time": "constant:1 slow:infx2"}, "needs 2 numbers"),
        ({"compute_time": "constant:1 slow:1.7x2"}, "must be a whole one"),
        ({"compute_time": "pareto:0.05,0.001"}, "must be at least 0.1"),
        ({"compute_time": RecordedTimes(((0.5, -1.0),))}, "must be finite numbers of at least 0"),
        ({"network": 5}, "must be a network such as"),
        ({"network": Network(hosts=(Host(up=1, down=1),), rack=1.5)}, "must be a whole number of at least 1 host"),  # type: ignore[arg-type]
        ({"network": Network(hosts=(Host(up=1, down=1),), oversubscription=None)}, "oversubscription"),  # type: ignore[arg-type]
        ({"ties": [1]}, "must be a whole number, or None"),
        ({"numerics": "none"}, "must be one of auto, real, batched, off"),
    ],
)
def test_bad_worlds_are_refused(cluster: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        train(AllReduce(), tmp_path / "run", cluster=Simulated(**cluster))
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()
