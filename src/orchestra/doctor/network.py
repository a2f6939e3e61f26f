# SPDX-License-Identifier: Apache-2.0
"""What runs between machines need: ports, an address, a name; and what the laboratory needs to stage them on one."""

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

_FIRST, _COUNT = 29400, 16  # the ports where torchrun begins as well
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}  # for examples: nobody has them
_CLONE_NEWNET = 0x40000000
_RATE = 8e6  # bits per second
_PARCEL = 50_000  # bytes, several times what the filter lets through at once


def ports() -> Finding:
    """Speak through loopback, and look for a range of ports that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(2)
        with socket.create_connection(door.getsockname(), timeout=2) as line:
            line.sendall(b"!")
            there, _ = door.accept()
            with there:
                there.settimeout(2)
                heard = there.recv(1)
    if heard != b"!":
        return broken("loopback loses bytes", "See `ip address show lo`.")
    first = next((p for p in range(_FIRST, 60000, _COUNT) if all(_free(q) for q in range(p, p + _COUNT))), None)
    if first is None:
        return limited("loopback works, but no 16 ports in a row are free", "See who has them: `ss -ltn`.")
    return fine(f"loopback works, ports {first} to {first + _COUNT - 1} are free")


def _free(port: int) -> bool:
    """Whether it can be had on every address of this machine."""
    with socket.socket() as door:
        try:
            door.bind(("", port))
        except OSError:
            return False
    return True


# This machine among others.


def host() -> Finding:
    """The address that others see, and whether the name of this machine leads there."""
    name = socket.gethostname()
    seen = [address for family in _ELSEWHERE if (address := _address(family))]
    if not seen:
        return limited(f"{name!r} has no route to other machines", "Only for runs between machines: see `ip route`.")
    device = _default_device()
    found = f"{name!r}, others see {' and '.join(seen)}" + (f" on {device}" if device else "")
    known = f"Only for runs between machines: add the line `{seen[0]} {name}` to /etc/hosts"
    known += f", or export GLOO_SOCKET_IFNAME={device}." if device else "."
    try:
        meant = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        return limited(f"{found}; the name does not resolve ({error.strerror})", known)
    if not set(meant) & set(seen):
        return limited(f"{found}, but the name means {' and '.join(meant)}", known)
    return fine(f"{found}, and the name means that")


def _address(family: socket.AddressFamily) -> str:
    """The own address of packets that leave; connecting a datagram socket sends none."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as line:
            line.connect((_ELSEWHERE[family], 9))
            return str(line.getsockname()[0])
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
    """A network namespace without a name, which goes with this process, and a slow link in it."""
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
    found = f"namespace, veth and tc work: {rate / 1e6:.1f} Mbit/s through a link of {_RATE / 1e6:.0f}"
    if not 0.5 < rate / _RATE < 2:
        return limited(f"{found}, {purpose}", "The kernel does not shape as it should: see `tc -s qdisc`.")
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
    """Bits per second through loopback."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(2)
        with socket.create_connection(door.getsockname(), timeout=2) as line:
            there, _ = door.accept()
            there.settimeout(2)
            sending = threading.Thread(target=line.sendall, args=(bytes(3 * _PARCEL),), daemon=True)
            sending.start()
            with there:
                _take(there, _PARCEL)  # the filter lets some through at once
                began = time.perf_counter()
                _take(there, 2 * _PARCEL)
                took = time.perf_counter() - began
            sending.join()
    return 8 * 2 * _PARCEL / took


def _take(line: socket.socket, count: int) -> None:
    while count:
        heard = line.recv(min(count, 1 << 16))
        if not heard:
            raise ConnectionError("loopback closed")
        count -= len(heard)
