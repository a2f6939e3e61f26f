# SPDX-License-Identifier: Apache-2.0
"""Waiting for other nodes: asleep in the kernel, with a deadline, and a description of what is awaited."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from orchestra.core.ops import Traffic
from orchestra.errors import Stalled
from orchestra.runs.status import name_of
from orchestra.worlds.shared_memory.futex import FutexWords
from orchestra.worlds.shared_memory.layout import ABORT, NOT_WAITING, STALLED, WAITING

_SLICE = 0.2  # seconds between two checks of the deadline and of whether the run is aborted


class Aborted(BaseException):
    """Raised when the run is aborted; it unwinds a node silently, since another one has reported the reason."""


class Waiter:
    """The waiting of one node."""

    def __init__(
        self, words: FutexWords, rank: int, workers: int, patience: float, traffic: Traffic, *, waits: int
    ) -> None:
        self._words = words
        self._rank = rank
        self._workers = workers
        self.patience = patience  # seconds; infinite once the coordinator watches for processes that hang
        self._waits = waits  # the word that shows whether this node waits
        self._traffic = traffic

    def wait(self, word: int, ready: Callable[[], bool], what: Callable[[], str], *, forever: bool = False) -> None:
        """Sleep on a word until `ready()`; raise after `patience` seconds unless `forever`."""
        words = self._words
        began = time.perf_counter()
        while True:
            seen = words[word]
            if ready():
                break
            if words[ABORT]:
                raise Aborted
            waited = time.perf_counter() - began
            if not forever and (waited > self.patience or words[STALLED]):
                raise Stalled(
                    f"{self.names([self._rank])} waited {min(waited, self.patience):.3g} s for {what()}. If a step may "
                    "take longer, give Local(patience=...) more seconds."
                )
            with self.doing(WAITING):
                words.wait(word, seen, _SLICE)
        self._traffic.waited += time.perf_counter() - began

    @contextmanager
    def doing(self, what: int) -> Iterator[None]:
        """Show the coordinator that this node waits or sleeps, and so does not hang."""
        self._words.set(self._waits, what)
        try:
            yield
        finally:
            self._words.set(self._waits, NOT_WAITING)

    def names(self, nodes: Sequence[int]) -> str:
        """Return the names of some nodes for messages."""
        return ", ".join(name_of(node, self._workers) for node in nodes) or "no node"
