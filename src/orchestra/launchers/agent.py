# SPDX-License-Identifier: Apache-2.0
"""The far end of a launcher: a line of JSON on standard input says what to do; an open input, that somebody cares.

    launcher                                     far end
    {"do": "check", ...}                     →   says its versions and what it lacks, in one line of JSON
    {"do": "sweep", "mark": m}               →   kills whatever carries the mark m in its environment
    {"do": "run", "argv": [...], ...}        →   runs it with the environment given; passes on what it prints
      SIGINT | SIGTERM | SIGKILL             →     to the process and its group
      an empty line, now and then            →     (the launcher is there)
      the end of input, or silence           →     SIGTERM; after a grace SIGKILL
                                             ←     exits as the process did, when nothing that it started is left

So the token of a run, which is part of the environment, is in no command line; and a launcher, a connection or a far
end that dies takes the process with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

MARK = "ORCHESTRA_LAUNCH"
_PR_SET_PDEATHSIG = 1
_PATIENCE = 10.0  # seconds for those that were killed to be gone
_LAST_WORDS = 2.0  # seconds for what was printed and is not yet passed on
_GLANCE = 0.5  # seconds between two looks at the clock
_WORDS = {number.name: number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)}
Orders = Mapping[str, Any]


def main() -> int:
    """Read what to do, and do it; gives the exit code."""
    ear = _Ear(sys.stdin.fileno())
    orders: Orders = json.loads(ear.first_line())
    match orders["do"]:
        case "check":
            print(json.dumps(look(orders)), flush=True)
            return 0
        case "sweep":
            kill_marked(orders["mark"])
            return 0
    return run(orders, ear)


# Before a run.


def look(orders: Orders) -> dict[str, Any]:
    """What runs here, and what is missing for what is asked: the folder, the first host's name, its port."""
    from orchestra._version import __version__

    problems = []
    if not os.path.isdir(orders["cwd"]):
        problems.append(f"has no folder {orders['cwd']}: make one, or say cwd= behind the host, or --cwd")
    try:
        socket.getaddrinfo(orders["master"], None)
    except OSError as error:
        problems.append(f"does not know {orders['master']} ({error}): say --master with an address all hosts can reach")
    torch = _version("torch")
    if torch is None:
        problems.append(f"has no torch for {sys.executable}: install it, or say python= behind the host, or --python")
    port = orders["port"]
    if orders["first"]:
        port = _free(orders["port"], orders["any_port"])
        if port is None:
            problems.append(f"has another program on port {orders['port']}: say --port with one that is free")
    return {
        "orchestra": __version__,
        "torch": torch,
        "code": _fingerprint(Path(__file__).parents[1]),
        "port": port,
        "problems": problems,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)  # without waiting for its import
    except importlib.metadata.PackageNotFoundError:
        return None


def _fingerprint(folder: Path) -> dict[str, str]:
    """Of each source: two checkouts of one version may differ."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:8]
        for path in sorted(folder.rglob("*.py"))
    }


def _free(wanted: int, any_port: bool) -> int | None:
    for port in (wanted, 0) if any_port else (wanted,):
        with contextlib.suppress(OSError), socket.create_server(("", port)) as door:
            return int(door.getsockname()[1])
    return None


# A run.


class _Ear:
    """Lines from a descriptor that may end or pause at any byte."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._rest = b""

    def first_line(self) -> str:
        """Wait for a whole line."""
        while b"\n" not in self._rest:
            more = os.read(self.fd, 1 << 16)
            if not more:
                raise SystemExit("orchestra.launchers.agent: is started by `orchestra launch`, which says what to do")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def lines(self) -> list[str] | None:
        """What can be read now; None at the end."""
        try:
            more = os.read(self.fd, 1 << 16)
        except OSError:
            more = b""
        *lines, self._rest = (self._rest + more).split(b"\n")
        return [line.decode(errors="replace") for line in lines] if more else None


def run(orders: Orders, ear: _Ear) -> int:
    """Run a process until it ends or nobody cares any more; its status as a shell counts."""
    try:
        process = _start(orders)
    except OSError as error:
        print(f"{orders['argv'][0]} cannot be run in {orders['cwd']}: {error}", file=sys.stderr)
        return 127
    voices = [
        threading.Thread(target=_pass_on, args=(pipe, to), daemon=True)
        for pipe, to in ((process.stdout, 1), (process.stderr, 2))
    ]
    for voice in voices:
        voice.start()
    try:
        _Watch(process, orders, ear).stand_by()
    finally:
        kill_marked(orders["mark"])
        code = process.wait()
    for voice in voices:
        voice.join(_LAST_WORDS)
    return code if code >= 0 else 128 - code


def _start(orders: Orders) -> subprocess.Popen[bytes]:
    libc, us = ctypes.CDLL(None), os.getpid()

    def with_us() -> None:
        """The kernel kills it if we are killed; and it can be interrupted, even if whoever started us cannot be."""
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if os.getppid() != us:
            os._exit(1)

    return subprocess.Popen(
        orders["argv"],
        cwd=orders["cwd"],
        env=os.environ | orders["environment"] | {MARK: orders["mark"]},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=with_us,  # there are no threads yet
    )


def _pass_on(pipe: IO[bytes], to: int) -> None:
    """Copy what is printed. When nobody reads it any more, read on: the process must still be able to save."""
    heard = True
    while said := os.read(pipe.fileno(), 1 << 16):
        while said and heard:
            try:
                said = said[os.write(to, said) :]
            except OSError:
                heard = False


class _Watch:
    """Over one process: until it ends, on behalf of a launcher that may be gone."""

    def __init__(self, process: subprocess.Popen[bytes], orders: Orders, ear: _Ear) -> None:
        self._process, self._mark, self._ear = process, orders["mark"], ear
        self._silence, self._grace = float(orders["silence"]), float(orders["grace"])  # seconds
        self._heard = time.monotonic()
        self._end: float | None = None  # when a process that was left alone is killed
        for number in (signal.SIGINT, signal.SIGHUP):  # from others than the launcher
            signal.signal(number, lambda number, _: self._signal(signal.Signals(number)))
        # Where the launcher started this process itself, the kernel sends SIGTERM when the launcher dies, beside the
        # end of input. The process hears of the two once: it would take a second SIGTERM as the order not to save.
        signal.signal(signal.SIGTERM, lambda *_: self._leave())

    def stand_by(self) -> None:
        """Return when the process has ended."""
        with selectors.DefaultSelector() as ears:
            ears.register(os.pidfd_open(self._process.pid), selectors.EVENT_READ)
            ears.register(self._ear.fd, selectors.EVENT_READ)
            while self._process.poll() is None:
                if any(key.fd == self._ear.fd for key, _ in ears.select(_GLANCE)) and not self._obey():
                    ears.unregister(self._ear.fd)
                    self._leave()
                now = time.monotonic()
                if now - self._heard > self._silence:
                    self._leave()
                if self._end is not None and now > self._end:
                    self._signal(signal.SIGKILL)

    def _obey(self) -> bool:
        """Do what the launcher says; False if it says no more."""
        words = self._ear.lines()
        self._heard = time.monotonic()
        for word in words or []:
            if word in _WORDS:
                self._signal(_WORDS[word])
        return words is not None

    def _leave(self) -> None:
        """Nobody waits for the process: let it save."""
        if self._end is None:
            self._end = time.monotonic() + self._grace
            self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        if number == signal.SIGKILL:
            kill_marked(self._mark)


def kill_marked(mark: str) -> None:
    """Kill every process of ours that carries a mark, and look again until none is left."""
    wanted, end = f"{MARK}={mark}".encode(), time.monotonic() + _PATIENCE
    while there := [pid for pid in _processes() if _carries(pid, wanted)]:
        if time.monotonic() > end:
            print(f"processes {there} cannot be killed; they wait for something in the kernel", file=sys.stderr)
            return
        for pid in there:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _processes() -> list[int]:
    return [pid for name in os.listdir("/proc") if name.isdecimal() and (pid := int(name)) != os.getpid()]


def _carries(pid: int, wanted: bytes) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has just ended, or is another's
        return False
    return any(entry.startswith(wanted) for entry in environment.split(b"\0"))


if __name__ == "__main__":
    sys.exit(main())
