# SPDX-License-Identifier: Apache-2.0
"""Processes of one machine: tensors in memory that all of them map, only signals between them.

    mean      everyone announces its vector; everyone averages its own range over all vectors, in rank order, into a
              result that all map; everyone announces that; everyone reads the result
    message   a header and the place of a body: the sender's own vector if it is lent, else one of two alternating slots

No thread stands between two processes, no tensor is serialised, and who has to wait sleeps in the kernel, with a
deadline, knowing whom it waits for.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from orchestra.errors import Stalled
from orchestra.ops import (
    Broadcast,
    Compute,
    Done,
    Gather,
    Group,
    Handle,
    Leave,
    Mean,
    MeanUpdate,
    Message,
    Op,
    Recv,
    Send,
    Sleep,
    Traffic,
)
from orchestra.transports.memory import ABORT, BARRIER, GO, STOP_ASKED, STOP_AT, Arena
from orchestra.vectors import split, weighted_mean

T = TypeVar("T")

_HEADER = struct.Struct("=IIQQqd")  # kind, dtype, place, numel, version, weight
_BODY, _FAREWELL = 1, 2
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
_SLICE = 0.2  # seconds between two looks at the deadline and at whether the run is being given up
_LEND_FROM = 1 << 18  # bytes; copying less than this costs less than making the sender wait for its vector


class Aborted(BaseException):
    """The run is being given up; unwinds a node without a word, since another one has already said why."""


@dataclass(slots=True)
class _Lent:
    """A message read in the sender's own memory."""

    transport: LocalTransport
    to: int
    number: int

    def wait(self) -> None:
        """Block until the receiver is done with the vector."""
        self.transport.await_release(self.to, self.number)


class LocalTransport:
    """One node's end of the shared memory."""

    def __init__(self, arena: Arena, rank: int, *, patience: float) -> None:
        plan = arena.plan
        self.rank = rank
        self.size = plan.nodes
        self.traffic = Traffic()
        self.patience = patience  # seconds
        self.on_idle: Callable[[], None] = _nothing
        self.gpu_means: Callable[[Tensor, float], float] | None = None  # where every worker has a GPU of its own
        self._arena = arena
        self._words = arena.words
        self._means = 0
        self._barriers = 0
        self._sent = [0] * plan.nodes  # messages posted to each node
        self._taken = [0] * plan.nodes  # messages received from each node
        self._left = [False] * plan.nodes
        self._rings = 0
        self._turn = 0
        self._rules: dict[type[Any], Callable[[Any], Handle[Any]]] = {
            Compute: lambda op: Done(op.fn()),
            Mean: self._mean,
            MeanUpdate: self._mean_update,
            Broadcast: self._broadcast,
            Gather: self._gather,
            Send: self._send,
            Recv: self._recv,
            Sleep: self._sleep,
            Leave: self._leave,
        }

    def now(self) -> float:
        """Seconds since training began."""
        return time.perf_counter() - self._arena.clock[0]

    def start(self, op: Op[T]) -> Handle[T]:
        """Carry out an op; all but lent sends are finished when this returns."""
        return cast("Handle[T]", self._rules[type(op)](op))

    # The run as a whole: begin together, end together.

    def await_go(self) -> None:
        """Block until every node is ready."""
        self._wait(GO, lambda: self._words[GO] != 0, lambda: "the other nodes to be ready")

    def proceed(self, step: int) -> bool:
        """Whether to begin `step`.

        To stop, the coordinator raises STOP_ASKED; from then on nobody begins a step before STOP_AT is known. It then
        sets STOP_AT past every step that was begun, so that all workers end after the same one.
        """
        words = self._words
        words.set(self._arena.plan.word("begun", self.rank), step)
        if not words[STOP_ASKED]:
            return True
        self._wait(STOP_AT, lambda: words[STOP_AT] != 0, lambda: "the coordinator to say after which step to stop")
        return step < words[STOP_AT]

    # Waiting.

    def _wait(self, word: int, ready: Callable[[], bool], whom: Callable[[], str]) -> None:
        """Sleep on a word until `ready()`."""
        words = self._words
        began = time.perf_counter()
        while True:
            seen = words[word]
            if ready():
                break
            if words[ABORT]:
                raise Aborted
            if time.perf_counter() - began > self.patience:
                raise Stalled(
                    f"{self._name(self.rank)} waited {self.patience:g} s for {whom()}. If a step may take that long, "
                    "give Local(patience=...) more seconds."
                )
            words.wait(word, seen, _SLICE)
        self.traffic.waited += time.perf_counter() - began

    def _barrier(self, group: Group) -> None:
        """Wait until every member has come here as often as this node.

        Only the last one to come wakes the others, and it wakes them all with one call.
        """
        words, plan = self._words, self._arena.plan
        self._barriers += 1
        number = self._barriers
        arrived = [plan.word("arrived", member) for member in group.members]
        words.set(plan.word("arrived", self.rank), number)

        def complete() -> bool:
            return all(words[word] >= number for word in arrived)

        if complete():
            words.announce(BARRIER, number)
            return

        def missing() -> str:
            return _names([m for m, w in zip(group.members, arrived, strict=True) if words[w] < number], plan.workers)

        self._wait(BARRIER, lambda: words[BARRIER] >= number or complete(), missing)

    # Collectives.

    def _publish(self, x: Tensor, weight: float) -> None:
        """Show the others where this node's vector lies, moving it to shared memory if it is elsewhere."""
        arena = self._arena
        place = arena.offset(x)
        if place is None:
            place = arena.plan.place("scratch", self.rank)
            self._fits(x)
            arena.tensor(place, x.numel(), x.dtype).copy_(x)
        arena.weights[2 * self.rank] = weight
        arena.places[2 * self.rank + 1] = place

    def _published(self, group: Group, part: slice, like: Tensor) -> tuple[list[Tensor], list[float]]:
        """The same range of everyone's vector, and everyone's weight."""
        arena = self._arena
        item = like.element_size()
        vectors = [
            arena.tensor(arena.places[2 * m + 1] + part.start * item, part.stop - part.start, like.dtype)
            for m in group.members
        ]
        return vectors, [arena.weights[2 * m] for m in group.members]

    def _result(self, x: Tensor) -> Tensor:
        """Where a collective leaves its result: alternating, so that nobody writes what a slow peer still reads."""
        self._means += 1
        return self._arena.tensor(self._arena.plan.place("mean", self._means % 2), x.numel(), x.dtype)

    def _count(self, x: Tensor, group: Group, mine: slice) -> None:
        """Count a mean as reduce-scatter and all-gather, the least that machines would have to exchange."""
        own = (mine.stop - mine.start) * x.element_size()
        rest = x.numel() * x.element_size() - own
        peers = len(group) - 1
        self.traffic.sent += rest + peers * own
        self.traffic.received += peers * own + rest

    def _mean(self, op: Mean) -> Handle[float]:
        if len(op.group) == 1:
            return Done(op.weight)
        if self.gpu_means is not None and op.x.is_cuda:
            self._count(op.x, op.group, split(op.x.numel(), len(op.group))[op.group.index(self.rank)])
            return Done(self.gpu_means(op.x, op.weight))
        mine = split(op.x.numel(), len(op.group))[op.group.index(self.rank)]
        result = self._result(op.x)
        self._publish(op.x, op.weight)
        self._barrier(op.group)
        vectors, weights = self._published(op.group, mine, op.x)
        if any(weights):
            weighted_mean(result[mine], vectors, weights)
        self._barrier(op.group)
        if any(weights):
            op.x.copy_(result)
        self._count(op.x, op.group, mine)
        return Done(sum(weights))

    def _mean_update(self, op: MeanUpdate) -> Handle[None]:
        x, g = op.x, op.g
        if len(op.group) == 1:
            if op.weight:
                op.apply(g)
            return Done(None)
        mine = split(g.numel(), len(op.group))[op.group.index(self.rank)]
        shared = self._arena.plan.shared_x
        result = self._result(g)
        self._publish(g, op.weight)
        self._barrier(op.group)
        vectors, weights = self._published(op.group, mine, g)
        alive = any(weights)
        if alive:
            # Nobody else reads this node's own range of its own g, so the mean may take its place.
            weighted_mean(vectors[op.group.index(self.rank)], vectors, weights)
            mean = vectors[op.group.index(self.rank)]
            op.apply(mean if mean.device == x.device else mean.to(x.device))
            if not shared:
                result[mine].copy_(x[mine])
        self._barrier(op.group)
        if alive and not shared:
            x.copy_(result)
        self._count(g, op.group, mine)
        return Done(None)

    def _broadcast(self, op: Broadcast) -> Handle[None]:
        result = self._result(op.x)
        peers = len(op.group) - 1
        nbytes = op.x.numel() * op.x.element_size()
        if self.rank == op.root:
            self._fits(op.x)
            result.copy_(op.x)
            self.traffic.sent += peers * nbytes
        self._barrier(op.group)
        if self.rank != op.root:
            op.x.copy_(result)
            self.traffic.received += nbytes
        # The next result but one uses this memory again: its writer has then passed a barrier with every reader.
        self._barrier(op.group)
        return Done(None)

    def _gather(self, op: Gather) -> Handle[list[Tensor]]:
        self._publish(op.x, 1.0)
        self._barrier(op.group)
        vectors, _ = self._published(op.group, slice(0, op.x.numel()), op.x)
        copies = [v.to(op.x.device, copy=True) for v in vectors]
        self._barrier(op.group)
        nbytes = op.x.numel() * op.x.element_size()
        self.traffic.sent += (len(op.group) - 1) * nbytes
        self.traffic.received += (len(op.group) - 1) * nbytes
        return Done(copies)

    def _fits(self, x: Tensor) -> None:
        if x.numel() * x.element_size() > self._arena.plan.vector:
            raise ValueError(
                f"a message of {x.numel() * x.element_size()} bytes is larger than the model with its margin "
                f"({self._arena.plan.vector} bytes). Send it in pieces."
            )

    def _sleep(self, op: Sleep) -> Handle[None]:
        time.sleep(op.seconds)
        return Done(None)

    # Messages.

    def _send(self, op: Send) -> Handle[None]:
        arena, to, x = self._arena, op.to, op.x
        self._release(to)
        number = self._sent[to]
        self.await_release(to, number - 1)  # two messages may be under way
        nbytes = x.numel() * x.element_size()
        place = arena.offset(x) if op.lend and nbytes >= _LEND_FROM else None
        lent = place is not None
        if place is None:
            self._fits(x)
            place = arena.plan.slot(self.rank, to, number % 2)
            arena.tensor(place, x.numel(), x.dtype).copy_(x.reshape(-1))
        self._post(to, _BODY, _DTYPES.index(x.dtype), place, x.numel(), op.version, op.weight)
        self.traffic.sent += nbytes
        return _Lent(self, to, number + 1) if lent else Done(None)

    def _leave(self, op: Leave) -> Handle[None]:
        for to in op.group.members:
            self._release(to)
            self.await_release(to, self._sent[to] - 1)
            self._post(to, _FAREWELL, 0, 0, 0, 0, 0.0)
        return Done(None)

    def _post(self, to: int, *header: float) -> None:
        plan = self._arena.plan
        number = self._sent[to]
        _HEADER.pack_into(self._arena.memory, plan.header(self.rank, to, number % 2), *header)
        self._sent[to] = number + 1
        self._words.set(plan.word("posted", self.rank, to), number + 1)
        self.ring(to)

    def ring(self, node: int) -> None:
        """Wake a node that waits for messages, so that it looks around.

        Every ring has a value of its own, so whoever looked at the bell before it rang sees that it did.
        """
        self._rings += 1
        self._words.announce(self._arena.plan.word("bell", node), (self._rings * self.size + self.rank) % 2**32)

    def await_word(self, word: int, number: int, node: int) -> None:
        """Block until a node has brought one of its words to `number`."""
        self._wait(word, lambda: self._words[word] >= number, lambda: self._name(node))

    def await_release(self, to: int, number: int) -> None:
        """Block until `to` is done with the first `number` messages of this node."""
        word = self._arena.plan.word("released", self.rank, to)
        self._wait(word, lambda: self._words[word] >= number, lambda: f"{self._name(to)} to take a message")

    def _release(self, source: int) -> None:
        """Tell a sender that what came from it so far is no longer looked at."""
        word = self._arena.plan.word("released", source, self.rank)
        if self._words[word] != self._taken[source]:
            self._words.announce(word, self._taken[source])

    def _recv(self, op: Recv) -> Handle[Message | None]:
        sources = op.group.members if op.source is None else (op.source,)
        for source in sources:
            self._release(source)
        bell = self._arena.plan.word("bell", self.rank)

        def ready() -> bool:
            self.on_idle()
            return self._arrived(sources) is not None or all(self._left[s] for s in sources)

        while True:
            self._wait(bell, ready, lambda: "a message from " + self._names([s for s in sources if not self._left[s]]))
            arrived = self._arrived(sources)
            if arrived is None:
                return Done(None)
            message = self._take(arrived)
            if message is not None:
                return Done(message)

    def _arrived(self, sources: Sequence[int]) -> int | None:
        """A source with a message waiting; the one served last comes last, so that nobody is passed over."""
        words, plan = self._words, self._arena.plan
        for i in range(len(sources)):
            source = sources[(self._turn + i) % len(sources)]
            if words[plan.word("posted", source, self.rank)] != self._taken[source]:
                return source
        return None

    def _take(self, source: int) -> Message | None:
        plan = self._arena.plan
        number = self._taken[source]
        self._taken[source] = number + 1
        self._turn = source + 1
        kind, dtype, place, numel, version, weight = _HEADER.unpack_from(
            self._arena.memory, plan.header(source, self.rank, number % 2)
        )
        if kind == _FAREWELL:
            self._left[source] = True
            self._release(source)
            return None
        x = self._arena.tensor(place, numel, _DTYPES[dtype])
        self.traffic.received += x.numel() * x.element_size()
        return Message(source, x, version, weight)

    def _name(self, node: int) -> str:
        return self._names([node])

    def _names(self, nodes: Sequence[int]) -> str:
        return _names(nodes, self._arena.plan.workers)


def _names(nodes: Sequence[int], workers: int) -> str:
    return ", ".join(name_of(node, workers) for node in nodes) or "nobody"


def name_of(node: int, workers: int) -> str:
    """How people are told of a node.

    >>> name_of(5, workers=4)
    'server 1'
    """
    return f"worker {node}" if node < workers else f"server {node - workers}"


def _nothing() -> None:
    pass
