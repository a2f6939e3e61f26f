# SPDX-License-Identifier: Apache-2.0
"""Trying things that may hang or crash: each in a process of its own.

    examine(checks)                                      answer(check), in the process
    a process each, a few side by side             →     act()
    what was found                                 ←     one line of JSON, also for an exception
    no answer in time: SIGTERM, then SIGKILL             SIGTERM unwinds it, so that its files go
    whatever bears its mark and still lives: SIGKILL

Processes are known by a mark in their environment: those of a run are in sessions of their own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from orchestra.errors import WorkerFailed
from orchestra.formatting import plural
from orchestra.launchers.marked_processes import kill_marked

_MARK = "ORCHESTRA_DOCTOR"
_ALTOGETHER = 18.0  # seconds for all checks
_LANES = 3  # checks at a time, at most
_GRACE = 0.5  # seconds between asking a check to go and killing it
_LONGEST = 240  # characters of what somebody else's error says


class State(StrEnum):
    """How a thing is."""

    FINE = "fine"
    LIMITED = "limited"  # some uses of it fail, or it is for some uses only
    BROKEN = "broken"
    UNTRIED = "untried"  # there was no time, or it needs something that is broken


@dataclass(frozen=True)
class Finding:
    """What a check found, with values; if that is not fine, what to do."""

    state: State
    found: str
    remedy: str = ""


def fine(found: str) -> Finding:
    """It works."""
    return Finding(State.FINE, found)


def limited(found: str, remedy: str) -> Finding:
    """It works, but."""
    return Finding(State.LIMITED, found, remedy)


def broken(found: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(State.BROKEN, found, remedy)


def untried(found: str, remedy: str) -> Finding:
    """Nobody knows."""
    return Finding(State.UNTRIED, found, remedy)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing to try."""

    name: str
    about: str  # what is tried
    act: Callable[[], Finding]
    mend: str  # the remedy for an end without an answer
    needed: bool = False  # training on this machine fails without it
    after: str | None = None  # another, which is vain to try this without
    slow: bool = False  # takes seconds where all is well
    seconds: float = 5.0  # it must answer within


# Where `orchestra doctor` runs.


def examine(checks: Sequence[Check]) -> Iterator[tuple[Check, Finding]]:
    """Try each, some side by side; what was found comes in the order of `checks`."""
    mark = secrets.token_hex(8)
    deadline = time.monotonic() + _ALTOGETHER
    lanes = ThreadPoolExecutor(max_workers=min(_LANES, cores()))
    found: dict[str | None, Future[Finding]] = {}
    try:
        # What others depend on begins first, and what depends on it last: then nobody waits for one that has not begun.
        for check in sorted(checks, key=lambda check: (check.after is not None, not check.slow)):
            before = found.get(check.after)
            found[check.name] = lanes.submit(_attempt, check, f"{mark}-{check.name}", deadline, before)
        for check in checks:
            yield check, found[check.name].result()
    finally:
        lanes.shutdown(wait=False, cancel_futures=True)
        kill_marked(f"{_MARK}={mark}", _GRACE)
        lanes.shutdown()


def _attempt(check: Check, mark: str, deadline: float, before: Future[Finding] | None) -> Finding:
    if before is not None and before.result().state is State.BROKEN:
        return untried(f"needs {check.after}", f"Mend {check.after} first.")
    alone = f"Try it alone: orchestra doctor {check.name}"
    seconds = min(check.seconds, deadline - time.monotonic())
    if seconds <= 0:
        return untried("the other checks took too long", f"{alone}.")
    try:
        child = _start(check.name, mark)
    except OSError as error:
        few = error.errno in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)
        remedy = "Raise `ulimit -n` and `ulimit -u`." if few else f"This user must be able to execute {sys.executable}."
        return broken(f"no process could be started: {error.strerror}", remedy)
    cut_short = False
    try:
        out, err = child.communicate(timeout=seconds)
        ending = _ending(child.returncode, err)
    except subprocess.TimeoutExpired:
        cut_short = seconds < check.seconds  # for the others' sake: it may only be slow
        out = _stop(child, mark)
        ending = f"no answer within {seconds:.0f} s, load {os.getloadavg()[0]:.1f} on {plural(cores(), 'core')}"
    kill_marked(f"{_MARK}={mark}", _GRACE)
    try:
        said = json.loads(out)
        return Finding(State(said["state"]), said["found"], said["remedy"])
    except ValueError:
        return untried(ending, f"{alone}.") if cut_short else broken(ending, f"{alone}. {check.mend}")


def _start(name: str, mark: str) -> subprocess.Popen[str]:
    source = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", "from orchestra import doctor; doctor.main()", name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": path, _MARK: mark},
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    )


def _stop(child: subprocess.Popen[str], mark: str) -> str:
    """End it, gently at first; gives what it said after all. One that the kernel holds is not waited for."""
    child.terminate()
    for _ in range(2):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.communicate(timeout=_GRACE)[0]
        child.kill()
        kill_marked(f"{_MARK}={mark}", _GRACE)
    return ""


def cores() -> int:
    """Those this process may use; all of them on systems that cannot tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ending(code: int, err: str) -> str:
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"{how} without an answer: {short(err.strip().splitlines()[-1])}" if err.strip() else how


def short(text: object) -> str:
    """In one line, and not a long one."""
    line = " ".join(str(text).split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."


# In the process of one check.


def answer(check: Check) -> None:
    """Carry out a check and say what was found."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not get in between
    try:
        finding = check.act()
    except WorkerFailed as error:
        finding = broken(short(f"{error.who} failed: {error.traceback.strip().splitlines()[-1]}"), check.mend)
    except Exception as error:
        finding = broken(short(f"{type(error).__name__}: {error}"), check.mend)
    os.write(out, json.dumps(asdict(finding)).encode())
    os.close(out)
