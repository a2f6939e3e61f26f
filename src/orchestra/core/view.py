# SPDX-License-Identifier: Apache-2.0
"""Who takes part in a run, as a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

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

    def saved(self) -> list[Any]:
        """Return the view as a checkpoint holds it."""
        return [self.number, self.workers.members, self.servers.members]

    @classmethod
    def restored(cls, saved: Sequence[Any]) -> Self:
        """Return the view that `saved` gave."""
        number, workers, servers = saved
        return cls(number, Group(tuple(workers)), Group(tuple(servers)))
