# SPDX-License-Identifier: Apache-2.0
"""The decisions for a run as a whole, in every world: when it begins, when it stops, which checkpoints count."""

from __future__ import annotations

import math
import shutil
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from orchestra.engine import checkpoint, expression
from orchestra.engine.control import BUDGET_SPENT, INTERRUPTED
from orchestra.engine.runner import PreparedRun
from orchestra.errors import Interrupted, RunFolderGone, WorkerFailed, by_name
from orchestra.runs import run_lock
from orchestra.runs.status import NodeStatus, RunStatus, name_of

_LOOK = 1.0  # seconds between two checks that the run folder exists


@dataclass
class RunSupervisor(ABC):
    """The supervisor of one run: handles the messages of its nodes. Subclasses reach the nodes."""

    prepared: PreparedRun
    ready: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    saved: dict[int, set[int]] = field(default_factory=dict)
    incomplete: set[int] = field(default_factory=set)  # steps at which a node could not save
    warnings: list[str] = field(default_factory=list)
    silenced: set[int] = field(default_factory=set)  # nodes whose log has failed once
    stopped_by: str = "budget"
    begun: bool = False
    asked_to_stop: bool = False
    interrupted: bool = False  # with steps left to do
    signals: int = 0
    signal_name: str = ""
    last_checkpoint: int | None = None
    beforehand: str = ""  # what must be done before the run can go on
    looked: float = 0.0  # time of the last check that the run folder exists

    def __post_init__(self) -> None:
        self.spec = self.prepared.spec
        self.nodes = self.spec.workers + self.spec.servers
        self.had_folder = not run_lock.is_gone(self.spec.run)

    @abstractmethod
    def begin(self) -> None:
        """Start the clock and all nodes; called when every node is ready."""

    @abstractmethod
    def ask_to_stop(self, code: int) -> None:
        """Agree with the workers on a last step: past every step begun, so that no worker has to go back."""

    @abstractmethod
    def seconds(self) -> float:
        """Return the seconds of training so far."""

    @abstractmethod
    def rows(self) -> tuple[NodeStatus, ...]:
        """Return the latest report of every node."""

    def progress(self) -> RunStatus:
        """Return the current state of the run."""
        spec = self.spec
        return RunStatus(
            spec.run, expression.show(spec.strategy), spec.workers, spec.servers, spec.last_step, self.begun,
            self.seconds() if self.begun else 0.0, self.rows(),
        )  # fmt: skip

    def handle_message(self, said: dict[str, Any]) -> None:
        """Handle a message from a node."""
        node = said["node"]
        match said["kind"]:
            case "ready":
                self.ready.add(node)
                if len(self.ready) == self.nodes:
                    self.begun = True
                    self.begin()
            case "done":
                self.done.add(node)
                self.interrupted |= said["interrupted"]
            case "saved":
                self._note_saved(said["step"], node)
            case "save-failed":
                before = self.last_checkpoint or self.prepared.resumed_from
                newest = f"that of step {before} is still the newest" if before else "there is none yet"
                self._warn(
                    f"{self.name(node)} could not save at step {said['step']}: {said['error']}. Training went on; of "
                    f"checkpoints, {newest}."
                )
                self.incomplete.add(said["step"])
                self._discard(said["step"])
            case "snapshot-failed":
                self._warn(
                    f"{self.name(node)} could not write its part of a snapshot at step {said['step']}: {said['error']}."
                )
            case "log-failed" if node not in self.silenced:
                self.silenced.add(node)
                self._warn(f"{self.name(node)} could not write its events: {said['error']}. It goes on trying.")
            case "failed":
                raise WorkerFailed(self.name(node), said["traceback"])
            case "refused":
                raise by_name(said["error"])(said["message"])

    def _note_saved(self, step: int, node: int) -> None:
        """Seal a checkpoint once every node has written its part; discard it if one of them could not."""
        if step in self.incomplete:
            self._discard(step)  # this node wrote its part after another had failed
            return
        here = self.saved.setdefault(step, set())
        here.add(node)
        if len(here) < self.nodes:
            return
        del self.saved[step]
        try:
            checkpoint.commit(self.spec.run / "checkpoints", step, self.prepared.about)
            self.last_checkpoint = step
        except OSError as error:
            self._warn(f"the checkpoint of step {step} could not be sealed: {error}. Training went on.")

    def _discard(self, step: int) -> None:
        shutil.rmtree(checkpoint.draft(self.spec.run / "checkpoints", step), ignore_errors=True)

    def _warn(self, message: str) -> None:
        """Print a warning, and keep it for the summary."""
        self.warnings.append(message)
        print(f"warning: {message}", file=sys.stderr)

    def consider_stopping(self) -> None:
        """Ask the workers to stop if there is a reason to."""
        self._require_folder()
        if not self.begun:
            if self.signals:
                self.raise_interrupted()
            return
        if self.asked_to_stop:
            return  # workers may already act on the first reason; a second Ctrl-C ends everything at once
        if self.signals:
            self._stop("interrupt", INTERRUPTED)
        elif self.prepared.seconds is not None and self.seconds() >= self.prepared.seconds:
            self._stop("seconds", BUDGET_SPENT)
        elif self.prepared.scorer.target_reached():
            self._stop("target", BUDGET_SPENT)

    def _require_folder(self) -> None:
        """Raise if the run folder was deleted; checked once a second."""
        now = time.monotonic()
        if self.had_folder and now - self.looked > _LOOK:
            self.looked = now
            if run_lock.is_gone(self.spec.run):
                raise RunFolderGone(self.spec.run)

    def _stop(self, reason: str, code: int) -> None:
        self.asked_to_stop, self.stopped_by = True, reason
        self.ask_to_stop(code)

    def settle(self) -> None:
        """Raise if the run was interrupted before its end; called when all nodes are done."""
        if self.interrupted:
            self.raise_interrupted()
        if self.stopped_by == "interrupt":  # too late: the last step was under way
            self.stopped_by = "budget"

    def raise_interrupted(self) -> None:
        """Raise `Interrupted`, with the command that resumes the run."""
        run = self.spec.run
        newest = self.last_checkpoint or self.prepared.resumed_from
        where = (
            f"A checkpoint of step {newest} is in {run}; go on with {self.prepared.how_to_resume}{self.beforehand}"
            if newest
            else " ".join(["No checkpoint was written.", *self.warnings])
        )
        error = Interrupted(f"stopped by {self.signal_name or 'SIGINT'}. {where}")
        error.exit_code = 143 if self.signal_name == "SIGTERM" else 130  # type: ignore[misc]
        raise error

    def name(self, node: int) -> str:
        """Return the name of a node in messages."""
        return name_of(node, self.spec.workers)


class Stoppable(Protocol):
    """Something that stops at the first signal, and at once at the second."""

    signals: int
    signal_name: str

    def raise_interrupted(self) -> None:
        """Raise `Interrupted`."""


@contextmanager
def counting(target: Stoppable, *, echo: float = 0.0) -> Iterator[None]:
    """Count Ctrl-C and SIGTERM instead of ending by them; signals within `echo` seconds of the first count as one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first = math.inf

    def note(number: int, frame: object) -> None:
        nonlocal first
        if target.signals and time.monotonic() - first < echo:
            return
        first = min(first, time.monotonic())
        target.signals += 1
        target.signal_name = signal.Signals(number).name
        if target.signals > 1:
            target.raise_interrupted()

    before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
