# SPDX-License-Identifier: Apache-2.0
"""What holds for every strategy, in virtual time: every example, whatever the timing."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.laws.examples import (
    EXAMPLES,
    SYNCHRONOUS,
    alone,
    bytes_sent,
    each_of,
    each_with,
    sieves,
    steps_of,
    workers_for,
)
from tests.laws.runs import BUSY, Seen, busy, check_what_is_held, simulate, simulated
from tests.zoo import BATCH, assert_close, assert_same, make_data, make_large, make_model, plain, train

from orchestra import EASGD, Downpour, ParameterServer, Simulated, SlowMo, Steps, Strategy, StrategySwitch
from orchestra.engine.expression import parse, show
from orchestra.model.flat_optimizer import Factory
from orchestra.strategies import catalogue
from orchestra.strategies.catalogue import STRATEGIES
from orchestra.strategies.parameter_server import consistency, filters
from orchestra.strategies.parameter_server.consistency.base import OnRequest
from orchestra.strategies.switch import triggers
from orchestra.worlds.simulated.networks import Host, Network

S = Strategy[Any]
LAYERS = [p.numel() for p in make_model().parameters()]
PARAMETERS = sum(LAYERS)
every = each_of(EXAMPLES)
synchronous = each_of(SYNCHRONOUS)
OPTIMIZERS: dict[str, Factory] = {
    "sgd": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": partial(torch.optim.Adam, lr=0.01),
}


def test_the_catalogue_is_covered() -> None:
    assert {type(s) for s in EXAMPLES} == set(STRATEGIES)


# Values.


@every
def test_frozen_hashable_and_read_back(strategy: S) -> None:
    known = vars(catalogue) | vars(consistency) | vars(filters) | vars(triggers)
    assert eval(repr(strategy), known) == strategy
    assert parse(show(strategy)) == strategy
    assert len({strategy, copy.deepcopy(strategy)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        strategy.anything = 1  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        type(strategy)(1)  # type: ignore[call-arg]


# What is computed.


@each_with("optimizer", OPTIMIZERS, EXAMPLES)
def test_a_world_of_one_is_plain_training(strategy: S, optimizer: Factory) -> None:
    steps = 20  # more than an epoch, so that the short last batch is among them
    found = simulated(alone(strategy), workers=1, steps=steps, optimizer=optimizer)
    expected = plain(optimizer=optimizer, steps=steps)
    # x₀ - (x₀ - x) is not x to the last bit.
    (assert_close if isinstance(strategy, SlowMo | EASGD) else assert_same)(found.model, expected)


@every
def test_all_replicas_are_equal_at_the_end(strategy: S) -> None:
    check_what_is_held(strategy, simulated(strategy))


@every
def test_another_seed_gives_another_model(strategy: S) -> None:
    models = simulated(strategy).model, simulated(strategy, seed=4).model
    assert not torch.equal(*(next(model.parameters()) for model in models))


@every
def test_gradients_taken_together_are_those_taken_alone(strategy: S) -> None:
    together = simulate(strategy, world=BUSY | {"numerics": "batched"})
    assert_close(busy(strategy).model, together.model, tolerance=2e-5)
    assert busy(strategy).summary.seconds == together.summary.seconds


# Timing.


@every
def test_same_inputs_same_events(strategy: S) -> None:
    assert simulate(strategy, world=BUSY).digest == busy(strategy).digest


@every
def test_greenlets_and_threads_agree(strategy: S) -> None:
    assert simulate(strategy, world=BUSY | {"fibers": "thread"}).digest == busy(strategy).digest


WORLDS: list[dict[str, Any]] = [
    {"network": "1mbit,50ms"},
    {"network": "10gbit,1us racks:2x4", "fidelity": "flows"},
    {"compute_time": "pareto:0.01,1.5", "network": "100mbit,1ms"},
    {"compute_time": "markov:0.01,10,0.3,0.3 pause:0.2,1 slow:1x5"},
]


@synchronous
def test_timing_changes_nothing(strategy: S) -> None:
    expected = simulated(strategy).model
    assert_same(busy(strategy).model, expected)
    for world in [*WORLDS, *({"ties": ties} for ties in range(3))]:
        assert_same(simulate(strategy, world=world).model, expected)


@pytest.mark.nightly
@synchronous
def test_a_hundred_orders_change_nothing(strategy: S) -> None:
    for ties in range(100):
        assert_same(simulate(strategy, world={"ties": ties}).model, simulated(strategy).model)


ORDERS = [pytest.param(5, id="5 orders"), pytest.param(1000, id="1000 orders", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("orders", ORDERS)
@every
def test_every_order_of_messages_runs_to_the_end(strategy: S, orders: int, tmp_path: Path) -> None:
    for ties in range(orders):
        out = tmp_path / str(ties)
        # On a crowded network what two servers are sent at once reaches them in different orders.
        world = (
            {"compute_time": "constant:1"} if ties % 2 else {"compute_time": "constant:0.001", "network": "10mbit,1ms"}
        )
        cluster = Simulated(workers=workers_for(strategy), ties=ties, numerics="off", **world)  # type: ignore[arg-type]
        train(strategy, out, cluster=cluster, budget=Steps(5))
        shutil.rmtree(out)


@each_with(
    "given",
    {
        "small": (make_model, 1e-6),
        "large": (make_large, 0.0),
        "small, arithmetic free": (make_model, 0.0),
        "large, arithmetic not free": (make_large, 1e-6),
    },
    [s for s in EXAMPLES if not sieves(s)],
)
def test_without_numbers_everything_takes_as_long(strategy: S, given: tuple[Any, float]) -> None:
    model, number = given
    network = Network(hosts=(Host(up=1e8, down=1e8, latency=1e-3, message=1e-4, number=number),))
    real, off = (
        simulate(strategy, model=model, steps=9, world={"network": network, "numerics": numerics}).summary
        for numerics in ("real", "off")
    )
    for figure in ("seconds", "samples", "steps", "sent_total", "sent_per_worker"):
        assert getattr(off, figure) == pytest.approx(getattr(real, figure), rel=1e-9), figure


# What is written.


@every
def test_the_facts_of_a_run_are_written(strategy: S) -> None:
    found = simulated(strategy)
    assert parse(found.facts["strategy"]) == strategy
    assert found.facts["parameters"] == PARAMETERS
    assert found.summary.steps == steps_of(strategy, found.workers, 7)
    assert found.summary.stopped_by == "budget"
    assert found.summary.sent_total == sum(found.ended(node).sent for node in range(len(found.events)))
    assert 0 < found.summary.samples <= found.workers * found.summary.steps * BATCH
    assert len(make_data()[0]) > 7 * BATCH  # no step is the short last one of an epoch of one worker


@every
@pytest.mark.parametrize("wanted", [2, 3])
def test_bytes_on_the_wire_are_those_of_the_docstring(strategy: S, wanted: int) -> None:
    steps = 5
    run = simulated(strategy, workers=wanted, steps=steps)
    workers, nodes = run.workers, range(len(run.events))
    if isinstance(strategy, ParameterServer) and isinstance(strategy.consistency, OnRequest):
        check_what_was_needed(run, steps)
        return
    if sieves(strategy):
        check_what_passed(run, steps)
        return
    sent, received = [run.ended(node).sent for node in nodes], [run.ended(node).received for node in nodes]
    by_worker, by_server = bytes_sent(strategy, workers, steps, LAYERS)
    assert sent == by_worker + by_server
    assert sum(received) == sum(sent)
    if isinstance(strategy, Downpour):
        assert received[:workers] == [sum(by_server) // workers] * workers  # as often as it fetches
    elif getattr(strategy, "algorithm", "native") == "native" and not isinstance(strategy, StrategySwitch):
        assert received == sent  # pushes and pulls, reduce-scatter and all-gather: symmetric
    assert "Bytes" in (sys.modules[type(strategy).__module__].__doc__ or "")


def check_what_was_needed(run: Seen, steps: int) -> None:
    """S is sent unless the gradient was cancelled; S is received unless x is still the same."""
    for worker in range(run.workers):
        cancelled, unchanged = len(run.logged(worker, "abandoned")), int(sum(run.logged(worker, "unchanged")))
        assert run.ended(worker).sent == 4 * PARAMETERS * (steps - cancelled)
        assert run.ended(worker).received == 4 * (PARAMETERS * steps - unchanged)
    nodes = range(len(run.events))
    assert sum(run.ended(n).sent for n in nodes) == sum(run.ended(n).received for n in nodes)


def check_what_passed(run: Seen, steps: int) -> None:
    """16 bytes, and all values or those that passed with their keys; of one server, which may answer without filter."""
    for node in range(run.workers + 1):
        passed = [int(value) for value in run.logged(node, "passed")]
        plain = steps * (1 if node < run.workers else run.workers) - len(passed)
        assert plain == 0 or node == run.workers
        bytes_passed = sum(16 + min(4 * PARAMETERS, 8 * k) for k in passed)
        assert run.ended(node).sent == bytes_passed + plain * 4 * PARAMETERS
