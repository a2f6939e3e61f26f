# SPDX-License-Identifier: Apache-2.0
"""Everything a node may ask of the world outside: a closed list.

A transport has one rule per op and one entrance, `start`, so metering, tracing and fault injection each wrap one
method. Strategies never build ops themselves; they speak through `Node` and `Comm`, which do.
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

    For worlds that model how long that takes, or take several gradients at once: `work` is the number of samples, and
    `batch` the mini-batch, if it is a gradient; `numbers` is how many elements of vectors it passes over, if it is not.
    `draws`: it may draw from the global random generators, of which several nodes in one process have one each.
    `cancel_on`: it is given up, and answers None, if a message from one of these nodes is there before it ends.
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
    """The mean of g is asked for next, and its ranges become final one after the other: begin with those that are.

    Answers a function to be called with every range that is final, or None where nothing is gained by it. `weight` is
    the one g will have, unless it turns out that it must not be used; `most` the weight of a whole mini-batch.
    """

    g: Tensor
    group: Group
    weight: float
    most: float


@dataclass(slots=True)
class MeanUpdate(Op[None]):
    """The mean of g over the group, then the optimizer: x is then the same everywhere.

    Each member averages one range of g, calls `apply(mean)` to update the same range of x, and ends with the whole new
    x; or, where torch takes the means, averages and applies the whole. All weights zero change nothing.
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
    """Which range of the model a message covers, and its sender's clock there."""

    clock: int = 0
    start: int = 0
    stop: int = 0


_UNSTAMPED = RangeStamp()


@dataclass(slots=True)
class Send(Op[None]):
    """A message to one node. `lend`: x is read in place and must not change until the handle's `wait` returns.

    `progress`: where the sender is in the data, in epochs; part of the header, so it adds no bytes to the body.
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
    """The next message from `source`, or from whoever comes first; None when those asked have all left.

    `departures`: it is answered when somebody leaves, too. `at_rest`: this node is as it was after its last step, so
    that the run may be saved while it waits.
    """

    source: int | None
    group: Group
    departures: bool = False
    at_rest: bool = False


@dataclass(slots=True)
class Sleep(Op[bool]):
    """Do nothing for a while, unless a message comes from one of some nodes: answers whether it did not."""

    seconds: float
    cancel_on: Group | None = None


@dataclass(slots=True)
class Leave(Op[None]):
    """Tell the group that this node sends nothing more."""

    group: Group


class ReservedTag(IntEnum):
    """Tags of messages that are not for a strategy to send."""

    PAUSE = 0xFFFF  # this worker sends nothing more until it resumes
    FINAL = 0xFFFE  # a server's last message


@dataclass(slots=True)
class Message:
    """What came from another node.

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
        """Block until it is done and give its answer."""
        ...


@dataclass(slots=True)
class Done(Generic[T]):
    """The handle of an op that is already finished."""

    value: T

    def wait(self) -> T:
        """Give the answer at once."""
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
    """What a node's ops cost so far.

    Bytes are those the op puts on a wire between machines (a mean as reduce-scatter and all-gather), so they are the
    same in every world, also where shared memory moves less. What passes between nodes of one machine is not counted.
    """

    sent: int = 0  # bytes
    received: int = 0  # bytes
    waited: float = 0.0  # seconds blocked on other nodes
    sent_to: dict[int, int] = field(default_factory=dict)  # bytes of messages, by node

    def count(self, to: int, nbytes: int) -> None:
        """A message is sent."""
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
        """Whether this worker may begin `step`. To stop, workers that go in step agree on one; others stop at once."""
        ...
