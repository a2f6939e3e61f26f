# SPDX-License-Identifier: Apache-2.0
"""Connections break and are made anew: nothing is lost, nothing comes twice, and who is gone is named soon."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.transports.test_exchange import SECRET, at_once, both_ways, meet, recv

from orchestra.errors import WorkerLost
from orchestra.ops import Group, Send, Traffic
from orchestra.transports import lines, neighbours
from orchestra.transports.exchange import Exchange
from orchestra.transports.token import Token

BOTH = Group((0, 1))


@contextmanager
def machines(monkeypatch: pytest.MonkeyPatch, *, apart: bool, trusted: bool = False, **given: Any) -> Iterator[Any]:
    """Two nodes, on one machine or as if on two."""
    if apart:
        names = itertools.count()
        monkeypatch.setattr(neighbours, "machine", lambda: f"machine {next(names)}")
    token, sockets = Token(SECRET, trusted=trusted), meet(2, trusted=trusted)
    with ThreadPoolExecutor(2) as pool:
        both = pool.map(
            lambda rank: neighbours.arrange(rank, sockets[rank], token, longest=1 << 20, grace=3.0), range(2)
        )
    made = [
        Exchange(
            rank, 2, token.run(), sockets[rank], arranged=arranged,
            **{"largest": 1 << 24, "patience": 20.0, "traffic": Traffic(), "summed": trusted, **given},
        )
        for rank, arranged in enumerate(both)
    ]  # fmt: skip
    yield made
    for node in made:
        node.close(within=0.05)


def cut(node: Exchange) -> None:
    """Break the connection, as a firewall that forgets it would."""
    (peer,) = node._peers.values()
    if peer.parted is None:
        with socket.socket(fileno=os.dup(peer.sock.fileno())) as line:  # below the encryption
            line.shutdown(socket.SHUT_RDWR)


@both_ways
@pytest.mark.parametrize("numel", [3, 100_000])
def test_no_message_is_lost_or_comes_twice(trusted: bool, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut again and again while messages go both ways: each comes once, in order, whole."""
    with machines(monkeypatch, apart=True, trusted=trusted) as (a, b):

        def speak(node: Exchange, other: int) -> list[tuple[int, float]]:
            found = []
            for i in range(60):
                node.send(Send(other, torch.full((numel,), float(i)), version=i))
                if i % 13 == 5 + 4 * other:
                    cut(node)
                came = recv(node, other, BOTH)
                assert bool((came.x == came.x[0]).all())
                found.append((came.version, float(came.x[0])))
            return found

        wanted = [(i, float(i)) for i in range(60)]
        assert at_once(lambda: speak(a, 1), lambda: speak(b, 0)) == [wanted, wanted]
        assert not a.lost
        assert not b.lost


def test_what_only_one_of_them_sends_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    with machines(monkeypatch, apart=True) as (a, b):

        def send() -> int:
            most = 0
            for _ in range(50):
                a.send(Send(1, torch.zeros(100_000)))
                most = max(most, len(a._peers[1].unheard))
            return most

        most, _ = at_once(send, lambda: [recv(b, 0, BOTH) for _ in range(50)])
        assert (
            most <= lines.AHEAD + 25
        )  # what lies in the kernels' buffers, and what was taken in before it was asked for
        at_once(lambda: a._wait(lambda: not a._peers[1].unheard, lambda: "b to have all", []), lambda: b.poll())


def test_a_node_that_computes_is_waited_for_and_one_that_is_gone_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_SILENT", 0.3)
    with machines(monkeypatch, apart=True) as (a, b):

        def compute() -> None:
            cut(b)
            time.sleep(4.0)  # longer than grace: its door is open, so it is not gone
            b.send(Send(0, torch.ones(3)))

        came, _ = at_once(lambda: recv(a, 1, BOTH), compute)
        assert float(came.x.sum()) == 3.0
        b._lines._reunion.door.close()  # as when its process ends
        cut(b)
        began = time.monotonic()
        with pytest.raises(WorkerLost, match=r"worker 1.*connection to worker 0 broke"):
            recv(a, 1, BOTH)
        assert time.monotonic() - began < 1.5


def test_a_stranger_at_the_door_is_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    with machines(monkeypatch, apart=True) as (a, b):
        door = a._lines._reunion.door.getsockname()
        strangers = [socket.create_connection(door) for _ in range(40)]
        for stranger in strangers[::2]:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        _, came = at_once(lambda: a.send(Send(1, torch.ones(3))).wait(), lambda: recv(b, 0, BOTH))
        assert float(came.x.sum()) == 3.0
        cut(a)
        came, _ = at_once(lambda: recv(a, 1, BOTH), lambda: [b.send(Send(0, torch.ones(4))).wait(), b.poll()])
        assert float(came.x.sum()) == 4.0
        for stranger in strangers:
            stranger.close()


def test_nodes_of_one_machine_have_memory_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    with machines(monkeypatch, apart=False) as (a, b):
        assert a._lines._reunion is None  # nothing that breaks
        outlet = a._peers[1].outlet
        assert outlet is not None
        laid: list[int | None] = []
        put = outlet.put

        def watched(number: int, body: memoryview) -> int | None:
            laid.append(put(number, body))
            return laid[-1]

        monkeypatch.setattr(outlet, "put", watched)

        def send() -> None:
            for i in range(40):
                a.send(Send(1, torch.full((200_000,), float(i))))  # many rounds of the ring
                a.send(Send(1, torch.full((3,), float(i))))

        def take() -> list[float]:
            return [float(recv(b, 0, BOTH).x.mean()) for _ in range(80)]

        _, found = at_once(send, take)
        assert found == [float(i) for i in range(40) for _ in range(2)]
        assert sum(place is not None for place in laid) > 20
        assert {place for place in laid[1::2]} == {None}  # not worth it


def test_a_place_where_nothing_lies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with machines(monkeypatch, apart=False) as (a, b):
        monkeypatch.setattr(a._peers[1].outlet, "put", lambda number, body: 1 << 40)
        a.send(Send(1, torch.zeros(10_000)))
        with pytest.raises(WorkerLost, match="lies where nothing is"):
            recv(b, 0, BOTH)
