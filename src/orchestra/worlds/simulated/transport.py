# SPDX-License-Identifier: Apache-2.0
"""The transport of one node in a simulation: it carries out each op in virtual seconds.

    Compute     the gradient is computed at the parameters from its beginning, and delivered at its end: changes of the
                model meanwhile make it stale
    Send, Recv  a flow from host to host; messages between the same two nodes keep their order, as on one connection

Collectives are in network.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from orchestra.core.ops import (
    Broadcast,
    Compute,
    Departed,
    Done,
    Gather,
    Group,
    Handle,
    Leave,
    Mean,
    MeanUpdate,
    Message,
    Op,
    PrepareMean,
    Recv,
    Send,
    Sleep,
    Traffic,
)
from orchestra.engine.compute_times import Sampler
from orchestra.runs.status import name_of
from orchestra.worlds.simulated import collectives
from orchestra.worlds.simulated.collectives import bytes_of, vector_of
from orchestra.worlds.simulated.kernel import Promise
from orchestra.worlds.simulated.network import Route, VirtualNetwork

T = TypeVar("T")


@dataclass(slots=True)
class _Delivery:
    """A message, or the notice that a node leaves, on its way."""

    message: Message | None
    source: int
    size: int  # bytes on the network
    posted: float  # seconds
    read: Promise[None] | None = None  # kept when the receiver has read a lent vector


class SimulatedTransport:
    """The transport of one node."""

    def __init__(self, world: VirtualNetwork, rank: int, size: int, others: list[SimulatedTransport]) -> None:
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        # Called when a computation begins; returns the function that gives its value when it ends.
        self.computing: Callable[[Compute[Any]], Callable[[], Any]] = _at_once
        self.lasts: Sampler = lambda step: 0.0  # seconds of each gradient
        self.begun = 0
        self._world = world
        self._number = world.host(rank).number
        self._ways = world.ways[rank]
        self._others = others  # by rank, itself included
        self._kernel = world.kernel
        self._step = 0
        self._boxes: dict[int, deque[_Delivery]] = {}
        self._arrivals: deque[int] = deque()  # sources of messages, in the order of arrival
        self._left: set[int] = set()
        self._lent: dict[int, Promise[None]] = {}  # vectors of others that this node may still be reading
        self._awaited: Promise[None] | None = None
        self._from: int | None = None  # the node whose message is awaited; None: any node
        self._alarm: tuple[Group, Promise[bool]] | None = None  # nodes whose messages end a sleep
        self._rules: dict[type[Any], Callable[[Any], Any]] = {
            Compute: self._compute,
            PrepareMean: lambda op: None,
            Mean: self._collective,
            MeanUpdate: self._collective,
            Broadcast: self._collective,
            Gather: self._collective,
            Recv: self._recv,
            Sleep: self._sleep,
            Leave: self._leave,
        }

    def now(self) -> float:
        """Return the virtual seconds since training began."""
        return self._kernel.now

    def start(self, op: Op[T]) -> Handle[T]:
        """Carry out an op; return when it is over in virtual time, except for sends of lent vectors."""
        if type(op) is Send:
            return cast("Handle[T]", self._send(op))
        return Done(self._rules[type(op)](op))

    def proceed(self, step: int, *, lockstep: bool) -> bool:
        """Return whether to begin `step`: once the run stops, workers in lockstep stop at the same step."""
        self.begun = step
        stop_at = self._world.stop_at
        return stop_at is None or (lockstep and step < stop_at)

    # One node alone.

    def _compute(self, op: Compute[Any]) -> Any:
        answer = self.computing(op)
        if op.work:
            self._step += 1
            if not self._sleep(Sleep(self.lasts(self._step - 1), op.cancel_on)):
                return None
        elif op.numbers:
            self._spend_time_on(op.numbers)
        return answer()

    def _spend_time_on(self, numbers: int) -> None:
        """Let the time pass that this host needs to process vector elements."""
        if self._number:
            self._pause(numbers * self._number)

    def _pause(self, seconds: float) -> None:
        promise: Promise[None] = Promise(self._kernel, _time_to_pass)
        self._kernel.after(seconds, promise.keep, None)
        promise.wait()

    def _sleep(self, op: Sleep) -> bool:
        if op.cancel_on is None:
            self._pause(op.seconds)
            return True
        if any(self._boxes.get(source) for source in op.cancel_on.members):
            return False
        promise: Promise[bool] = Promise(self._kernel, _time_to_pass)
        self._alarm = (op.cancel_on, promise)
        self._kernel.after(op.seconds, _keep_once, promise)
        undisturbed = promise.wait()
        self._alarm = None
        return undisturbed

    # Messages.

    def _send(self, op: Send) -> Handle[None]:
        x, to = op.x, op.to
        if self._lent:
            self._release(to)
        way = self._ways.get(to) or self._world.way(self.rank, to)
        size = x.nbytes if way.links else 0
        self.traffic.count(to, size)
        read: Promise[None] | None = None
        if op.lend:
            read = Promise(self._kernel, self._reader, to)
        elif not x.is_meta:
            x = x.detach().clone()
        message = Message(self.rank, x, op.version, op.weight, op.tag, op.stamp, op.progress)
        delivery = _Delivery(message, self.rank, size, self._kernel.now, read)
        if way.keeps is None or read is not None:
            self._post(to, way, delivery)
        else:
            self._send_blocking(to, way, delivery)
        return read or _NOTHING

    def _send_blocking(self, to: int, way: Route, delivery: _Delivery) -> None:
        """Send a message and wait until the simulated kernel buffer has room for it, as sockets do."""
        self._world.under_way += 1
        taken = self._world.send_blocking(way, delivery.size, self._others[to].deliver, delivery)
        if taken is not None:
            taken.wait()
            self.traffic.waited += self._kernel.now - delivery.posted

    def _reader(self, to: int) -> str:
        return f"{name_of(to, self._world.workers)} to have read a message"

    def _release(self, source: int) -> None:
        """Release the vector that another node lent to this one."""
        read = self._lent.pop(source, None)
        if read is not None:
            read.keep(None)

    def _leave(self, op: Leave) -> None:
        for to in op.group.members:
            self._release(to)
            self._post(to, self._world.way(self.rank, to), _Delivery(None, self.rank, 0, self._kernel.now))

    def _post(self, to: int, way: Route, delivery: _Delivery) -> None:
        world = self._world
        world.under_way += 1
        world.carry(way, delivery.size, self._others[to].deliver, delivery)

    def deliver(self, delivery: _Delivery) -> None:
        """Put an arrived message into the inbox, and wake this node if it waits for it."""
        self._world.under_way -= 1
        source, awaited = delivery.source, self._awaited
        box = self._boxes.get(source)
        if box is None:
            box = self._boxes[source] = deque()
        box.append(delivery)
        self._arrivals.append(source)
        if awaited is not None:
            if self._from is None or self._from == source:
                self._awaited = None
                awaited.keep(None)
        elif self._alarm is not None and source in self._alarm[0] and not self._alarm[1].done:
            self._alarm[1].keep(False)

    def _recv(self, op: Recv) -> Message | Departed | None:
        asked = self._kernel.now
        if self._lent:
            for source in [s for s in self._lent if s in op.group] if op.source is None else [op.source]:
                self._release(source)
        while True:
            delivery = self._take(op)
            if delivery is None:
                sources = op.group.members if op.source is None else (op.source,)
                if self._left and all(source in self._left for source in sources):
                    self.traffic.waited += self._kernel.now - asked
                    return None
                self._from = op.source
                self._awaited = Promise(self._kernel, self._sources_awaited, sources)
                self._awaited.wait()
            elif delivery.message is None:
                self._left.add(delivery.source)
                if op.departures:
                    self.traffic.waited += self._kernel.now - asked
                    return Departed(delivery.source)
            else:
                if delivery.read is not None:
                    self._lent[delivery.source] = delivery.read
                self.traffic.received += delivery.size
                # Only the time until the message was sent counts as waiting; the rest was its transfer.
                if delivery.posted > asked:
                    self.traffic.waited += delivery.posted - asked
                return delivery.message

    def _take(self, op: Recv) -> _Delivery | None:
        """Remove and return the message that arrived first, from one node or from any of several."""
        if op.source is not None:
            box = self._boxes.get(op.source)
            if not box:
                return None
            self._arrivals.remove(op.source)
            return box.popleft()
        for i, candidate in enumerate(self._arrivals):
            if candidate in op.group:
                del self._arrivals[i]
                return self._boxes[candidate].popleft()
        return None

    def _sources_awaited(self, sources: Sequence[int]) -> str:
        waited = [s for s in sources if s not in self._left]
        return "a message from " + (", ".join(name_of(s, self._world.workers) for s in waited[:8]) or "no node")

    # Collectives.

    def _collective(self, op: Any) -> Any:
        if len(op.group) == 1:
            return collectives.CARRY_OUT[type(op)](op.group, [op])[0]
        asked = self._kernel.now
        began, value = self._world.meet(self.rank, op, op.group).wait()
        self.traffic.waited += began - asked
        sent, received = bytes_of(op, self.rank)
        self.traffic.sent += sent
        self.traffic.received += received
        if isinstance(op, Mean | MeanUpdate):
            self._spend_time_on(vector_of(op).numel())  # its range of every member's vector: one vector in total
        return value


_NOTHING: Handle[None] = Done(None)


def _at_once(op: Compute[Any]) -> Callable[[], Any]:
    value = op.fn()
    return lambda: value


def _keep_once(promise: Promise[bool]) -> None:
    if not promise.done:
        promise.keep(True)


def _time_to_pass() -> str:
    return "time to pass"


def connect(world: VirtualNetwork, nodes: int) -> list[SimulatedTransport]:
    """Return the transports of all nodes."""
    transports: list[SimulatedTransport] = []
    transports += [SimulatedTransport(world, rank, nodes, transports) for rank in range(nodes)]
    return transports
