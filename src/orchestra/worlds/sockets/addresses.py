# SPDX-License-Identifier: Apache-2.0
"""Addresses: resolving names, and by which address other machines can reach this one.

A name may not be resolvable yet (a pod that is being started). A machine may resolve its own name to 127.0.1.1, by
which no other machine reaches it. And an address may be IPv4 or IPv6.
"""

from __future__ import annotations

import ipaddress
import socket
import sys
import time
from collections.abc import Callable

from orchestra.errors import ClusterError

Address = tuple[str, int]
Notify = Callable[[str], None]

EVERYWHERE = ""  # to listen at all addresses of this machine
_AGAIN = 0.2  # seconds between two attempts to resolve a name
_FIRST, _MOST = 5.0, 60.0  # seconds before the first reminder, and at most between two
_BACKLOG = 1024  # connections that wait to be accepted


def bare(host: str) -> str:
    """Remove the brackets that an IPv6 address has in front of a port.

    >>> bare("[::1]"), bare("10.0.0.1")
    ('::1', '10.0.0.1')
    """
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def show(address: Address) -> str:
    """Format an address for messages.

    >>> show(("::1", 29500)), show(("10.0.0.1", 29500))
    ('[::1]:29500', '10.0.0.1:29500')
    """
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(address: str) -> bool:
    """Whether an address means the machine itself on every machine.

    >>> [is_loopback(a) for a in ("127.0.1.1", "::1", "::ffff:127.0.0.1", "10.0.0.1", "fe80::1%eth0")]
    [True, True, True, False, False]
    """
    return ipaddress.ip_address(plain(address).partition("%")[0]).is_loopback


def plain(address: str) -> str:
    """Return an IPv4 address as such where a socket for both protocols shows it as IPv6.

    >>> plain("::ffff:10.0.0.1"), plain("::1")
    ('10.0.0.1', '::1')
    """
    return address[7:] if address.lower().startswith("::ffff:") and "." in address else address


def ends(sock: socket.socket) -> str:
    """Format the addresses of both ends of a connection, which must be open."""
    here, there = sock.getsockname(), sock.getpeername()
    return f"{show((plain(here[0]), here[1]))} to {show((plain(there[0]), there[1]))}"


def print_notice(text: str) -> None:
    """Print a message about this process to stderr."""
    print(f"orchestra: {text}", file=sys.stderr, flush=True)


class Reminder:
    """Reports what a process waits for: after some seconds, then at growing intervals."""

    def __init__(self, notify: Notify) -> None:
        self._notify, self._gap = notify, _FIRST
        self._next = time.monotonic() + _FIRST

    def __call__(self, what: Callable[[], str]) -> None:
        """Report that the process still waits, if it is time."""
        if time.monotonic() > self._next:
            self._notify(what())
            self._gap = min(2 * self._gap, _MOST)
            self._next = time.monotonic() + self._gap


def resolve(host: str, port: int, *, patience: float, notify: Notify = lambda text: None) -> list[str]:
    """Return the addresses of a name, trying until it can be resolved."""
    until, remind = time.monotonic() + patience, Reminder(notify)
    while True:
        try:
            found = socket.getaddrinfo(bare(host), port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(where[0]) for *_, where in found))
        except (OSError, UnicodeError) as error:
            why = error.args[-1]
            if time.monotonic() > until:
                raise ClusterError(
                    f"the name {host!r} could not be resolved within {patience:g} s to find port {port} there: {why}. "
                    f"Is MASTER_ADDR right, and can this machine resolve the name (getent hosts {host})? An address "
                    "works as well."
                ) from None
        remind(lambda why=why: f"{host!r} cannot be resolved yet, to find port {port} there: {why}")  # type: ignore[misc]
        time.sleep(_AGAIN)


def where_to_listen(found: list[str], *, one_machine: bool) -> str:
    """Choose the address to listen at, from those of the name that other machines use.

    The name's own address, unless it belongs to something in front of this machine, such as a Kubernetes service, or
    means another machine elsewhere: then all addresses of this machine.
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
    """Listen at an address of this machine, or at all of them by both protocols."""
    if host != EVERYWHERE:
        return socket.create_server((host, port), family=_family(host), backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=_BACKLOG)


def connect(address: Address, *, timeout: float) -> socket.socket:
    """Connect to an address."""
    return _without_delay(socket.create_connection(address, timeout=timeout))


def accept(listening: socket.socket) -> socket.socket:
    """Accept a connection."""
    return _without_delay(listening.accept()[0])


def _without_delay(sock: socket.socket) -> socket.socket:
    """Send short messages at once: without this option the kernel may hold them back for 40 ms."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        sock.close()
        raise
    return sock


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
