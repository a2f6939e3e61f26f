# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, and the exit code each takes on the command line.

OrchestraError                 1
├── ConfigError                2   something asked for cannot be; every problem at once, before any process starts
├── EnvironmentProblem         3   this machine lacks something
│   └── RunFolderGone          3   the run folder was deleted while the run went on
├── ClusterError               4   the nodes did not come together
│   ├── WorkerFailed           1   a node raised; its traceback comes first
│   ├── WorkerLost             6   a node died or hangs, or its machine is out of reach
│   ├── Stopped                10  another process ended the run: its message is the cause
│   ├── Stalled                4   a wait passed its deadline; names whom it waited for
│   └── Deadlock               4   in virtual time: all nodes wait for each other
├── Diverged                   5   too many gradients in a row were not finite
├── CheckpointError            7   a checkpoint that cannot be trusted or does not fit
├── Exposed                    8   other machines could connect to the run, and no token is asked for
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
    """One thing wrong with what was asked: where, the value given, and what to do."""

    where: str
    value: object
    message: str

    def __str__(self) -> str:
        shown = repr(self.value)
        if len(shown) > 60:
            shown = shown[:57] + "..."
        return f"{self.where} = {shown}    {self.message}"


class ConfigError(OrchestraError):
    """The configuration cannot be run. Lists every problem found, each with its remedy."""

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
    """The nodes did not come together, or did not stay together."""

    exit_code = 4


class WorkerFailed(ClusterError):
    """A node raised. The message opens with that node's own traceback."""

    exit_code = 1

    def __init__(self, who: str, traceback: str) -> None:
        self.who = who
        self.traceback = traceback
        super().__init__(
            f"{traceback.rstrip()}\n\n{who} failed (its traceback is above); the other nodes were stopped."
        )


class WorkerLost(ClusterError):
    """A node died without saying why (killed, out of memory, crashed), or its machine is out of reach."""

    exit_code = 6

    def __init__(self, who: str, cause: str, *, fate: str = "died", advice: str = "") -> None:
        self.who = who
        self.cause = cause
        super().__init__(f"{who} {fate}: {cause}; the other nodes were stopped.{advice and ' '}{advice}")


class Stopped(ClusterError):
    """Another process ended the run, and said why. `code`: its own exit code."""

    exit_code = 10

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        if code in (WorkerLost.exit_code, *_SIGNALLED):  # one died, or all were asked to stop: who says so is no cause
            self.exit_code = code  # type: ignore[misc]

    @property
    def is_interruption(self) -> bool:
        """Whether somebody asked the run to stop, and nothing failed."""
        return self.exit_code in _SIGNALLED


class Stalled(ClusterError):
    """A node waited past its deadline."""


class Deadlock(ClusterError):
    """Nodes wait for each other, and no event is left that could end it."""


class Diverged(OrchestraError):
    """Too many gradients in a row were NaN or infinite."""

    exit_code = 5


class CheckpointError(OrchestraError):
    """A checkpoint is missing, damaged, or of another model or cluster."""

    exit_code = 7


class Exposed(OrchestraError):
    """The run would listen where strangers can reach it, without a token that tells them from its own processes."""

    exit_code = 8

    def __init__(self, host: str) -> None:
        super().__init__(
            f"MASTER_ADDR = {host!r} can be reached from other machines, and there is no token to keep strangers out. "
            "Make one (`openssl rand -hex 32 > token; chmod 600 token`), copy it to every machine, and say "
            "--token-file token or ORCHESTRA_TOKEN_FILE=token; `orchestra launch` does all that."
        )


class Interrupted(OrchestraError, KeyboardInterrupt):
    """The run was asked to stop (Ctrl-C) and did, at a step boundary, with a checkpoint."""

    exit_code = 130


def by_name(name: str) -> type[OrchestraError]:
    """The error class that another process named."""
    return {cls.__name__: cls for cls in (EnvironmentProblem, ClusterError, Stalled, Diverged, CheckpointError)}.get(
        name, OrchestraError
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean ...?` for a misspelt name, or the list of known ones."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
