# SPDX-License-Identifier: Apache-2.0
"""What the control groups of this process allow, in a container or not: processors, memory, processes.

A limit holds for a group and everything below it, so the tightest limit on the path to the root counts. Version 1 has a
tree for each controller, version 2 one tree for all; many machines have both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class Groups:
    """The control groups of a process."""

    root: Path = Path("/sys/fs/cgroup")
    own: Path = Path("/proc/self/cgroup")

    def quota(self) -> float | None:
        """Return how many processors' time this process may use; None if there is no limit."""
        found = []
        for folder in self._folders("cpu"):
            amount, period = (_read(folder / "cpu.max") or "max 1").split()
            if amount == "max":
                amount = _read(folder / "cpu.cfs_quota_us") or "-1"
                period = _read(folder / "cpu.cfs_period_us") or "1"
            if int(amount) > 0:
                found.append(int(amount) / int(period))
        return min(found, default=None)

    def memory(self) -> tuple[int, int] | None:
        """Return the tightest limit in bytes and what is left of it; None if there is no limit."""
        pairs = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
        return min(self._limits("memory", pairs), key=lambda pair: pair[1], default=None)

    def processes(self) -> tuple[int, int] | None:
        """Return the tightest limit on processes and threads, and what is left of it; None if there is no limit."""
        return min(self._limits("pids", (("pids.max", "pids.current"),)), key=lambda pair: pair[1], default=None)

    def _limits(self, controller: str, pairs: tuple[tuple[str, str], ...]) -> Iterator[tuple[int, int]]:
        for folder in self._folders(controller):
            for most, now in pairs:
                limit, used = _read(folder / most), _read(folder / now)
                if (
                    limit and used and limit != "max" and int(limit) < 1 << 60
                ):  # version 1 writes a huge number for "no limit"
                    yield int(limit), int(limit) - int(used)

    def _folders(self, controller: str) -> Iterator[Path]:
        """Yield the folders of this process's groups for one controller, each up to the root."""
        for line in (_read(self.own) or "").splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            tops = [self.root / controllers, self.root / controller] if controllers else [self.root]
            tops += [self.root / "unified"] if not controllers else []
            inside = PurePosixPath(group.lstrip("/"))
            yield from (top / part for top in tops for part in (inside, *inside.parents))


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
