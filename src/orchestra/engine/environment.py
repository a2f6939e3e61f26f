# SPDX-License-Identifier: Apache-2.0
"""What the environment says of this process, for those who cannot wait for torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import TracebackType

from orchestra.errors import ConfigError, Exposed, Problem

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
WORKERS = "ORCHESTRA_WORKERS"  # how many of the processes are meant to be workers, where somebody has said it
STARTED_BY = "ORCHESTRA_STARTED_BY"  # the command that did, up to what it was to start
STARTED_ON = "ORCHESTRA_STARTED_ON"  # or the cluster that did, as `orchestra resume` takes it
_OWN = ("RANK", "LOCAL_RANK")  # what is wrong with these concerns one process only


def launched() -> bool:
    """Whether this process was started as one of several: by torchrun, `orchestra launch` or the like."""
    return all(os.environ.get(name) for name in NEEDED)


# What this process was told of its place: data may have been cut by it. Per place: a process may come to another.
_kept: set[tuple[str | None, ...]] = set()
_told: dict[tuple[str | None, ...], set[int]] = {}


def _here() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in NEEDED)


def keep_order() -> None:
    """Let ranks stay as they were started, from now on."""
    _kept.add(_here())


def keeps_order() -> bool:
    """Whether this process was told its rank, so that it must not become another."""
    return _here() in _kept


def tell_workers(count: int) -> None:
    """Remember how many workers this process was told of."""
    _told.setdefault(_here(), set()).add(count)


def told_workers() -> set[int]:
    """Give the numbers of workers that this process was told of."""
    return _told.get(_here(), set())


def half_set() -> list[Problem]:
    """What is missing where the rest is there: this process was meant to be one of several, and would train alone."""
    missing = [name for name in NEEDED if not os.environ.get(name)]
    there = [name for name in NEEDED if name not in missing]
    if not missing or not {"RANK", "WORLD_SIZE"} & {*there}:  # where to meet says nothing of whether there are others
        return []
    message = (
        f"{_are(missing)} not set, but {' and '.join(there)} {_are(there)}: start with torchrun or `orchestra launch`, "
        f"which set all of them, or unset {' '.join(there)} to train on this machine alone"
    )
    return [Problem(", ".join(missing), None, message)]


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def is_member() -> bool:
    """Whether another process of the run speaks for it."""
    return launched() and os.environ["RANK"] != "0"


def is_told_by_another(error: BaseException) -> bool:
    """Whether the first process of this machine runs into the same, and says so: once is enough."""
    if not launched() or os.environ.get("LOCAL_RANK", "0") in ("", "0"):
        return False
    if isinstance(error, ConfigError):
        return not any(problem.where in _OWN for problem in error.problems)
    return isinstance(error, Exposed)


def hush(error: BaseException) -> None:
    """Let a script end by an error as it would, but without a word."""
    before = sys.excepthook

    def say(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is not error:
            before(kind, raised, trace)

    sys.excepthook = say
