# SPDX-License-Identifier: Apache-2.0
"""Checks of the machine itself: processors, memory, limits, clock, terminal."""

from __future__ import annotations

import ctypes
import locale
import mmap
import os
import resource
import signal
import statistics
import sys
import time
from pathlib import Path

from orchestra.doctor.limits import Groups
from orchestra.doctor.trial import Finding, broken, cores, fine, limited
from orchestra.formatting import size

_TOUCHED = 1 << 26  # bytes
_ENOUGH_MEMORY = 1 << 30  # a process of a run takes some 200 MB, most of it shared with the others
_LEAST_MEMORY = 1 << 28
_FILES = 256  # descriptors open at once
_PROCESSES = 16  # at once


# Processors and memory.


def processors() -> Finding:
    """Count the cores of the machine and those this process may use, and read the quota of its control group."""
    usable, quota = cores(), Groups().quota()
    threads = os.environ.get("OMP_NUM_THREADS")
    found = (
        f"{usable} of {os.cpu_count()} usable, "
        + ("no quota" if quota is None else f"quota of {quota:g}")
        + f", load {os.getloadavg()[0]:.1f}"
        + (f", OMP_NUM_THREADS={threads}" if threads else "")
    )
    if quota is not None and quota < usable:
        few = "0" if quota < 2 else f"0-{int(quota) - 1}"
        return limited(found, f"Runs use every core and ignore the quota: start the command with `taskset -c {few}`.")
    if usable == 1:
        return limited(
            found, "Workers take turns on one core, so step times mean little: give this process more cores."
        )
    return fine(found)


def memory() -> Finding:
    """Read how much memory is free, on the machine and in the control group, and write to some of it."""
    figures = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    total, free = (int(figures[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    found = f"{size(free)} of {size(total)} free"
    if group := Groups().memory():
        free = min(free, group[1])
        found += f", {size(group[1])} of {size(group[0])} left to this control group"
    with mmap.mmap(-1, _TOUCHED) as block:
        block[:: mmap.PAGESIZE] = bytes(_TOUCHED // mmap.PAGESIZE)
    if free < _ENOUGH_MEMORY:
        bad = broken if free < _LEAST_MEMORY else limited
        return bad(
            found, "End other programs, or give the container more memory; else use few workers and small models."
        )
    return fine(found)


# Limits.


def limits() -> Finding:
    """Open as many files and start as many processes as a run with many workers does."""
    files, processes = (_limit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC))
    opened, forked = _open_many(), _fork_many()
    found = f"open files {files} ({opened} tried), processes {processes} ({forked} tried)"
    if group := Groups().processes():
        found += f", {group[1]} of {group[0]} processes left to this control group"
    address_space = _limit(resource.RLIMIT_AS)
    if address_space != "unlimited":
        found += f", address space {size(int(address_space))}"
    if opened < _FILES:
        return limited(found, "Raise the limit of open files: `ulimit -n 4096`.")
    if forked < _PROCESSES:
        return limited(found, "Raise the limit of processes: `ulimit -u 4096`, or `--pids-limit` of the container.")
    if address_space != "unlimited":
        return limited(found, "Workers reserve more address space than they use: `ulimit -v unlimited`.")
    return fine(found)


def _limit(kind: int) -> str:
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


def _open_many() -> int:
    opened: list[int] = []
    try:
        while len(opened) < _FILES:
            opened.append(os.dup(2))
    except OSError:
        pass
    for fd in opened:
        os.close(fd)
    return len(opened)


def _fork_many() -> int:
    children: list[int] = []
    try:
        while len(children) < _PROCESSES:
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(5)
                os._exit(0)
            children.append(pid)
    except OSError:
        pass
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return len(children)


# The clock.

_UNSYNCHRONISED = 0x40  # STA_UNSYNC of timex.h


class _Timex(ctypes.Structure):
    """The fields of `struct timex` up to the last that is read here, and room for the rest."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("maximum_error", ctypes.c_long),
        ("estimated_error", ctypes.c_long),  # microseconds
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),
    )


def clock() -> Finding:
    """Measure the clock's resolution and its drift from the wall clock; ask the kernel whether it is synchronised."""
    step = statistics.median(_tick() for _ in range(99))
    apart, began = _apart(), time.monotonic()
    time.sleep(0.3)
    drift = (_apart() - apart) / (time.monotonic() - began)
    kernel = _Timex()
    state = ctypes.CDLL(None).adjtimex(ctypes.byref(kernel))
    found = f"steps of {step * 1e9:.0f} ns, wall clock and monotonic differ by {abs(drift) * 1e6:.0f} ppm"
    unknown = "offset to other machines unknown"
    if abs(drift) > 1e-3:
        return limited(
            f"{found}; {unknown}", "The wall clock is being changed: see `timedatectl`, or the host's clock."
        )
    if state < 0 or kernel.status & _UNSYNCHRONISED:
        why = "not known to be synchronised" if state < 0 else "not synchronised"
        return limited(
            f"{found}; {why}, {unknown}",
            "Only for comparing times of several machines: `timedatectl set-ntp true`, or chrony.",
        )
    return fine(f"{found}; synchronised to {kernel.estimated_error} µs by the kernel's estimate, {unknown}")


def _tick() -> float:
    """Return the time until the clock shows another value."""
    began = time.perf_counter()
    while (now := time.perf_counter()) == began:
        pass
    return now - began


def _apart() -> float:
    """Return wall clock minus monotonic clock, from the quickest of several readings, as it was not interrupted."""
    readings = []
    for _ in range(20):
        before, wall, after = time.monotonic(), time.time(), time.monotonic()
        readings.append((after - before, wall - (before + after) / 2))
    return min(readings)[1]


# The terminal.


def terminal() -> Finding:
    """Try to encode the characters that other commands print."""
    names = ("PYTHONIOENCODING", "LC_ALL", "LC_CTYPE", "LANG")  # the first one set decides
    name = next((name for name in names if os.environ.get(name)), "LANG")
    language = f"{name}={os.environ.get(name, '')}"
    encoding = sys.stdout.encoding.lower()
    found = f"{encoding}, {language}, TERM={os.environ.get('TERM', '')}"
    try:
        "τ ← · µ …".encode(encoding)
        locale.setlocale(locale.LC_ALL, "")
    except UnicodeEncodeError:
        return limited(
            found, f"The terminal cannot show some characters of pages and tables: unset {name}; export LANG=C.UTF-8."
        )
    except locale.Error:
        return limited(
            f"{found}, which is not installed", f"Choose one of `locale -a`, e.g. unset {name}; export LANG=C.UTF-8."
        )
    return fine(found)
