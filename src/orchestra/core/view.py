# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a run, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from orchestra.core.ops import Group


@dataclass(frozen=True)
class View:
    """The nodes that take part until the next view, which has a higher number. Each node enters it by itself."""

    number: int
    workers: Group
    servers: Group

    def without_last(self, count: int) -> View:
        """Return the next view, in which the last `count` workers take no part."""
        members = self.workers.members
        return View(self.number + 1, Group(members[: len(members) - count]), self.servers)
