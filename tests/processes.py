# SPDX-License-Identifier: Apache-2.0
"""Processes as a launcher would start them: one for each rank, told where it is by its environment alone."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import cloudpickle
import pytest
import torch

from orchestra.errors import OrchestraError
from orchestra.user_loop.earlier_calls import EARLIER

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(  # what every process would import: torch's optimizers load the compiler
    [
        "torch",
        "torch._dynamo",
        "cryptography.x509",
        "cryptography.hazmat.primitives.serialization",
        "encodings.idna",
        "orchestra._train",
        "orchestra.worlds.sockets.coordinator",
        "orchestra._prepare",
        "pytest",
        "tests.zoo",
    ]
)


@dataclass(frozen=True)
class Outcome:
    """How one process ended: what it gave, or what it raised; neither if it was killed."""

    value: Any = None
    error: str = ""
    kind: str = ""
    code: int | None = None


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """What the processes returned; it fails if one of them raised or was killed."""
    for outcome in outcomes:
        assert not outcome.kind, outcome.error
    return [outcome.value for outcome in outcomes]


def own_address() -> str:
    """Return this machine's address in its network; without a network, skip the test."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent to collect its status does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _own_ports() -> Iterator[int]:
    """The ports of this process's tests, again and again, below those that the kernel gives to others."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw-1").removeprefix("gw")) + 1
    first, skipped = 20_000 + 1000 * (number % 12), os.getpid() % 1000  # another run of tests is somewhere else
    return itertools.cycle([*range(first + skipped, first + 1000), *range(first, first + skipped)])


_PORTS = _own_ports()


def free_port() -> int:
    """A port that no process listens at, and that no other test is given soon."""
    while True:
        with suppress(OSError), socket.create_server(("", port := next(_PORTS))):
            return port


def environ_of(rank: int, size: int, port: int, host: str = "127.0.0.1") -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": host, "MASTER_PORT": str(port),
    }  # fmt: skip


def _live(end: Connection, environ: dict[str, str], call: bytes) -> None:
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the test process was started with
    torch.set_num_threads(1)  # as torchrun has it
    EARLIER.servers_return = True  # a call may catch the SystemExit of a server and prepare again, unlike a script
    try:
        outcome = Outcome(pickle.loads(call)())
    except OrchestraError as error:
        outcome = Outcome(error=str(error), kind=type(error).__name__, code=error.exit_code)
    except BaseException:
        outcome = Outcome(error=traceback.format_exc(), kind="crash", code=1)
    end.send_bytes(cloudpickle.dumps(outcome))


@dataclass
class Processes:
    """Some processes, each to make a call of its own."""

    calls: Sequence[Callable[[], Any]]
    more: Mapping[str, str] | Sequence[Mapping[str, str]] = field(default_factory=dict)  # of the environment
    host: str = "127.0.0.1"

    def __enter__(self) -> Self:
        port, size = free_port(), len(self.calls)
        each = [self.more] * size if isinstance(self.more, Mapping) else self.more
        self.ends, self.processes = [], []
        for rank, call in enumerate(self.calls):
            mine, theirs = _CONTEXT.Pipe(duplex=False)
            environ = environ_of(rank, size, port, self.host) | dict(each[rank])
            process = _CONTEXT.Process(target=_live, args=(theirs, environ, cloudpickle.dumps(call)), daemon=True)
            process.start()
            theirs.close()
            self.ends.append(mine)
            self.processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def outcomes(self, *, seconds: float = 60) -> list[Outcome]:
        """Wait until all have ended."""
        found = []
        for rank, end in enumerate(self.ends):
            if not wait([end], timeout=seconds):
                raise TimeoutError(f"process {rank} did not end within {seconds} s")
            try:
                found.append(pickle.loads(end.recv_bytes()))
            except EOFError:
                found.append(Outcome(kind="killed"))
        return found


def together(
    size: int, call: Callable[[], Any], *, seconds: float = 60, more: Mapping[str, str] | None = None
) -> list[Outcome]:
    """The same call from so many processes."""
    with Processes([call] * size, more or {}) as processes:
        return processes.outcomes(seconds=seconds)
