# SPDX-License-Identifier: Apache-2.0
"""Messages between machines: over real sockets, in any order, beside connections without the token."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestra.core.ops import Departed, Group, Leave, Message, Recv, Send, Sleep, Traffic
from orchestra.errors import ClusterError, ConfigError, Stalled, WorkerLost
from orchestra.worlds.sockets import auth as tokens
from orchestra.worlds.sockets.auth import Token
from orchestra.worlds.sockets.messenger import Messenger
from orchestra.worlds.sockets.rendezvous import Rendezvous

SECRET = "0123456789abcdef0123456789abcdef"
ABOUT = {"version": "1", "seed": 3, "strategy": "ps"}
both_ways = pytest.mark.parametrize("trusted", [False, True], ids=["encrypted", "trusted network"])


def meet(size: int, *, trusted: bool = False, abouts: list[dict[str, Any]] | None = None) -> list[Any]:
    """Return the connections of every node, or its error."""
    token = [Token(SECRET, trusted=trusted) for _ in range(size)]
    meetings = [Rendezvous(r, token[r], (abouts or [ABOUT] * size)[r]) for r in range(size)]
    addresses = [rendezvous.address for rendezvous in meetings]

    def join(rendezvous: Rendezvous) -> Any:
        try:
            return rendezvous.connect_all(addresses, patience=10)
        except ClusterError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, meetings))


@contextmanager
def nodes(size: int, *, workers: int | None = None, trusted: bool = False, **given: Any) -> Iterator[list[Messenger]]:
    made = [
        Messenger(
            rank, size if workers is None else workers, Token(SECRET).run(), connections,
            **{"largest": 1 << 26, "patience": 5.0, "traffic": Traffic(), "summed": trusted, **given},
        )
        for rank, connections in enumerate(meet(size, trusted=trusted))
    ]  # fmt: skip
    yield made
    for node in made:
        node.close(within=0.05)


def at_once(*bodies: Callable[[], Any]) -> list[Any]:
    """Run each node in a thread of its own; in a run, each has a process."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return [future.result(timeout=20) for future in [pool.submit(body) for body in bodies]]


def recv(node: Messenger, source: int | None, group: Group, **more: Any) -> Message:
    came = node.recv(Recv(source, group, **more)).wait()
    assert isinstance(came, Message)
    return came


# Messages.


@both_ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
@pytest.mark.parametrize("numel", [0, 1, 83, 300_001])
def test_what_is_sent_arrives(trusted: bool, dtype: torch.dtype, numel: int) -> None:
    with nodes(2, trusted=trusted) as (a, b):
        x = torch.arange(numel).to(dtype)
        both = Group((0, 1))
        sent = Send(1, x, version=-5, weight=0.25, tag=9, progress=2 / 3)
        _, came = at_once(lambda: a.send(sent).wait(), lambda: recv(b, 0, both))
        assert torch.equal(came.x, x)
        assert came.x.dtype == dtype
        assert (came.source, came.version, came.weight, came.tag, came.progress) == (0, -5, 0.25, 9, 2 / 3)
        assert a._traffic.sent == b._traffic.received == numel * x.element_size()


@both_ways
def test_two_nodes_that_send_much_at_once_both_make_progress(trusted: bool) -> None:
    """The data exceeds the kernels' buffers: a node that waits to send must read."""
    x = torch.randn(4_000_000)
    three = Group((0, 1, 2))
    with nodes(3, trusted=trusted, patience=15.0) as made:

        def body(node: Messenger, rank: int) -> float:
            others = [other for other in range(3) if other != rank]
            handles = [node.send(Send(other, x, version=rank, lend=True)) for other in others]
            total = sum(float(recv(node, other, three).x.sum()) for other in others)
            for handle in handles:
                handle.wait()
            return total

        found = at_once(*(lambda n=n, r=r: body(n, r) for r, n in enumerate(made)))
        assert found == [pytest.approx(2 * float(x.sum()))] * 3


def test_a_vector_may_change_as_soon_as_send_returns() -> None:
    with nodes(2) as (a, b):
        x = torch.ones(1_000_000)

        def sender() -> None:
            for i in range(5):
                x.fill_(i)
                a.send(Send(1, x)).wait()

        def receiver() -> list[float]:
            time.sleep(0.1)  # so that they pile up
            return [float(v) for _ in range(5) for v in {*recv(b, 0, Group((0,))).x.tolist()}]

        assert at_once(sender, receiver)[1] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_lent_vector_is_read_in_place_until_the_handle_says_so() -> None:
    with nodes(2, trusted=True) as (a, b):
        x = torch.zeros(3_000_000)
        handle = a.send(Send(1, x, lend=True))
        x[-1] = 7.0  # not sent yet, since the other node does not read
        with pytest.raises(WorkerLost, match="was damaged"):  # so it was read in place, and that was noticed
            at_once(handle.wait, lambda: recv(b, 0, Group((0,))))


def test_any_source_is_served_in_turn() -> None:
    with nodes(4, workers=3) as made:
        server, workers = made[3], Group((0, 1, 2))
        for i in range(6):
            for rank in range(3):
                made[rank].send(Send(3, torch.tensor([float(i)]), version=i))
        order = [recv(server, None, workers).source for _ in range(18)]
        assert sorted(order) == sorted([0, 1, 2] * 6)
        assert all(len(set(order[i : i + 3])) == 3 for i in range(0, 18, 3))


def test_farewells_end_a_receive() -> None:
    with nodes(3, workers=2) as made:
        server, workers = made[2], Group((0, 1))
        made[0].send(Send(2, torch.ones(3)))
        made[0].leave(Leave(Group((2,))))
        made[1].leave(Leave(Group((2,))))
        came = [server.recv(Recv(None, workers, departures=True)).wait() for _ in range(4)]
        assert came[-1] is None
        assert sum(isinstance(c, Departed) for c in came) == 2
        assert sum(isinstance(c, Message) for c in came) == 1
        assert server.recv(Recv(0, workers)).wait() is None


def test_a_sender_far_ahead_waits() -> None:
    """Messages that the receiver has not asked for do not fill its memory."""
    with nodes(3, patience=1.0) as (a, b, _):
        x, sent = torch.zeros(1_000_000), 0

        def send_all() -> None:
            nonlocal sent
            while sent < 60:
                a.send(Send(1, x)).wait()
                sent += 1

        def sender() -> None:
            with pytest.raises(Stalled, match="worker 1"):
                send_all()

        def receiver() -> None:
            with pytest.raises(Stalled, match="worker 2"):  # it reads what comes, and asks for another's
                recv(b, 2, Group((2,)))

        at_once(sender, receiver)
        assert sent < 30  # 4 MB each: what the buffers of the kernel hold, and some that are received ahead of time


def test_messages_that_pile_up_arrive_in_order() -> None:
    with nodes(2) as (a, b):
        x = torch.zeros(1_000_000)

        def sender() -> None:
            for i in range(60):
                a.send(Send(1, x, version=i)).wait()

        def receiver() -> list[int]:
            time.sleep(0.1)
            return [recv(b, 0, Group((0,))).version for _ in range(60)]

        assert at_once(sender, receiver)[1] == list(range(60))


@pytest.mark.timed
def test_a_message_ends_a_sleep() -> None:
    with nodes(2) as (a, b):
        assert b.sleep(Sleep(0.02, Group((0,))))
        a.send(Send(1, torch.ones(1)))
        began = time.perf_counter()
        assert not b.sleep(Sleep(5.0, Group((0,))))
        assert time.perf_counter() - began < 2


def test_a_stalled_receive_names_the_nodes_it_waited_for() -> None:
    with (
        nodes(3, workers=2, patience=0.3) as made,
        pytest.raises(Stalled, match=r"server 0 waited .* worker 0, worker 1"),
    ):
        made[2].recv(Recv(None, Group((0, 1))))


@pytest.mark.timed
def test_a_connection_that_breaks_is_noticed_at_once_and_named() -> None:
    with nodes(2) as (a, b):
        began = time.perf_counter()

        def die() -> None:
            time.sleep(0.1)
            a._peers[1].sock.shutdown(socket.SHUT_RDWR)

        with pytest.raises(WorkerLost, match="worker 0 died: its connection to worker 1 broke"):
            at_once(die, lambda: b.recv(Recv(0, Group((0,)))))
        assert time.perf_counter() - began < 2


def test_bytes_of_another_protocol_end_the_connection() -> None:
    with nodes(2) as (a, b):
        a._peers[1].sock.setblocking(True)
        a._peers[1].sock.sendall(b"x" * 200)
        with pytest.raises(WorkerLost, match="no frame of this protocol"):
            b.recv(Recv(0, Group((0,))))


def test_what_is_too_long_is_refused_before_memory_is_taken() -> None:
    with nodes(2, largest=1000) as (a, b):
        a.send(Send(1, torch.zeros(251)))
        with pytest.raises(WorkerLost, match="announced 1,004 bytes; nothing longer than 1,000"):
            b.recv(Recv(0, Group((0,))))


# Authentication.


@both_ways
def test_processes_without_the_token_are_rejected_and_delay_no_node(trusted: bool) -> None:
    token = Token(SECRET, trusted=trusted)
    meetings = [Rendezvous(r, token, ABOUT) for r in range(2)]
    addresses = [m.address for m in meetings]
    stop, seen = threading.Event(), []

    def other_program(say: bytes, *, read: bool) -> None:
        while not stop.is_set():
            try:
                with socket.create_connection(addresses[0], timeout=1) as sock:
                    sock.sendall(say)
                    if read:
                        seen.append(sock.recv(4096))
            except OSError:
                pass
            time.sleep(0.01)

    def impostor() -> None:
        while not stop.is_set():
            other = Token(SECRET[::-1], trusted=trusted)
            try:
                sock = socket.create_connection(addresses[0], timeout=1)
                with sock, other.secure(sock, server=False) as secured:
                    secured.sendall(b"hello")
            except OSError:
                pass
            time.sleep(0.01)

    others = [
        threading.Thread(target=other_program, args=(b"GET / HTTP/1.0\r\n\r\n",), kwargs={"read": True}),
        threading.Thread(target=other_program, args=(os.urandom(300),), kwargs={"read": True}),
        threading.Thread(target=other_program, args=(b"",), kwargs={"read": False}),
        threading.Thread(target=impostor),
    ]
    idle = [socket.create_connection(addresses[0]) for _ in range(20)]  # silent for as long as they may be
    for thread in others:
        thread.start()
    time.sleep(0.2)
    try:
        joined = at_once(*(lambda m=m: m.connect_all(addresses, patience=10) for m in meetings))
    finally:
        stop.set()
        for thread in others:
            thread.join()
        for sock in idle:
            sock.close()
    assert [list(connections) for connections in joined] == [[1], [0]]
    for connections in joined:
        for sock in connections.values():
            sock.close()
    assert not any(SECRET.encode() in said for said in seen)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(addresses[0], timeout=1)  # the socket is closed


def test_the_first_difference_is_named() -> None:
    found = meet(2, abouts=[ABOUT, {**ABOUT, "seed": 4, "strategy": "other"}])
    assert all(isinstance(error, ClusterError) for error in found)
    assert "seed is 4 here and 3 there" in str(found[1])
    assert "Start all of them with the same command" in str(found[0])


def test_nodes_that_do_not_connect_are_named() -> None:
    rendezvous = Rendezvous(0, Token(SECRET), ABOUT)
    with pytest.raises(ClusterError, match="nodes 1, 2 did not connect"):
        rendezvous.connect_all([rendezvous.address] * 3, patience=0.2)


def test_two_processes_with_one_rank_are_refused() -> None:
    token = Token(SECRET)
    first, *others = [Rendezvous(r, token, ABOUT) for r in (0, 1, 1)]
    addresses = [first.address, others[0].address, others[1].address]

    def join(rendezvous: Rendezvous) -> Any:
        try:
            return rendezvous.connect_all(addresses, patience=10 if rendezvous is first else 3)
        except ClusterError as error:
            return str(error)

    said = at_once(*(lambda m=m: join(m) for m in (first, *others)))
    assert any("claim to be node 1" in str(each) for each in said)


def test_nothing_readable_passes_an_encrypted_connection() -> None:
    token, passed = Token(SECRET), bytearray()

    def pump(a: socket.socket, b: socket.socket) -> None:
        while data := a.recv(65536):
            passed.extend(data)
            b.sendall(data)
        b.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_server(("127.0.0.1", 0)) as middle:

        def relay() -> None:
            with middle.accept()[0] as inside, socket.create_connection(listening.getsockname()) as outside:
                at_once(lambda: pump(outside, inside), lambda: pump(inside, outside))

        def server() -> bytes:
            with token.secure(listening.accept()[0], server=True) as sock:
                return sock.recv(100)

        def client() -> str | None:
            with token.secure(socket.create_connection(middle.getsockname()), server=False) as sock:
                sock.sendall(b"the weights of the model")
                assert isinstance(sock, ssl.SSLSocket)
                return sock.version()

        heard, version, _ = at_once(server, client, relay)
    assert heard == b"the weights of the model"
    assert version == "TLSv1.3"
    assert b"weights" not in passed
    assert len(passed) > 500


# Tokens.


def test_a_token_is_read_only_from_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(tokens.new() + "\n")
    path.chmod(0o600)
    assert len(tokens.read(path)) == 64
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="can be read by others"):
        tokens.read(path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(ConfigError, match="holds 5 characters that are not a token of at least 128 random bits"):
        tokens.read(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        tokens.read(tmp_path / "none")


def test_keys_are_the_same_wherever_they_are_made_and_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert Token(SECRET)._identity() == Token(SECRET)._identity() != Token(SECRET + "0")._identity()
    assert Token(SECRET).run() != Token(SECRET + "0").run()
    Token(SECRET)._context(server=True)
    assert not list(tmp_path.iterdir())
