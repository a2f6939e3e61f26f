# SPDX-License-Identifier: Apache-2.0
"""Pushes in pieces, and pushes that come twice: consistencies see each of them whole, and once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.cases import in_both_worlds
from tests.zoo import adam, assert_same, ended, events, make_large, make_model, simulate, train
from torch import nn

from orchestra import BSP, BoundedDelay, KSync, Local, ParameterServer, Simulated, Steps
from orchestra.core.node import Node
from orchestra.core.ops import Handle, Op, Send
from orchestra.engine.middleware import TransportWrapper
from orchestra.runs.events import Logged
from orchestra.strategies.parameter_server.consistency import Consistency, ServerState

T = TypeVar("T")
WORKERS, STEPS = 3, 8
BULK = [BSP(), BoundedDelay(tau=0), KSync(k=WORKERS)]
GIVEN: dict[str, Any] = {"budget": Steps(STEPS), "optimizer": adam}
in_worlds = partial(
    in_both_worlds,
    local=Local(workers=WORKERS),
    simulated=Simulated(workers=WORKERS, network="1mbit,1ms", compute_time="lognormal:0.05,0.5", ties=3),
    real=lambda consistency, *more: consistency == BSP(),
)


class Doubling(TransportWrapper):
    """Sends every push twice, as after a failure where it is not known whether the first one arrived."""

    def start(self, op: Op[T]) -> Handle[T]:
        handle = self.inner.start(op)
        if isinstance(op, Send) and op.stamp.clock:
            self.inner.start(op)
        return handle


@dataclass(frozen=True, kw_only=True)
class Twice(ParameterServer):
    """A parameter server on a network that repeats itself."""

    def init(self, node: Node) -> ServerState:
        node.comm.transport = Doubling(node.comm.transport)
        return ParameterServer.init(self, node)


@pytest.mark.parametrize("model", [make_model, pytest.param(make_large, marks=pytest.mark.nightly)])
@in_worlds("consistency, pieces", BULK, [1, 3])
def test_what_comes_twice_counts_once(
    consistency: Consistency, pieces: int, model: Any, cluster: Any, tmp_path: Path
) -> None:
    given = GIVEN | {"cluster": cluster, "model": model}
    which: dict[str, Any] = {"consistency": consistency, "servers": 2}
    twice = train(Twice(**which, pieces=pieces), tmp_path / "twice", **given)
    assert_same(twice.model, train(ParameterServer(**which), tmp_path / "once", **given).model)
    for server in (WORKERS, WORKERS + 1):
        dropped = [e for e in events(tmp_path / "twice", server) if isinstance(e, Logged) and e.name == "duplicate"]
        assert len(dropped) == WORKERS * STEPS * pieces
    assert ended(tmp_path / "twice", 0).sent == 2 * ended(tmp_path / "once", 0).sent


@in_worlds("consistency", BULK)
def test_a_push_in_pieces_is_the_push(consistency: Consistency, cluster: Any, tmp_path: Path) -> None:
    given = GIVEN | {"cluster": cluster}
    whole = train(ParameterServer(consistency=consistency, servers=2), tmp_path / "whole", **given).model
    for pieces in (2, 5, 100):  # a server has 42 numbers, or 41
        strategy = ParameterServer(consistency=consistency, servers=2, pieces=pieces)
        assert_same(train(strategy, tmp_path / str(pieces), **given).model, whole)
        assert ended(tmp_path / str(pieces), 0).sent == ended(tmp_path / "whole", 0).sent


def test_pieces_of_nothing(tmp_path: Path) -> None:
    """More servers than parameters: some have none to cut."""

    def tiny() -> nn.Module:
        return nn.Linear(7, 1, bias=False)

    given: dict[str, Any] = {"model": tiny, "workers": 3}
    pieces = simulate(ParameterServer(servers=9, pieces=2), tmp_path / "ps", **given)
    assert_same(pieces.model, simulate(ParameterServer(), tmp_path / "one", **given).model)
