# SPDX-License-Identifier: Apache-2.0
"""A run on hosts that ssh reaches: check every host, start one process for each slot, end with them.

    launcher ── ssh host ── orchestra.launchers.agent ── the process
    orders go to standard input, with the token among them: nothing secret is in a command line, on either machine

The only ports needed are ssh's and, between the hosts, those of the run.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestra.engine.environment import STARTED_BY
from orchestra.errors import ConfigError, EnvironmentProblem, Problem
from orchestra.launchers.hosts import PORT, LaunchHost, ProcessSlot, argv, place, process_slots
from orchestra.launchers.marked_processes import ending_with_parent
from orchestra.launchers.preflight import Answer, agree
from orchestra.launchers.process_group import GRACE, SILENCE, AgentProcess, News, ProcessGroup

_CONNECT = 10  # seconds to connect to a host
_ANSWER = 30.0  # seconds for a host to report its versions
_SWEEP = 10.0  # seconds to find and kill processes that were left behind
# Keys only, since ssh cannot ask for many passwords at once; a connection that is silent for 30 s counts as lost.
_OPTIONS = ("BatchMode=yes", f"ConnectTimeout={_CONNECT}", "ServerAliveInterval=10", "ServerAliveCountMax=3")
_REMEDIES = {
    "host key verification failed": "connect once by hand, {ssh} {host}, and accept its key",
    "permission denied (": "put your key there with ssh-copy-id {host}; ssh must not ask for a password",
    "could not resolve": "correct its name, or give its address",
    "no module named": "install this package there, or set python= behind the host, or --python",
    "not found": "set python= behind the host, or --python",
    "no such file": "set python= behind the host, or --python",
    "permission denied": "let this user run it there, or set python= behind the host, or --python",
    "unknown option": "set python= behind the host, or --python: it must be Python 3.11 or later",
}


@dataclass(frozen=True)
class SshLaunch:
    """Everything about a run but its token."""

    hosts: Sequence[LaunchHost]
    command: Sequence[str]
    ssh: Sequence[str] = ("ssh",)
    master: str | None = None  # where the others find the first host
    port: int | None = None
    environment: Mapping[str, str] | None = None
    grace: float = GRACE  # seconds to save when asked to stop
    again: str = ""  # the command that started it, up to what it starts

    @property
    def master_address(self) -> str:
        """The address that was given, or the first host's name for ssh."""
        return self.master or self.hosts[0].address

    def check(self) -> None:
        """Check the arguments, without reaching a host."""
        problems = []
        address = self.hosts[0].address
        nearby = address == "localhost" or address.startswith("127.")
        if nearby and self.master is None and len(self.hosts) > 1:
            message = "is another machine for every host: give --master the first host's address"
            problems.append(Problem("master", address, message))
        if self.port is not None and not 1 <= self.port <= 65535:
            problems.append(Problem("port", self.port, "must be from 1 to 65535"))
        if not self.ssh:
            problems.append(Problem("ssh", "", 'must be a command, e.g. "ssh -p 2222"'))
        if problems:
            raise ConfigError(problems)

    def line(self, host: LaunchHost) -> list[str]:
        """Return the command that starts the agent on a host. Other programs than ssh do not get its options."""
        options = [word for option in _OPTIONS for word in ("-o", option)] if Path(self.ssh[0]).name == "ssh" else []
        far = shlex.join([host.python, "-P", "-m", "orchestra.launchers.agent"])
        return [*self.ssh, *(["-T", *options] if options else []), host.name, f"exec {far}"]

    def place(self, slot: ProcessSlot, port: int) -> dict[str, str]:
        """Return the environment of the process in a slot, without the token."""
        size = sum(host.slots for host in self.hosts)
        found = place(slot.rank, size, slot.local_rank, slot.host.slots, self.master_address, port)
        return found | dict(self.environment or {})


def describe(run: SshLaunch) -> str:
    """Describe what `launch` would run on which host."""
    lines = []
    for slot in process_slots(run.hosts):
        host, found = slot.host, run.place(slot, run.port or PORT)
        lines += [
            f"rank {slot.rank} on {host.name}, in {host.cwd}:",
            f"  {shlex.join(run.line(host))}",
            "  on its standard input: ORCHESTRA_TOKEN, " + " ".join(f"{k}={shlex.quote(v)}" for k, v in found.items()),
            f"  which runs: {shlex.join(argv(run.command, host.python))}",
        ]
    return "\n".join(lines)


def launch(run: SshLaunch, token: str) -> int:
    """Start a run, pass on its output, end with it; return its exit code."""
    port = prepare(run)
    mark, news, slots = secrets.token_hex(8), News(), process_slots(run.hosts)
    group = ProcessGroup([slot.host.name for slot in slots], news, run.grace)
    try:
        code = group.run({slot.rank: _link(run, slot, port, token, mark, news) for slot in slots})
    finally:
        # A process that a signal or a lost connection ended may have left others behind; so may one of unknown status.
        doubtful = [slot.host for slot in slots if group.statuses.get(slot.rank, 255) >= 128]
        _sweep(run, list(dict.fromkeys(doubtful)), mark)
    return code


def _link(run: SshLaunch, slot: ProcessSlot, port: int, token: str, mark: str, news: News) -> AgentProcess:
    orders = {
        "do": "run",
        "argv": argv(run.command, slot.host.python),
        "cwd": slot.host.cwd,
        "environment": run.place(slot, port) | {"ORCHESTRA_TOKEN": token, STARTED_BY: run.again},
        "mark": f"{mark}:{slot.rank}.",
        "silence": SILENCE,
        "grace": run.grace,
    }
    return AgentProcess(slot.rank, run.line(slot.host), json.dumps(orders), news, tied=True)


def _sweep(run: SshLaunch, hosts: Sequence[LaunchHost], mark: str) -> None:
    """Kill processes that the agents could not; on a host that cannot be reached, the agent ends them."""
    _ask_all(run, [(host, {"do": "sweep", "mark": f"{mark}:"}) for host in hosts], _SWEEP)


# Before the start.


def prepare(run: SshLaunch) -> int:
    """Ask every host whether it can take part; return the port. Raises with the problems of all."""
    run.check()
    asked = {"do": "check", "master": run.master_address, "port": run.port or PORT, "any_port": run.port is None}
    questions = [(host, asked | {"cwd": host.cwd, "first": host is run.hosts[0]}) for host in run.hosts]
    said = _ask_all(run, questions, _ANSWER)
    answers = [(host.name, _understand(run, host, *words)) for host, words in zip(run.hosts, said, strict=True)]
    return int(agree(answers)[0]["port"])


def _ask_all(
    run: SshLaunch, questions: Sequence[tuple[LaunchHost, Mapping[str, Any]]], patience: float
) -> list[tuple[int, str, str]]:
    """Ask all hosts at once; return the exit status, standard output and standard error of each."""
    asked: list[subprocess.Popen[str]] = []
    end = time.monotonic() + patience
    try:
        for host, question in questions:
            asked.append(_ask(run.line(host), question))
        return [_answer(process, end, patience) for process in asked]
    finally:
        for process in asked:
            process.kill()


def _ask(line: Sequence[str], question: Mapping[str, Any]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            line, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True,
            preexec_fn=ending_with_parent(signal.SIGTERM),
        )  # fmt: skip
    except OSError as error:
        raise EnvironmentProblem(
            f"{line[0]} cannot be run here: {error}. Install it, or give --ssh a command that reaches hosts."
        ) from None
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin as far:
        far.write(json.dumps(question) + "\n")
    process.stdin = None  # `communicate` must not write to it
    return process


def _answer(process: subprocess.Popen[str], end: float, patience: float) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        return 124, "", f"no answer within {patience:.0f} s"
    return process.returncode, out, err


def _understand(run: SshLaunch, host: LaunchHost, status: int, out: str, err: str) -> Answer | str:
    """Return a host's answer, or what is wrong and what to do."""
    with contextlib.suppress(ValueError, IndexError):
        answer = json.loads(out.strip().splitlines()[-1])  # a login script may have printed something before
        if status == 0 and isinstance(answer, dict):
            return answer
    lines = err.strip().splitlines() or [f"exit status {status}"]
    known = ((line, remedy) for sign, remedy in _REMEDIES.items() for line in lines if sign in line.lower())
    why, remedy = next(known, (lines[-1], "try by hand: {ssh} {host} true"))
    return f"{why.strip().rstrip('.')}. Next: {remedy.format(ssh=shlex.join(run.ssh), host=host.name)}"
