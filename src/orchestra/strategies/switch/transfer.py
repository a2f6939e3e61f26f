# SPDX-License-Identifier: Apache-2.0
"""The transfer of x and the optimizer's momenta from their holders under one strategy to those under the next.

    workers → workers       nothing moves; if each had its own x, the workers average
    workers → servers       the server of range k gets x[k] and the momenta of that range from worker k − M mod N
    servers → workers       every worker gets x and the momenta from all servers
    servers → servers       every worker gets x; momenta stay

Momenta that are reset are not sent. Servers also receive the number of samples so far, and the workers' position in the
data, from which the schedule continues.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from orchestra.core import optimizer_state
from orchestra.core.node import Node
from orchestra.core.strategy import Layout, Strategy
from orchestra.core.traffic import ExpectedTraffic, RunSize
from orchestra.core.view import View
from orchestra.errors import Problem
from orchestra.strategies.switch.triggers import AtShare

if TYPE_CHECKING:
    from orchestra.strategies.switch.switch import StrategySwitch


def problems(first: Strategy[Any], then: Strategy[Any]) -> Iterator[Problem]:
    """Yield the reasons why no transfer is possible between two strategies."""
    a, b = first.layout, then.layout
    if a.servers and b.servers not in (0, a.servers):
        message = f"must be {a.servers} as in `first`: servers keep their ranges"
        yield Problem("strategy.then.servers", b.servers, message)
    if a.servers and b.servers and (a.placement, a.colocated) != (b.placement, b.colocated):
        yield Problem("strategy.then", then, "must place its servers as `first` does: they keep their ranges")
    if not a.updates.can_meet:
        yield Problem("strategy.first", first, "lets some workers wait for others, so they never all meet")
    for name, part in (("first", first), ("then", then)):
        if part.layout.model_location == "shared" or part.layout.then is not None:
            yield Problem(f"strategy.{name}", part, "cannot be switched from or to")


def from_worker(node: Node, view: View, first: Layout, then: Layout, *, keep: bool) -> None:
    """Do a worker's part of the transfer, and enter the next view.

    All workers call this after the same step, and wait for each other.
    """
    comm = node.comm
    if not keep:
        node.optimizer.reset()
    comm.use(None)
    samples = torch.tensor([float(node.samples)], dtype=torch.float64)
    comm.mean_(samples)
    total = round(float(samples) * len(comm.workers))
    parts = node.placement
    if first.servers:
        node.enter(view)
        outlines: list[optimizer_state.Outline] = []
        vectors: list[list[Tensor]] = []
        for server, part in zip(comm.servers.members, parts, strict=True):
            node.x[part].copy_(comm.recv(server).x)
            if not then.servers:
                outline, momenta = _receive(node, server)
                outlines.append(outline)
                vectors.append(momenta)
        if not then.servers:
            node.optimizer.adopt(*optimizer_state.joined(parts, outlines, vectors))
        return
    if first.model_location == "apart":
        comm.mean_(node.x, weight=float(max(1, node.samples)))
    members = comm.workers.members
    for k, (server, part) in enumerate(zip(comm.servers.members, parts, strict=True)):
        if then.servers and members[(k - len(parts)) % len(members)] == node.rank:
            comm.send(server, node.x[part], version=total)
            _send(node, server, part)
    node.enter(view)


def at_server(node: Node, view: View, first: Layout, then: Layout, *, keep: bool) -> bool:
    """Do a server's part of the transfer, and enter the next view; return False if the run has ended before."""
    comm, workers = node.comm, node.comm.workers.members
    comm.use(None)
    if first.servers:
        if not node.enter(view):
            return False
        if not keep:
            node.optimizer.reset()
        for worker in workers:
            comm.send(worker, node.x)
            if not then.servers:
                _send(node, worker, slice(0, node.x.numel()))
        return True
    giver = workers[(comm.servers.index(node.rank) - len(comm.servers)) % len(workers)]
    came = comm.recv(giver, departures=True)
    if came is None:
        return False
    node.x.copy_(came.x)
    samples = came.version
    node.optimizer.adopt(*_receive(node, giver))
    node.enter(view)
    node.samples = samples  # now that it holds everything
    comm.known = dict.fromkeys(workers, came.progress)  # all workers are at the same step
    return True


def set_pace(node: Node, momentum: float | None, scale: float, *, given: bool) -> None:
    """Set the momentum (None: unchanged) and multiply the rate by `scale`; log both if either may have changed.

    Unless `scale` was `given` by the user, the rate also compensates for the change of the momentum.
    """
    inner = node.optimizer
    if momentum is not None:
        inner.set_momentum(momentum, keep=not given)
    inner.rescale(scale)
    if momentum is None and scale == 1:
        return
    inner.set_progress(node.epochs)
    if inner.momentum is not None:
        node.log("momentum after the switch", inner.momentum)
    node.log("rate after the switch", node.lr)


def _send(node: Node, to: int, part: slice) -> None:
    outline, vectors = optimizer_state.within(node.optimizer.outline(), part, node.x.numel()), node.optimizer.vectors()
    text = torch.frombuffer(bytearray(json.dumps(outline).encode()), dtype=torch.uint8)
    node.comm.send(to, text, version=len(vectors))
    for vector in vectors:
        node.comm.send(to, vector[part])


def _receive(node: Node, source: int) -> tuple[Any, list[Tensor]]:
    came = node.comm.recv(source)
    outline, count = json.loads(bytes(came.x.tolist())), came.version
    return outline, [node.comm.recv(source).x.clone() for _ in range(count)]


def traffic(strategy: StrategySwitch, run: RunSize) -> ExpectedTraffic | None:
    """Return the bytes of both strategies and of the transfer; None if the loss decides when, or with `promote`."""
    if not isinstance(strategy.when, AtShare) or strategy.promote:
        return None
    steps = math.ceil(strategy.when.share * run.steps)
    before = run.of(strategy.first, replace(run, steps=steps))
    after = run.of(strategy.then, replace(run, steps=run.steps - steps))
    if before is None or after is None or before.servers is None or after.servers is None:
        return None
    sent = [sum(all_of) for all_of in zip(before.workers, after.workers, run.average(1, 8), strict=True)]
    served = [sum(both) for both in zip_longest(before.servers, after.servers, fillvalue=0)]
    first, then = strategy.first.layout, strategy.then.layout
    if first.model_location == "apart" and not first.servers:
        sent = [own + mean for own, mean in zip(sent, run.average(), strict=True)]
    momenta, outline = len(run.momenta), len(json.dumps(dict(run.momenta)))
    for server, part in enumerate(run.ranges(strategy.layout)):
        state = part + momenta * part + outline
        if first.servers:
            served[server] += run.workers * (part if then.servers else state)
        else:
            sent[(server - strategy.layout.servers) % run.workers] += state
    return ExpectedTraffic(workers=sent, servers=served)
