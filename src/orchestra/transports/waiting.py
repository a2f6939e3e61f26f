# SPDX-License-Identifier: Apache-2.0
"""How a node waits for others: asleep in the kernel, with a deadline, knowing for whom."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from orchestra.board import name_of
from orchestra.errors import Stalled
from orchestra.ops import Traffic
from orchestra.transports.futex import Words
from orchestra.transports.memory import ABORT

_SLICE = 0.2  # seconds between two looks at the deadline and at whether the run is being given up


class Aborted(BaseException):
    """The run is being given up; unwinds a node without a word, since another one has already said why."""


class Waiter:
    """One node's patience."""

    def __init__(self, words: Words, rank: int, workers: int, patience: float, traffic: Traffic) -> None:
        self._words = words
        self._rank = rank
        self._workers = workers
        self._patience = patience  # seconds
        self._traffic = traffic

    def wait(self, word: int, ready: Callable[[], bool], whom: Callable[[], str], *, forever: bool = False) -> None:
        """Sleep on a word until `ready()`, at most as long as this node is patient unless told `forever`."""
        words = self._words
        began = time.perf_counter()
        while True:
            seen = words[word]
            if ready():
                break
            if words[ABORT]:
                raise Aborted
            if not forever and time.perf_counter() - began > self._patience:
                raise Stalled(
                    f"{self.names([self._rank])} waited {self._patience:g} s for {whom()}. If a step may take longer, "
                    "give Local(patience=...) more seconds."
                )
            words.wait(word, seen, _SLICE)
        self._traffic.waited += time.perf_counter() - began

    def names(self, nodes: Sequence[int]) -> str:
        """How people are told of some nodes."""
        return ", ".join(name_of(node, self._workers) for node in nodes) or "nobody"
