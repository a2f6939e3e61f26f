# SPDX-License-Identifier: Apache-2.0
"""Ops as messages between machines, over one connection for each pair of nodes.

    mean    all workers send the k-th range of their vectors to worker k; it takes the mean, in the order of the ranks,
            and sends it to all: reduce-scatter and all-gather, 2 (N−1)/N S sent by each

The sums are the same, in the same order, as those that processes on one machine make in shared memory, so the results
are equal bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from orchestra.core.ops import (
    All,
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
    PrepareMean,
    Recv,
    Send,
    Sleep,
    Traffic,
)
from orchestra.core.vectors import ranges, share_of_mean, weighted_mean
from orchestra.errors import ClusterError
from orchestra.worlds.computing import compute
from orchestra.worlds.sockets.messenger import Messenger

if TYPE_CHECKING:
    from orchestra.worlds.torch_collectives import TorchCollectives

T = TypeVar("T")


class SocketTransport:
    """Carries out one node's ops."""

    def __init__(self, rank: int, size: int, messenger: Messenger, traffic: Traffic) -> None:
        self.rank, self.size, self.traffic = rank, size, traffic
        self.messenger = messenger
        self.means: TorchCollectives | None = None  # takes the means, if torch does; every worker then updates all of x
        self.began = time.perf_counter()
        self._rules: dict[type[Any], Callable[[Any], Handle[Any]]] = {
            Compute: lambda op: compute(op, messenger.sleep),
            PrepareMean: self._ahead,
            Mean: self._mean,
            MeanUpdate: self._mean_update,
            Broadcast: self._broadcast,
            Gather: self._gather,
            Send: messenger.send,
            Recv: messenger.recv,
            Sleep: lambda op: Done(messenger.sleep(op)),
            Leave: messenger.leave,
        }

    def begin(self) -> None:
        """Start the clock of training, and count traffic from now on."""
        self.began = time.perf_counter()
        self.traffic.sent, self.traffic.received, self.traffic.waited = 0, 0, 0.0
        self.traffic.sent_to.clear()
        self.messenger.begin()

    def now(self) -> float:
        """Return the seconds since training began."""
        return time.perf_counter() - self.began

    def start(self, op: Op[T]) -> Handle[T]:
        """Carry out an op; all but sends of lent vectors are finished when this returns."""
        return cast("Handle[T]", self._rules[type(op)](op))

    # Collectives.

    def _ahead(self, op: PrepareMean) -> Handle[Callable[[slice], None] | None]:
        means = self._means_of(op.group)
        return Done(None if means is None else means.ahead(op.g, op.weight, op.most))

    def _means_of(self, group: Group) -> TorchCollectives | None:
        return self.means if self.means is not None and 1 < len(group) == self.means.workers else None

    def _mean(self, op: Mean) -> Handle[float]:
        if (means := self._means_of(op.group)) is not None:
            self._count(op.x, op.group)
            with self.messenger.waiting():
                return Done(means.mean_(op.x, op.weight))
        x = op.x if op.x.device.type == "cpu" and op.x.is_contiguous() else op.x.detach().cpu().contiguous()
        mine = ranges(x.numel(), len(op.group))[op.group.index(self.rank)]
        mean = torch.empty_like(x[mine])
        total = self._reduce(x, op.group, op.weight, mean)
        if total:
            x[mine] = mean
            self._share(x, mean, op.group)
            if x is not op.x:
                op.x.copy_(x)
        return Done(total)

    def _mean_update(self, op: MeanUpdate) -> Handle[None]:
        if len(op.group) == 1:
            if op.weight:
                op.apply(op.g)
            return Done(None)
        if self.means is not None:
            return self._update_whole(op)
        g, x = op.g.detach().cpu(), op.x.detach().cpu()
        mine = ranges(g.numel(), len(op.group))[op.group.index(self.rank)]
        mean = torch.empty_like(g[mine])
        if self._reduce(g, op.group, op.weight, mean):
            op.apply(mean.to(op.x.device))
            updated = op.x[mine].detach().cpu()
            self._share(x, updated, op.group)
            if x.data_ptr() != op.x.data_ptr():
                x[mine] = updated
                op.x.copy_(x)
        return Done(None)

    def _update_whole(self, op: MeanUpdate) -> Handle[None]:
        mean, means = op.g, self._means_of(op.group)
        if means is None:
            total = self._mean(Mean(op.g, op.group, op.weight)).wait()
        else:
            self._count(op.g, op.group)
            with self.messenger.waiting():
                mean, total = means.mean(op.g, op.weight)
        if total:
            op.apply(mean)
        return Done(None)

    def _reduce(self, x: Tensor, group: Group, weight: float, mean: Tensor) -> float:
        """Take the mean of this node's range; return the sum of the weights. If that is 0, nothing is written."""
        parts = ranges(x.numel(), len(group))
        given = [
            self.messenger.send_piece(member, x[part], weight)
            for member, part in zip(group.members, parts, strict=True)
            if member != self.rank
        ]
        vectors, weights = [], []
        for member, part in zip(group.members, parts, strict=True):
            piece = None if member == self.rank else self._take(member, mean)
            vectors.append(x[part] if piece is None else piece.x)
            weights.append(weight if piece is None else piece.weight)
        All(given).wait()
        if any(weights):
            weighted_mean(mean, vectors, weights)
        self._count(x, group)
        return sum(weights)

    def _share(self, x: Tensor, mine: Tensor, group: Group) -> None:
        """Send this node's range to all others, and fill the rest of x with theirs."""
        others = [member for member in group.members if member != self.rank]
        given = [self.messenger.send_piece(member, mine, 1.0) for member in others]
        for member, part in zip(group.members, ranges(x.numel(), len(group)), strict=True):
            if member != self.rank:
                x[part] = self._take(member, x[part]).x
        All(given).wait()

    def _take(self, member: int, like: Tensor) -> Message:
        """Receive a part of a collective; raise if it is part of another one."""
        piece = self.messenger.receive_piece(member)
        if piece.x.dtype != like.dtype or piece.x.numel() != like.numel():
            raise ClusterError(
                f"node {member} called another collective than node {self.rank}: it sent {piece.x.numel():,} numbers "
                f"({piece.x.dtype}), not {like.numel():,} ({like.dtype}). All must make the same calls in turn."
            )
        return piece

    def _count(self, x: Tensor, group: Group) -> None:
        both = share_of_mean(x, len(group), group.index(self.rank)) if len(group) > 1 else 0
        self.traffic.sent += both
        self.traffic.received += both

    def _broadcast(self, op: Broadcast) -> Handle[None]:
        nbytes = op.x.numel() * op.x.element_size()
        others = [member for member in op.group.members if member != self.rank]
        if self.rank == op.root:
            x = op.x.detach().cpu().contiguous()
            All([self.messenger.send_piece(member, x, 1.0) for member in others]).wait()
            self.traffic.sent += len(others) * nbytes
        else:
            op.x.copy_(self.messenger.receive_piece(op.root).x)
            self.traffic.received += nbytes
        return Done(None)

    def _gather(self, op: Gather) -> Handle[list[Tensor]]:
        x = op.x.detach().cpu().contiguous()
        others = [member for member in op.group.members if member != self.rank]
        given = [self.messenger.send_piece(member, x, 1.0) for member in others]
        found = [
            op.x.clone() if m == self.rank else self.messenger.receive_piece(m).x.to(op.x.device)
            for m in op.group.members
        ]
        All(given).wait()
        nbytes = len(others) * x.numel() * x.element_size()
        self.traffic.sent += nbytes
        self.traffic.received += nbytes
        return Done(found)

    def proceed(self, step: int, *, lockstep: bool) -> bool:
        """Whether to begin `step`: always, since no node can ask to stop."""
        return True
