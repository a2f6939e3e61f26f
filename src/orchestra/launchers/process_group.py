# SPDX-License-Identifier: Apache-2.0
"""Processes on one or many machines that run as one program.

    output              rank 0's unchanged, line by line; that of the others on standard error, with the host in front
    Ctrl-C, SIGTERM     passed on: a run saves and stops, a script handles it in its own way; a second one kills
    one fails           the others have a few seconds to notice, are asked to stop, are killed; the first cause is named
    the launcher dies   the input of every agent closes, and the agent ends what it has started

A process is reached through a link: `LocalProcess` for one of this machine, `AgentProcess` for one behind
`orchestra.launchers.agent`, whose input and output ssh or another program carries.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import IO, Any, BinaryIO, Literal, Protocol

from orchestra.errors import ClusterError, ConfigError, Stopped, WorkerLost
from orchestra.launchers.marked_processes import ending_with_parent, exit_status

Output = tuple[Literal["out", "err"], bytes]
Ended = tuple[Literal["end"], int]
News = SimpleQueue[tuple[int | None, Output | Ended | tuple[Literal["signal"], int]]]  # from a rank, or this process

SILENCE, GRACE = 60.0, 20.0  # seconds that an agent waits for a message; and then for its process to save
_PULSE = 5.0  # seconds between two messages that show that the launcher is alive
_NOTICE = 3.0  # seconds for processes to notice that another has failed
_KILLED = 5.0  # seconds to end after being killed
_LAST_OUTPUT = 1.0  # seconds for output that was printed and not yet read
_TAIL = 12  # lines of standard error that are repeated
_LONGEST_LINE = 1 << 16  # bytes; a longer one is passed on in parts
_REFUSED = ConfigError.exit_code  # of processes that reject the command
# Exit codes of processes that only noticed the end of another, the likeliest cause first.
_CONSEQUENCES = (ClusterError.exit_code, WorkerLost.exit_code, Stopped.exit_code)


class ProcessLink(Protocol):
    """Connection to one process. Its output and its end are put into the queue of news."""

    def send(self, message: str) -> None:
        """Send one line: the name of a signal for the process, or an empty one to show that the launcher is alive."""

    def close(self) -> None:
        """End the connection, and the process with it."""


class LocalProcess:
    """A process of this machine, in a session of its own: the launcher passes on a Ctrl-C of the terminal."""

    def __init__(
        self,
        rank: int,
        command: Sequence[str],
        news: News,
        *,
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        preexec_fn: Callable[[], None] | None = None,
    ) -> None:
        self._rank, self._news = rank, news
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
            preexec_fn=preexec_fn,
        )
        self.stdin = self._process.stdin
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: str) -> None:
        """Send a signal, by its name, to the process and its group."""
        if message and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.Signals[message])

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()

    def _listen(self) -> None:
        kinds: tuple[Literal["out", "err"], ...] = ("out", "err")
        pipes = zip(kinds, (self._process.stdout, self._process.stderr), strict=True)
        readers = [threading.Thread(target=self._read, args=pair, daemon=True) for pair in pipes]
        for reader in readers:
            reader.start()
        code = self._process.wait()
        if self.stdin is not None:
            self.stdin.close()
        for reader in readers:  # a background process may keep a pipe open indefinitely
            reader.join(_LAST_OUTPUT)
        self._news.put((self._rank, ("end", exit_status(code))))

    def _read(self, kind: Literal["out", "err"], pipe: IO[bytes]) -> None:
        with pipe:
            while printed := os.read(pipe.fileno(), 1 << 16):
                self._news.put((self._rank, (kind, printed)))


class AgentProcess:
    """A process started by an agent, which a command such as ssh reaches. `tied`: the command ends with this process.

    An ssh that is still connecting does not read its input, so it would not notice that the input closes.
    """

    def __init__(self, rank: int, command: Sequence[str], orders: str, news: News, *, tied: bool = False) -> None:
        tie = ending_with_parent(signal.SIGTERM) if tied else None
        self._agent = LocalProcess(rank, command, news, stdin=subprocess.PIPE, preexec_fn=tie)
        self.send(orders)

    def send(self, message: str) -> None:
        """Send one line to the agent. If the agent has ended, the queue of news says so."""
        assert self._agent.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._agent.stdin.write(message.encode() + b"\n")

    def close(self) -> None:
        """Kill the command: the agent's input closes."""
        self._agent.close()


@dataclass
class ProcessGroup:
    """The processes of one program, from their start to the end of the last."""

    names: Sequence[str]  # of the host of each rank
    news: News
    grace: float = GRACE  # seconds between asking to stop and killing
    asking: str = "stop, and waits for those that save first"  # a script may not save
    silent: bool = False  # the processes' output is not passed on
    # If patient, signals are passed on unchanged, saving may take any time, and processes get time to notice a
    # failure. If not, all are asked to stop by SIGINT, or at once at the first failure, and killed after the grace.
    patient: bool = True
    out: BinaryIO | None = None  # where output goes, with the host in front of every line; None: as described above
    err: BinaryIO | None = None
    links: dict[int, ProcessLink] = field(default_factory=dict)
    statuses: dict[int, int] = field(default_factory=dict)  # in the order in which they ended
    tails: dict[int, deque[bytes]] = field(default_factory=dict)
    asked: int | None = None  # the signal that this process was sent
    _open: dict[tuple[int, str], bytes] = field(default_factory=dict)  # lines that have not ended
    _due: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _stopping: bool = False  # later failures are consequences of the request to stop
    _killed: bool = False
    _failed: tuple[int, ...] = ()  # before the others were asked to stop, in order

    def run(self, links: Mapping[int, ProcessLink]) -> int:
        """Pass on output and signals until all processes have ended; return the exit code of the group."""
        self.links = dict(links)
        self.tails = {rank: deque(maxlen=_TAIL) for rank in links}
        self._due = [(time.monotonic() + _PULSE, self._pulse)]
        try:
            with _signals(self.news):
                while len(self.statuses) < len(self.links):
                    self._turn()
        finally:
            for link in self.links.values():
                link.close()
        return self._verdict()

    def _turn(self) -> None:
        """Handle one entry of the queue, or do what is due."""
        self._due.sort(key=lambda entry: entry[0])
        try:
            rank, news = self.news.get(timeout=max(0.0, self._due[0][0] - time.monotonic()))
        except Empty:
            _, act = self._due.pop(0)
            act()
            return
        match news:
            case "signal", int(number):
                self._stop(number)
            case "end", int(status):
                assert rank is not None
                self._flush(rank)
                self._ended(rank, status)
            case ("out" | "err") as kind, bytes(printed):
                assert rank is not None
                self._pass_on(rank, kind, printed)

    # Stopping.

    def _send_all(self, message: str) -> None:
        for rank, link in self.links.items():
            if rank not in self.statuses:
                link.send(message)

    def _pulse(self) -> None:
        self._send_all("")
        self._due.append((time.monotonic() + _PULSE, self._pulse))

    def _stop(self, number: int) -> None:
        """Ask all processes to stop; the second time, kill them."""
        if self.asked is not None:
            self._kill()
            return
        self.asked = number
        self._send_all("SIGINT" if number == signal.SIGINT or not self.patient else "SIGTERM")
        if not self.patient:
            self._due.append((time.monotonic() + self.grace, self._kill))
        self._tell(f"asked all to {self.asking}; a second signal kills them")

    def _ended(self, rank: int, status: int) -> None:
        self.statuses[rank] = status
        if status == 0 or (self.asked is not None and (status in (130, 143) or not self.patient)):
            return
        # Of the processes that were asked to stop, one may still be the cause that others only noticed.
        if self._stopping and (status >= 128 or not self._failed or self.statuses[self._cause()] not in _CONSEQUENCES):
            return
        if not self._failed:
            end = time.monotonic() + (_NOTICE if self.patient else 0.0)
            self._due += [(end, self._end), (end + self.grace, self._kill)]
        self._failed += (rank,)

    def _end(self) -> None:
        self._stopping = True
        self._send_all("SIGTERM")

    def _kill(self) -> None:
        self._stopping = self._killed = True
        self._send_all("SIGKILL")
        self._due.append((time.monotonic() + _KILLED, self._close))

    def _close(self) -> None:
        for rank, link in self.links.items():
            if rank not in self.statuses:
                link.close()

    # Output.

    def _pass_on(self, rank: int, kind: str, printed: bytes) -> None:
        *lines, rest = (self._open.get((rank, kind), b"") + printed).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        self._open[rank, kind] = rest
        self._print(rank, kind, lines)

    def _flush(self, rank: int) -> None:
        """Print the lines that a process has begun and not ended."""
        for kind in ("out", "err"):
            if rest := self._open.pop((rank, kind), b""):
                self._print(rank, kind, [rest], ended=False)

    def _print(self, rank: int, kind: str, lines: Sequence[bytes], *, ended: bool = True) -> None:
        """Print whole lines, so that those of two processes do not mix."""
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]  # the last state of a progress bar
        if kind == "err":
            self.tails[rank].extend(shown)
        if self.silent or not lines:
            return
        named = b"".join(b"%s | %s\n" % (self.name_of(rank).encode(), line) for line in shown)
        if (to := self.out if kind == "out" else self.err) is not None:
            to.write(named)
            to.flush()
        elif rank:
            _write(2, named)
        else:
            _write(1 if kind == "out" else 2, b"".join(line + b"\n" for line in lines)[: None if ended else -1])

    def name_of(self, rank: int) -> str:
        """Return the name of a rank's host, with the rank if the host has several."""
        name = self.names[rank]
        return name if self.names.count(name) == 1 else f"{name}[{rank}]"

    # The result.

    def _verdict(self) -> int:
        """Return the exit code of the process that failed first, or else of rank 0."""
        if not self._failed:
            return 128 + self.asked if self._killed and self.asked else self.statuses[0]
        rank = self._cause()
        status, tail = self.statuses[rank], list(self.tails[rank])
        self._tell(f"rank {rank} on {self.names[rank]} failed first: {_describe(status)}")
        if tail and not self.silent and self.out is None:
            self._tell("the last lines of its standard error:")
            _write(2, b"".join(b"  %s\n" % line for line in tail))
        return status

    def _tell(self, message: str) -> None:
        if not self.silent and self.out is None:
            print(f"orchestra: {message}", file=sys.stderr, flush=True)

    @property
    def last_error(self) -> str:
        """The last line that the first process to fail wrote to standard error, or how it ended."""
        if not self._failed:
            return ""
        rank = self._cause()
        printed = [line.decode(errors="replace").strip() for line in self.tails[rank]]
        return next((line for line in reversed(printed) if line), _describe(self.statuses[rank]))

    def _cause(self) -> int:
        """Return the first rank that failed, leaving out processes that only report the end of another."""
        for known in range(len(_CONSEQUENCES) + 1):
            suspects = [rank for rank in self._failed if self.statuses[rank] not in _CONSEQUENCES[known:]]
            if suspects:
                first = suspects[0]
                if self.statuses[first] == _REFUSED:  # all reject it, and one process of each host prints why
                    alike = (rank for rank in suspects if self.statuses[rank] == _REFUSED and self.tails[rank])
                    first = next(alike, first)
                return first
        return self._failed[0]


@contextmanager
def _signals(news: News) -> Iterator[None]:
    """Put signals into the queue of news; a SimpleQueue allows that while the same thread reads from it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old: dict[int, Any] = {
        number: signal.signal(number, lambda number, _: news.put((None, ("signal", number)))) for number in numbers
    }
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def _describe(status: int) -> str:
    if status == 255:
        return "exit status 255, as when a connection is lost"
    if status > 128:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(status - 128).name} (exit status {status})"
    return f"exit status {status}"


def _write(fd: int, data: bytes) -> None:
    """Write bytes unchanged: rank 0 may print something that is not text."""
    (sys.stdout if fd == 1 else sys.stderr).flush()
    while data:
        data = data[os.write(fd, data) :]
