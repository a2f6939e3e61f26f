# SPDX-License-Identifier: Apache-2.0
"""Run a command on hosts of a lab: on all at once, each line with its host in front.

A host's command is in the host's namespace and cgroup and in a session of its own, and the kernel kills it if this
process dies. All processes that it starts inherit a mark in their environment, by which they are found and killed at
the end.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from orchestra.errors import ConfigError, EnvironmentProblem, Interrupted, Problem
from orchestra.lab.cpu_shares import find_cgroups
from orchestra.lab.inspection import LabState
from orchestra.lab.plan import host_environment, host_of
from orchestra.launchers.marked_processes import exit_status, kill_marked
from orchestra.launchers.process_group import LocalProcess, News, ProcessGroup

_MARK = "ORCHESTRA_LAB_RUN"
_GRACE = 5.0  # seconds between asking to end and killing
_PATIENCE = 10.0  # seconds for killed processes to end
_ENTER = 'test -z "$0" || echo $$ > "$0" || exit 125; exec "$@"'  # into the cgroup, if there is one


def command_in(lab: LabState, host: int, command: Sequence[str]) -> list[str]:
    """Return the command line that runs a command on a host, for `subprocess`."""
    space = host_of(lab.name, host)
    shares = find_cgroups()
    procs_file = (shares.procs_file(space) if shares else None) or ""
    with_us = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    return ["sh", "-c", _ENTER, str(procs_file), *with_us, "ip", "netns", "exec", space, *command]


def environment_in(lab: LabState, host: int) -> dict[str, str]:
    """Return this process's environment, with the variables that describe a host and the others."""
    ours = host_environment(lab.name, host - 1, [address or "" for address in lab.addresses])
    port = os.environ.get("MASTER_PORT", ours["MASTER_PORT"])
    # The hosts share this machine's cores, and threads that wait for each other spin.
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
    """Run a command on one host, or on all with the host in front of each line; return the first status that failed.

    A host that fails ends the others, and so does Ctrl-C, which raises `Interrupted` afterwards.
    """
    lab.check()
    if not command:
        raise ConfigError([Problem("command", "", "give a command to run: orchestra lab run -- hostname -I")])
    if host is not None and not 1 <= host <= lab.size:
        raise ConfigError([Problem("host", host, f"there is no such host; they count from 1 to {lab.size}")])
    sys.stdout.flush()  # earlier output of this process comes first
    mark = secrets.token_hex(8)
    try:
        if host is not None and out is None and err is None:
            return _attached(lab, host, command, mark)
        chosen = range(1, lab.size + 1) if host is None else [host]
        return _on_hosts(lab, chosen, command, mark, out or sys.stdout.buffer, err or sys.stderr.buffer)
    finally:
        if left := kill_marked(f"{_MARK}={mark}", _PATIENCE):
            raise EnvironmentProblem(f"processes {left} cannot be killed; they wait for something in the kernel.")


def _attached(lab: LabState, host: int, command: Sequence[str], mark: str) -> int:
    """Run on one host, with this process's input and output; on a terminal in the foreground, where it gets Ctrl-C."""
    terminal = sys.stdin is not None and sys.stdin.isatty()
    process = subprocess.Popen(
        command_in(lab, host, command),
        env=_marked(lab, host, mark),
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
                    os.killpg(process.pid, signal.SIGKILL if stopped else signal.SIGINT)
                    stopped, end = True, time.monotonic() + _GRACE
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    if stopped:
        raise Interrupted(f"stopped on host-{host}.")
    return exit_status(process.returncode)


def _on_hosts(
    lab: LabState, hosts: Sequence[int], command: Sequence[str], mark: str, out: BinaryIO, err: BinaryIO
) -> int:
    names, news = [f"host-{host}" for host in hosts], News()
    group = ProcessGroup(names, news, _GRACE, patient=False, out=out, err=err)
    links = {
        rank: LocalProcess(rank, command_in(lab, host, command), news, environment=_marked(lab, host, mark))
        for rank, host in enumerate(hosts)
    }
    status = group.run(links)
    if group.asked is not None:
        error = Interrupted("stopped on every host.")
        error.exit_code = 128 + group.asked  # type: ignore[misc]
        raise error
    return status


def _marked(lab: LabState, host: int, mark: str) -> Mapping[str, str]:
    return environment_in(lab, host) | {_MARK: mark}
