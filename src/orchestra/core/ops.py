# SPDX-License-Identifier: Apache-2.0
"""The ops: everything that a node may ask of its transport, as a closed list.

A transport implements each op behind one method, `start`, so metering, tracing and fault injection each wrap one
method. Strategies do not build ops themselves; they use `Node` and `Comm`, which do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Group:
    """Nodes that act together, by id, in ascending order."""

    members: tuple[int, ...]

    def __hash__(self) -> int:
        return self._hash

    def __len__(self) -> int:
        return len(self.members)

    def __contains__(self, node: int) -> bool:
        return node in self._places

    def index(self, node: int) -> int:
        """Position of a node within the group."""
        return self._places[node]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {node: i for i, node in enumerate(self.members)}

    @cached_property
    def _hash(self) -> int:
        return hash(self.members)


class Op(Generic[T]):
    """A request whose answer is a `T`."""

    __slots__ = ()


@dataclass(slots=True)
class Compute(Op[T]):
    """Run `fn` on this node.

    For worlds that model its duration, or compute several gradients at once: `work` is the number of samples, and
    `batch` the mini-batch, of a gradient; `numbers` is the number of vector elements that other computations process.
    `draws`: `fn` may draw from the global random generators, of which every node in one process has its own.
    `cancel_on`: the op is cancelled, and answers None, if a message from one of these nodes arrives before it ends.
    """

    fn: Callable[[], T]
    work: int = 0
    batch: Any = None
    numbers: int = 0
    draws: bool = False
    cancel_on: Group | None = None


@dataclass(slots=True)
class Mean(Op[float]):
    """x ← Σ wᵢ xᵢ / Σ wᵢ over the group, on every member, in place. Answers Σ wᵢ; if that is zero, x stays as it is."""

    x: Tensor
    group: Group
    weight: float


@dataclass(slots=True)
class PrepareMean(Op["Callable[[slice], None] | None"]):
    """Announce that the mean of g follows, so that ranges of g can be averaged as soon as each is final.

    Answers a function to be called with every final range, or None if the world does not profit. `weight` is the one
    that g will have unless it cannot be used; `most` the weight of a full mini-batch.
    """

    g: Tensor
    group: Group
    weight: float
    most: float


@dataclass(slots=True)
class MeanUpdate(Op[None]):
    """Average g over the group and apply the optimizer: x is then equal on all members.

    Each member averages one range of g, calls `apply(mean)` to update the same range of x, and ends with the whole new
    x; with torch.distributed, each averages and applies the whole. If all weights are zero, nothing changes.
    """

    x: Tensor
    g: Tensor
    group: Group
    weight: float
    apply: Callable[[Tensor], None]


@dataclass(slots=True)
class Broadcast(Op[None]):
    """x ← x of `root` on every member of the group, in place."""

    x: Tensor
    root: int
    group: Group


@dataclass(slots=True)
class Gather(Op[list[Tensor]]):
    """Every member's x (all of one length), in the group's order, on every member."""

    x: Tensor
    group: Group


class RangeStamp(NamedTuple):
    """The range of the model that a message covers, and the sender's clock there."""

    clock: int = 0
    start: int = 0
    stop: int = 0


_UNSTAMPED = RangeStamp()


@dataclass(slots=True)
class Send(Op[None]):
    """A message to one node. `lend`: x is read in place and must not change until the handle's `wait` returns.

    `progress`: the sender's position in the data, in epochs; part of the header, so it adds no bytes to the body.
    """

    to: int
    x: Tensor
    version: int = 0
    weight: float = 1.0
    lend: bool = False
    tag: int = 0
    stamp: RangeStamp = _UNSTAMPED
    progress: float = 0.0


@dataclass(slots=True)
class Recv(Op["Message | Departed | None"]):
    """Receive the next message from `source`, or from any node of the group; None when all of them have left.

    `departures`: also answer when a node leaves. `at_rest`: the state of this node has not changed since its last step,
    so a checkpoint may be saved while it waits.
    """

    source: int | None
    group: Group
    departures: bool = False
    at_rest: bool = False


@dataclass(slots=True)
class Sleep(Op[bool]):
    """Sleep, but only until a message arrives from a node in `cancel_on`; answers False if one did."""

    seconds: float
    cancel_on: Group | None = None


@dataclass(slots=True)
class Leave(Op[None]):
    """Tell the group that this node sends nothing more."""

    group: Group


class ReservedTag(IntEnum):
    """Tags of messages that are not for a strategy to send."""

    NEXT_VIEW = 0xFFFF  # this worker has entered the view of this number, and sends nothing more in the one before
    FINAL = 0xFFFE  # a server's last message


@dataclass(slots=True)
class Message:
    """A message from another node.

    `x` is read in place: valid until the next receive that could bring a message from `source`, or send to it.
    """

    source: int
    x: Tensor
    version: int
    weight: float
    tag: int = 0
    stamp: RangeStamp = _UNSTAMPED
    progress: float = 0.0


@dataclass(slots=True)
class Departed:
    """A node that sends nothing more."""

    source: int


class Handle(Protocol[T_co]):
    """An op under way."""

    def wait(self) -> T_co:
        """Block until the op is done and return its answer."""
        ...


@dataclass(slots=True)
class Done(Generic[T]):
    """The handle of an op that is already finished."""

    value: T

    def wait(self) -> T:
        """Return the answer at once."""
        return self.value


@dataclass(slots=True)
class All:
    """The handle of several ops."""

    handles: Sequence[Handle[None]]

    def wait(self) -> None:
        """Block until all are done."""
        for handle in self.handles:
            handle.wait()


@dataclass(slots=True)
class Traffic:
    """The bytes and waiting times of a node's ops so far.

    Bytes are those that an op sends between machines (a mean as reduce-scatter and all-gather), so they are equal in
    every world, even if shared memory moves less. Messages between nodes of one machine are not counted.
    """

    sent: int = 0  # bytes
    received: int = 0  # bytes
    waited: float = 0.0  # seconds blocked on other nodes
    sent_to: dict[int, int] = field(default_factory=dict)  # bytes of messages, by node

    def count(self, to: int, nbytes: int) -> None:
        """Count a message that is sent."""
        self.sent += nbytes
        self.sent_to[to] = self.sent_to.get(to, 0) + nbytes


class Transport(Protocol):
    """A world that carries out ops for one node."""

    rank: int
    size: int
    traffic: Traffic

    def now(self) -> float:
        """Seconds since training began, by this world's clock."""
        ...

    def start(self, op: Op[T]) -> Handle[T]:
        """Begin an op."""
        ...

    def proceed(self, step: int, *, lockstep: bool) -> bool:
        """Return whether this worker may begin `step`: workers in lockstep stop at the same step, others at once."""
        ...
