# SPDX-License-Identifier: Apache-2.0
"""The coordinator of a run on one machine: it starts the nodes, watches them, and ends with them."""

from __future__ import annotations

import json
import math
import os
import pickle
import select
import signal
import socket
import sys
import time
from dataclasses import dataclass, field

import cloudpickle

from orchestra.engine.runner import Ending
from orchestra.engine.supervisor import RunSupervisor, counting
from orchestra.engine.torch_settings import TorchSettings
from orchestra.errors import ClusterError, Stalled, WorkerLost
from orchestra.runs.status import NodeStatus
from orchestra.worlds.shared_memory import fork_server, layout
from orchestra.worlds.shared_memory.caller_model import CallerModel
from orchestra.worlds.shared_memory.child import ChildSetup
from orchestra.worlds.shared_memory.control import SharedControl
from orchestra.worlds.shared_memory.hangs import HangWatch, Limits, Seen
from orchestra.worlds.shared_memory.layout import (
    ABORT,
    GO,
    STALLED,
    Arena,
    ArenaLayout,
)

_GRACE = 1.0  # seconds between asking nodes to exit and killing them
_START = 30.0  # minimum of seconds that nodes have to get ready
_STARTER, _SERVER = "the process that starts workers", -1  # name and number of the fork server among the nodes
_LAST_LOOKS = 5  # checks within which one of several deadlocked nodes must report
_GLANCE = 0.1  # seconds between two checks of the board


@dataclass
class LocalCoordinator(RunSupervisor):
    """The supervisor of one run by processes of this machine."""

    patience: float = 300.0  # seconds for all nodes to be ready
    gone: set[int] = field(default_factory=set)  # nodes whose process has ended
    pids: dict[int, int] = field(default_factory=dict)  # of the other nodes
    stalls: int = 0  # checks that found all nodes waiting for each other

    def __post_init__(self) -> None:
        super().__post_init__()
        spec, x0 = self.spec, self.prepared.x0
        self.plan = ArenaLayout(spec.workers, spec.servers, x0.numel(), x0.dtype, spec.shares_x)
        self.watch = HangWatch(Limits.of(self.patience), lambda node: _STARTER if node == _SERVER else self.name(node))
        self.forked = math.inf  # when the processes were forked

    def run(self) -> Ending:
        """Train, or raise what ended the run early; leave no process and no memory behind."""
        arena_fd = layout.create(self.plan)
        setup_fd = os.memfd_create("orchestra-run")
        messages, messages_out = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        exits: socket.socket | None = None
        try:
            self.arena = Arena(arena_fd, self.plan)
            start = self.plan.place("x", 0) if self.plan.shared_x else self.plan.start
            self.arena.tensor(start, self.plan.numel, self.plan.dtype).copy_(self.prepared.x0)
            self.control = SharedControl(self.arena)
            self.control.write("save_wanted", self.prepared.resumed_from)
            with os.fdopen(os.dup(setup_fd), "wb") as file:
                file.write(self._setup())
            self.prepared.scorer.start()
            with counting(self):
                self.server = fork_server.warm()
                exits = self.server.spawn(self.plan.nodes, [arena_fd, setup_fd, messages_out.fileno()])
                messages_out.close()
                self._watch(messages, exits)
        finally:
            if exits is not None:
                self._end(exits)
            for fd in (arena_fd, setup_fd):
                os.close(fd)
            messages.close()
        return Ending(self.stopped_by, self.warnings)

    def _setup(self) -> bytes:
        prepared, spec = self.prepared, self.spec
        return pickle.dumps(
            ChildSetup(
                plan=self.plan,
                spec=cloudpickle.dumps(spec),
                path=list(sys.path),
                folder=os.getcwd(),
                environment=dict(os.environ),
                origin=CallerModel.of(prepared.module, prepared.data, spec.validation_samples(), spec.seed),
                torch_settings=TorchSettings.current(),
                asked=time.perf_counter(),
                patience=self.patience,
            )
        )

    def _watch(self, messages: socket.socket, exits: socket.socket) -> None:
        while len(self.gone) < self.nodes:
            readable, _, _ = select.select([messages, exits], [], [], _GLANCE)
            if messages in readable:
                self.handle_message(json.loads(messages.recv(1 << 17)))
            elif exits in readable:
                # Only when there are no messages: read a node's error before its exit status.
                self._note_exit(exits)
            self.consider_stopping()
            self._look_for_hangs()
            self.prepared.show(self.progress())
        self.settle()

    def _look_for_hangs(self) -> None:
        """Raise if a process hangs. If all nodes wait for each other, make them raise with what they wait for."""
        seen = {node: self._seen(node) for node in self.pids} if self.begun else {}
        if self.watch.look(self.pids | {_SERVER: self.server.pid}, seen, asked=self.asked_to_stop):
            self.arena.words.announce(STALLED, 1)
            self.stalls += 1
            if self.stalls > _LAST_LOOKS:
                raise Stalled("all nodes wait for each other, and none reports for what. This is a bug in orchestra.")
        late = max(self.patience, _START)
        if not self.begun and time.monotonic() - self.forked > late:
            names = ", ".join(self.name(node) for node in range(self.nodes) if node not in self.ready)
            raise Stalled(f"{names} did not get ready within {late:g} s. Give Local(patience=...) more seconds.")

    def _seen(self, node: int) -> Seen:
        row = self.arena.reported(node)
        return Seen((row.step, row.samples), self.arena.words[self.plan.word("waits", node)])

    def begin(self) -> None:
        """Start the clock and the nodes."""
        self.arena.clock[0] = time.perf_counter() - self.prepared.resumed_at
        self.arena.words.announce(GO, 1)
        self.arena.forget_start()

    def seconds(self) -> float:
        """Return the seconds of training so far."""
        return time.perf_counter() - self.arena.clock[0]

    def rows(self) -> tuple[NodeStatus, ...]:
        """Return the latest report of every node."""
        return tuple(self.arena.reported(node) for node in range(self.nodes))

    def ask_to_stop(self, code: int) -> None:
        """Agree on a last step: past every step begun, so that no worker has to go back.

        Once `stop_asked` is visible no worker begins another step before it knows the last one. A worker may have
        checked just before, so the last step is one more than any begun.
        """
        self.control.write("stop_asked", code)
        last = self.control.last_step([self.control.read("begun", w) for w in range(self.plan.workers)])
        self.control.write("stop_at", last, wake=True)
        for node in range(self.nodes):  # wake nodes that wait until the others are done
            self.arena.words.announce(self.plan.word("bell", node), 0)

    def _note_exit(self, exits: socket.socket) -> None:
        message = exits.recv(1 << 16)
        if not message:
            raise ClusterError(f"{_STARTER} died. Run again; if that happens again, look at dmesg.")
        said = json.loads(message)
        if "node" not in said:
            self.pids, self.forked = dict(enumerate(said["pids"])), time.monotonic()
            return
        node, status = said["node"], said["status"]
        self.gone.add(node)
        self.pids.pop(node, None)
        if node not in self.done:
            raise WorkerLost(self.name(node), _cause(status))

    def _end(self, exits: socket.socket) -> None:
        """Ask the nodes to exit, then kill those that do not."""
        self.arena.words.announce(ABORT, 1)
        deadline = time.monotonic() + (_GRACE if self.signals < 2 else 0.0)
        killed = False
        exits.settimeout(0.05)
        while len(self.gone) < self.nodes:
            try:
                message = exits.recv(1 << 16)
                if not message:
                    break
                said = json.loads(message)
                if "node" in said:
                    self.gone.add(said["node"])
            except TimeoutError:
                if time.monotonic() > deadline and not killed:
                    killed = True
                    exits.send(b"k")
                elif (
                    time.monotonic() > deadline + _GRACE
                ):  # the fork server may be stopped itself; the nodes die with it
                    self.server.close()
                    break
        exits.close()


def _cause(status: int) -> str:
    if status >= 0:
        return f"it exited with code {status} without an error message"
    name = signal.Signals(-status).name
    hint = " (possibly out of memory: see dmesg, or use a smaller batch or fewer workers)" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"
