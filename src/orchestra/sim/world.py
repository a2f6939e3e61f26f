# SPDX-License-Identifier: Apache-2.0
"""What passes between the nodes of a virtual cluster: messages, and collectives as the flows of their algorithms.

    Mean        begins when the last member has come; then every member sends every other its range, and, once it has
                all of its own, the mean of that: reduce-scatter and all-gather, as between real machines
    Broadcast   one flow to each member; Gather: one flow from each to each

Where all hosts are alike, all nodes take part and nothing else is under way, a collective's flows are all equal, and
its time is a formula:

    Mean        2 (max(o + (N-1) S/N / R, (N-1) o + S/N / R) + α)    S bytes, N members, rate R, latency α,
                                                                     work per message o
    Gather      max(o + (N-1) S/R, (N-1) o + S/R) + α
    Broadcast   (N-1) S / R + α                  if messages take no work
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestra.board import name_of
from orchestra.networks import Host, Network
from orchestra.ops import (
    Broadcast,
    Gather,
    Group,
    Mean,
    MeanUpdate,
)
from orchestra.sim import collectives
from orchestra.sim.collectives import nbytes, vector_of
from orchestra.sim.flows import Flows, Link
from orchestra.sim.kernel import Kernel, Promise

UP, DOWN = 0, 1  # kinds of links
Way = tuple[int, int]  # from node to node
_NONE: deque[Any] = deque(maxlen=0)  # nothing waits behind a message, as is mostly so


@dataclass(slots=True)
class _Meeting:
    """Members of a group on their way to a collective."""

    ops: dict[int, Any] = field(default_factory=dict)
    promises: dict[int, Promise[Any]] = field(default_factory=dict)


class World:
    """Everything the nodes share."""

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
        self.stop_at: int | None = None  # the step before which workers stop, where they stop together
        self._closed_forms = closed_forms and network.symmetric
        self._machines = range(nodes) if machines is None else machines  # of every node
        every = range(max(self._machines) + 1)
        self._hosts = [network.host(m) for m in every]
        self._busy = [0.0 for _ in every]  # until when a host works on messages
        self._up = [Link(f"up {m}", network.host(m).up / 8, UP) for m in every]
        self._down = [Link(f"down {m}", network.host(m).down / 8, DOWN) for m in every]
        self._racks = _racks(network, len(every))
        self._streams: dict[Way, deque[tuple[float, Callable[..., None], tuple[Any, ...]]]] = {}
        self._flying: dict[Way, deque[tuple[Callable[..., None], tuple[Any, ...]]]] = {}
        self._meetings: dict[tuple[int, ...], _Meeting] = {}
        self.under_way = 0  # messages and collectives in flight

    # From host to host.

    def host(self, node: int) -> Host:
        """The machine that a node lives on."""
        return self._hosts[self._machines[node]]

    def near(self, node: int, other: int) -> bool:
        """Whether two nodes live on one machine."""
        return self._machines[node] == self._machines[other]

    def carry(self, source: int, to: int, size: float, arrived: Callable[..., None], *about: Any) -> None:
        """Send bytes from node to node; calls `arrived` when the last one is there, at once if they are near."""
        way = source, to
        if self._machines[source] == self._machines[to]:
            self._fly(way, 0.0, arrived, about)
            return
        stream = self._streams.get(way)
        if stream is None:
            self._streams[way] = _NONE
            self._depart(way, size, arrived, about)
        elif stream is _NONE:
            self._streams[way] = deque([(size, arrived, about)])
        else:
            stream.append((size, arrived, about))

    def _depart(self, way: Way, size: float, arrived: Callable[..., None], about: tuple[Any, ...]) -> None:
        source = self._machines[way[0]]
        if work := self._hosts[source].message:
            # The work on a message is done after that on the messages before it.
            self._busy[source] = done = max(self._busy[source], self.kernel.now) + work
            self.kernel.at(done, self.flows.start, self._links(*way), size, self._sent, way, arrived, about)
        else:
            self.flows.start(self._links(*way), size, self._sent, way, arrived, about)

    def _sent(self, way: Way, arrived: Callable[..., None], about: tuple[Any, ...]) -> None:
        self._fly(way, self.host(way[0]).latency + self.host(way[1]).latency, arrived, about)
        stream = self._streams[way]
        if stream:
            self._depart(way, *stream.popleft())
        else:
            del self._streams[way]

    def _fly(self, way: Way, latency: float, arrived: Callable[..., None], about: tuple[Any, ...]) -> None:
        if self.kernel.shuffles:
            # Messages of the same two nodes may arrive at the same time, but never in another order.
            flying = self._flying.setdefault(way, deque())
            flying.append((arrived, about))
            self.kernel.after(latency, self._land, flying)
        else:
            self.kernel.after(latency, arrived, *about)

    def _land(self, flying: deque[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        arrived, about = flying.popleft()
        arrived(*about)

    def _links(self, source: int, to: int) -> tuple[Link, ...]:
        source, to = self._machines[source], self._machines[to]
        if self._racks and (a := self._racks[source]) is not (b := self._racks[to]):
            return (self._up[source], a[0], b[1], self._down[to])
        return (self._up[source], self._down[to])

    # Collectives.

    def meet(self, rank: int, op: Any, group: Group) -> Promise[Any]:
        """Come to a collective; it begins when every member has."""
        meeting = self._meetings.setdefault(group.members, _Meeting())
        if rank in meeting.ops:
            raise RuntimeError(f"node {rank} comes to a collective twice before the others came once")

        def missing() -> str:
            late = [m for m in group.members if m not in meeting.ops]
            return ", ".join(name_of(m, self.workers) for m in late) or "a collective to end"

        promise: Promise[Any] = Promise(self.kernel, missing)
        meeting.ops[rank], meeting.promises[rank] = op, promise
        if len(meeting.ops) == len(group):
            del self._meetings[group.members]
            self._collect(group, meeting)
        return promise

    def _collect(self, group: Group, meeting: _Meeting) -> None:
        ops = [meeting.ops[m] for m in group.members]
        kinds = {type(op) for op in ops}
        if len(kinds) > 1:
            names = sorted(kind.__name__ for kind in kinds)
            raise RuntimeError(f"members {group.members} came to different collectives: {', '.join(names)}")
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
        """Whether a formula tells when every member of a collective is done, and no other traffic can change that."""
        in_turn = isinstance(op, Broadcast) and self._hosts[0].message  # then they are not done at the same time
        everyone = len(group) == len(self._machines) and self.under_way == 1 and not self._streams
        return self._closed_forms and everyone and not in_turn

    def _complete_all(self, group: Group, complete: Callable[[int], None]) -> None:
        for member in group.members:
            complete(member)

    def _seconds(self, group: Group, op: Any) -> float:
        """How long a collective takes by itself, where all hosts are alike."""
        n, host = len(group), self.network.hosts[0]
        size = nbytes(vector_of(op))
        slower = min(host.up, host.down) / 8
        latency = 2 * host.latency
        match op:
            case Broadcast():
                return max((n - 1) * size / (host.up / 8), size / slower) + latency
            case Gather():
                return _everyone_to_everyone(n, size / slower, host.message) + latency
            case _:
                return 2 * (_everyone_to_everyone(n, size / n / slower, host.message) + latency)

    def average(self, group: Group, op: Mean | MeanUpdate, complete: Callable[[int], None]) -> None:
        """The flows of a mean: everyone's parts to everyone, and from whoever has all of its own their mean."""
        size = nbytes(vector_of(op)) / len(group)
        whole = _when_all_came(group, complete)
        mine = _when_all_came(group, lambda member: self._to_all(group, member, size, whole))
        for member in group.members:
            self._to_all(group, member, size, mine)

    def spread(self, group: Group, op: Broadcast, complete: Callable[[int], None]) -> None:
        """The flows of a broadcast: from the root to everyone."""
        left = len(group) - 1

        def arrived(member: int) -> None:
            nonlocal left
            left -= 1
            complete(member)
            if not left:
                complete(op.root)

        for member in group.members:
            if member != op.root:
                self.carry(op.root, member, nbytes(op.x), arrived, member)

    def exchange(self, group: Group, op: Gather, complete: Callable[[int], None]) -> None:
        """The flows of a gather: from everyone to everyone."""
        whole = _when_all_came(group, complete)
        for member in group.members:
            self._to_all(group, member, nbytes(op.x), whole)

    def _to_all(self, group: Group, source: int, size: float, arrived: Callable[[int], None]) -> None:
        members, i = group.members, group.index(source)
        for member in (*members[i + 1 :], *members[:i]):  # everyone begins with another
            self.carry(source, member, size, arrived, member)


_FLOWS: dict[type[Any], Callable[..., None]] = {
    Mean: World.average,
    MeanUpdate: World.average,
    Broadcast: World.spread,
    Gather: World.exchange,
}


def _when_all_came(group: Group, complete: Callable[[int], None]) -> Callable[[int], None]:
    """To be called with whom something came to; calls `complete` with whoever has something of all others."""
    left = dict.fromkeys(group.members, len(group) - 1)

    def arrived(member: int) -> None:
        left[member] -= 1
        if not left[member]:
            complete(member)

    return arrived


def _everyone_to_everyone(n: int, part: float, message: float) -> float:
    """Seconds, if a part is on its way for `part` seconds and each takes `message` seconds of work."""
    return max(message + (n - 1) * part, (n - 1) * message + part)


def _racks(network: Network, machines: int) -> list[tuple[Link, Link]]:
    """Each machine's rack, as its links to and from the core."""
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
