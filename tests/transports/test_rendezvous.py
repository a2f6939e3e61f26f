# SPDX-License-Identifier: Apache-2.0
"""How nodes connect to each other: beside many other connections, by names that resolve late, by either protocol."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from tests.processes import own_address
from tests.waiting import wait_until

from orchestra.errors import ClusterError
from orchestra.worlds.sockets import addresses, link_probe, rendezvous
from orchestra.worlds.sockets.addresses import EVERYWHERE, is_loopback, resolve, where_to_listen
from orchestra.worlds.sockets.auth import Token, Unauthenticated
from orchestra.worlds.sockets.rendezvous import Rendezvous

SECRET = "0123456789abcdef0123456789abcdef"
ABOUT = {"seed": 3}
both_ways = pytest.mark.parametrize("trusted", [False, True], ids=["encrypted", "trusted network"])


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Return what each call returns, or its error."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except ClusterError as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(outcome, calls))


def close_all(*found: Any) -> None:
    for connections in found:
        for sock in connections.values():
            sock.close()


def some(rank: int, *, trusted: bool = True, **given: Any) -> Rendezvous:
    return Rendezvous(rank, Token(SECRET, trusted=trusted), ABOUT, **given)


@contextmanager
def names(monkeypatch: pytest.MonkeyPatch, known: Callable[[], dict[str, str]]) -> Iterator[None]:
    """Let this machine resolve these names as well."""
    really = socket.getaddrinfo

    def look_up(host: Any, *args: Any, **given: Any) -> Any:
        if str(host).endswith(".test") and host not in known():
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return really(known().get(host, host), *args, **given)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", look_up)
        yield


# Many connections.


@pytest.mark.timed
@both_ways
def test_silent_connections_do_not_block_nodes(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more of them than the node keeps, and all connect before its peers."""
    monkeypatch.setattr(rendezvous, "_HANDSHAKE", 20.0)  # they would time out later than this test ends
    monkeypatch.setattr(rendezvous, "_UNAUTHENTICATED", 8)
    node0, other = some(0, trusted=trusted), some(1, trusted=trusted, host=None)
    with ExitStack() as silent, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(node0.host_all, 2, patience=10)
        for _ in range(30):
            silent.enter_context(socket.create_connection(node0.address))
        began = time.monotonic()
        joined = other.join(node0.address, patience=10)
        assert time.monotonic() - began < 5
        close_all(joined, waiting.result())


def test_nodes_dropped_for_want_of_room_try_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose connection was dropped connects again, until it is admitted."""
    room = Unauthenticated
    monkeypatch.setattr(rendezvous, "Unauthenticated", lambda _: room(2))
    size = 12
    node0, *others = [some(rank, host="127.0.0.1" if rank == 0 else None) for rank in range(size)]
    found = at_once(
        lambda: node0.host_all(size, patience=20), *(lambda o=o: o.join(node0.address, patience=20) for o in others)
    )
    assert [sorted(each) for each in found] == [[n for n in range(size) if n != rank] for rank in range(size)]
    close_all(*found)


def test_a_node_that_missed_its_admission_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And does not count as a second process of the same rank."""
    node0, second, third = some(0), some(1, host=None), some(2, host=None)
    heard, cut = rendezvous.receive_json, threading.Event()

    def lose(sock: socket.socket, until: float | None = None) -> dict[str, Any]:
        said = heard(sock, until)
        if said["rank"] == 0 and not cut.is_set():
            cut.set()
            raise TimeoutError("the answer came too late")
        return said

    monkeypatch.setattr(rendezvous, "receive_json", lose)
    with ThreadPoolExecutor(2) as pool:
        waiting, first = pool.submit(node0.host_all, 3, patience=5), pool.submit(second.join, node0.address, patience=5)
        assert cut.wait(5)
        found = third.join(node0.address, patience=5), first.result(), waiting.result()
    assert [sorted(each) for each in found] == [[0, 1], [0, 2], [1, 2]]
    close_all(*found)


@pytest.mark.timed
@both_ways
def test_a_slow_handshake_has_one_deadline(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_HANDSHAKE", 0.6)
    node0 = some(0, trusted=trusted)
    with ThreadPoolExecutor(1) as pool, socket.create_connection(node0.address) as slow:
        waiting = pool.submit(node0.connect_all, [node0.address] * 2, patience=3)
        began = time.monotonic()
        with suppress(OSError):  # when it is cut off
            while time.monotonic() - began < 10:
                slow.sendall(b"\x16" if time.monotonic() - began < 0.1 else b"\x03")
                time.sleep(0.2)
        assert time.monotonic() - began < 2.5
        assert isinstance(waiting.exception(), ClusterError)


@pytest.mark.timed
def test_a_slow_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program listens where node 0 should, and answers slowly."""
    monkeypatch.setattr(rendezvous, "_HANDSHAKE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            sock, _ = listening.accept()
            with sock:
                for _ in range(40):
                    try:
                        sock.sendall(b"x")
                    except OSError:
                        return
                    time.sleep(0.2)

        threading.Thread(target=drip, daemon=True).start()
        began = time.monotonic()
        with pytest.raises(ClusterError, match=r"node 1 cannot connect to node 0 at 127\.0\.0\.1"):
            some(1, host=None).join(listening.getsockname(), patience=0.3)
        assert time.monotonic() - began < 2


# Names.


@pytest.mark.timed
def test_a_name_may_become_resolvable_later(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    with names(monkeypatch, lambda: {"pod.test": "127.0.0.1"} if time.monotonic() - began > 0.5 else {}):
        assert resolve("pod.test", 29500, patience=5) == ["127.0.0.1"]
        assert time.monotonic() - began > 0.5


def test_a_name_that_cannot_be_resolved_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_FIRST", 0.1)
    said: list[str] = []
    with names(monkeypatch, dict), pytest.raises(ClusterError, match=r"'pod\.test' could not be resolved.*port 29500"):
        resolve("pod.test", 29500, patience=0.5, notify=said.append)
    assert "'pod.test' cannot be resolved yet" in said[0]
    with names(monkeypatch, dict), pytest.raises(ClusterError, match=r"pod\.test:29500.*Is MASTER_ADDR right"):
        some(1, host=None).join(("pod.test", 29500), patience=0.3)


# Addresses.


@pytest.mark.parametrize(("host", "by"), [("::1", "::1"), ("[::1]", "::1"), ("127.0.0.1", "127.0.0.1")])
def test_either_protocol(host: str, by: str) -> None:
    if by == "::1" and not socket.has_ipv6:
        pytest.skip("this machine does not speak IPv6")
    node0, second, third = some(0, host=by), some(1, host=None), some(2, host=None)
    found = at_once(
        lambda: node0.host_all(3, patience=5), *(
            lambda m=m: m.join((host, node0.address[1]), patience=5) for m in (second, third)
        )
    )  # fmt: skip
    assert [sock.getpeername()[0] for sock in found[2].values()] == [by, by]
    close_all(*found)


def test_a_machine_whose_name_is_a_loopback_address_is_reachable() -> None:
    """Nodes 0 and 1 are on one machine, whose name resolves to 127.0.1.1 there; node 2 is on another machine."""
    host = where_to_listen(["127.0.1.1"], one_machine=False)
    assert host == EVERYWHERE
    node0, near, far = (some(rank, host=host if rank == 0 else None, one_machine=False) for rank in range(3))
    port, outside = node0.address[1], own_address()
    found = at_once(
        lambda: node0.host_all(3, patience=5),
        lambda: near.join(("127.0.1.1", port), patience=5),
        lambda: far.join((outside, port), patience=5),
    )
    assert is_loopback(near.address[0])
    assert found[2][1].getpeername()[0] == outside  # what node 1 called 127.0.0.1
    close_all(*found)


def test_where_to_listen() -> None:
    outside = own_address()
    assert where_to_listen([outside], one_machine=False) == outside
    assert where_to_listen([outside, "127.0.1.1"], one_machine=False) == EVERYWHERE
    assert where_to_listen(["198.51.100.7"], one_machine=False) == EVERYWHERE  # a name in front of this machine
    assert where_to_listen(["127.0.1.1"], one_machine=True) == "127.0.1.1"


# Messages to the user.


def test_a_port_in_use_is_reported() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        pytest.raises(
            ClusterError, match=r"node 0 cannot listen at port \d+ of 127.0.0.1: Address already in use. Cho"
        ),
    ):
        some(0, port=listening.getsockname()[1])


def test_reminders_name_the_missing_nodes_and_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_FIRST", 0.2)
    said: list[str] = []
    node0 = some(0, notify=said.append)
    called = ("10.9.8.7", 29500)
    with pytest.raises(ClusterError, match=r"nodes 1, 2 did not connect to node 0 at 10\.9\.8\.7:29500 within 1\.5 s"):
        node0.host_all(3, patience=1.5, known_as=called)
    assert said[0] == "node 0 waits for nodes 1, 2 to connect to 10.9.8.7:29500"
    assert len(said) == 2  # at growing intervals
    said.clear()
    with pytest.raises(ClusterError, match="Was it started there, and does a firewall"):
        some(1, host=None, notify=said.append).join(node0.address, patience=1)
    assert said[0].startswith(f"node 1 tries to reach node 0 at 127.0.0.1:{node0.address[1]}: ")


@both_ways
def test_a_connected_node_reports_that_it_waits_for_others(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_FIRST", 0.2)
    said: list[str] = []
    node0, second = some(0, trusted=trusted), some(1, trusted=trusted, host=None, notify=said.append)
    third = some(2, trusted=trusted, host=None)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(node0.host_all, 3, patience=20)
        other = pool.submit(second.join, node0.address, patience=20)
        wait_until(lambda: said, 15)
        found = first, other, pool.submit(third.join, node0.address, patience=20)
        close_all(*(each.result() for each in found))
    port = node0.address[1]
    assert said[0] == f"node 1 is connected to node 0 at 127.0.0.1:{port}, which waits for other nodes and names them"


def test_a_node_that_leaves_early_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    node0, other = some(0), some(1, host=None)

    def cut(sock: socket.socket, what: Any) -> None:
        if "addresses" in what:
            raise BrokenPipeError("Broken pipe")
        said(sock, what)

    said = rendezvous.send_json
    monkeypatch.setattr(rendezvous, "send_json", cut)
    first, second = at_once(lambda: node0.host_all(2, patience=3), lambda: other.join(node0.address, patience=3))
    assert "node 1 at 127.0.0.1:" in str(first)
    assert "left before all nodes had connected: Broken pipe" in str(first)
    assert "addresses of the other nodes: it stopped waiting for them" in str(second)


@pytest.mark.parametrize("says", [b"", struct.pack("<I", 12) + b'{"rank": 01}', struct.pack("<I", 2) + b"{}"])
def test_a_connection_that_breaks_while_it_is_measured_is_named(says: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as far:
        near, _ = listening.accept()
        with near:
            here, there = (":".join(map(str, s.getsockname())) for s in (near, far))
            far.sendall(says)
            far.shutdown(socket.SHUT_WR)
            with pytest.raises(ClusterError, match=f"process 0 lost process 1 \\({here} to {there}\\) while"):
                link_probe.agree(0, {1: near}, {}, lambda found: found)


def test_process_0_decides_for_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()) as far:
        near, _ = listening.accept()
        with near:
            assert at_once(
                lambda: link_probe.announce(0, {1: near}, True), lambda: link_probe.announce(1, {0: far})
            ) == [
                True,
                True,
            ]
