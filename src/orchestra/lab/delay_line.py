# SPDX-License-Identifier: Apache-2.0
"""The switch of a lab with latencies: a program of its own, which holds frames until they are due.

    repeat
        for every frame that came from a host i
            J ← the host it is addressed to, or all but i if that is not known
            for j in J: put (now + d_i + d_j, j, frame) on the heap
        take from the heap what is due, and write it to its host

d is half of the latency of a host (`orchestra.worlds.simulated.networks`). Each host has a TAP here. With IFF_VNET_HDR
and the offloads on, segments of up to 64 kB pass as one frame with unfinished checksums, which makes Python fast
enough: the header that says so comes before the frame and is passed on with it.

    python delay_line.py NAMESPACE LOCK TAP=SECONDS TAP=SECONDS ...

It prints "ready" once its TAPs exist, closes the inherited file descriptor LOCK, and ends when NAMESPACE does. It needs
nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import os
import select
import struct
import sys
import time
from itertools import count

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_CSUM, _TSO4, _TSO6 = 0x01, 0x02, 0x04
_HEADER = 10  # bytes of struct virtio_net_hdr before every frame
_LARGEST = _HEADER + 14 + 65_536
_AT_ONCE = 32  # frames read from one host before those of the others
_CHECK = 1.0  # seconds between two checks whether the lab still exists

Waiting = tuple[float, int, int, bytes]  # when it is due, its number, the file to write it to, the frame


def open_tap(name: str) -> int:
    """Make a TAP in this namespace; closing the file deletes it."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _CSUM | _TSO4 | _TSO6)
    return tap


def exists(namespace: str) -> bool:
    """Whether the namespace of that name is still the one of this process."""
    try:
        named, own = os.stat(f"/run/netns/{namespace}"), os.stat("/proc/self/ns/net")
    except FileNotFoundError:
        return False
    return (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)


def forward(latency: dict[int, float], namespace: str) -> None:
    """Pass frames on between the TAPs, each after its latency, for as long as the namespace exists."""
    learned: dict[bytes, int] = {}  # the TAP of each address
    heap: list[Waiting] = []
    number = count()
    check = 0.0
    while True:
        now = time.monotonic()
        if now >= check:
            if not exists(namespace):
                return
            check = now + _CHECK
        until = min(heap[0][0], check) if heap else check
        for source in select.select(list(latency), [], [], max(0.0, until - now))[0]:
            for frame in _read(source):
                came = time.monotonic()
                to, sender = frame[_HEADER : _HEADER + 6], frame[_HEADER + 6 : _HEADER + 12]
                learned[sender] = source
                known = learned.get(to)
                for target in [other for other in latency if other != source] if known is None else [known]:
                    due = came + latency[source] + latency[target]
                    heapq.heappush(heap, (due, next(number), target, frame))
        while heap and heap[0][0] <= time.monotonic():
            _, _, target, frame = heapq.heappop(heap)
            with contextlib.suppress(OSError):  # a link that is down, or full, loses frames, as with any switch
                os.write(target, frame)


def _read(source: int) -> list[bytes]:
    frames: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while len(frames) < _AT_ONCE:
            frames.append(os.read(source, _LARGEST))
    return frames


def _raise_priority() -> None:
    """Run before the hosts' processes: to wait for a busy processor cost a tenth of the rate at 100 Mbit/s."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except OSError:  # not in every container
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)


def main(arguments: list[str]) -> None:
    """Make the TAPs, print "ready", and forward."""
    if os.fork():
        os._exit(0)  # the child has no parent that would have to wait for its end
    namespace, lock, *ports = arguments
    latency = {}
    for port in ports:
        name, _, seconds = port.partition("=")
        latency[open_tap(name)] = float(seconds)
    _raise_priority()
    os.write(1, b"ready\n")
    os.close(int(lock))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    forward(latency, namespace)


if __name__ == "__main__":
    main(sys.argv[1:])
