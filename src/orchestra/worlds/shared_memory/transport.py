# SPDX-License-Identifier: Apache-2.0
"""The transport between processes of one machine: tensors in memory that all of them map, with signals by futexes.

    mean      every worker publishes its vector; barrier; every worker averages its own range over all vectors, in rank
              order, into a result that all map; barrier; every worker reads the result
              small vectors: every worker averages the whole, with one barrier
    message   a header and the offset of a body (mailbox.py)

There is no thread between two processes, and no tensor is serialised. A node that has to wait sleeps in the kernel,
with a deadline, and knows for which nodes it waits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from orchestra.core.ops import (
    Broadcast,
    Compute,
    Done,
    Gather,
    Group,
    Handle,
    Leave,
    Mean,
    MeanUpdate,
    Op,
    PrepareMean,
    Recv,
    Send,
    Sleep,
    Traffic,
)
from orchestra.core.vectors import is_small, ranges, share_of_mean, weighted_mean
from orchestra.worlds.computing import compute
from orchestra.worlds.shared_memory.control import SharedControl
from orchestra.worlds.shared_memory.layout import (
    BARRIER,
    EVEN,
    FACTS,
    GO,
    ODD,
    PLACE,
    WAITING,
    WEIGHT,
    Arena,
)
from orchestra.worlds.shared_memory.mailbox import Mailbox
from orchestra.worlds.shared_memory.waiting import Waiter

if TYPE_CHECKING:
    from orchestra.worlds.torch_collectives import TorchCollectives

T = TypeVar("T")


class SharedMemoryTransport:
    """The transport of one node."""

    def __init__(self, arena: Arena, rank: int, *, patience: float, near: Collection[int] = ()) -> None:
        self.rank = rank
        self.size = arena.plan.nodes
        self.traffic = Traffic()
        self.gpu_means: TorchCollectives | None = None  # if every worker has its own GPU
        self._arena = arena
        self._words = arena.words
        self.control = SharedControl(arena)
        waits = arena.plan.word("waits", rank)
        self._waiter = Waiter(arena.words, rank, arena.plan.workers, patience, self.traffic, waits=waits)
        self.mailbox = Mailbox(arena, rank, self._waiter, self.traffic, near)
        self._means = 0
        self._small = 0
        self._barriers = 0
        self._rules: dict[type[Any], Callable[[Any], Handle[Any]]] = {
            Compute: lambda op: compute(op, self.mailbox.sleep),
            PrepareMean: lambda op: Done(None),
            Mean: self._mean,
            MeanUpdate: self._mean_update,
            Broadcast: self._broadcast,
            Gather: self._gather,
            Send: self.mailbox.send,
            Recv: self.mailbox.recv,
            Sleep: lambda op: Done(self.mailbox.sleep(op)),
            Leave: self.mailbox.leave,
        }

    def now(self) -> float:
        """Return the seconds since training began."""
        return time.perf_counter() - self._arena.clock[0]

    def start(self, op: Op[T]) -> Handle[T]:
        """Carry out an op; all ops but lent sends are finished when this returns."""
        return cast("Handle[T]", self._rules[type(op)](op))

    # Start, checkpoints and end of the run.

    def await_go(self) -> None:
        """Block until every node is ready. From then on the coordinator detects waits that never end."""
        self._waiter.wait(GO, lambda: self._words[GO] != 0, lambda: "the other nodes to be ready")
        self._waiter.patience = math.inf

    def await_saved(self, node: int, label: int, *, lockstep: bool) -> None:
        """Block until a node has saved a checkpoint, which it does when every worker has."""
        control, workers = self.control, range(self._arena.plan.workers)

        def awaited() -> str:
            late = [w for w in workers if control.saved(w) < label]
            return f"{self._waiter.names(late or [node])} to save a checkpoint"

        # Without lockstep, the others may stop before they see that they should save.
        self._waiter.wait(
            control.index("saved", node),
            lambda: control.saved(node) >= label or (not lockstep and control.stop_at != 0),
            awaited,
        )

    def wait_for_wakeup(self, ready: Callable[[], bool]) -> None:
        """Block until `ready`, which is checked whenever this node is woken; there is no time-out."""
        self._waiter.wait(self._arena.plan.word("bell", self.rank), ready, lambda: "the others", forever=True)

    def wake_all(self) -> None:
        """Wake every node."""
        for node in range(self.size):
            self.mailbox.ring(node)

    def proceed(self, step: int, *, lockstep: bool) -> bool:
        """Return whether to begin `step`.

        To stop, the coordinator sets `stop_asked`; from then on no worker begins a step before `stop_at` is known. The
        coordinator then sets `stop_at` past every step that was begun, so that all workers end after the same one.
        Without lockstep, each worker ends after its present step.
        """
        control = self.control
        control.write("begun", step, self.rank)
        if not control.stop_asked:
            return True
        self._waiter.wait(
            control.index("stop_at"),
            lambda: control.stop_at != 0,
            lambda: "the coordinator to say after which step to stop",
        )
        return lockstep and step < control.stop_at

    # Collectives.

    def _barrier(self, group: Group) -> None:
        """Wait until every member has entered the barrier as often as this node.

        The last one to enter wakes all others with one call.
        """
        words, plan = self._words, self._arena.plan
        if len(group) != plan.workers:
            raise NotImplementedError(f"collectives of all {plan.workers} workers only, not of {group.members}")
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
            return self._waiter.names([m for m, w in zip(group.members, arrived, strict=True) if words[w] < number])

        self._waiter.wait(BARRIER, lambda: words[BARRIER] >= number or complete(), missing)

    def _publish(self, x: Tensor, weight: float) -> None:
        """Publish the offset of this node's vector, after copying it to shared memory if it is elsewhere."""
        arena = self._arena
        place = arena.offset(x)
        if place is None:
            place = arena.plan.place("scratch", self.rank)
            self._arena.require_room(x)
            arena.tensor(place, x.numel(), x.dtype).copy_(x)
        arena.numbers[FACTS * self.rank + WEIGHT] = weight
        arena.places[FACTS * self.rank + PLACE] = place

    def _published(self, group: Group, part: slice, like: Tensor) -> tuple[list[Tensor], list[float]]:
        """Return a range of every member's vector, and every member's weight."""
        arena = self._arena
        item = like.element_size()
        vectors = [
            arena.tensor(arena.places[FACTS * m + PLACE] + part.start * item, part.stop - part.start, like.dtype)
            for m in group.members
        ]
        return vectors, [arena.numbers[FACTS * m + WEIGHT] for m in group.members]

    def _result(self, x: Tensor) -> Tensor:
        """Return memory for the result of a collective: two in turn, since a slow peer may still read the last one."""
        self._means += 1
        return self._arena.tensor(self._arena.plan.place("mean", self._means % 2), x.numel(), x.dtype)

    def _count(self, x: Tensor, group: Group) -> None:
        both = share_of_mean(x, len(group), group.index(self.rank))
        self.traffic.sent += both
        self.traffic.received += both

    def _mean(self, op: Mean) -> Handle[float]:
        if len(op.group) == 1:
            return Done(op.weight)
        if self.gpu_means is not None and op.x.is_cuda:
            self._count(op.x, op.group)
            with self._waiter.doing(WAITING):
                return Done(self.gpu_means.mean_(op.x, op.weight))
        mine = ranges(op.x.numel(), len(op.group))[op.group.index(self.rank)]
        if is_small(op.x.numel(), len(op.group)):
            self._count(op.x, op.group)
            return Done(self._small_mean(op))
        result = self._result(op.x)
        self._publish(op.x, op.weight)
        self._barrier(op.group)
        vectors, weights = self._published(op.group, mine, op.x)
        if any(weights):
            weighted_mean(result[mine], vectors, weights)
        self._barrier(op.group)
        if any(weights):
            op.x.copy_(result)
        self._count(op.x, op.group)
        return Done(sum(weights))

    def _small_mean(self, op: Mean) -> float:
        """Average the whole vector on every node.

        The copies alternate: the next mean writes the other ones, and the one after that begins only when all nodes
        have read these.
        """
        arena, plan = self._arena, self._arena.plan
        arena.require_room(op.x)
        self._small += 1
        kind, column = (("even", EVEN), ("odd", ODD))[self._small % 2]
        vectors = [arena.tensor(plan.place(kind, m), op.x.numel(), op.x.dtype) for m in op.group.members]
        vectors[op.group.index(self.rank)].copy_(op.x)
        arena.numbers[FACTS * self.rank + column] = op.weight
        self._barrier(op.group)
        weights = [arena.numbers[FACTS * m + column] for m in op.group.members]
        if any(weights):
            mean = op.x if op.x.device.type == "cpu" else torch.empty_like(op.x, device="cpu")
            weighted_mean(mean, vectors, weights)
            if mean is not op.x:
                op.x.copy_(mean)
        return sum(weights)

    def _mean_update(self, op: MeanUpdate) -> Handle[None]:
        x, g = op.x, op.g
        if len(op.group) == 1:
            if op.weight:
                op.apply(g)
            return Done(None)
        if self.gpu_means is not None and g.is_cuda:
            self._count(g, op.group)
            with self._waiter.doing(WAITING):
                mean, total = self.gpu_means.mean(g, op.weight)
            if total:
                op.apply(mean)
            return Done(None)
        mine = ranges(g.numel(), len(op.group))[op.group.index(self.rank)]
        shared = self._arena.plan.shared_x
        result = self._result(g)
        self._publish(g, op.weight)
        self._barrier(op.group)
        vectors, weights = self._published(op.group, mine, g)
        alive = any(weights)
        if alive:
            # No other node reads this node's own range of its own g, so the mean may overwrite it.
            weighted_mean(vectors[op.group.index(self.rank)], vectors, weights)
            mean = vectors[op.group.index(self.rank)]
            op.apply(mean if mean.device == x.device else mean.to(x.device))
            if not shared:
                result[mine].copy_(x[mine])
        self._barrier(op.group)
        if alive and not shared:
            x.copy_(result)
        self._count(g, op.group)
        return Done(None)

    def _broadcast(self, op: Broadcast) -> Handle[None]:
        self._arena.require_room(op.x)
        result = self._result(op.x)
        peers = len(op.group) - 1
        nbytes = op.x.numel() * op.x.element_size()
        if self.rank == op.root:
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
