# SPDX-License-Identifier: Apache-2.0
"""How the nodes of a run on many machines begin, save and stop together."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from orchestra.core.ops import Traffic
from orchestra.engine.control import Control, OfNode, OfRun
from orchestra.runs.status import name_of
from orchestra.worlds.sockets.messenger import Messenger
from orchestra.worlds.sockets.transport import SocketTransport
from orchestra.worlds.sockets.wire import BadFrame


class ReplicatedState(Control):
    """A copy of the run's control values in every process: each change is sent to all others."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._values: defaultdict[tuple[str, int], int] = defaultdict(int)

    def read(self, field: OfRun | OfNode, node: int = 0) -> int:
        """Return a value as this process knows it."""
        return self._values[field, node]

    def write(self, field: OfRun | OfNode, value: int, node: int = 0, *, wake: bool = False) -> None:
        """Set a value and send it to all others; the message wakes nodes that wait."""
        self._values[field, node] = value
        self._messenger.send_control_to_all({"kind": "control", "field": field, "of": node, "value": value})

    def learn(self, field: str, value: int, node: int = 0) -> None:
        """Note a value that another process has set."""
        self._values[field, node] = value


class RunTransport(SocketTransport):
    """Carries out one node's ops, and agrees with the others on what concerns all of them."""

    def __init__(self, rank: int, workers: int, nodes: int, messenger: Messenger, traffic: Traffic) -> None:
        super().__init__(rank, nodes, messenger, traffic)
        self.control = ReplicatedState(messenger)
        self.mailbox = messenger
        self.begun = 0  # the step that this worker is in
        self._workers, self._nodes = workers, nodes
        self._going = False

    def go(self, resumed_at: float) -> None:
        """Start the clock: every node is ready."""
        self.began = time.perf_counter() - resumed_at
        self.messenger.begin()
        self._going = True

    def await_go(self) -> None:
        """Block until every node is ready."""
        self.messenger.wait_until(
            lambda: self._going, lambda: "the other nodes to be ready", forever=True, starting=True
        )

    def await_saved(self, node: int, label: int, *, lockstep: bool) -> None:
        """Block until a server has saved a checkpoint, which it does when every worker has."""
        control = self.control

        def waiting_for() -> str:
            late = [w for w in range(self._workers) if control.saved(w) < label]
            return ", ".join(name_of(n, self._workers) for n in late or [node]) + " to save a checkpoint"

        # Without lockstep, the others may have been told to stop before they saw that they should save.
        self.messenger.wait_until(
            lambda: control.saved(node) >= label or (not lockstep and control.stop_at != 0), waiting_for
        )

    def wait_for_wakeup(self, ready: Callable[[], bool]) -> None:
        """Block, for as long as it takes, until something happens that concerns this node."""
        self.messenger.wait_until(ready, lambda: "the others", forever=True)

    def wake_all(self) -> None:
        """Do nothing: control messages wake nodes that wait."""

    def proceed(self, step: int, *, lockstep: bool) -> bool:
        """Whether to begin `step`. Once a stop is requested, wait until the last step is known."""
        self.begun = step
        self.messenger.stepped(step)
        self.messenger.poll(watch=True)  # others that hang, which a worker with local steps does not wait for
        if not self.control.stop_asked:
            return True
        waiting_for = "worker 0 to say after which step to stop"
        self.messenger.wait_until(lambda: self.control.stop_at != 0, lambda: waiting_for)
        return lockstep and step < self.control.stop_at

    def handle_control(self, message: dict[str, Any]) -> bool:
        """Handle a control message that all nodes handle in the same way; return whether it was one."""
        match message["kind"]:
            case "control":
                if message["of"] >= self._nodes:
                    raise BadFrame(f"a value of node {message['of']} was sent, but there are only {self._nodes} nodes")
                self.control.learn(message["field"], message["value"], message["of"])
            case "go":
                self.go(float(message["at"]))
            case _:
                return False
        return True
