# SPDX-License-Identifier: Apache-2.0
"""Addresses: of what was asked for, and by which others can reach this machine.

A name may not be known yet (a pod that is being started). A machine may know its own name as 127.0.1.1 only, which is
another machine for everybody else. And an address may be of either protocol.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
import time
from collections.abc import Callable

from orchestra.errors import ClusterError

Address = tuple[str, int]
Tell = Callable[[str], None]

EVERYWHERE = ""  # to listen at all addresses of this machine
_AGAIN = 0.2  # seconds between two questions for a name
_QUIET, _RARELY = 5.0, 60.0  # seconds before the first reminder, and at most between two
_BACKLOG = 1024  # callers that the kernel holds


def bare(host: str) -> str:
    """Without the brackets that an address of the sixth version wears in front of a port.

    >>> bare("[::1]"), bare("10.0.0.1")
    ('::1', '10.0.0.1')
    """
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def show(address: Address) -> str:
    """For people.

    >>> show(("::1", 29500)), show(("10.0.0.1", 29500))
    ('[::1]:29500', '10.0.0.1:29500')
    """
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether an address is that of the same machine on every machine.

    >>> [is_loopback(a) for a in ("127.0.1.1", "::1", "::ffff:127.0.0.1", "10.0.0.1", "fe80::1%eth0")]
    [True, True, True, False, False]
    """
    return ipaddress.ip_address(plain(address).partition("%")[0]).is_loopback


def plain(address: str) -> str:
    """An address of the fourth version as such, if a door for both had to write it otherwise.

    >>> plain("::ffff:10.0.0.1"), plain("::1")
    ('10.0.0.1', '::1')
    """
    return address[7:] if address.lower().startswith("::ffff:") and "." in address else address


def ends(sock: socket.socket) -> str:
    """Both ends of a connection, for people; known only while it stands."""
    here, there = sock.getsockname(), sock.getpeername()
    return f"{show((plain(here[0]), here[1]))} to {show((plain(there[0]), there[1]))}"


def speak(text: str) -> None:
    """Tell whoever started this process."""
    print(f"orchestra: {text}", file=sys.stderr, flush=True)


class Reminder:
    """Says what is waited for: after some seconds, and then ever less often."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._gap = tell, _QUIET
        self._next = time.monotonic() + _QUIET

    def __call__(self, what: Callable[[], str]) -> None:
        """Still waiting."""
        if time.monotonic() > self._next:
            self._tell(what())
            self._gap = min(2 * self._gap, _RARELY)
            self._next = time.monotonic() + self._gap


def resolve(host: str, port: int, *, patience: float, tell: Tell = lambda text: None) -> list[str]:
    """The addresses of a name, which may take some time to become known."""
    until, remind = time.monotonic() + patience, Reminder(tell)
    while True:
        try:
            found = socket.getaddrinfo(bare(host), port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(where[0]) for *_, where in found))
        except (OSError, UnicodeError) as error:
            why = error.args[-1]
            if time.monotonic() > until:
                raise ClusterError(
                    f"the name {host!r} cannot be resolved, asked for again and again for {patience:g} s to find port "
                    f"{port} there: {why}. Is MASTER_ADDR right, and does this machine know the name (getent hosts "
                    f"{host})? An address will do as well."
                ) from None
        remind(lambda why=why: f"{host!r} cannot be resolved yet, to find port {port} there: {why}")  # type: ignore[misc]
        time.sleep(_AGAIN)


def door_of(found: list[str], *, one_machine: bool) -> str:
    """Where to listen so that whoever knows a name by its address, or by another, arrives.

    At the address others are given, unless that is a name in front of this machine, such as a service of Kubernetes; or
    one that means another machine elsewhere.
    """
    if one_machine:
        return next((address for address in found if _is_ours(address)), found[0])
    if len(found) == 1 and not is_loopback(found[0]) and _is_ours(found[0]):
        return found[0]
    return EVERYWHERE


def _is_ours(address: str) -> bool:
    try:
        with socket.create_server((address, 0), family=_family(address)):
            return True
    except OSError:
        return False


def listen(host: str, port: int = 0) -> socket.socket:
    """A door at an address of this machine, or at all of them by both protocols."""
    if host != EVERYWHERE:
        return socket.create_server((host, port), family=_family(host), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def connect(address: Address, *, timeout: float) -> socket.socket:
    """A connection to a door."""
    return _at_once(socket.create_connection(address, timeout=timeout))


def accept(door: socket.socket) -> socket.socket:
    """A connection to whoever has come to a door."""
    return _at_once(door.accept()[0])


def _at_once(sock: socket.socket) -> socket.socket:
    """Send short words as they are said, from the first on: to wait for more to say takes 40 ms at times."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
