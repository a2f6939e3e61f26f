# SPDX-License-Identifier: Apache-2.0
"""The other nodes, as a strategy sees them: averages over the workers, messages, and departures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from orchestra.core.ops import (
    All,
    Broadcast,
    Compute,
    Departed,
    Gather,
    Group,
    Handle,
    Leave,
    Mean,
    Message,
    Recv,
    ReservedTag,
    Send,
    Transport,
)

if TYPE_CHECKING:
    from orchestra.core.codec import Codec


class Comm:
    """The other nodes: workers in one group, servers in another."""

    def __init__(self, transport: Transport, workers: Group, servers: Group) -> None:
        self.transport = transport
        self.rank = transport.rank  # id of this node; workers come first
        self.workers = workers
        self.servers = servers
        self.between_messages: Callable[[], None] = lambda: None  # called before a message is awaited
        self._paused: set[int] = set()  # workers that send nothing more for now
        self.progress = 0.0  # epochs dealt before the gradient that this worker computes; every message carries it
        self.known: dict[int, float] = {}  # on a server: the progress of each worker's latest gradient
        self._codec: Codec | None = None

    def use(self, codec: Codec | None) -> None:
        """Encode and decode messages from now on; None sends them as they are."""
        self._codec = codec

    def _packed(self, message: Send) -> Sequence[Send]:
        return (message,) if self._codec is None else self._codec.pack(message)

    def mean(self, x: Tensor, *, weight: float = 1.0) -> Tensor:
        """Return the weighted mean of x over the workers, as a new tensor."""
        mean = x.clone()
        self.mean_(mean, weight=weight)
        return mean

    def mean_(self, x: Tensor, *, weight: float = 1.0) -> float:
        """x ← the weighted mean of x over the workers, in place. Return the sum of the weights; if it is 0, x stays."""
        return self.transport.start(Mean(x, self.workers, weight)).wait()

    def add_(self, x: Tensor, y: Tensor) -> None:
        """x ← x + y, in place: the additions of an all-reduce made of messages, which may take simulated time."""
        self.transport.start(Compute(lambda: x.add_(y), numbers=x.numel())).wait()

    def broadcast_(self, x: Tensor, *, root: int = 0) -> None:
        """x ← x of worker `root`, in place."""
        self.transport.start(Broadcast(x, root, self.workers)).wait()

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return the x of every worker, in rank order."""
        return self.transport.start(Gather(x, self.workers)).wait()

    def send(self, to: int, x: Tensor, *, version: int = 0, weight: float = 1.0, tag: int = 0) -> None:
        """Send x, which may be changed as soon as this returns. The strategy defines the meaning of `tag`."""
        self._require(to)
        for message in self._packed(Send(to, x, version, weight, tag=tag, progress=self.progress)):
            self.transport.start(message).wait()

    def start_send(self, to: int, x: Tensor, *, version: int = 0, weight: float = 1.0) -> Handle[None]:
        """Begin to send x without a copy: x must not change until the handle's `wait` returns."""
        self._require(to)
        message = Send(to, x, version, weight, lend=True, progress=self.progress)
        handles = [self.transport.start(m) for m in self._packed(message)]
        return handles[0] if len(handles) == 1 else All(handles)

    def _require(self, other: int) -> None:
        """Raise if a node does not exist, or is this one."""
        if not 0 <= other < self.transport.size or other == self.rank:
            others = f"the others are among 0 to {self.transport.size - 1}"
            raise ValueError(f"node {self.rank} cannot exchange messages with node {other}: {others}")

    @overload
    def recv(self, source: int, *, at_rest: bool = False) -> Message: ...

    @overload
    def recv(self, source: int, *, departures: Literal[True]) -> Message | None: ...

    def recv(self, source: int, *, at_rest: bool = False, departures: bool = False) -> Message | None:
        """Return the next message from one node.

        With `departures`, return None if that node has left; otherwise raise. `at_rest`: the state of this node has not
        changed since its last step, so a checkpoint may be saved while it waits.
        """
        self._require(source)
        message = self._next(source, at_rest=at_rest)
        if isinstance(message, Message):
            return message
        if departures:
            return None
        raise RuntimeError(f"node {self.transport.rank} expects a message from node {source}, which has left")

    @overload
    def inbox(self) -> Iterator[Message]: ...

    @overload
    def inbox(self, *, departures: Literal[True]) -> Iterator[Message | Departed]: ...

    def inbox(self, *, departures: bool = False) -> Iterator[Message | Departed]:
        """Yield messages from the workers in the order they arrive, until every worker has left.

        With `departures`, each worker that leaves is yielded as well.
        """
        while (message := self._next(None, departures=departures)) is not None:
            yield message

    def _next(
        self, source: int | None, *, departures: bool = False, at_rest: bool = False
    ) -> Message | Departed | None:
        while not self._paused or (source not in self._paused and len(self._paused) < len(self.workers)):
            self.between_messages()
            came = self.transport.start(Recv(source, self.workers, departures, at_rest)).wait()
            if not isinstance(came, Message):
                return came
            if came.tag == ReservedTag.PAUSE:
                self._paused.add(came.source)
                if departures:
                    return Departed(came.source)
            elif (whole := came if self._codec is None else self._codec.unpack(came)) is not None:
                if not whole.tag:
                    self.known[whole.source] = whole.progress
                return whole
        return None

    def pause(self) -> None:
        """Tell the servers that this worker pauses: until `resume` they treat it as if it had left."""
        for server in self.servers.members:
            self.send(server, torch.empty(0), tag=ReservedTag.PAUSE)

    def resume(self) -> bool:
        """On a server, end the pause of all workers; return False if they have left instead."""
        paused = len(self._paused) == len(self.workers)
        self._paused.clear()
        return paused

    def dismiss(self, count: int) -> None:
        """Remove the last `count` of the initial workers from the group."""
        self.workers = Group(tuple(range(self.servers.members[0] - count)))

    def leave(self) -> None:
        """Tell the servers that this worker sends nothing more."""
        self.transport.start(Leave(self.servers)).wait()
