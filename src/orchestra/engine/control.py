# SPDX-License-Identifier: Apache-2.0
"""The control values that all nodes of a run can read: when to stop, what to save, how far each node is.

    stop_asked     0, or why the workers are asked to stop: BUDGET_SPENT or INTERRUPTED
    stop_at        the step that no worker begins any more; 0 until it is known. Also the label of the last checkpoint
    save_wanted    label of the newest checkpoint that was asked for
    begun(w)       the step that worker w is in; NO_MORE_STEPS once it has done its last
    saved(n)       label of the newest part of a checkpoint that node n has written

Each value has one writer at a time. How a value reaches the other nodes depends on the world: through shared memory, or
in a message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, get_args

BUDGET_SPENT, INTERRUPTED = 1, 2  # values of stop_asked
NO_MORE_STEPS = 2**32 - 1  # a value of `begun`

OfRun = Literal["stop_asked", "stop_at", "save_wanted"]
OfNode = Literal["begun", "saved"]
FIELDS: tuple[str, ...] = (*get_args(OfRun), *get_args(OfNode))


class Control(ABC):
    """The values above, readable by every node."""

    @abstractmethod
    def read(self, field: OfRun | OfNode, node: int = 0) -> int:
        """Return a value as this node knows it."""

    @abstractmethod
    def write(self, field: OfRun | OfNode, value: int, node: int = 0, *, wake: bool = False) -> None:
        """Set a value for all nodes; `wake` those that wait for it."""

    @property
    def stop_asked(self) -> int:
        """Why the workers are asked to stop, or 0."""
        return self.read("stop_asked")

    @property
    def stop_at(self) -> int:
        """The step that no worker begins any more, or 0."""
        return self.read("stop_at")

    @property
    def save_wanted(self) -> int:
        """Label of the newest checkpoint that was asked for."""
        return self.read("save_wanted")

    def saved(self, node: int) -> int:
        """Return the label of the newest part of a checkpoint that a node has written."""
        return self.read("saved", node)

    def is_done(self, worker: int) -> bool:
        """Return whether a worker has done its last step."""
        return self.read("begun", worker) == NO_MORE_STEPS

    def last_step(self, begun: list[int]) -> int:
        """Return the step to stop at: past every step that was begun, so that no worker has to go back.

        It also labels the checkpoint of this moment, which must be the newest.
        """
        last = max((step for step in begun if step != NO_MORE_STEPS), default=0)
        return max(last, self.save_wanted) + 1
