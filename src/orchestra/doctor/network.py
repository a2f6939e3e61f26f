# SPDX-License-Identifier: Apache-2.0
"""Checks of what runs between machines need (ports, an address, a host name), and of what the laboratory needs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

from orchestra.doctor.trial import Finding, broken, fine, limited, short

_FIRST, _COUNT = 29400, 16  # the first port that torchrun uses
_ELSEWHERE = {
    socket.AF_INET: "192.0.2.1",
    socket.AF_INET6: "2001:db8::1",
}  # reserved for documentation: no host has them
_CLONE_NEWNET = 0x40000000
_RATE = 8e6  # bits per second
_CHUNK = 50_000  # bytes, several times the burst that the filter lets through


def ports() -> Finding:
    """Send a byte through loopback, and look for a range of free ports."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(2)
        with socket.create_connection(listener.getsockname(), timeout=2) as client:
            client.sendall(b"!")
            server, _ = listener.accept()
            with server:
                server.settimeout(2)
                received = server.recv(1)
    if received != b"!":
        return broken("loopback loses bytes", "See `ip address show lo`.")
    first = next((p for p in range(_FIRST, 60000, _COUNT) if all(_free(q) for q in range(p, p + _COUNT))), None)
    if first is None:
        return limited("loopback works, but no 16 ports in a row are free", "List the ports in use: `ss -ltn`.")
    return fine(f"loopback works, ports {first} to {first + _COUNT - 1} are free")


def _free(port: int) -> bool:
    """Whether a port can be bound on every address of this machine."""
    with socket.socket() as listener:
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True


# The address and name of this machine.


def host() -> Finding:
    """Find the address that other machines see, and check that the name of this machine resolves to it."""
    name = socket.gethostname()
    visible = [address for family in _ELSEWHERE if (address := _address(family))]
    if not visible:
        return limited(f"{name!r} has no route to other machines", "Only for runs between machines: see `ip route`.")
    device = _default_device()
    found = f"{name!r}, other machines see {' and '.join(visible)}" + (f" on {device}" if device else "")
    known = f"Only for runs between machines: add the line `{visible[0]} {name}` to /etc/hosts"
    known += f", or export GLOO_SOCKET_IFNAME={device}." if device else "."
    try:
        resolved = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        return limited(f"{found}; the name does not resolve ({error.strerror})", known)
    if not set(resolved) & set(visible):
        return limited(f"{found}, but the name resolves to {' and '.join(resolved)}", known)
    return fine(f"{found}, and the name resolves to it")


def _address(family: socket.AddressFamily) -> str:
    """Return the source address of outgoing packets; connecting a datagram socket sends none."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((_ELSEWHERE[family], 9))
            return str(sock.getsockname()[0])
    except OSError:
        return ""


def _default_device() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/route").read_text(encoding="ascii").splitlines()[1:]:
            device, destination, *_ = line.split()
            if destination == "00000000":
                return device
    return ""


# The laboratory.


def namespaces() -> Finding:
    """Make an unnamed network namespace, which ends with this process, and a slow link in it."""
    purpose = "only for the laboratory"
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool, path=_path())]
    if missing:
        return limited(f"no {' and no '.join(missing)}, {purpose}", "Install iproute2.")
    if os.geteuid():
        return limited(
            f"needs root, {purpose}", "Run the laboratory as root, or in a container with --cap-add NET_ADMIN."
        )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        reason = os.strerror(ctypes.get_errno())
        return limited(f"no namespace ({reason}), {purpose}", "Start the container with --cap-add SYS_ADMIN,NET_ADMIN.")
    try:
        _call("ip link add name orchestra0 type veth peer name orchestra1")
        _call("ip link set dev lo mtu 1500 up")
        _call(f"tc qdisc add dev lo root tbf rate {_RATE:.0f}bit burst 10kb latency 400ms")
    except RuntimeError as error:
        return limited(f"{error}, {purpose}", "Give the container NET_ADMIN, or the kernel veth and sch_tbf.")
    rate = _measure()
    found = f"namespace, veth and tc work: {rate / 1e6:.1f} Mbit/s through a {_RATE / 1e6:.0f} Mbit/s link"
    if not 0.5 < rate / _RATE < 2:
        return limited(f"{found}, {purpose}", "The kernel does not limit the rate as configured: see `tc -s qdisc`.")
    return fine(found)


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/bin", "/bin"])


def _call(command: str) -> None:
    words = command.split()
    tool = shutil.which(words[0], path=_path()) or words[0]
    done = subprocess.run([tool, *words[1:]], capture_output=True, text=True, timeout=2, check=False)
    if done.returncode:
        raise RuntimeError(short(f"`{command}` failed: {done.stderr}"))


def _measure() -> float:
    """Return bits per second through loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(2)
        with socket.create_connection(listener.getsockname(), timeout=2) as client:
            server, _ = listener.accept()
            server.settimeout(2)
            sending = threading.Thread(target=client.sendall, args=(bytes(3 * _CHUNK),), daemon=True)
            sending.start()
            with server:
                _receive(server, _CHUNK)  # not timed: it contains the burst that the filter lets through
                began = time.perf_counter()
                _receive(server, 2 * _CHUNK)
                took = time.perf_counter() - began
            sending.join()
    return 8 * 2 * _CHUNK / took


def _receive(sock: socket.socket, count: int) -> None:
    while count:
        received = sock.recv(min(count, 1 << 16))
        if not received:
            raise ConnectionError("loopback closed")
        count -= len(received)
