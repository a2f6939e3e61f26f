# SPDX-License-Identifier: Apache-2.0
"""The control values of a run in shared memory: a futex word each."""

from __future__ import annotations

from orchestra.engine.control import Control, OfNode, OfRun
from orchestra.worlds.shared_memory.layout import SAVE_WANTED, STOP_ASKED, STOP_AT, Arena

_WORDS = {"stop_asked": STOP_ASKED, "stop_at": STOP_AT, "save_wanted": SAVE_WANTED}


class SharedControl(Control):
    """Control values in an arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def index(self, field: OfRun | OfNode, node: int = 0) -> int:
        """Return the index of the futex word that holds a value."""
        return _WORDS[field] if field in _WORDS else self._arena.plan.word(field, node)

    def read(self, field: OfRun | OfNode, node: int = 0) -> int:
        """Return the present value."""
        return self._arena.words[self.index(field, node)]

    def write(self, field: OfRun | OfNode, value: int, node: int = 0, *, wake: bool = False) -> None:
        """Set a value; `wake` the processes that wait for it."""
        put = self._arena.words.announce if wake else self._arena.words.set
        put(self.index(field, node), value)
