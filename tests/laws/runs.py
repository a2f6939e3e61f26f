# SPDX-License-Identifier: Apache-2.0
"""Runs that many laws look at: each is carried out once, and what it leaves is kept in memory."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.laws.examples import ends_at, workers_for
from tests.zoo import events, train
from torch import Tensor, nn

from orchestra import Local, Simulated, Steps, Strategy
from orchestra.core.traffic import RunSize
from orchestra.engine import snapshot
from orchestra.runs.events import Event, Logged, NodeEnded
from orchestra.runs.facts import Facts

# Worlds in which nothing takes as long as anything else: as they come, and with ties broken by chance.
BUSY: dict[str, Any] = {
    "compute_time": "lognormal:0.05,0.5", "network": "10mbit,1ms,10us", "ties": 5, "numerics": "real",
    "fibers": "greenlet",
}  # fmt: skip


@dataclass(frozen=True)
class Seen:
    """What a run left; laws only look at it."""

    workers: int
    model: nn.Module
    summary: Facts
    facts: dict[str, Any]
    events: list[list[Event]]  # of each node
    held: list[Tensor]  # by each node that held something of the model, at the end
    digest: str  # of all events

    def ended(self, node: int) -> NodeEnded:
        """How a node ended."""
        (event,) = [e for e in self.events[node] if isinstance(e, NodeEnded)]
        return event

    def logged(self, node: int, name: str) -> list[float]:
        """Figures that a node logged under a name."""
        return [e.value for e in self.events[node] if isinstance(e, Logged) and e.name == name]


def look(strategy: Strategy[Any], cluster: Local | Simulated, *, steps: int = 7, **given: Any) -> Seen:
    """Carry a run out, and keep what it leaves."""
    with ExitStack() as stack:
        out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        held = _keep_what_is_held(stack.enter_context(pytest.MonkeyPatch.context()))
        result = train(strategy, out, cluster=cluster, budget=Steps(steps), **given)
        nodes = range(cluster.workers + strategy.layout.servers)
        text = b"".join(path.read_bytes() for path in sorted(out.glob("events-*.jsonl")))
        return Seen(
            cluster.workers, result.model, result.summary, json.loads((out / "config.json").read_text()),
            [events(out, node) for node in nodes], held, hashlib.sha256(text).hexdigest(),
        )  # fmt: skip


def _keep_what_is_held(patch: pytest.MonkeyPatch) -> list[Tensor]:
    """What each node held at the end, as the coordinator reads it."""
    held: list[Tensor] = []
    read: Callable[..., list[snapshot.SnapshotPart]] = snapshot.parts

    def reading(*folders: Path) -> list[snapshot.SnapshotPart]:
        found = read(*folders)
        held.extend(part.x for part in found if part.x is not None)
        return found

    patch.setattr(snapshot, "parts", reading)
    return held


def simulate(strategy: Strategy[Any], *, workers: int = 3, world: dict[str, Any] | None = None, **given: Any) -> Seen:
    """A run in virtual time, of as many workers or as the strategy takes."""
    return look(strategy, Simulated(workers=workers_for(strategy, workers), **world or {}), **given)


@cache
def simulated(strategy: Strategy[Any], **given: Any) -> Seen:
    """The same, carried out when it is first asked for."""
    return simulate(strategy, **given)


@cache
def busy(strategy: Strategy[Any]) -> Seen:
    """A run in virtual time among nodes and links that are never equally fast."""
    return simulate(strategy, world=BUSY)


@cache
def real(strategy: Strategy[Any], **given: Any) -> Seen:
    """A run in processes, carried out when it is first asked for."""
    return look(strategy, Local(workers=workers_for(strategy), patience=20), **given)


def check_what_is_held(strategy: Strategy[Any], run: Seen) -> None:
    """All replicas are equal at the end, or the servers' ranges make up the model that was returned."""
    where, layers = ends_at(strategy), tuple(p.numel() for p in run.model.parameters())
    if where == "apart":
        assert len(run.held) == run.workers
        for x in run.held:
            assert torch.equal(x, run.held[0])
    elif where == "servers":
        size = RunSize(workers=1, steps=1, layers=layers, item=1)
        assert [len(x) for x in run.held] == size.ranges(strategy.layout)
    else:
        assert len(run.held) == 1
    x = run.held[0] if where != "servers" else torch.cat(run.held)
    assert torch.equal(x, torch.cat([p.detach().reshape(-1) for p in run.model.parameters()]))
