# SPDX-License-Identifier: Apache-2.0
"""What should carry messages between machines: TLS on plain sockets, or ZeroMQ with CURVE?

Two processes on loopback. There and back: a vector as long as LeNet-5, which the other returns. Stream: vectors of
10 MB one way, one answer at the end. Processor: seconds of both processes together.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from benchmarks.common import ROOT, Outcome, Rounds, main
from orchestra.core.ops import Group, Message, Recv, Send, Traffic
from orchestra.worlds.sockets.auth import Token
from orchestra.worlds.sockets.messenger import Messenger
from orchestra.worlds.sockets.rendezvous import Rendezvous

SMALL, LARGE = torch.zeros(61_706), torch.zeros(2_500_000)
TIMES, STREAM = 100, 30
KINDS = ("sockets, TLS 1.3", "sockets, trusted", "ZeroMQ, CURVE", "ZeroMQ, plain")
SECRET = "0123456789abcdef" * 2  # public: it protects nothing


class Carrier(Protocol):
    """One end of a connection."""

    def send(self, x: torch.Tensor) -> None:
        """Send a vector."""

    def recv(self) -> torch.Tensor:
        """The next vector."""
        ...


class Sockets:
    """Ours."""

    def __init__(self, rank: int, kind: str, other: str | None, tell: Callable[[str], None]) -> None:
        token = Token(SECRET, trusted="trusted" in kind)
        rendezvous = Rendezvous(rank, token, {})
        tell(str(rendezvous.address[1]))
        addresses = [("127.0.0.1", int(other))] if other else [rendezvous.address]
        found = rendezvous.connect_all([*addresses, rendezvous.address], patience=30)
        self._other = 1 - rank
        self._messenger = Messenger(
            rank, 2, token.run(), found, largest=1 << 26, patience=60, traffic=Traffic(), summed=token.trusted
        )

    def send(self, x: torch.Tensor) -> None:
        self._messenger.send(Send(self._other, x)).wait()

    def recv(self) -> torch.Tensor:
        came = self._messenger.recv(Recv(self._other, Group((self._other,)))).wait()
        assert isinstance(came, Message)
        return came.x


class Zmq:
    """ZeroMQ's own framing, copies and threads; a pair of sockets."""

    def __init__(self, rank: int, kind: str, other: str | None, tell: Callable[[str], None]) -> None:
        import zmq

        self._socket: Any = zmq.Context().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        public, secret = (bytes(40), bytes(40))
        if "CURVE" in kind:
            secret = b"D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs"
            public = zmq.curve_public(secret)
        if rank == 0:
            if "CURVE" in kind:
                self._socket.curve_server, self._socket.curve_secretkey = True, secret
            tell(str(self._socket.bind_to_random_port("tcp://127.0.0.1")))
        else:
            if "CURVE" in kind:
                self._socket.curve_serverkey = public
                self._socket.curve_publickey, self._socket.curve_secretkey = public, secret
            self._socket.connect(f"tcp://127.0.0.1:{other}")

    def send(self, x: torch.Tensor) -> None:
        self._socket.send(memoryview(x.numpy().data), copy=False)

    def recv(self) -> torch.Tensor:
        return torch.frombuffer(self._socket.recv(copy=False).buffer, dtype=torch.float32)


def _carrier(rank: int, kind: str, other: str | None, tell: Callable[[str], None]) -> Carrier:
    return (Sockets if kind.startswith("sockets") else Zmq)(rank, kind, other, tell)


def echo(kind: str, port: str) -> None:
    """The other process: returns what is short, counts what is long."""
    there = _carrier(1, kind, port, lambda address: None)
    long = 0
    while True:
        x = there.recv()
        if x.numel() == 1:
            return
        long += x.numel() == LARGE.numel()
        if long == STREAM or x.numel() == SMALL.numel():
            there.send(torch.zeros(2) if long else x)
            long = 0


def measure(rounds: int) -> Outcome:
    """Milliseconds, megabytes a second, and processor time of each."""
    figures = {name: Rounds() for name in ("there and back, ms", "processor, ms", "stream, MB/s", "processor, s/GB")}
    for number in range(rounds):
        for kind in KINDS if number % 2 else KINDS[::-1]:
            for name, value in zip(figures, _one(kind), strict=True):
                figures[name].add(kind, value)
    outcome = Outcome("Carriers", (__doc__ or "").split("\n\n", 1)[1].replace("\n", " ").strip())
    outcome.table(
        ["carrier", *figures],
        [
            [kind, *(rounds_[kind].show(3 if "ms" in name else 2) for name, rounds_ in figures.items())]
            for kind in KINDS
        ],
    )
    fast, slow = figures["there and back, ms"], figures["stream, MB/s"]
    outcome.say(
        f"TLS on sockets against CURVE: there and back {fast.ratio(KINDS[0], KINDS[2]).show(2)} of its time, streams "
        f"{slow.ratio(KINDS[0], KINDS[2]).show(2)} times as fast."
    )
    return outcome


def _one(kind: str) -> tuple[float, float, float, float]:
    child: list[subprocess.Popen[str]] = []

    def tell(address: str) -> None:
        command = [sys.executable, "-m", "benchmarks.carriers", "--echo", kind, address]
        child.append(subprocess.Popen(command, cwd=ROOT, text=True))

    here = _carrier(0, kind, None, tell)
    process = child[0]

    def spent() -> float:
        own = os.times()
        with open(f"/proc/{process.pid}/stat", encoding="ascii") as file:
            ticks = file.read().rsplit(") ", 1)[1].split()[11:13]
        return own.user + own.system + sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def there_and_back() -> float:
        began = time.perf_counter()
        here.send(SMALL)
        here.recv()
        return time.perf_counter() - began

    for _ in range(10):
        there_and_back()
    before = spent()
    times = sorted(there_and_back() for _ in range(TIMES))
    processor = (spent() - before) / TIMES
    before, began = spent(), time.perf_counter()
    for _ in range(STREAM):
        here.send(LARGE)
    here.recv()
    took, gigabytes = time.perf_counter() - began, STREAM * LARGE.numel() * 4 / 1e9
    streaming = (spent() - before) / gigabytes
    here.send(torch.zeros(1))
    process.wait(10)
    return 1e3 * times[TIMES // 2], 1e3 * processor, 1e3 * gigabytes / took, streaming


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--echo"]:
        echo(*sys.argv[2:])
    else:
        main(measure, rounds=7)
