# SPDX-License-Identifier: Apache-2.0
"""What the environment says about this process; importable without torch, which is slow to import."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import TracebackType

from orchestra.errors import ConfigError, Exposed, Problem

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
WORKERS = "ORCHESTRA_WORKERS"  # how many of the processes are to be workers, if the launcher was given a number
STARTED_BY = "ORCHESTRA_STARTED_BY"  # the launching command, without the program that it started
STARTED_ON = "ORCHESTRA_STARTED_ON"  # or the launching cluster, in the form that `orchestra resume` takes
_OWN = ("RANK", "LOCAL_RANK")  # what is wrong with these concerns one process only


def launched() -> bool:
    """Return whether this process was started as one of several: by torchrun, `orchestra launch` or the like."""
    return all(os.environ.get(name) for name in NEEDED)


# What this process was told of its rank: data may have been divided by it. By rank, which a process may change.
_kept: set[tuple[str | None, ...]] = set()
_worker_counts: dict[tuple[str | None, ...], set[int]] = {}


def _here() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in NEEDED)


def keep_order() -> None:
    """Do not let this process change its rank from now on."""
    _kept.add(_here())


def keeps_order() -> bool:
    """Return whether the user's program knows its rank, so that the rank must not change."""
    return _here() in _kept


def record_worker_count(count: int) -> None:
    """Remember a number of workers that the user's program was told."""
    _worker_counts.setdefault(_here(), set()).add(count)


def recorded_worker_counts() -> set[int]:
    """Return the numbers of workers that the user's program was told."""
    return _worker_counts.get(_here(), set())


def half_set() -> list[Problem]:
    """Return a problem if only some of the variables are set, so that the process would train alone by mistake."""
    missing = [name for name in NEEDED if not os.environ.get(name)]
    there = [name for name in NEEDED if name not in missing]
    if not missing or not {"RANK", "WORLD_SIZE"} & {*there}:  # an address alone does not mean several processes
        return []
    message = (
        f"{_are(missing)} not set, but {' and '.join(there)} {_are(there)}: start with torchrun or `orchestra launch`, "
        f"which set all of them, or unset {' '.join(there)} to train on this machine alone"
    )
    return [Problem(", ".join(missing), None, message)]


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def is_member() -> bool:
    """Return whether this process is one of several, other than rank 0, which reports for the run."""
    return launched() and os.environ["RANK"] != "0"


def is_told_by_another(error: BaseException) -> bool:
    """Return whether the first process of this machine raises the same error and prints it."""
    if not launched() or os.environ.get("LOCAL_RANK", "0") in ("", "0"):
        return False
    if isinstance(error, ConfigError):
        return not any(problem.where in _OWN for problem in error.problems)
    return isinstance(error, Exposed)


def hush(error: BaseException) -> None:
    """Let a script end by this error without printing it."""
    before = sys.excepthook

    def say(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            before(kind, raised, trace)

    sys.excepthook = say
