# SPDX-License-Identifier: Apache-2.0
"""The memory that all processes of a run map: one anonymous file with a computed layout.

    words      futex words: go, abort, stop, per node and per pair of nodes
    board      the latest report of each node (step, loss, seconds by kind, bytes), for display
    headers    `UNDER_WAY` message headers per ordered pair of nodes
    start      the initial parameters
    x, g       every node's two flat vectors (one x for all if the replicas are always equal)
    scratch    copies of vectors that are not in this memory
    even, odd  every node's copy of a small vector to be averaged; they alternate
    mean       two alternating results of means
    slots      two alternating message bodies per ordered pair of nodes
    small      as many small message bodies as headers, each with that fraction of a vector's bytes

The file has no name, so nothing can be left behind in /dev/shm; its pages exist only once they are touched, so the room
for pairs that never exchange messages costs nothing.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orchestra.errors import EnvironmentProblem
from orchestra.runs.status import NodeStatus
from orchestra.worlds.shared_memory.futex import FutexWords

_PAGE = 4096
HEADER = 128  # bytes reserved for a message header: whole cache lines
SLACK = _PAGE  # margin of a message over the model's length
UNDER_WAY = 4  # maximum of unread messages from one node to another

# Words that concern the whole run.
GO, ABORT, STOP_ASKED, STOP_AT, BARRIER, SAVE_WANTED, STALLED = range(7)

# Activities of a node that makes no step: computing, waiting for others, sleeping on purpose.
NOT_WAITING, WAITING, SLEEPING = range(3)

_GLOBAL_WORDS = 16


# The facts of a node for a collective: its weight, the offset of its vector, its weight for even and odd small means.
WEIGHT, PLACE, EVEN, ODD = range(4)
FACTS = 4


@dataclass(frozen=True)
class ArenaLayout:
    """The offsets of everything: a pure function of the run's size, so that every process computes the same."""

    workers: int
    servers: int
    numel: int
    dtype: torch.dtype
    shared_x: bool

    @property
    def nodes(self) -> int:
        """The number of workers and servers."""
        return self.workers + self.servers

    @property
    def vector(self) -> int:
        """The bytes reserved for one flat vector."""
        return _round(self.numel * self.dtype.itemsize + SLACK)

    def word(self, kind: str, node: int, other: int = 0) -> int:
        """Return the index of a node's word (arrived, bell, begun, saved, waits) or a pair's (posted, released)."""
        kinds = ("arrived", "bell", "begun", "saved", "waits")
        if kind in kinds:
            return _GLOBAL_WORDS + kinds.index(kind) * self.nodes + node
        pairs = _GLOBAL_WORDS + len(kinds) * self.nodes
        return pairs + ("posted", "released").index(kind) * self.nodes**2 + node * self.nodes + other

    @property
    def words(self) -> int:
        """The number of futex words."""
        return self.word("released", self.nodes - 1, self.nodes - 1) + 1

    @property
    def board(self) -> int:
        """Offset of the board."""
        return _round(4 * self.words)

    @property
    def facts(self) -> int:
        """Offset of the clock, followed by the facts of each node for a collective: a row each of `FACTS`."""
        return self.board + _round(self.nodes * 8 * len(NodeStatus._fields))

    def header(self, source: int, to: int, number: int) -> int:
        """Return the offset of a message header."""
        pair = source * self.nodes + to
        return self.facts + _round((self.nodes + 1) * 8 * FACTS) + (UNDER_WAY * pair + number % UNDER_WAY) * HEADER

    @property
    def start(self) -> int:
        """Offset of the initial parameters."""
        return _round(self.header(self.nodes - 1, self.nodes - 1, UNDER_WAY - 1) + HEADER)

    def place(self, kind: str, node: int) -> int:
        """Return the offset of a node's `x`, `g`, `scratch`, `even` or `odd`, or of the `mean` of parity `node`."""
        kinds = ("x", "g", "scratch", "even", "odd")
        base = self.start + self.vector
        if kind == "mean":
            return base + (len(kinds) * self.nodes + node) * self.vector
        if kind == "x" and self.shared_x:
            node = 0
        return base + (kinds.index(kind) * self.nodes + node) * self.vector

    def slot(self, source: int, to: int, parity: int) -> int:
        """Return the offset of a long message body."""
        return self.place("mean", 2) + (2 * (source * self.nodes + to) + parity) * self.vector

    @property
    def small(self) -> int:
        """The maximum length of a small body in bytes."""
        return self.vector // UNDER_WAY

    def small_slot(self, source: int, to: int, number: int) -> int:
        """Return the offset of a small message body."""
        pair = source * self.nodes + to
        return self.slot(self.nodes, 0, 0) + pair * self.vector + number % UNDER_WAY * self.small

    @property
    def nbytes(self) -> int:
        """The length of the whole file, most of which is never touched."""
        return self.small_slot(self.nodes, 0, 0)


def _round(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def create(plan: ArenaLayout) -> int:
    """Create the anonymous file and return its descriptor."""
    fd = os.memfd_create("orchestra")
    os.ftruncate(fd, plan.nbytes)
    return fd


class Arena:
    """The mapped file."""

    def __init__(self, fd: int, plan: ArenaLayout) -> None:
        self.plan = plan
        self._nbytes = plan.nbytes
        self.memory = mmap.mmap(fd, self._nbytes)
        self.words = FutexWords(self.memory, plan.words)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.base = self.bytes.data_ptr()
        rows = plan.nodes * len(NodeStatus._fields)
        self._board = memoryview(self.memory)[plan.board : plan.board + 8 * rows].cast("d")
        self.clock = memoryview(self.memory)[plan.facts : plan.facts + 8].cast("d")  # when training began
        facts = memoryview(self.memory)[plan.facts + 8 * FACTS : plan.facts + 8 * FACTS * (plan.nodes + 1)]
        self.numbers = facts.cast("d")
        self.places = facts.cast("Q")

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a flat tensor at an offset."""
        return self.bytes[offset : offset + numel * dtype.itemsize].view(dtype)

    def vector(self, kind: str, node: int, numel: int | None = None) -> Tensor:
        """Return a node's x, g or scratch, with the model's dtype."""
        return self.tensor(self.plan.place(kind, node), self.plan.numel if numel is None else numel, self.plan.dtype)

    def require_room(self, x: Tensor) -> None:
        """Raise if a tensor does not fit into the memory for one vector."""
        nbytes = x.numel() * x.element_size()
        if nbytes > self.plan.vector:
            raise ValueError(
                f"a vector of {nbytes} bytes is larger than the model with its margin ({self.plan.vector} bytes). "
                "Send it in pieces."
            )

    def pin(self, node: int) -> None:
        """Pin the memory that this node uses, for direct copies by the GPU; needs a CUDA context.

        Only memory that the node will certainly use is pinned, since pinned pages are allocated.
        """
        plan = self.plan
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        places = [plan.place("scratch", node), plan.place("mean", 0), plan.place("mean", 1)]
        for other in range(plan.workers, plan.nodes):
            places += [plan.slot(a, b, parity) for a, b in ((node, other), (other, node)) for parity in (0, 1)]
        for place in places:
            code = int(cudart.cudaHostRegister(self.base + place, plan.vector, 0))
            if code:
                raise EnvironmentProblem(f"CUDA could not pin {plan.vector} bytes of shared memory (error {code}).")

    def offset(self, x: Tensor) -> int | None:
        """Return the offset of a tensor in the arena, or None if it lies elsewhere or is not contiguous."""
        offset = x.data_ptr() - self.base
        inside = 0 <= offset < self._nbytes and x.is_contiguous() and x.device.type == "cpu"
        return offset if inside else None

    def forget_start(self) -> None:
        """Free the memory of the initial parameters, once every node has its copy."""
        self.memory.madvise(mmap.MADV_REMOVE, self.plan.start, self.plan.vector)

    def report(self, node: int, row: NodeStatus) -> None:
        """Write a node's row to the board."""
        at = node * len(row)
        for i, value in enumerate(row):
            self._board[at + i] = value

    def reported(self, node: int) -> NodeStatus:
        """Read a node's row from the board."""
        width = len(NodeStatus._fields)
        return NodeStatus(*self._board[node * width : (node + 1) * width])
