# SPDX-License-Identifier: Apache-2.0
"""The errors of the package, and the exit code of each on the command line.

OrchestraError                 1
├── ConfigError                2   the configuration cannot be run; lists every problem, before any process starts
├── EnvironmentProblem         3   this machine lacks something
│   └── RunFolderGone          3   the run folder was deleted while the run went on
├── ClusterError               4   the nodes did not connect, or did not stay connected
│   ├── WorkerFailed           1   a node raised; its traceback comes first
│   ├── WorkerLost             6   a node died or hangs, or its machine is out of reach
│   ├── Stopped                10  another process ended the run: its message is the cause
│   ├── Stalled                4   a wait passed its deadline; names the node it waited for
│   └── Deadlock               4   in virtual time: all nodes wait for each other
├── Diverged                   5   too many gradients in a row were not finite
├── CheckpointError            7   a checkpoint is missing, damaged or does not fit
├── Exposed                    8   other machines could connect to the run, and no token is required
└── Interrupted              130   Ctrl-C, or SIGTERM (143): the run stopped after a step and left a checkpoint
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

_SIGNALLED = (130, 143)  # exit codes of SIGINT and SIGTERM


class OrchestraError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code: ClassVar[int] = 1


@dataclass(frozen=True)
class Problem:
    """One problem of a configuration: where it is, the value given, and what to do."""

    where: str
    value: object
    message: str

    def __str__(self) -> str:
        shown = repr(self.value)
        if len(shown) > 60:
            shown = shown[:57] + "..."
        return f"{self.where} = {shown}    {self.message}"


class ConfigError(OrchestraError):
    """The configuration cannot be run. The message lists every problem, each with its remedy."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = f"{len(self.problems)} problem" + ("s" if len(self.problems) != 1 else "")
        super().__init__("\n".join([count, *(f"  {problem}" for problem in self.problems)]))


class EnvironmentProblem(OrchestraError):
    """Something that the run needs is missing on this machine."""

    exit_code = 3


class RunFolderGone(EnvironmentProblem):
    """The run folder was deleted while the run went on."""

    def __init__(self, folder: object) -> None:
        super().__init__(f"the run folder {folder} was deleted while the run went on; training was stopped.")


class ClusterError(OrchestraError):
    """The nodes did not connect, or did not stay connected."""

    exit_code = 4


class WorkerFailed(ClusterError):
    """A node raised. The message begins with that node's traceback."""

    exit_code = 1

    def __init__(self, node: str, traceback: str) -> None:
        self.node = node
        self.traceback = traceback
        super().__init__(
            f"{traceback.rstrip()}\n\n{node} failed (its traceback is above); the other nodes were stopped."
        )


class WorkerLost(ClusterError):
    """A node died without an error (killed, out of memory, crashed) or hangs, or its machine is out of reach."""

    exit_code = 6

    def __init__(self, node: str, cause: str, *, fate: str = "died", advice: str = "") -> None:
        self.node = node
        self.cause = cause
        super().__init__(f"{node} {fate}: {cause}; the other nodes were stopped.{advice and ' '}{advice}")


class Stopped(ClusterError):
    """Another process ended the run and sent the reason. `code` is the exit code of that process."""

    exit_code = 10

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        if code in (WorkerLost.exit_code, *_SIGNALLED):  # the reporting process is not the cause
            self.exit_code = code  # type: ignore[misc]

    @property
    def is_interruption(self) -> bool:
        """Whether the run was asked to stop, and nothing failed."""
        return self.exit_code in _SIGNALLED


class Stalled(ClusterError):
    """A node waited past its deadline."""


class Deadlock(ClusterError):
    """Nodes wait for each other, and no event is left that could wake one."""


class Diverged(OrchestraError):
    """Too many gradients in a row were NaN or infinite."""

    exit_code = 5


class CheckpointError(OrchestraError):
    """A checkpoint is missing, damaged, or of another model or cluster."""

    exit_code = 7


class Exposed(OrchestraError):
    """The run would accept connections from other machines without a token that authenticates its own processes."""

    exit_code = 8

    def __init__(self, host: str) -> None:
        super().__init__(
            f"MASTER_ADDR = {host!r} can be reached from other machines, and no token keeps strangers out. "
            "Make one (`openssl rand -hex 32 > token; chmod 600 token`), copy it to every machine, and give "
            "--token-file token or ORCHESTRA_TOKEN_FILE=token; `orchestra launch` does all that."
        )


class Interrupted(OrchestraError, KeyboardInterrupt):
    """The run was asked to stop (Ctrl-C) and did, at a step boundary, with a checkpoint."""

    exit_code = 130


def by_name(name: str) -> type[OrchestraError]:
    """Return the error class of this name, as sent by another process; `OrchestraError` for other names."""
    return {cls.__name__: cls for cls in (EnvironmentProblem, ClusterError, Stalled, Diverged, CheckpointError)}.get(
        name, OrchestraError
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "did you mean ...?" for a misspelt name, or the list of known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
