# SPDX-License-Identifier: Apache-2.0
"""One node's end of a virtual cluster: one rule per op, each in virtual seconds.

    Compute     the gradient is taken at the parameters held when it starts, and delivered when it ends: what others do
                to the model meanwhile is what staleness is
    Send, Recv  a flow from host to host; messages between the same two nodes keep their order, as on one connection

Collectives are in world.py.
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
    """A message, or a farewell, on its way."""

    message: Message | None
    source: int
    size: int  # bytes on the network
    posted: float  # seconds
    read: Promise[None] | None = None  # kept when the receiver is done with a lent vector


class SimulatedTransport:
    """One node's end of it."""

    def __init__(self, world: VirtualNetwork, rank: int, size: int, others: list[SimulatedTransport]) -> None:
        self.rank = rank
        self.size = size
        self.traffic = Traffic()
        # How values come about: what is called when an op begins gives what is called when it ends.
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
        self._arrivals: deque[int] = deque()  # sources of letters, in the order they came
        self._left: set[int] = set()
        self._lent: dict[int, Promise[None]] = {}  # vectors of others that this node may still be reading
        self._awaited: Promise[None] | None = None
        self._from: int | None = None  # whose letter is awaited; None: anybody's
        self._alarm: tuple[Group, Promise[bool]] | None = None  # whose letters disturb it
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
        """Virtual seconds since training began."""
        return self._kernel.now

    def start(self, op: Op[T]) -> Handle[T]:
        """Carry out an op; returns when it is over, in virtual time, but for vectors that are lent."""
        if type(op) is Send:
            return cast("Handle[T]", self._send(op))
        return Done(self._rules[type(op)](op))

    def proceed(self, step: int, *, lockstep: bool) -> bool:
        """Whether to begin `step`: not once the run is to stop, where all stop at the same one if they go in step."""
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
            self._pass_over(op.numbers)
        return answer()

    def _pass_over(self, numbers: int) -> None:
        """Work on vectors, if that takes any time here."""
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
        letter = _Delivery(message, self.rank, size, self._kernel.now, read)
        if way.keeps is None or read is not None:
            self._post(to, way, letter)
        else:
            self._hand_over(to, way, letter)
        return read or _NOTHING

    def _hand_over(self, to: int, way: Route, letter: _Delivery) -> None:
        """Wait until the kernel has the message, as sockets do."""
        self._world.under_way += 1
        taken = self._world.hand_over(way, letter.size, self._others[to].deliver, letter)
        if taken is not None:
            taken.wait()
            self.traffic.waited += self._kernel.now - letter.posted

    def _reader(self, to: int) -> str:
        return f"{name_of(to, self._world.workers)} to have read a message"

    def _release(self, source: int) -> None:
        """This node no longer looks at what was lent to it."""
        read = self._lent.pop(source, None)
        if read is not None:
            read.keep(None)

    def _leave(self, op: Leave) -> None:
        for to in op.group.members:
            self._release(to)
            self._post(to, self._world.way(self.rank, to), _Delivery(None, self.rank, 0, self._kernel.now))

    def _post(self, to: int, way: Route, letter: _Delivery) -> None:
        world = self._world
        world.under_way += 1
        world.carry(way, letter.size, self._others[to].deliver, letter)

    def deliver(self, letter: _Delivery) -> None:
        """A letter has come."""
        self._world.under_way -= 1
        source, awaited = letter.source, self._awaited
        box = self._boxes.get(source)
        if box is None:
            box = self._boxes[source] = deque()
        box.append(letter)
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
            letter = self._take(op)
            if letter is None:
                sources = op.group.members if op.source is None else (op.source,)
                if self._left and all(source in self._left for source in sources):
                    self.traffic.waited += self._kernel.now - asked
                    return None
                self._from = op.source
                self._awaited = Promise(self._kernel, self._whom, sources)
                self._awaited.wait()
            elif letter.message is None:
                self._left.add(letter.source)
                if op.departures:
                    self.traffic.waited += self._kernel.now - asked
                    return Departed(letter.source)
            else:
                if letter.read is not None:
                    self._lent[letter.source] = letter.read
                self.traffic.received += letter.size
                # Before it was sent there was nothing to do but wait; after that it was on its way.
                if letter.posted > asked:
                    self.traffic.waited += letter.posted - asked
                return letter.message

    def _take(self, op: Recv) -> _Delivery | None:
        """The letter that came first, from one node or from any of several."""
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

    def _whom(self, sources: Sequence[int]) -> str:
        waited = [s for s in sources if s not in self._left]
        return "a message from " + (", ".join(name_of(s, self._world.workers) for s in waited[:8]) or "nobody")

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
            self._pass_over(vector_of(op).numel())  # its share of everyone's vector, which makes one whole
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
    """The ends of all nodes."""
    transports: list[SimulatedTransport] = []
    transports += [SimulatedTransport(world, rank, nodes, transports) for rank in range(nodes)]
    return transports
