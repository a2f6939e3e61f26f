# SPDX-License-Identifier: Apache-2.0
"""Connections break and are replaced: no message is lost or delivered twice, and a lost node is named soon."""

from __future__ import annotations

import itertools
import os
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.transports.recorder import Recorder
from tests.transports.test_messenger import SECRET, at_once, both_ways, meet, recv

from orchestra.core.ops import Group, Send, Traffic
from orchestra.errors import WorkerLost
from orchestra.worlds.sockets import connections, pairing, reconnect
from orchestra.worlds.sockets.auth import Token
from orchestra.worlds.sockets.messenger import Messenger
from orchestra.worlds.sockets.reconnect import NewConnection

BOTH = Group((0, 1))


@contextmanager
def machines(
    monkeypatch: pytest.MonkeyPatch, *, remote: bool, trusted: bool = False, grace: float = 3.0, **given: Any
) -> Iterator[Any]:
    """Two nodes, on one machine or as if on two."""
    if remote:
        names = itertools.count()
        monkeypatch.setattr(pairing, "machine", lambda: f"machine {next(names)}")
    token, sockets = Token(SECRET, trusted=trusted), meet(2, trusted=trusted)
    with ThreadPoolExecutor(2) as pool:
        both = pool.map(
            lambda rank: pairing.arrange(rank, sockets[rank], token, longest=1 << 20, grace=grace, patience=10),
            range(2),
        )
    made = [
        Messenger(
            rank, 2, token.run(), sockets[rank], pairing=pairing,
            **{"largest": 1 << 24, "patience": 20.0, "traffic": Traffic(), "summed": trusted, **given},
        )
        for rank, pairing in enumerate(both)
    ]  # fmt: skip
    yield made
    for node in made:
        node.close(within=0.05)


def cut(node: Messenger) -> None:
    """Break the connection, as a firewall that forgets it does."""
    (peer,) = node._peers.values()
    if peer.broken_at is None:
        with socket.socket(fileno=os.dup(peer.sock.fileno())) as line:  # below the encryption
            line.shutdown(socket.SHUT_RDWR)


@both_ways
@pytest.mark.parametrize("numel", [3, 100_000])
def test_no_message_is_lost_or_delivered_twice(trusted: bool, numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks again and again while messages go both ways: each arrives once, in order, complete."""
    with machines(monkeypatch, remote=True, trusted=trusted) as (a, b):

        def speak(node: Messenger, other: int) -> list[tuple[int, float]]:
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


def test_one_sided_traffic_is_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    with machines(monkeypatch, remote=True) as (a, b):

        def send() -> int:
            most = 0
            for _ in range(50):
                a.send(Send(1, torch.zeros(100_000)))
                most = max(most, len(a._peers[1].unacknowledged))
            return most

        most, _ = at_once(send, lambda: [recv(b, 0, BOTH) for _ in range(50)])
        assert most <= connections.AHEAD + 25  # in the kernels' buffers, and received ahead of time
        at_once(lambda: a._wait(lambda: not a._peers[1].unacknowledged, lambda: "b to have all", []), lambda: b.poll())


def test_a_busy_node_is_waited_for_and_an_ended_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_SILENT", 0.3)
    with machines(monkeypatch, remote=True) as (a, b):

        def compute() -> None:
            cut(b)
            time.sleep(4.0)  # longer than grace: it still listens, so it has not ended
            b.send(Send(0, torch.ones(3)))

        came, _ = at_once(lambda: recv(a, 1, BOTH), compute)
        assert float(came.x.sum()) == 3.0
        b._connections._reconnector.listening.close()  # as when its process ends
        cut(b)
        with pytest.raises(WorkerLost, match=r"^worker 1 died: its connection to worker 0 broke"):  # not unreachable
            recv(a, 1, BOTH)


def test_unauthenticated_connections_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    with machines(monkeypatch, remote=True) as (a, b):
        address = a._connections._reconnector.listening.getsockname()
        others = [socket.create_connection(address) for _ in range(40)]
        for sock in others[::2]:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        _, came = at_once(lambda: a.send(Send(1, torch.ones(3))).wait(), lambda: recv(b, 0, BOTH))
        assert float(came.x.sum()) == 3.0
        cut(a)
        came, _ = at_once(lambda: recv(a, 1, BOTH), lambda: [b.send(Send(0, torch.ones(4))).wait(), b.poll()])
        assert float(came.x.sum()) == 4.0
        for sock in others:
            sock.close()


def test_nodes_of_one_machine_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with machines(monkeypatch, remote=False) as (a, b):
        assert a._connections._reconnector is None  # nothing that breaks
        ring_out = a._peers[1].ring_out
        assert ring_out is not None
        laid: list[int | None] = []
        put = ring_out.put

        def watched(number: int, body: memoryview) -> int | None:
            laid.append(put(number, body))
            return laid[-1]

        monkeypatch.setattr(ring_out, "put", watched)

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


def test_a_place_outside_of_the_ring_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with machines(monkeypatch, remote=False) as (a, b):
        monkeypatch.setattr(a._peers[1].ring_out, "put", lambda number, body: 1 << 40)
        a.send(Send(1, torch.zeros(10_000)))
        with pytest.raises(WorkerLost, match="lies outside of the shared memory"):
            recv(b, 0, BOTH)


def test_unread_control_messages_survive_a_broken_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that arrived before the connection broke are read to the end."""
    with machines(monkeypatch, remote=True) as (a, b):
        heard: list[int] = []
        a.listen(Recorder(lambda said: heard.append(said["i"])))
        for i in range(2000):
            b.send_control(0, {"kind": "word", "i": i})
        b._flush(b._peers[0])
        cut(b)
        time.sleep(0.2)
        a.send_control(1, {"kind": "word"})
        done = threading.Event()

        def wait() -> None:
            a._wait(lambda: len(heard) == 2000, lambda: "all", [])
            done.set()

        at_once(wait, lambda: b._wait(done.is_set, lambda: "it", []))
        assert heard == list(range(2000))


# Messages to the user.


def test_warnings_say_when_a_connection_is_lost_and_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connections, "_WARN_AFTER", 0.0)
    with machines(monkeypatch, remote=True) as (a, b):
        cut(b)
        while not a._peers[1].reported:
            a._connections.pump(0.05)
        at_once(lambda: recv(a, 1, BOTH), lambda: [b.send(Send(0, torch.ones(4))).wait(), b.poll()])
    told = [line for line in capfd.readouterr().err.splitlines() if " to worker 1 a" in line]
    assert len(told) == 2
    assert re.search(
        r"lost the connection to worker 1 at \d\d:\d\d:\d\d: its .* broke: .* Reconnecting, .*for 3 s\.$", told[0]
    )
    assert re.search(r"reconnected to worker 1 after \d+\.\d s: its connection to worker 0 broke", told[1])


def test_a_quick_reconnection_prints_no_warning(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connections, "_WARN_AFTER", 1e9)
    with machines(monkeypatch, remote=True) as (a, b):
        cut(b)
        at_once(lambda: recv(a, 1, BOTH), lambda: [b.send(Send(0, torch.ones(4))).wait(), b.poll()])
    assert "lost the connection" not in capfd.readouterr().err


def test_a_machine_that_does_not_answer_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost_on_the_way(*_: Any, **__: Any) -> Any:
        raise TimeoutError("timed out")

    monkeypatch.setattr(reconnect, "connect", lost_on_the_way)
    with machines(monkeypatch, remote=True, grace=0.3) as (a, b):
        cut(b)
        with pytest.raises(
            WorkerLost,
            match=r"^worker 1 has been unreachable since \d\d:\d\d:\d\d: its .* for 0\.3 s: .*Attached\(grace=\.\.\.\)",
        ):
            recv(a, 1, BOTH)
        with pytest.raises(WorkerLost, match="unreachable since"):  # any further use raises, too
            a.send(Send(1, torch.ones(1)))


def test_a_machine_that_answers_has_the_patience_to_reconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    with machines(monkeypatch, remote=True) as (a, b):
        b._connections._reconnector._closed = True  # it does not connect, as if it were computing
        cut(b)
        a._connections.patience = 0.3
        while not a.lost:
            a._connections.pump(0.05)
        assert re.search(r"did not reconnect within 0\.3 s\. .*Attached\(patience=", str(a.lost[1]))


def test_a_process_that_ends_during_reconnection_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with machines(monkeypatch, remote=True) as (a, b):
        there = b._connections._reconnector
        there._closed = True  # it does not connect, as if it were computing
        cut(b)

        def die() -> None:
            assert select.select([there.listening], [], [], 60)[0]
            there.listening.accept()[0].close()  # of the other node, which sees whether this one still exists
            there.listening.close()

        with pytest.raises(WorkerLost, match=r"^worker 1 died: its connection to worker 0 broke"):  # not unreachable
            at_once(lambda: recv(a, 1, BOTH), die)


def test_a_new_connection_may_break_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with machines(monkeypatch, remote=True) as (a, b):
        ours, theirs = socket.socketpair()
        theirs.close()
        a._connections._reconnector._new.put(NewConnection(1, ours, 0, None, 0))
        a.poll()
        assert not a.lost
        came, _ = at_once(lambda: recv(a, 1, BOTH), lambda: [b.send(Send(0, torch.ones(4))).wait(), b.poll()])
        assert float(came.x.sum()) == 4.0


def test_silent_connections_do_not_block_reconnection(monkeypatch: pytest.MonkeyPatch) -> None:
    with machines(monkeypatch, remote=True) as (a, b):
        address = b._connections._reconnector._addresses[0].address
        others = [socket.create_connection(address) for _ in range(60)]
        cut(a)
        began = time.monotonic()
        came, _ = at_once(lambda: recv(a, 1, BOTH), lambda: [b.send(Send(0, torch.ones(4))).wait(), b.poll()])
        assert float(came.x.sum()) == 4.0
        assert time.monotonic() - began < 10  # four times as many as are heard at once, each for 5 s
        for sock in others:
            sock.close()


def test_a_node_of_another_run_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token may be the same, but each pair of nodes has a secret of its own."""
    with machines(monkeypatch, remote=True) as (a, b):
        seeker = b._connections._reconnector
        seeker._addresses = {0: seeker._addresses[0]._replace(secret="of yesterday")}
        calling = socket.create_connection(seeker._addresses[0].address)
        _, called = at_once(
            lambda: [a._connections.pump(0.1) for _ in range(20)], lambda: seeker._introduce(0, calling, 0)
        )
        assert not called
        assert a._peers[1].broken_at is None
