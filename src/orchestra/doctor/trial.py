# SPDX-License-Identifier: Apache-2.0
"""Run checks that may hang or crash, each in a process of its own.

    examine(checks)                                      answer(check), in the process
    a process each, a few side by side             →     act()
    its finding                                    ←     one line of JSON, also for an exception
    no answer in time: SIGTERM, then SIGKILL             SIGTERM raises SystemExit, so that its files are removed
    processes with its mark that still run: SIGKILL

A check's processes are found by a mark in their environment, as those of a run are in sessions of their own.
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
_GRACE = 0.5  # seconds between SIGTERM and SIGKILL
_LONGEST = 240  # characters of an error message of another library


class State(StrEnum):
    """The outcome of a check."""

    FINE = "fine"
    LIMITED = "limited"  # some uses of it fail, or only some uses need it
    BROKEN = "broken"
    UNTRIED = "untried"  # no time was left, or a check that it depends on is broken


@dataclass(frozen=True)
class Finding:
    """The result of a check: its state, what was measured, and a remedy if something does not work."""

    state: State
    found: str
    remedy: str = ""


def fine(found: str) -> Finding:
    """Return a finding that it works."""
    return Finding(State.FINE, found)


def limited(found: str, remedy: str) -> Finding:
    """Return a finding that it works for some uses only."""
    return Finding(State.LIMITED, found, remedy)


def broken(found: str, remedy: str) -> Finding:
    """Return a finding that it does not work."""
    return Finding(State.BROKEN, found, remedy)


def untried(found: str, remedy: str) -> Finding:
    """Return a finding that it is unknown whether it works."""
    return Finding(State.UNTRIED, found, remedy)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing to try."""

    name: str
    about: str  # what is tried
    act: Callable[[], Finding]
    remedy: str  # what to do if it ends without a finding
    needed: bool = False  # training on this machine fails without it
    after: str | None = None  # the check that this one depends on
    slow: bool = False  # takes seconds even if it is fine
    seconds: float = 5.0  # within which it must answer


# In the process of `orchestra doctor`.


def examine(checks: Sequence[Check]) -> Iterator[tuple[Check, Finding]]:
    """Run the checks, up to `_LANES` at a time; yield each with its finding, in the order of `checks`."""
    mark = secrets.token_hex(8)
    deadline = time.monotonic() + _ALTOGETHER
    lanes = ThreadPoolExecutor(max_workers=min(_LANES, cores()))
    found: dict[str | None, Future[Finding]] = {}
    try:
        # Slow checks start first and dependent ones last: then none occupies a lane for one that has not started.
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
        return untried(f"needs {check.after}", f"Fix {check.after} first.")
    alone = f"Run it alone: orchestra doctor {check.name}"
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
        cut_short = seconds < check.seconds  # by the deadline of all checks: it may only be slow
        out = _stop(child, mark)
        ending = f"no answer within {seconds:.0f} s, load {os.getloadavg()[0]:.1f} on {plural(cores(), 'core')}"
    kill_marked(f"{_MARK}={mark}", _GRACE)
    try:
        reply = json.loads(out)
        return Finding(State(reply["state"]), reply["found"], reply["remedy"])
    except ValueError:
        return untried(ending, f"{alone}.") if cut_short else broken(ending, f"{alone}. {check.remedy}")


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
    """End a check, by SIGTERM first; return what it printed. Give up on a process that even SIGKILL does not end."""
    child.terminate()
    for _ in range(2):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.communicate(timeout=_GRACE)[0]
        child.kill()
        kill_marked(f"{_MARK}={mark}", _GRACE)
    return ""


def cores() -> int:
    """Return how many cores this process may use; all of them where the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ending(code: int, err: str) -> str:
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"{how} without an answer: {short(err.strip().splitlines()[-1])}" if err.strip() else how


def short(text: object) -> str:
    """Return a text as one line of at most `_LONGEST` characters."""
    line = " ".join(str(text).split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 4]} ..."


# In the process of one check.


def answer(check: Check) -> None:
    """Run a check and print its finding as JSON."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not mix with the JSON
    try:
        finding = check.act()
    except WorkerFailed as error:
        finding = broken(short(f"{error.node} failed: {error.traceback.strip().splitlines()[-1]}"), check.remedy)
    except Exception as error:
        finding = broken(short(f"{type(error).__name__}: {error}"), check.remedy)
    os.write(out, json.dumps(asdict(finding)).encode())
    os.close(out)
