# SPDX-License-Identifier: Apache-2.0
"""The near end of a launcher: processes on many machines as if they were one program.

    rank 0 is heard as it is, line by line; the others on standard error, each line with its host in front
    Ctrl-C, SIGTERM     passed on: a run saves and stops, a script does as it likes; a second one kills
    one fails           the others have a few seconds to notice, are asked to stop, are killed; the first cause is told
    we die              so does the input of every far end, and with it what runs there

The far end is `orchestra.launchers.agent`, behind ssh or whatever else carries its input and output.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from typing import IO, Any, Literal, Protocol

from orchestra.errors import ClusterError, ConfigError, Stopped, WorkerLost

Heard = tuple[Literal["out", "err"], bytes]
Ended = tuple[Literal["end"], int]
News = SimpleQueue[tuple[int | None, Heard | Ended | tuple[Literal["signal"], int]]]  # of a rank, or of ourselves

SILENCE, GRACE = 60.0, 20.0  # seconds that a far end waits for a word; and for a process to save when there is none
_PULSE = 5.0  # seconds between two words that say we are there
_NOTICE = 3.0  # seconds to notice that another has failed
_KILLED = 5.0  # seconds to be gone after being killed
_LAST_WORDS = 1.0  # seconds for what was said and is not yet read
_TAIL = 12  # lines of standard error that are repeated
_OPENINGS = 1 << 16  # bytes of a line that does not end
_PR_SET_PDEATHSIG = 1  # of prctl.h
_REFUSED = ConfigError.exit_code  # of those who find something wrong with the command
# Exit codes of those who noticed that another was gone, the likeliest cause first: all say so if its host is gone.
_CONSEQUENCES = (ClusterError.exit_code, WorkerLost.exit_code, Stopped.exit_code)


class AgentLink(Protocol):
    """To the far end of one process. What comes back is put among the news."""

    def say(self, word: str) -> None:
        """One line."""

    def cut(self) -> None:
        """Hang up."""


def ending_with_us() -> Callable[[], None]:
    """For `preexec_fn`: SIGTERM for the new process when the thread that starts it ends, so also when we are killed.

    An ssh that still connects does not read its input, so it would not notice that.
    """
    libc, us = ctypes.CDLL(None), os.getpid()

    def tie() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != us:  # we died before the line above took effect
            os._exit(1)

    return tie


class AgentProcess:
    """A far end behind a command, such as ssh. `tied`: the command ends with the thread that starts it."""

    def __init__(self, rank: int, command: Sequence[str], orders: str, news: News, *, tied: bool = False) -> None:
        self._rank, self._news = rank, news
        # A session of its own: Ctrl-C on our terminal is for us to pass on.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
            preexec_fn=ending_with_us() if tied else None,
        )
        self.say(orders)
        threading.Thread(target=self._listen, daemon=True).start()

    def say(self, word: str) -> None:
        """One line; whether anybody is left to hear it, the news tell."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(word.encode() + b"\n")

    def cut(self) -> None:
        """Hang up."""
        self._process.kill()

    def _listen(self) -> None:
        kinds: tuple[Literal["out", "err"], ...] = ("out", "err")
        pipes = zip(kinds, (self._process.stdout, self._process.stderr), strict=True)
        ears = [threading.Thread(target=self._hear, args=pair, daemon=True) for pair in pipes]
        for ear in ears:
            ear.start()
        code = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        for ear in ears:  # one that ssh left in the background may keep a pipe open for ever
            ear.join(_LAST_WORDS)
        self._news.put((self._rank, ("end", code if code >= 0 else 128 - code)))

    def _hear(self, kind: Literal["out", "err"], pipe: IO[bytes]) -> None:
        with pipe:
            while said := os.read(pipe.fileno(), 1 << 16):
                self._news.put((self._rank, (kind, said)))


@dataclass
class ProcessGroup:
    """Processes that play together, from the first to the last of them."""

    names: Sequence[str]  # of the host of each rank
    news: News
    grace: float = GRACE  # seconds between asking to stop and killing
    asking: str = "stop, and waits for those that save first"  # whether a script does, nobody knows
    silent: bool = False  # nothing that the processes print is passed on
    wires: dict[int, AgentLink] = field(default_factory=dict)
    statuses: dict[int, int] = field(default_factory=dict)  # in the order in which they ended
    tails: dict[int, deque[bytes]] = field(default_factory=dict)
    _open: dict[tuple[int, str], bytes] = field(default_factory=dict)  # lines that have not ended
    _due: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    _asked: int | None = None  # the signal that we were sent
    _stopping: bool = False  # whoever fails now does because we asked
    _killed: bool = False
    _failed: tuple[int, ...] = ()  # before anybody was asked to stop, in order

    def play(self, wires: Mapping[int, AgentLink]) -> int:
        """Listen until all have ended; gives the exit code of the whole."""
        self.wires = dict(wires)
        self.tails = {rank: deque(maxlen=_TAIL) for rank in wires}
        self._due = [(time.monotonic() + _PULSE, self._pulse)]
        try:
            with _signals(self.news):
                while len(self.statuses) < len(self.wires):
                    self._turn()
        finally:
            for wire in self.wires.values():
                wire.cut()
        return self._verdict()

    def _turn(self) -> None:
        """Hear one piece of news, or do what is due."""
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
            case ("out" | "err") as kind, bytes(said):
                assert rank is not None
                self._pass_on(rank, kind, said)

    # Stopping.

    def _say(self, word: str) -> None:
        for rank, wire in self.wires.items():
            if rank not in self.statuses:
                wire.say(word)

    def _pulse(self) -> None:
        self._say("")
        self._due.append((time.monotonic() + _PULSE, self._pulse))

    def _stop(self, number: int) -> None:
        """As Ctrl-C asks: the first time when they like, which is when they have saved, the second time at once."""
        if self._asked is not None:
            self._kill()
            return
        self._asked = number
        self._say("SIGINT" if number == signal.SIGINT else "SIGTERM")
        self._tell(f"asked all to {self.asking}; once more kills them")

    def _ended(self, rank: int, status: int) -> None:
        self.statuses[rank] = status
        if status == 0 or (self._asked is not None and status in (130, 143)):
            return
        # Of those who were asked to stop, one may still be the cause that others only told of.
        if self._stopping and (status >= 128 or not self._failed or self.statuses[self._cause()] not in _CONSEQUENCES):
            return
        if not self._failed:
            now = time.monotonic()
            self._due += [(now + _NOTICE, self._end), (now + _NOTICE + self.grace, self._kill)]
        self._failed += (rank,)

    def _end(self) -> None:
        self._stopping = True
        self._say("SIGTERM")

    def _kill(self) -> None:
        self._stopping = self._killed = True
        self._say("SIGKILL")
        self._due.append((time.monotonic() + _KILLED, self._hang_up))

    def _hang_up(self) -> None:
        for rank, wire in self.wires.items():
            if rank not in self.statuses:
                wire.cut()

    # What is printed.

    def _pass_on(self, rank: int, kind: str, said: bytes) -> None:
        *lines, rest = (self._open.get((rank, kind), b"") + said).split(b"\n")
        if len(rest) > _OPENINGS:
            lines, rest = [*lines, rest], b""
        self._open[rank, kind] = rest
        self._note(rank, kind, lines)

    def _flush(self, rank: int) -> None:
        """Lines that were never ended."""
        for kind in ("out", "err"):
            if rest := self._open.pop((rank, kind), b""):
                self._note(rank, kind, [rest], ended=False)

    def _note(self, rank: int, kind: str, lines: Sequence[bytes], *, ended: bool = True) -> None:
        """Whole lines, one after the other: none of another process falls into one of them."""
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]  # what is left of a bar that was redrawn
        if kind == "err":
            self.tails[rank].extend(shown)
        if self.silent:
            return
        if rank and lines:
            _write(2, b"".join(b"%s | %s\n" % (self.name_of(rank).encode(), line) for line in shown))
        elif lines:
            _write(1 if kind == "out" else 2, b"".join(line + b"\n" for line in lines)[: None if ended else -1])

    def name_of(self, rank: int) -> str:
        """The host, and the rank where a host has several."""
        name = self.names[rank]
        return name if self.names.count(name) == 1 else f"{name}[{rank}]"

    # How it went.

    def _verdict(self) -> int:
        """The exit code: of the first that failed, else of rank 0."""
        if not self._failed:
            return 128 + self._asked if self._killed and self._asked else self.statuses[0]
        rank = self._cause()
        status, tail = self.statuses[rank], list(self.tails[rank])
        self._tell(f"rank {rank} on {self.names[rank]} failed first: {_words(status)}")
        if tail and not self.silent:
            self._tell("the last lines of its standard error:")
            _write(2, b"".join(b"  %s\n" % line for line in tail))
        return status

    def _tell(self, message: str) -> None:
        if not self.silent:
            print(f"orchestra: {message}", file=sys.stderr, flush=True)

    @property
    def last_words(self) -> str:
        """The last line that the process which failed first wrote to standard error, or how it ended."""
        if not self._failed:
            return ""
        rank = self._cause()
        said = [line.decode(errors="replace").strip() for line in self.tails[rank]]
        return next((line for line in reversed(said) if line), _words(self.statuses[rank]))

    def _cause(self) -> int:
        """Who failed first; but whoever only says that another ended is not the cause, even if heard sooner."""
        for known in range(len(_CONSEQUENCES) + 1):
            suspects = [rank for rank in self._failed if self.statuses[rank] not in _CONSEQUENCES[known:]]
            if suspects:
                first = suspects[0]
                if self.statuses[first] == _REFUSED:  # all find it, and one process of each host says it: that one
                    alike = (rank for rank in suspects if self.statuses[rank] == _REFUSED and self.tails[rank])
                    first = next(alike, first)
                return first
        return self._failed[0]


@contextmanager
def _signals(news: News) -> Iterator[None]:
    """Signals as news. SimpleQueue is the one queue that may be put into while it is read from."""
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


def _words(status: int) -> str:
    if status == 255:
        return "exit status 255, as when a connection is lost"
    if status > 128:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(status - 128).name} (exit status {status})"
    return f"exit status {status}"


def _write(fd: int, data: bytes) -> None:
    """Straight to the descriptor: what rank 0 prints is not ours to decode."""
    (sys.stdout if fd == 1 else sys.stderr).flush()
    while data:
        data = data[os.write(fd, data) :]
