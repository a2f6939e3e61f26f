# SPDX-License-Identifier: Apache-2.0
"""`ip` and `tc` commands, the lock that lets one process build at a time, and the processes in namespaces."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestra.errors import EnvironmentProblem
from orchestra.runs.files import lock_file

NAMESPACES = Path("/run/netns")  # where `ip netns` keeps them
_LOCK = "/run"  # a folder that always exists: no lock file is left behind
_PATIENCE = 30.0  # seconds that a command may take, and that another process may build

Identity = tuple[int, int]


def refuse_without(*, delayed: bool = False) -> None:
    """Raise early if this machine cannot have a lab."""
    instead = "Or use Docker: orchestra lab compose --help"
    if os.geteuid() != 0:
        raise EnvironmentProblem(
            f"a lab needs root, and this is user {os.geteuid()}: it makes network namespaces. "
            f'Try: sudo "$(command -v orchestra)" lab ... {instead}'
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise EnvironmentProblem(
            f"{' and '.join(missing)} not found on PATH. Install iproute2 (apt-get install iproute2). {instead}"
        )
    if delayed and not os.path.exists("/dev/net/tun"):
        raise EnvironmentProblem(
            "/dev/net/tun is missing, which latencies need (CONFIG_TUN). Try modprobe tun, or leave --latency out."
        )


@dataclass(frozen=True)
class IpCommands:
    """Runs `ip` and `tc`."""

    lock: int | None = None  # every command inherits it: after a builder is killed, the next waits for its command

    def ip(self, *words: str, inside: str | None = None, needs: str = "") -> None:
        """Run one `ip` command."""
        self.call(["ip", *(["-n", inside] if inside else []), *words], needs=needs)

    def batch(self, tool: str, lines: Iterable[str], *, inside: str, needs: str) -> None:
        """Run many commands of one tool in one namespace; the first failure ends the batch."""
        self.call([tool, "-n", inside, "-batch", "-"], stdin="\n".join(lines), needs=needs)

    def ask(self, tool: str, *words: str, inside: str) -> list[dict[str, Any]]:
        """Return the output of a `show` command; nothing if there is no such object."""
        said = subprocess.run([tool, "-n", inside, "-j", *words], capture_output=True, text=True, check=False)
        found: list[dict[str, Any]] = json.loads(said.stdout or "[]") if said.returncode == 0 else []
        return [entry for entry in found if entry]

    def call(self, command: list[str], *, stdin: str = "", needs: str = "") -> None:
        """Run a command; if it fails, raise with what it needs."""
        keep = () if self.lock is None else (self.lock,)
        try:
            said = subprocess.run(
                command, input=stdin, capture_output=True, text=True, check=False, pass_fds=keep, timeout=_PATIENCE
            )
        except subprocess.TimeoutExpired:
            raise EnvironmentProblem(f"`{' '.join(command)}` did not end within {_PATIENCE:.0f} s.") from None
        if said.returncode:
            why = " ".join((said.stderr or said.stdout).split())[:300]
            step = _failed_line(said.stderr, stdin) or " ".join(command)
            raise EnvironmentProblem(f"`{step}` failed: {why}. {needs}".rstrip())


def _failed_line(complaint: str, batch: str) -> str:
    """Return the line that a batch stopped at: its output ends with "Command failed -:3"."""
    _, found, number = complaint.rpartition("Command failed -:")
    return batch.splitlines()[int(number) - 1] if found and number.strip().isdecimal() else ""


@contextmanager
def building() -> Iterator[IpCommands]:
    """Hold the lock for building and taking down labs; the kernel frees it if the process dies."""
    lock = os.open(_LOCK, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            lock_file(lock, within=_PATIENCE)
        except BlockingIOError:
            raise EnvironmentProblem(
                f"another `orchestra lab` has been building for {_PATIENCE:.0f} s: it holds a lock on {_LOCK}. "
                "Wait for it, or end it."
            ) from None
        yield IpCommands(lock)
    finally:
        os.close(lock)


# Namespaces and their processes.


def namespaces() -> list[str]:
    """Return the names of all network namespaces."""
    return sorted(os.listdir(NAMESPACES)) if NAMESPACES.is_dir() else []


def identity(path: str | Path) -> Identity | None:
    """Return a number pair that identifies the namespace of a file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def processes_in(names: Collection[str]) -> list[int]:
    """Return the processes in these namespaces, but none in this process's own or the machine's."""
    wanted = {identity(NAMESPACES / name) for name in names}
    wanted -= {None, identity("/proc/1/ns/net"), identity("/proc/self/ns/net")}
    if not wanted:
        return []
    return [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and identity(f"/proc/{pid}/ns/net") in wanted]
