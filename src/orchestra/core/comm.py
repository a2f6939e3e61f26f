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
    from orchestra.core.view import View


class Comm:
    """The other nodes: those of the view in force."""

    def __init__(self, transport: Transport, view: View) -> None:
        self.transport = transport
        self.rank = transport.rank  # id of this node
        self.view = view
        self.between_messages: Callable[[], None] = lambda: None  # called before a message is awaited
        self._gone_on: set[int] = set()  # workers that have entered the next view
        self.progress = 0.0  # epochs dealt before the gradient that this worker computes; every message carries it
        self.known: dict[int, float] = {}  # on a server: the progress of each worker's latest gradient
        self._codec: Codec | None = None

    @property
    def workers(self) -> Group:
        """The workers of the view."""
        return self.view.workers

    @property
    def servers(self) -> Group:
        """The servers of the view."""
        return self.view.servers

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
        """Yield messages from the workers in the order they arrive, until each has left or entered the next view.

        With `departures`, each worker that does so is yielded as well.
        """
        while (message := self._next(None, departures=departures)) is not None:
            yield message

    def _next(
        self, source: int | None, *, departures: bool = False, at_rest: bool = False
    ) -> Message | Departed | None:
        while not self._gone_on or (source not in self._gone_on and len(self._gone_on) < len(self.workers)):
            self.between_messages()
            came = self.transport.start(Recv(source, self.workers, departures, at_rest)).wait()
            if not isinstance(came, Message):
                return came
            if came.tag == ReservedTag.NEXT_VIEW:
                self._gone_on.add(came.source)
                if departures:
                    return Departed(came.source)
            elif (whole := came if self._codec is None else self._codec.unpack(came)) is not None:
                if not whole.tag:
                    self.known[whole.source] = whole.progress
                return whole
        return None

    def enter(self, view: View) -> bool:
        """Take part in the next view. A worker tells the servers of this one, for which it is as if it had left.

        A server enters it after all workers, and returns False if they have left instead.
        """
        if self.rank in self.workers:
            for server in self.servers.members:
                self.send(server, torch.empty(0), version=view.number, tag=ReservedTag.NEXT_VIEW)
        else:
            for worker in self.workers.members:
                if self._next(worker) is not None:
                    raise RuntimeError(f"node {self.rank} enters view {view.number} with unread messages of {worker}")
        with_all = len(self._gone_on) == len(self.workers)
        self._gone_on.clear()
        self.view = view
        return with_all

    def leave(self) -> None:
        """Tell the servers that this worker sends nothing more."""
        self.transport.start(Leave(self.servers)).wait()
