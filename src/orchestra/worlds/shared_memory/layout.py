# SPDX-License-Identifier: Apache-2.0
"""The memory that all processes of a run map: one anonymous file, laid out by a plan.

    words      futex words: go, abort, stop, per node and per pair of nodes
    board      what each node last reported (step, loss, seconds by kind, bytes), for whoever watches
    headers    `UNDER_WAY` message headers per ordered pair of nodes
    start      the initial parameters
    x, g       every node's two flat vectors (one x for all where the replicas are always equal)
    scratch    for vectors that do not live here
    even, odd  every node's copy of a small vector to be averaged; they alternate
    mean       two alternating results of means
    slots      two alternating message bodies per ordered pair of nodes
    small      as many as headers, of bodies that are no longer than such a part of a vector

The file has no name, so nothing can be left behind in /dev/shm; its pages exist only once they are touched, so the
room for pairs that never talk costs nothing.
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
HEADER = 128  # bytes set aside for a message header: whole cache lines
SLACK = _PAGE  # a message may be a little longer than the model: a vector and its weight travel together
UNDER_WAY = 4  # messages from one node to another that have not been read

# Words that concern the whole run.
GO, ABORT, STOP_ASKED, STOP_AT, BARRIER, SAVE_WANTED, STALLED = range(7)

# What a node does, as far as it makes no step: nothing of the kind, wait for others, sleep because it is told to.
NOT_WAITING, WAITING, SLEEPING = range(3)

_GLOBAL_WORDS = 16


# What a node publishes for a collective: its weight, the place of its vector, its weight for even and odd small means.
WEIGHT, PLACE, EVEN, ODD = range(4)
FACTS = 4


@dataclass(frozen=True)
class ArenaLayout:
    """Where everything lies. A pure function of the run's shape, so every process computes the same."""

    workers: int
    servers: int
    numel: int
    dtype: torch.dtype
    shared_x: bool

    @property
    def nodes(self) -> int:
        """Workers and servers."""
        return self.workers + self.servers

    @property
    def vector(self) -> int:
        """Bytes set aside for one flat vector."""
        return _round(self.numel * self.dtype.itemsize + SLACK)

    def word(self, kind: str, node: int, other: int = 0) -> int:
        """Index of a word per node (`arrived`, `bell`, `begun`, `saved`, `waits`) or pair (`posted`, `released`)."""
        kinds = ("arrived", "bell", "begun", "saved", "waits")
        if kind in kinds:
            return _GLOBAL_WORDS + kinds.index(kind) * self.nodes + node
        pairs = _GLOBAL_WORDS + len(kinds) * self.nodes
        return pairs + ("posted", "released").index(kind) * self.nodes**2 + node * self.nodes + other

    @property
    def words(self) -> int:
        """How many futex words there are."""
        return self.word("released", self.nodes - 1, self.nodes - 1) + 1

    @property
    def board(self) -> int:
        """Offset of the board."""
        return _round(4 * self.words)

    @property
    def facts(self) -> int:
        """Offset of the clock, and then of what nodes publish for a collective: a row each of `FACTS`."""
        return self.board + _round(self.nodes * 8 * len(NodeStatus._fields))

    def header(self, source: int, to: int, number: int) -> int:
        """Offset of a message header."""
        pair = source * self.nodes + to
        return self.facts + _round((self.nodes + 1) * 8 * FACTS) + (UNDER_WAY * pair + number % UNDER_WAY) * HEADER

    @property
    def start(self) -> int:
        """Offset of the initial parameters."""
        return _round(self.header(self.nodes - 1, self.nodes - 1, UNDER_WAY - 1) + HEADER)

    def place(self, kind: str, node: int) -> int:
        """Offset of a node's `x`, `g`, `scratch`, `even` or `odd`, or of the `mean` of parity `node`."""
        kinds = ("x", "g", "scratch", "even", "odd")
        base = self.start + self.vector
        if kind == "mean":
            return base + (len(kinds) * self.nodes + node) * self.vector
        if kind == "x" and self.shared_x:
            node = 0
        return base + (kinds.index(kind) * self.nodes + node) * self.vector

    def slot(self, source: int, to: int, parity: int) -> int:
        """Offset of a long message body."""
        return self.place("mean", 2) + (2 * (source * self.nodes + to) + parity) * self.vector

    @property
    def small(self) -> int:
        """Bytes of a body that counts as small."""
        return self.vector // UNDER_WAY

    def small_slot(self, source: int, to: int, number: int) -> int:
        """Offset of a small message body."""
        pair = source * self.nodes + to
        return self.slot(self.nodes, 0, 0) + pair * self.vector + number % UNDER_WAY * self.small

    @property
    def nbytes(self) -> int:
        """Length of the whole file; most of it is never touched."""
        return self.small_slot(self.nodes, 0, 0)


def _round(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def create(plan: ArenaLayout) -> int:
    """Make the anonymous file and give its descriptor."""
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
        """A flat tensor at an offset."""
        return self.bytes[offset : offset + numel * dtype.itemsize].view(dtype)

    def vector(self, kind: str, node: int, numel: int | None = None) -> Tensor:
        """A node's x, g or scratch, as the model's dtype."""
        return self.tensor(self.plan.place(kind, node), self.plan.numel if numel is None else numel, self.plan.dtype)

    def require_room(self, x: Tensor) -> None:
        """Refuse what does not fit the room for one vector."""
        nbytes = x.numel() * x.element_size()
        if nbytes > self.plan.vector:
            raise ValueError(
                f"a vector of {nbytes} bytes is larger than the model with its margin ({self.plan.vector} bytes). "
                "Send it in pieces."
            )

    def pin(self, node: int) -> None:
        """Let the GPU copy straight from and to what this node uses; needs a CUDA context.

        Only what the node will surely touch: pinned pages exist, whether used or not.
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
        """Where a tensor lies in the arena, or None if it lies elsewhere or is not contiguous."""
        offset = x.data_ptr() - self.base
        inside = 0 <= offset < self._nbytes and x.is_contiguous() and x.device.type == "cpu"
        return offset if inside else None

    def forget_start(self) -> None:
        """Give back the memory of the initial parameters: every node has its own by now."""
        self.memory.madvise(mmap.MADV_REMOVE, self.plan.start, self.plan.vector)

    def report(self, node: int, row: NodeStatus) -> None:
        """Put a node's row on the board."""
        at = node * len(row)
        for i, value in enumerate(row):
            self._board[at + i] = value

    def reported(self, node: int) -> NodeStatus:
        """Read a node's row from the board."""
        width = len(NodeStatus._fields)
        return NodeStatus(*self._board[node * width : (node + 1) * width])
