# SPDX-License-Identifier: Apache-2.0
"""Nodes of one machine see when the others work, and for how long at most: a hang is judged by that."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from tests.transports.test_reconnect import machines

from orchestra.errors import Stalled
from orchestra.worlds.sockets import messenger, neighbours
from orchestra.worlds.sockets.shm_ring import activity_of


def test_work_counts_from_the_beginning_of_the_run_and_waits_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=time.monotonic)
    clock.perf_counter = lambda: clock.now

    def longest(work: float, wait: float) -> float:
        clock.now += work
        with a.waiting():
            clock.now += wait
            return activity_of(peer.ring_in).longest

    with machines(monkeypatch, remote=False) as (a, b), monkeypatch.context() as patch:
        patch.setattr(neighbours, "time", clock)
        (peer,) = b._peers.values()
        assert [longest(60, 1), longest(60, 1)] == [0, 0]  # it loads its data
        a.begin()
        assert [longest(2, 100), longest(1, 0), longest(3, 5)] == [2, 2, 3]


def test_patience_counts_since_another_process_last_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 works for 60 s, then waits as well: what it has sent may not be here yet."""
    clock = SimpleNamespace(now=0.0, monotonic=time.monotonic)
    clock.perf_counter = lambda: clock.now

    with machines(monkeypatch, remote=False) as (a, b), monkeypatch.context() as patch:
        patch.setattr(messenger, "time", clock)
        b._connections.patience = 2.0
        clock.now = 60.0
        b._keep_waiting(0.0, lambda: "a mean")
        with a.waiting():
            clock.now = 61.9
            b._keep_waiting(0.0, lambda: "a mean")
            clock.now = 62.1
            with pytest.raises(Stalled, match="waited 2 s for a mean"):
                b._keep_waiting(0.0, lambda: "a mean")
