# SPDX-License-Identifier: Apache-2.0
"""Running a command on hosts of a lab: on all at once, with their lines told apart, and none outlives it.

A host's command is in the host's namespace and cgroup and in a session of its own, and the kernel kills it if we die.
Whatever it starts carries a mark in its environment, by which it is found in the end.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, BinaryIO

from orchestra.errors import ConfigError, EnvironmentProblem, Interrupted, Problem
from orchestra.lab.cgroups import find_cgroups
from orchestra.lab.inspection import LabState
from orchestra.lab.ip_commands import environment_of, living_in
from orchestra.lab.plan import host_of, told

_MARK = "ORCHESTRA_LAB_RUN"
_GRACE = 5.0  # seconds between asking to end and killing
_PATIENCE = 10.0  # seconds for those that were killed to be gone
_LAST_WORDS = 1.0  # seconds for what was said and is not yet read
_ENTER = 'test -z "$0" || echo $$ > "$0" || exit 125; exec "$@"'  # into the cgroup, if there is one


def command_in(lab: LabState, host: int, command: Sequence[str]) -> list[str]:
    """The command line that runs a command on a host, for `subprocess`."""
    space = host_of(lab.name, host)
    shares = find_cgroups()
    door = (shares.door(space) if shares else None) or ""
    with_us = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    return ["sh", "-c", _ENTER, str(door), *with_us, "ip", "netns", "exec", space, *command]


def environment_in(lab: LabState, host: int) -> dict[str, str]:
    """What a host is told of itself and the others, beside the variables there are."""
    ours = told(lab.name, host - 1, [address or "" for address in lab.addresses])
    port = os.environ.get("MASTER_PORT", ours["MASTER_PORT"])
    # They share this machine's cores: threads that wait for each other spin, and a host that has all of them has none.
    threads = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // lab.size))}
    return threads | dict(os.environ) | ours | {"MASTER_PORT": port}


def run(
    lab: LabState,
    command: Sequence[str],
    *,
    host: int | None = None,
    out: BinaryIO | None = None,
    err: BinaryIO | None = None,
) -> int:
    """Run a command on one host, or on all with each line prefixed by its host; the status of the first that failed.

    One that fails ends the others, and so does Ctrl-C, which raises `Interrupted` afterwards.
    """
    lab.check()
    if not command:
        raise ConfigError([Problem("command", "", "say what to run: orchestra lab run -- hostname -I")])
    if host is not None and not 1 <= host <= lab.size:
        raise ConfigError([Problem("host", host, f"there is no such host; they count from 1 to {lab.size}")])
    sys.stdout.flush()  # theirs comes after what was printed before
    mark = f"{_MARK}={secrets.token_hex(8)}"
    spaces = [host_of(lab.name, i + 1) for i in range(lab.size)]
    try:
        if host is not None and out is None and err is None:
            return _alone(lab, host, command, mark)
        chosen = range(1, lab.size + 1) if host is None else [host]
        return _HostCommands(lab, chosen, command, mark, out or sys.stdout.buffer, err or sys.stderr.buffer).play()
    finally:
        _kill_marked(spaces, mark)


def _marked(environment: Mapping[str, str], mark: str) -> dict[str, str]:
    name, _, value = mark.partition("=")
    return {**environment, name: value}


def _kill_marked(spaces: Collection[str], mark: str) -> None:
    """End all that a run started and that is still there."""
    end = time.monotonic() + _PATIENCE
    while there := [pid for pid in living_in(spaces) if mark in environment_of(pid)]:
        if time.monotonic() > end:
            raise EnvironmentProblem(f"processes {there} cannot be killed; they wait for something in the kernel.")
        for pid in there:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _status(code: int) -> int:
    """As a shell counts: 128 and more for signals."""
    return code if code >= 0 else 128 - code


def _signal(processes: Iterable[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """To each command and all of its group."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)


def _alone(lab: LabState, host: int, command: Sequence[str], mark: str) -> int:
    """One host, with our own input and output. On a terminal it is in the foreground, and has Ctrl-C to itself."""
    terminal = sys.stdin is not None and sys.stdin.isatty()
    process = subprocess.Popen(
        command_in(lab, host, command),
        env=_marked(environment_in(lab, host), mark),
        start_new_session=not terminal,
    )
    stopped = False
    end: float | None = None
    try:
        while process.returncode is None:
            try:
                process.wait(None if end is None else max(0.0, end - time.monotonic()))
            except KeyboardInterrupt:
                if not terminal:
                    _signal([process], signal.SIGKILL if stopped else signal.SIGINT)
                    stopped, end = True, time.monotonic() + _GRACE
            except subprocess.TimeoutExpired:
                _signal([process], signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    if stopped:
        raise Interrupted(f"stopped on host-{host}.")
    return _status(process.returncode)


@dataclass
class _HostCommands:
    """Commands on several hosts at once."""

    lab: LabState
    hosts: Sequence[int]
    command: Sequence[str]
    mark: str
    out: BinaryIO
    err: BinaryIO
    playing: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    open_lines: dict[IO[bytes], bytes] = field(default_factory=dict)
    failed: int = 0  # the status of the first that failed
    end: float | None = None  # when those that were asked to end are killed

    def play(self) -> int:
        """From the start of the first to the end of the last."""
        stopped = False
        with selectors.DefaultSelector() as ears:
            try:
                for host in self.hosts:
                    self._start(host, ears)
                while self.playing:
                    try:
                        self._turn(ears)
                        if self.end is not None and time.monotonic() >= self.end:
                            self._ask_to_end(signal.SIGKILL)
                    except KeyboardInterrupt:
                        self._ask_to_end(signal.SIGKILL if stopped else signal.SIGINT)
                        stopped = True
            finally:
                self._clear(ears)
        if stopped:
            raise Interrupted("stopped on every host.")
        return self.failed

    def _clear(self, ears: selectors.BaseSelector) -> None:
        """End whoever is left, and hear what they had said."""
        _signal(self.playing.values(), signal.SIGKILL)
        _kill_marked([host_of(self.lab.name, host) for host in self.hosts], self.mark)
        self.end = time.monotonic() + _LAST_WORDS  # a program that hid from us may keep its pipe open for ever
        while ears.get_map() and time.monotonic() < self.end and self._turn(ears):
            pass
        for key in list(ears.get_map().values()):
            ears.unregister(key.fileobj)
            os.close(key.fd) if isinstance(key.fileobj, int) else key.fileobj.close()  # type: ignore[attr-defined]

    def _start(self, host: int, ears: selectors.BaseSelector) -> None:
        process = subprocess.Popen(
            command_in(self.lab, host, self.command),
            env=_marked(environment_in(self.lab, host), self.mark),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.playing[host] = process
        ears.register(os.pidfd_open(process.pid), selectors.EVENT_READ, (host, None))
        for pipe, to in ((process.stdout, self.out), (process.stderr, self.err)):
            assert pipe is not None
            self.open_lines[pipe] = b""
            ears.register(pipe, selectors.EVENT_READ, (host, to))

    def _turn(self, ears: selectors.BaseSelector) -> bool:
        """Hear whoever says something or ends. False: patience ended first."""
        heard = ears.select(None if self.end is None else max(0.0, self.end - time.monotonic()))
        for key, _ in heard:
            host, to = key.data
            if to is not None:
                self._relay(host, key.fileobj, to, ears)  # type: ignore[arg-type]
                continue
            ears.unregister(key.fileobj)
            os.close(key.fd)
            code = _status(self.playing.pop(host).wait())
            if code and self.end is None:
                self.failed = code
                self._ask_to_end(signal.SIGTERM)
        return bool(heard)

    def _relay(self, host: int, pipe: IO[bytes], to: BinaryIO, ears: selectors.BaseSelector) -> None:
        said = os.read(pipe.fileno(), 1 << 16)
        *lines, rest = (self.open_lines[pipe] + said).split(b"\n")
        if not said:
            ears.unregister(pipe)
            pipe.close()
            del self.open_lines[pipe]
            lines += [rest] if rest else []
        else:
            self.open_lines[pipe] = rest
        to.write(b"".join(b"host-%d | %s\n" % (host, line) for line in lines))
        to.flush()

    def _ask_to_end(self, number: signal.Signals) -> None:
        _signal(self.playing.values(), number)
        self.end = time.monotonic() + _GRACE
