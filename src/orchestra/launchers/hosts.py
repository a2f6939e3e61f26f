# SPDX-License-Identifier: Apache-2.0
"""The hosts of a run on many machines: their slots, and the rank of the process in each slot.

    # hosts.txt: one host a line, as ssh takes it
    ada@10.0.0.1   slots=2                              two processes
    10.0.0.2       python=/opt/py/bin/python  cwd=/data   paths that differ from those of this machine

Ranks count through the first host's slots, then the second's. A process finds its place in its environment, under the
names that torchrun uses.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestra.errors import ConfigError, Problem, nearest

PORT = 29500  # torchrun's
_NAME = re.compile(r"(?:[\w.][\w.-]*@)?[\w:][\w.:%-]*")  # no leading hyphen: ssh would take it for an option
_KEYS = ("cwd", "python", "slots")
_VERBS = ("run", "resume")  # commands that a node of a run can carry out


@dataclass(frozen=True)
class LaunchHost:
    """A machine: its name for ssh, its number of processes, its Python and its working directory."""

    name: str
    slots: int
    python: str
    cwd: str

    @property
    def address(self) -> str:
        """The name without the user."""
        return self.name.rpartition("@")[2]


@dataclass(frozen=True)
class ProcessSlot:
    """The place of one process: a rank, and a slot of a host."""

    rank: int
    local_rank: int
    host: LaunchHost


def process_slots(hosts: Sequence[LaunchHost]) -> list[ProcessSlot]:
    """Return every slot of every host, in rank order.

    >>> two = LaunchHost("a", 2, "python", "/"), LaunchHost("b", 1, "python", "/")
    >>> [(slot.rank, slot.host.name, slot.local_rank) for slot in process_slots(two)]
    [(0, 'a', 0), (1, 'a', 1), (2, 'b', 0)]
    """
    places = [(host, local) for host in hosts for local in range(host.slots)]
    return [ProcessSlot(rank, local, host) for rank, (host, local) in enumerate(places)]


def place(rank: int, size: int, local_rank: int, local_size: int, master: str, port: int) -> dict[str, str]:
    """Return the environment that tells a process its place."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_size),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "PYTHONUNBUFFERED": "1",  # output appears when it is printed, as in a terminal
    }


def argv(command: Sequence[str], python: str) -> list[str]:
    """Return the command after `--` with a host's own Python.

    >>> argv(["run", "digits"], "/opt/python")
    ['/opt/python', '-m', 'orchestra', 'run', 'digits']
    >>> argv(["python", "train.py"], "/opt/python")
    ['/opt/python', 'train.py']
    """
    first, *rest = command
    return [python, *rest] if first in ("python", "python3") else [python, "-m", "orchestra", *command]


def check_command(words: Sequence[str]) -> list[str]:
    """Return the command for every process; refuse one that no node of a run can carry out."""
    command = list(words[1:] if words[:1] == ["orchestra"] else words)
    example = "e.g. -- run digits --strategy slowmo, or -- python train.py"
    if not command:
        raise ConfigError([Problem("command", "", f"give the command to run after --, {example}")])
    if command[0] not in (*_VERBS, "python", "python3"):
        raise ConfigError([Problem("command", command[0], f"cannot be run on many machines; {example}")])
    if len(command) == 1:
        raise ConfigError([Problem("command", command[0], f"needs something to run, {example}")])
    return command


def read_hosts(path: Path, *, per_host: int, python: str, cwd: str) -> list[LaunchHost]:
    """Read the hosts in a file; raise with all problems, each with its line."""
    if per_host < 1:
        raise ConfigError([Problem("per-host", per_host, "must be at least 1 process")])
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem("hosts", str(path), f"cannot be read: {error}")]) from None
    found: dict[str, tuple[int, LaunchHost]] = {}
    problems: list[Problem] = []
    for number, line in enumerate(lines, start=1):
        try:
            host = _read(line, LaunchHost("", per_host, python, cwd))
            if host is None:
                continue
            if host.address in found:
                first = found[host.address][0]
                raise ValueError(f"is on line {first} already: set slots=2 there for two processes")
            found[host.address] = number, host
        except ValueError as error:
            problems.append(Problem(f"{path}:{number}", line.strip(), str(error)))
    if not found and not problems:
        problems.append(Problem("hosts", str(path), "names no host: write one a line, e.g. user@10.0.0.1 slots=2"))
    if problems:
        raise ConfigError(problems)
    return [host for _, host in found.values()]


def _read(line: str, usual: LaunchHost) -> LaunchHost | None:
    """Read a line as a host; None if it is empty. Raises ValueError."""
    try:
        name, *options = shlex.split(line, comments=True) or [""]
    except ValueError as error:
        raise ValueError(f"cannot be read: {str(error).lower()}") from None
    if not name:
        return None
    if not _NAME.fullmatch(name):
        raise ValueError("is not a host: write it as ssh takes it, e.g. user@10.0.0.1, and options behind it")
    given: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key not in _KEYS:
            raise ValueError(f"{option!r} is not an option of a host; {nearest(key, _KEYS)}")
        if not value or key in given:
            raise ValueError(f"{key} needs one value, e.g. {key}={'2' if key == 'slots' else '/a/path'}")
        given[key] = value
    return LaunchHost(name, _slots(given, usual.slots), given.get("python", usual.python), given.get("cwd", usual.cwd))


def _slots(given: Mapping[str, str], usual: int) -> int:
    text = given.get("slots", str(usual))
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise ValueError(f"slots={text} must be a whole number from 1 to 1024")
    return int(text)
