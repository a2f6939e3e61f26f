# SPDX-License-Identifier: Apache-2.0
"""The network of a simulation: messages, and collectives as the flows of their algorithms.

    Mean        begins when the last member has joined, then a ring: reduce-scatter and all-gather
    Broadcast   one flow to each member; Gather: one flow from each to each
    Send        a flow; with a limited kernel buffer the sender continues when the rest of the message fits into it:
                by then all earlier messages have left, and so have the bytes of this one that do not fit

If all hosts are equal, all nodes take part and nothing else is in flight, the flows of a collective are all equal, and
its time is a formula:

    Mean        2 (N-1) (S/N / R + α + o)        S bytes, N members, rate R, latency α, work per message o
    Gather      max(o + (N-1) S/R, (N-1) o + S/R) + α
    Broadcast   (N-1) S / R + α                  if messages take no work
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from orchestra.core.ops import (
    Broadcast,
    Gather,
    Group,
    Mean,
    MeanUpdate,
)
from orchestra.runs.status import name_of
from orchestra.worlds.simulated import collectives
from orchestra.worlds.simulated.collectives import nbytes, vector_of
from orchestra.worlds.simulated.flows import Flows, Link
from orchestra.worlds.simulated.kernel import Kernel, Promise
from orchestra.worlds.simulated.networks import Host, Network

UP, DOWN = 0, 1  # kinds of links
Arrived = Callable[[Any], None]  # called when a message has arrived


_Queued = tuple[float, Arrived, Any, Promise[None] | None]  # bytes, callback, its argument, a sender that waits


@dataclass(slots=True, eq=False)
class Route:
    """The route from one node to another, like a connection: messages keep their order."""

    source: int  # machine
    links: tuple[Link, ...] = ()  # none between nodes of one machine
    latency: float = 0.0  # seconds
    work: float = 0.0  # seconds for every message, at its source
    busy: bool = False  # with a message that has not left yet
    behind: deque[_Queued] | None = None  # messages that wait for it; usually none
    keeps: float | None = None  # bytes of the kernel buffer at the source
    leaving: float = 0.0  # bytes of the message that is about to leave


@dataclass(slots=True)
class _Collective:
    """The members of a group that have joined a collective."""

    ops: dict[int, Any] = field(default_factory=dict)
    promises: dict[int, Promise[Any]] = field(default_factory=dict)


class VirtualNetwork:
    """The network that all nodes share."""

    def __init__(
        self,
        kernel: Kernel,
        network: Network,
        nodes: int,
        workers: int,
        *,
        machines: Sequence[int] | None = None,
        closed_forms: bool = True,
    ) -> None:
        self.kernel = kernel
        self.network = network
        self.workers = workers
        self.flows = Flows(kernel, single=network.rack is None)
        self.stop_at: int | None = None  # the step before which workers in lockstep stop
        self._closed_forms = closed_forms and network.symmetric
        self._machines = range(nodes) if machines is None else machines  # of every node
        every = range(max(self._machines) + 1)
        self._hosts = [network.host(m) for m in every]
        self._busy = [0.0 for _ in every]  # time until which each host processes messages
        self._up = [Link(f"up {m}", network.host(m).up / 8, UP) for m in every]
        self._down = [Link(f"down {m}", network.host(m).down / 8, DOWN) for m in every]
        self._racks = _racks(network, len(every))
        self.ways: list[dict[int, Route]] = [{} for _ in range(nodes)]  # from each node to those that it has sent to
        self._flying: dict[Route, deque[tuple[Arrived, Any]]] = {}
        self._meetings: dict[Group, _Collective] = {}
        self.under_way = 0  # messages and collectives in flight

    # From host to host.

    def host(self, node: int) -> Host:
        """Return the host of a node."""
        return self._hosts[self._machines[node]]

    def way(self, source: int, to: int) -> Route:
        """Return the route from one node to another."""
        way = self.ways[source].get(to)
        if way is None:
            way = self.ways[source][to] = self._between(self._machines[source], self._machines[to])
        return way

    def _between(self, source: int, to: int) -> Route:
        if source == to:
            return Route(source)
        links: tuple[Link, ...] = (self._up[source], self._down[to])
        if self._racks and (a := self._racks[source]) is not (b := self._racks[to]):
            links = (self._up[source], a[0], b[1], self._down[to])
        here, there = self._hosts[source], self._hosts[to]
        return Route(source, links, here.latency + there.latency, here.message, keeps=here.keeps)

    def send_blocking(self, way: Route, size: float, arrived: Arrived, about: Any) -> Promise[None] | None:
        """Send a message; if it does not fit into the kernel buffer, return a promise that is kept once it does."""
        if way.keeps is None or not way.links or _backlog(way) + size <= way.keeps:
            self.carry(way, size, arrived, about)
            return None
        taken: Promise[None] = Promise(self.kernel, _kernel_to_take)
        self.carry(way, size, arrived, about, taken)
        return taken

    def carry(self, way: Route, size: float, arrived: Arrived, about: Any, taken: Promise[None] | None = None) -> None:
        """Send bytes; `arrived` is called when the last one has arrived, without delay on one machine."""
        if not way.links:
            self._fly(way, arrived, about)
        elif way.busy:
            if way.behind is None:
                way.behind = deque()
            way.behind.append((size, arrived, about, taken))
        else:
            way.busy = True
            self._depart(way, size, arrived, about, taken)

    def _depart(self, way: Route, size: float, arrived: Arrived, about: Any, taken: Promise[None] | None) -> None:
        way.leaving = size
        then: tuple[Any, ...] = (self._sent, way, arrived, about)
        if taken is not None:
            size = max(0.0, size - (way.keeps or 0.0))
            then = (self._taken, way, arrived, about, taken)
        if work := way.work:
            # A host processes messages one after the other.
            self._busy[way.source] = done = max(self._busy[way.source], self.kernel.now) + work
            self.kernel.at(done, self.flows.start, way.links, size, *then)
        else:
            self.flows.start(way.links, size, *then)

    def _taken(self, way: Route, arrived: Arrived, about: Any, taken: Promise[None]) -> None:
        """Continue when the rest of a message fits into the kernel buffer: the sender may go on."""
        way.leaving = min(way.leaving, way.keeps or 0.0)
        self.flows.start(way.links, way.leaving, self._sent, way, arrived, about)
        taken.keep(None)

    def _sent(self, way: Route, arrived: Arrived, about: Any) -> None:
        self._fly(way, arrived, about)
        if way.behind:
            self._depart(way, *way.behind.popleft())
        else:
            way.busy = False

    def _fly(self, way: Route, arrived: Arrived, about: Any) -> None:
        kernel = self.kernel
        if not kernel.shuffles:
            kernel.at(kernel.now + way.latency, arrived, about)
            return
        # Messages between two nodes keep their order, even if they arrive at the same time.
        self._flying.setdefault(way, deque()).append((arrived, about))
        kernel.at(kernel.now + way.latency, self._land, way)

    def _land(self, way: Route) -> None:
        arrived, about = self._flying[way].popleft()
        arrived(about)

    # Collectives.

    def meet(self, rank: int, op: Any, group: Group) -> Promise[Any]:
        """Join a collective, which begins when every member has joined."""
        meeting = self._meetings.get(group)
        if meeting is None:
            meeting = self._meetings[group] = _Collective()
        if rank in meeting.ops:
            raise RuntimeError(f"node {rank} joined a collective twice before the others joined once")

        def missing() -> str:
            late = [m for m in group.members if m not in meeting.ops]
            return ", ".join(name_of(m, self.workers) for m in late) or "a collective to end"

        promise: Promise[Any] = Promise(self.kernel, missing)
        meeting.ops[rank], meeting.promises[rank] = op, promise
        if len(meeting.ops) == len(group):
            del self._meetings[group]
            self._collect(group, meeting)
        return promise

    def _collect(self, group: Group, meeting: _Collective) -> None:
        ops = [meeting.ops[m] for m in group.members]
        kinds = {type(op) for op in ops}
        if len(kinds) > 1:
            names = sorted(kind.__name__ for kind in kinds)
            raise RuntimeError(f"members {group.members} called different collectives: {', '.join(names)}")
        values = collectives.CARRY_OUT[kinds.pop()](group, ops)
        began = self.kernel.now
        self.under_way += 1

        def complete(member: int) -> None:
            promise = meeting.promises.pop(member)
            if not meeting.promises:
                self.under_way -= 1
            promise.keep((began, values[group.index(member)]))

        if self._alone(group, ops[0]):
            self.kernel.after(self._seconds(group, ops[0]), self._complete_all, group, complete)
        else:
            _FLOWS[type(ops[0])](self, group, ops[0], complete)

    def _alone(self, group: Group, op: Any) -> bool:
        """Return whether the formulas hold for a collective: equal hosts, all nodes, and no other traffic."""
        in_turn = isinstance(op, Broadcast) and self._hosts[0].message  # then they are not done at the same time
        everyone = len(group) == len(self._machines) and self.under_way == 1
        return self._closed_forms and everyone and not in_turn

    def _complete_all(self, group: Group, complete: Callable[[int], None]) -> None:
        for member in group.members:
            complete(member)

    def _seconds(self, group: Group, op: Any) -> float:
        """Return the duration of a collective without other traffic between equal hosts."""
        n, host = len(group), self.network.hosts[0]
        size = nbytes(vector_of(op))
        slower = min(host.up, host.down) / 8
        latency = 2 * host.latency
        match op:
            case Mean() | MeanUpdate():
                return 2 * (n - 1) * (size / n / slower + latency + host.message)
            case Broadcast():
                return max((n - 1) * size / (host.up / 8), size / slower) + latency
            case _:
                first, rest = host.message + (n - 1) * size / slower, (n - 1) * host.message + size / slower
                return max(first, rest) + latency

    def ring(self, group: Group, op: Mean | MeanUpdate, complete: Callable[[int], None]) -> None:
        """Start the flows of an all-reduce: 2 (N-1) rounds in which every member sends a part to the next one."""
        n, size = len(group), nbytes(vector_of(op)) / len(group)
        rounds = 2 * (n - 1)
        sent, got = [0] * n, [0] * n
        ways = [self.way(a, b) for a, b in pairwise((*group.members, group.members[0]))]

        def go_on(i: int) -> None:
            # The part of a round can leave once the previous part has arrived.
            while sent[i] < rounds and sent[i] <= got[i]:
                sent[i] += 1
                self.carry(ways[i], size, receive, (i + 1) % n)

        def receive(i: int) -> None:
            got[i] += 1
            if got[i] == rounds:
                complete(group.members[i])
            else:
                go_on(i)

        for i in range(n):
            go_on(i)

    def spread(self, group: Group, op: Broadcast, complete: Callable[[int], None]) -> None:
        """Start the flows of a broadcast: from the root to every other member."""
        left = len(group) - 1

        def arrived(member: int) -> None:
            nonlocal left
            left -= 1
            complete(member)
            if not left:
                complete(op.root)

        for member in group.members:
            if member != op.root:
                self.carry(self.way(op.root, member), nbytes(op.x), arrived, member)

    def exchange(self, group: Group, op: Gather, complete: Callable[[int], None]) -> None:
        """Start the flows of a gather: from every member to every other."""
        left = dict.fromkeys(group.members, len(group) - 1)

        def arrived(member: int) -> None:
            left[member] -= 1
            if not left[member]:
                complete(member)

        members = group.members
        for i, source in enumerate(members):
            for member in (*members[i + 1 :], *members[:i]):  # each begins with another receiver
                self.carry(self.way(source, member), nbytes(op.x), arrived, member)


def _backlog(way: Route) -> float:
    """Return the bytes of the messages that have not left, including the whole of one that is leaving."""
    return way.leaving + sum(queued[0] for queued in way.behind or ()) if way.busy else 0.0


def _kernel_to_take() -> str:
    return "the kernel to take a message"


_FLOWS: dict[type[Any], Callable[..., None]] = {
    Mean: VirtualNetwork.ring,
    MeanUpdate: VirtualNetwork.ring,
    Broadcast: VirtualNetwork.spread,
    Gather: VirtualNetwork.exchange,
}


def _racks(network: Network, machines: int) -> list[tuple[Link, Link]]:
    """Return the rack of each machine, as its links to and from the core."""
    if network.rack is None:
        return []
    found: list[tuple[Link, Link]] = []
    for first in range(0, machines, network.rack):
        hosts = [network.host(m) for m in range(first, min(machines, first + network.rack))]
        up = sum(host.up for host in hosts) / 8 / network.oversubscription
        down = sum(host.down for host in hosts) / 8 / network.oversubscription
        rack = (Link(f"rack of {first}, up", up), Link(f"rack of {first}, down", down))
        found += [rack] * len(hosts)
    return found
