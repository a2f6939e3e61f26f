# SPDX-License-Identifier: Apache-2.0
"""A launcher's agent on a machine: a line of JSON on its standard input says what to do.

    launcher                                     agent
    {"do": "check", ...}                     →   prints its versions and what it lacks, in one line of JSON
    {"do": "sweep", "mark": m}               →   kills all processes with the mark m in their environment
    {"do": "run", "argv": [...], ...}        →   runs a process with the given environment; passes on its output
      SIGINT | SIGTERM | SIGKILL             →     sends the signal to the process and its group
      an empty line, every few seconds       →     (the launcher is alive)
      the end of input, or silence           →     sends SIGTERM; after a grace SIGKILL
                                             ←     exits as the process did, once nothing that it started is left

So the token of a run, which is part of the environment, is in no command line; and the process ends when the launcher,
the connection or the agent does.
"""

from __future__ import annotations

import contextlib
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

from orchestra.launchers.marked_processes import ending_with_parent, exit_status, kill_marked

_MARK = "ORCHESTRA_LAUNCH"
_PATIENCE = 10.0  # seconds for killed processes to end
_LAST_OUTPUT = 2.0  # seconds for output that was printed and not yet passed on
_SLICE = 0.5  # seconds between two checks of the clock
_SIGNALS = {number.name: number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)}
Orders = Mapping[str, Any]


def main() -> int:
    """Read an order and carry it out; return the exit code."""
    lines = _InputLines(sys.stdin.fileno())
    orders: Orders = json.loads(lines.first())
    match orders["do"]:
        case "check":
            print(json.dumps(check_machine(orders)), flush=True)
            return 0
        case "sweep":
            _kill(orders["mark"])
            return 0
    return run(orders, lines)


# Before a run.


def check_machine(orders: Orders) -> dict[str, Any]:
    """Report the versions here, and what these orders lack: the folder, the first host's name, its port."""
    from orchestra._version import __version__

    problems = []
    if not os.path.isdir(orders["cwd"]):
        problems.append(f"has no folder {orders['cwd']}: make one, or set cwd= behind the host, or --cwd")
    try:
        socket.getaddrinfo(orders["master"], None)
    except OSError as error:
        problems.append(f"cannot resolve {orders['master']} ({error}): give --master an address that all can reach")
    torch = _version("torch")
    if torch is None:
        problems.append(f"has no torch for {sys.executable}: install it, or set python= behind the host, or --python")
    port = orders["port"]
    if orders["first"]:
        port = _free(orders["port"], orders["any_port"])
        if port is None:
            problems.append(f"has another program on port {orders['port']}: give --port one that is free")
    return {
        "orchestra": __version__,
        "torch": torch,
        "code": _fingerprint(Path(__file__).parents[1]),
        "port": port,
        "problems": problems,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)  # without importing it
    except importlib.metadata.PackageNotFoundError:
        return None


def _fingerprint(folder: Path) -> dict[str, str]:
    """Hash each source: two checkouts of one version may differ."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:8]
        for path in sorted(folder.rglob("*.py"))
    }


def _free(wanted: int, any_port: bool) -> int | None:
    for port in (wanted, 0) if any_port else (wanted,):
        with contextlib.suppress(OSError), socket.create_server(("", port)) as listener:
            return int(listener.getsockname()[1])
    return None


# A run.


class _InputLines:
    """Lines from a descriptor that may end or pause at any byte."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._rest = b""

    def first(self) -> str:
        """Wait for the first whole line, and return it."""
        while b"\n" not in self._rest:
            more = os.read(self.fd, 1 << 16)
            if not more:
                raise SystemExit("orchestra.launchers.agent: only `orchestra launch` starts this program")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()

    def ready(self) -> list[str] | None:
        """Return the lines that can be read now; None at the end."""
        try:
            more = os.read(self.fd, 1 << 16)
        except OSError:
            more = b""
        *lines, self._rest = (self._rest + more).split(b"\n")
        return [line.decode(errors="replace") for line in lines] if more else None


def run(orders: Orders, lines: _InputLines) -> int:
    """Run a process until it ends or the launcher is gone; return its exit status, as a shell gives it."""
    try:
        process = _start(orders)
    except OSError as error:
        print(f"{orders['argv'][0]} cannot be run in {orders['cwd']}: {error}", file=sys.stderr)
        return 127
    copiers = [
        threading.Thread(target=_pass_on, args=(pipe, to), daemon=True)
        for pipe, to in ((process.stdout, 1), (process.stderr, 2))
    ]
    for copier in copiers:
        copier.start()
    try:
        _Watch(process, orders, lines).until_end()
    finally:
        _kill(orders["mark"])
        code = process.wait()
    for copier in copiers:
        copier.join(_LAST_OUTPUT)
    return exit_status(code)


def _start(orders: Orders) -> subprocess.Popen[bytes]:
    tie = ending_with_parent(signal.SIGKILL)

    def prepare() -> None:
        tie()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher may have been started with it ignored
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    return subprocess.Popen(
        orders["argv"],
        cwd=orders["cwd"],
        env=os.environ | orders["environment"] | {_MARK: orders["mark"]},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=prepare,  # there are no threads yet
    )


def _pass_on(pipe: IO[bytes], to: int) -> None:
    """Copy output. When the launcher is gone, keep reading: the process must still be able to print, and save."""
    open_ = True
    while printed := os.read(pipe.fileno(), 1 << 16):
        while printed and open_:
            try:
                printed = printed[os.write(to, printed) :]
            except OSError:
                open_ = False


class _Watch:
    """Carries out the launcher's messages for one process until it ends, also when the launcher is gone."""

    def __init__(self, process: subprocess.Popen[bytes], orders: Orders, lines: _InputLines) -> None:
        self._process, self._mark, self._lines = process, orders["mark"], lines
        self._silence, self._grace = float(orders["silence"]), float(orders["grace"])  # seconds
        self._last_message = time.monotonic()
        self._end: float | None = None  # when a process without a launcher is killed
        for number in (signal.SIGINT, signal.SIGHUP):  # not sent by the launcher
            signal.signal(number, lambda number, _: self._signal(signal.Signals(number)))
        # Where the launcher started this process itself, the kernel sends SIGTERM when the launcher dies, beside the
        # end of input. The process gets one SIGTERM for both: a second would make it end without saving.
        signal.signal(signal.SIGTERM, lambda *_: self._stop())

    def until_end(self) -> None:
        """Return when the process has ended."""
        with selectors.DefaultSelector() as selector:
            selector.register(os.pidfd_open(self._process.pid), selectors.EVENT_READ)
            selector.register(self._lines.fd, selectors.EVENT_READ)
            while self._process.poll() is None:
                if any(key.fd == self._lines.fd for key, _ in selector.select(_SLICE)) and not self._obey():
                    selector.unregister(self._lines.fd)
                    self._stop()
                now = time.monotonic()
                if now - self._last_message > self._silence:
                    self._stop()
                if self._end is not None and now > self._end:
                    self._signal(signal.SIGKILL)

    def _obey(self) -> bool:
        """Carry out the launcher's messages; return False at their end."""
        messages = self._lines.ready()
        self._last_message = time.monotonic()
        for message in messages or []:
            if message in _SIGNALS:
                self._signal(_SIGNALS[message])
        return messages is not None

    def _stop(self) -> None:
        """Let the process save and stop: its launcher is gone."""
        if self._end is None:
            self._end = time.monotonic() + self._grace
            self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        if number == signal.SIGKILL:
            _kill(self._mark)


def _kill(mark: str) -> None:
    if left := kill_marked(f"{_MARK}={mark}", _PATIENCE):
        print(f"processes {left} cannot be killed; they wait for something in the kernel", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
