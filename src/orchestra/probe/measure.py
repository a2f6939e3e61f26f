# SPDX-License-Identifier: Apache-2.0
"""Measure this machine with the code that real runs use.

    computing          the steps of short runs of the workload, one worker, at several batches (cli/probe.py)
    memory_exchange    small and large messages back and forth between the two workers of a real run
    loopback           the same between two processes through a socket
    memory             a copy of more bytes than a cache holds
    number             an optimizer's step over a large vector

A message of S bytes takes  message + latency + S / rate:  small messages give the first two, large ones the rate.
"""

from __future__ import annotations

import functools
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orchestra._train import train
from orchestra.clusters.local import Local
from orchestra.core.node import Node
from orchestra.core.strategy import Strategy
from orchestra.model.flat_optimizer import FlatOptimizer
from orchestra.runs.budget import Steps
from orchestra.runs.events import Logged, read
from orchestra.runs.measurements import LinkMeasurement

_LARGE = 1 << 20  # numbers in a large message
_COPIES = 1 << 26  # bytes of the copies that measure memory


def machine() -> str:
    """Describe this machine in a line."""
    model = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{os.cpu_count()} cores of {model}, torch {torch.__version__}, Python {platform.python_version()}"


# Memory.


def memory(repeats: int = 9) -> float:
    """Return the bytes per second that one process copies."""
    source, target = (torch.zeros(_COPIES, dtype=torch.uint8) for _ in range(2))
    with _one_thread():
        return _COPIES / _median(lambda: target.copy_(source), repeats)


def number(repeats: int = 50) -> float:
    """Return the seconds per number that an optimizer updates: SGD with momentum, over a large vector."""
    x, g = torch.zeros(_LARGE), torch.zeros(_LARGE)
    optimizer = FlatOptimizer(functools.partial(torch.optim.SGD, lr=1e-9, momentum=0.9), x, fused=True)
    optimizer.step(g)
    with _one_thread():
        return _median(lambda: optimizer.step(g), repeats) / _LARGE


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# Two workers.


@dataclass(frozen=True, kw_only=True)
class _PingPong(Strategy[None]):
    """Two workers send a vector back and forth."""

    repeats: int

    def init(self, node: Node) -> None:
        return None

    def step(self, node: Node, s: None) -> None:
        node.gradient()
        for name, x in (("small", node.x[:1]), ("large", node.x)):
            for _ in range(self.repeats):
                began = node.now()
                posted = self._send(node, x) if node.rank == 0 else self._send_back(node, x)
                node.log(name, node.now() - began)
                node.log(f"{name}, posting", posted)

    def _send(self, node: Node, x: Tensor) -> float:
        began = node.now()
        sending = node.comm.start_send(1, x)
        posted = node.now() - began
        x.copy_(node.comm.recv(1).x)
        sending.wait()
        return posted

    def _send_back(self, node: Node, x: Tensor) -> float:
        x.copy_(node.comm.recv(0).x)
        began = node.now()
        node.comm.start_send(0, x)  # no wait: the next message shows that worker 0 has read this one
        return node.now() - began


def _nothing() -> tuple[Tensor, Tensor]:
    return torch.zeros(64, 1), torch.zeros(64, 1)


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def memory_exchange(repeats: int = 100) -> LinkMeasurement:
    """Messages between two processes of a real run."""
    with tempfile.TemporaryDirectory(prefix="orchestra-probe-") as folder:
        train(
            model=functools.partial(nn.Linear, 1, _LARGE // 2),
            data=_nothing,
            loss=_mean,
            optimizer=functools.partial(torch.optim.SGD, lr=1e-9),
            strategy=_PingPong(repeats=repeats),
            cluster=Local(workers=2, threads=1),
            batch=1,
            budget=Steps(2),
            out=Path(folder) / "run",
            progress=False,
        )
        found: dict[str, list[float]] = defaultdict(list)
        for event in read(Path(folder) / "run" / "events-0.jsonl"):
            if isinstance(event, Logged) and event.step == 2:  # the first step warms up
                found[event.name].append(event.value)
    middle = {name: statistics.median(values) for name, values in found.items()}
    # A round trip is two messages.
    return _exchange(middle["small, posting"], middle["small"] / 2, middle["large"] / 2, 4 * _LARGE)


# Two processes and a socket.

_ECHO = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as line:
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    room = memoryview(bytearray(1 << 20))
    while head := line.recv(8, socket.MSG_WAITALL):
        left = int.from_bytes(head, "little")
        while left:
            left -= line.recv_into(room[: min(left, len(room))])
        line.sendall(b".")
"""


def loopback(repeats: int = 100) -> LinkMeasurement:
    """Measure messages to another process of this machine through a socket; each is answered with a byte."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        port = listener.getsockname()[1]
        with subprocess.Popen([sys.executable, "-c", _ECHO, str(port)]) as echo:
            connection, _ = listener.accept()
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                small, posting = _talk(connection, 1, repeats)
                large, _ = _talk(connection, 4 * _LARGE, repeats)
            echo.wait(30)
    # The answer is one byte, so a small message takes half of its round trip.
    return _exchange(posting, small / 2, large - small / 2, 4 * _LARGE)


def _talk(connection: socket.socket, size: int, repeats: int) -> tuple[float, float]:
    """Return the median seconds until the answer, and until the kernel had taken the message."""
    message = size.to_bytes(8, "little") + bytes(size)
    until_answer, until_posted = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        connection.sendall(message)
        until_posted.append(time.perf_counter() - began)
        connection.recv(1)
        until_answer.append(time.perf_counter() - began)
    return statistics.median(until_answer), statistics.median(until_posted)


def _exchange(message: float, small: float, large: float, size: int) -> LinkMeasurement:
    """Return the measurement from the seconds to post a message, and those a small one and one of `size` bytes take."""
    message = min(message, small)
    return LinkMeasurement(rate=size / max(large - small, 1e-9), latency=small - message, message=message)


def _median(act: Callable[[], Any], repeats: int) -> float:
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        act()
        took.append(time.perf_counter() - began)
    return statistics.median(took)
