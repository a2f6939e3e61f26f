# SPDX-License-Identifier: Apache-2.0
"""Sockets: short messages are sent at once, and every connection is closed, whatever fails."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import socket
import struct
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.transports.test_messenger import SECRET, at_once, both_ways, meet, recv
from tests.transports.test_reconnect import BOTH, cut, machines

from orchestra.core.ops import Send
from orchestra.errors import ClusterError
from orchestra.worlds.sockets import link_probe, pairing
from orchestra.worlds.sockets.addresses import accept, connect
from orchestra.worlds.sockets.auth import Token, Unauthenticated
from orchestra.worlds.sockets.reconnect import NewConnection, Reconnector
from orchestra.worlds.sockets.rendezvous import Rendezvous, receive_json, send_json


@contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yield both ends of a connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        connect(listening.getsockname(), timeout=5) as far,
        accept(listening) as near,
    ):
        yield far, near


def is_prompt(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))


def is_closed(sock: socket.socket) -> bool:
    """Whether the other end closed the connection; a silent one has not."""
    sock.settimeout(10)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


# Short messages are sent at once.


@both_ways
def test_short_messages_are_not_delayed_while_connections_are_measured(
    trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a near process may seem 40 ms away, and the ring becomes too long."""
    really, seen = link_probe._round_trip, []

    def look(sock: socket.socket, *, first: bool) -> float:
        seen.append(is_prompt(sock))
        return really(sock, first=first)

    monkeypatch.setattr(link_probe, "_round_trip", look)
    sockets = meet(2, trusted=trusted)
    at_once(lambda: link_probe.measure(0, sockets[0]), lambda: link_probe.measure(1, sockets[1]))
    for each in sockets:
        for sock in each.values():
            sock.close()
    assert seen == [True, True]


@both_ways
def test_short_messages_are_not_delayed_after_reconnection(trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with machines(monkeypatch, remote=True, trusted=trusted) as (a, b):
        before = a._peers[1].sock
        cut(a)
        at_once(lambda: recv(a, 1, BOTH), lambda: [b.send(Send(0, torch.ones(4))).wait(), b.poll()])
        assert a._peers[1].sock is not before
        assert is_prompt(a._peers[1].sock)
        assert is_prompt(b._peers[0].sock)


# Every connection is closed.


def test_a_connection_reset_before_the_handshake_is_closed() -> None:
    gc.collect()  # what others left
    with connected() as (far, near), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        number = near.fileno()
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()  # which resets the connection
        until = time.monotonic() + 10
        with pytest.raises(ConnectionResetError):
            Token(SECRET).secure(near, server=True, until=until)
        gc.collect()
        assert not [warning for warning in told if f"fd={number}" in str(warning.message)]


@pytest.mark.parametrize("lacking", ["files", "threads"])
def test_a_connection_that_cannot_be_served_is_closed(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files") if lacking == "files" else RuntimeError("no new thread")

    unauthenticated = Unauthenticated(4)
    with socket.create_server(("127.0.0.1", 0)) as listening, connect(listening.getsockname(), timeout=5) as far:
        with monkeypatch.context() as patch:
            patch.setattr(*((socket.socket, "dup", fail) if lacking == "files" else (threading.Thread, "start", fail)))
            with pytest.raises((OSError, RuntimeError)):
                unauthenticated.receive(listening, lambda sock, handle: None)
        assert is_closed(far)
        assert not unauthenticated._handles


def test_a_connection_after_the_rendezvous_is_closed() -> None:
    token = Token(SECRET, trusted=True)
    rendezvous = Rendezvous(0, token, {})
    rendezvous._unauthenticated = Unauthenticated(4)
    rendezvous.close()
    with connected() as (far, near), ThreadPoolExecutor(1) as pool:
        pool.submit(rendezvous._admit, near, near.dup())
        token.secure(far, server=False)
        send_json(far, {"rank": 1, "about": {}, "address": ["127.0.0.1", 1]})
        receive_json(far)
        send_json(far, {"rank": 1})
        assert is_closed(far)


def test_a_connection_made_after_closing_is_closed() -> None:
    reconnector = Reconnector(0, Token(SECRET), socket.create_server(("127.0.0.1", 0)), {}, {}, 1.0)
    reconnector.close()
    with connected() as (far, near):
        reconnector._add(NewConnection(1, near, 0, None, 0))
        assert is_closed(far)


def test_a_failed_pairing_closes_its_listening_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    names, really, opened = itertools.count(), pairing._listen, []

    def listen(connections: list[socket.socket]) -> socket.socket:
        opened.append(really(connections))
        return opened[-1]

    monkeypatch.setattr(pairing, "machine", lambda: f"machine {next(names)}")
    monkeypatch.setattr(pairing, "_listen", listen)
    with connected() as (far, near):
        send_json(far, {"rank": 1, "machine": "another"})
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(ClusterError, match="could not set up its connection to node 1"):
            pairing.arrange(0, {1: near}, Token(SECRET), longest=1 << 10, grace=1.0, patience=5)
    assert [listening.fileno() for listening in opened] == [-1]


def test_an_end_that_does_not_encrypt_is_reported() -> None:
    with connected() as (far, near):
        thread = threading.Thread(target=_secure, args=(Token(SECRET, trusted=True), near), daemon=True)
        thread.start()
        with pytest.raises(ConnectionError, match="--trusted-network must be given on every machine, or on none"):
            Token(SECRET).secure(far, server=False, until=time.monotonic() + 10)
        thread.join(20)


def _secure(token: Token, sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        token.secure(sock, server=True, until=time.monotonic() + 10)
