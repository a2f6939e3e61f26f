# SPDX-License-Identifier: Apache-2.0
"""Shares of the processor: a cgroup per host, of version 1 or 2, whichever has this machine's CPU controller.

    quota = cpu × period        microseconds of all its processes together, in every period

The period is 10 ms: with the usual 100 ms, a host of a quarter core would pause for 75 ms at a time. The kernel accepts
no quota below 1 ms, so small shares have longer periods.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

from orchestra.errors import EnvironmentProblem
from orchestra.lab.plan import owner_of

_PERIOD, _LEAST_QUOTA = 10_000, 1_000  # microseconds
_PATIENCE = 5.0  # seconds until a cgroup whose processes were killed is empty


@dataclass(frozen=True)
class Cgroups:
    """The folder in which the hosts' cgroups are made."""

    root: Path
    unified: bool  # version 2

    def limit(self, name: str, cpu: float) -> None:
        """Make a group that may use so many cores."""
        period = max(_PERIOD, round(_LEAST_QUOTA / cpu))
        quota = max(_LEAST_QUOTA, round(cpu * period))
        group = self.root / name
        try:
            if self.unified:
                switch = self.root / "cgroup.subtree_control"
                if "cpu" not in switch.read_text(encoding="ascii").split():
                    switch.write_text("+cpu", encoding="ascii")
            group.mkdir(exist_ok=True)
            if self.unified:
                (group / "cpu.max").write_text(f"{quota} {period}", encoding="ascii")
            else:
                (group / "cpu.cfs_period_us").write_text(str(period), encoding="ascii")
                (group / "cpu.cfs_quota_us").write_text(str(quota), encoding="ascii")
        except OSError as error:
            raise EnvironmentProblem(
                f"the processor cannot be limited: {error.strerror}: {error.filename or group}. "
                "Leave --cpu out, or run where cgroups may be written (in Docker: --privileged --cgroupns=host)."
            ) from None

    def share(self, name: str) -> float | None:
        """Return how many cores a group may use, if it exists and has a limit."""
        try:
            if self.unified:
                quota, period = (self.root / name / "cpu.max").read_text(encoding="ascii").split()
            else:
                quota = (self.root / name / "cpu.cfs_quota_us").read_text(encoding="ascii")
                period = (self.root / name / "cpu.cfs_period_us").read_text(encoding="ascii")
            return None if quota in ("max", "-1\n") else int(quota) / int(period)
        except OSError:
            return None

    def procs_file(self, name: str) -> Path | None:
        """Return the file into which a process writes its pid to enter the group, if the group exists."""
        path = self.root / name / "cgroup.procs"
        return path if path.exists() else None

    def of(self, lab: str) -> list[str]:
        """Return the groups of a lab."""
        return sorted(name for name in os.listdir(self.root) if owner_of(name) == lab)

    def labs(self) -> set[str]:
        """Return the labs that have groups."""
        return {lab for name in os.listdir(self.root) if (lab := owner_of(name))}

    def members(self, name: str) -> list[int]:
        """Return the processes in a group."""
        with contextlib.suppress(OSError):
            return [int(pid) for pid in (self.root / name / "cgroup.procs").read_text(encoding="ascii").split()]
        return []

    def remove(self, name: str) -> None:
        """Remove a group whose processes were killed."""
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                (self.root / name).rmdir()
                return
            except FileNotFoundError:
                return
            except OSError as error:
                if time.monotonic() > end:
                    raise EnvironmentProblem(f"{self.root / name} cannot be removed: {error.strerror}.") from None
                time.sleep(0.01)


def find_cgroups(mounts: Path = Path("/proc/mounts")) -> Cgroups | None:
    """Return the cgroups by which this machine can limit the processor, if it has any."""
    found: list[Cgroups] = []
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, where, kind, options, *_ = line.split()
        root = Path(where)
        if kind == "cgroup" and "cpu" in options.split(","):
            found.append(Cgroups(root, unified=False))
        elif kind == "cgroup2":
            with contextlib.suppress(OSError):
                if "cpu" in (root / "cgroup.controllers").read_text(encoding="ascii").split():
                    found.append(Cgroups(root, unified=True))
    return found[0] if found else None
