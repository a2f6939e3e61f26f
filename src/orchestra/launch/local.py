# SPDX-License-Identifier: Apache-2.0
"""The coordinator of a run on one machine: starts the nodes, watches them, ends together with them."""

from __future__ import annotations

import json
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from orchestra import checkpoint, expression
from orchestra.board import Progress, name_of
from orchestra.cluster import Ending, Order
from orchestra.errors import ClusterError, Interrupted, WorkerFailed, WorkerLost, by_name
from orchestra.launch import forkserver
from orchestra.launch.child import Handover
from orchestra.launch.keeper import BUDGET_SPENT, INTERRUPTED
from orchestra.transports import memory
from orchestra.transports.memory import (
    ABORT,
    GO,
    NOTHING_MORE,
    SAVE_WANTED,
    STOP_ASKED,
    STOP_AT,
    Arena,
    Plan,
)

_GRACE = 1.0  # seconds between asking nodes to go and killing them
_GLANCE = 0.1  # seconds between two looks at the board


@dataclass
class Coordinator:
    """One run of one job."""

    order: Order
    patience: float  # seconds a node waits for another
    ready: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    gone: set[int] = field(default_factory=set)
    saved: dict[int, set[int]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    silenced: set[int] = field(default_factory=set)  # who has complained once about its log
    stopped_by: str = "budget"
    begun: bool = False
    asked_to_stop: bool = False
    interrupted: bool = False  # with steps left to do
    signals: int = 0
    signal_name: str = ""
    last_checkpoint: int | None = None

    def __post_init__(self) -> None:
        job, x0 = self.order.job, self.order.x0
        self.job = job
        self.plan = Plan(job.workers, job.servers, x0.numel(), x0.dtype, job.shares_x)

    def run(self) -> Ending:
        """Train. Raises what ended the run early; leaves no process and no memory behind."""
        arena_fd = memory.create(self.plan)
        handover_fd = os.memfd_create("orchestra-job")
        told, telling = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        news: socket.socket | None = None
        try:
            self.arena = Arena(arena_fd, self.plan)
            start = self.plan.place("x", 0) if self.plan.shared_x else self.plan.start
            self.arena.tensor(start, self.plan.numel, self.plan.dtype).copy_(self.order.x0)
            self.arena.words.set(SAVE_WANTED, self.order.resumed_from)
            with os.fdopen(os.dup(handover_fd), "wb") as file:
                file.write(self._handover())
            if self.order.has_target:
                self.order.scorer.start()
            with self._signals():
                news = forkserver.warm().spawn(self.plan.nodes, [arena_fd, handover_fd, telling.fileno()])
                telling.close()
                self._watch(told, news)
        finally:
            if news is not None:
                self._end(news)
            for fd in (arena_fd, handover_fd):
                os.close(fd)
            told.close()
        return Ending(self.stopped_by, self.warnings)

    def _handover(self) -> bytes:
        return pickle.dumps(
            Handover(
                plan=self.plan,
                job=cloudpickle.dumps(self.job),
                path=list(sys.path),
                folder=os.getcwd(),
                environment=dict(os.environ),
                asked=time.perf_counter(),
                patience=self.patience,
            )
        )

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Count Ctrl-C and SIGTERM instead of dying of them, while the run lasts."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def note(number: int, frame: object) -> None:
            self.signals += 1
            self.signal_name = signal.Signals(number).name
            if self.signals > 1:
                self._raise_interrupted()

        before = {s: signal.signal(s, note) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for s, handler in before.items():
                signal.signal(s, handler)

    def _watch(self, told: socket.socket, news: socket.socket) -> None:
        while len(self.gone) < self.plan.nodes:
            readable, _, _ = select.select([told, news], [], [], _GLANCE)
            if told in readable:
                self._hear(json.loads(told.recv(1 << 17)))
            elif news in readable:
                # Only when nothing is left to be heard: a node's last words matter more than that it is gone.
                self._mourn(news)
            self._consider_stopping()
            self.order.show(self._progress())
        if self.interrupted:
            self._raise_interrupted()
        if self.stopped_by == "interrupt":  # too late: the last step was under way
            self.stopped_by = "budget"

    def _progress(self) -> Progress:
        job = self.job
        rows = tuple(self.arena.reported(node) for node in range(self.plan.nodes))
        strategy = expression.show(job.strategy)
        return Progress(
            job.run, strategy, job.workers, job.servers, job.last_step, self.begun, self._seconds(), rows
        )  # fmt: skip

    def _seconds(self) -> float:
        """Of training so far."""
        return time.perf_counter() - self.arena.clock[0] if self.begun else 0.0

    def _hear(self, said: dict[str, Any]) -> None:
        node = said["node"]
        match said["kind"]:
            case "ready":
                self.ready.add(node)
                if len(self.ready) == self.plan.nodes:
                    self.arena.clock[0] = time.perf_counter() - self.order.resumed_at
                    self.begun = True
                    self.arena.words.announce(GO, 1)
                    self.arena.forget_start()
            case "done":
                self.done.add(node)
                self.interrupted |= said["interrupted"]
            case "saved":
                self._note_saved(said["step"], node)
            case "save-failed":
                before = self.last_checkpoint or self.order.resumed_from
                newest = f"that of step {before} is still the newest" if before else "there is none yet"
                self._warn(
                    f"{self._name(node)} could not save at step {said['step']}: {said['error']}. Training went on; of "
                    f"checkpoints, {newest}."
                )
                shutil.rmtree(checkpoint.draft(self.job.run / "checkpoints", said["step"]), ignore_errors=True)
            case "snapshot-failed":
                self._warn(f"{self._name(node)} could not set aside the model at step {said['step']}: {said['error']}.")
            case "log-failed" if node not in self.silenced:
                self.silenced.add(node)
                self._warn(f"{self._name(node)} could not write its events: {said['error']}. It goes on trying.")
            case "failed":
                raise WorkerFailed(self._name(node), said["traceback"])
            case "refused":
                raise by_name(said["error"])(said["message"])

    def _note_saved(self, step: int, node: int) -> None:
        """Seal a checkpoint once every node has written its part."""
        here = self.saved.setdefault(step, set())
        here.add(node)
        if len(here) < self.plan.nodes:
            return
        del self.saved[step]
        try:
            checkpoint.commit(self.job.run / "checkpoints", step, self.order.about)
            self.last_checkpoint = step
        except OSError as error:
            self._warn(f"the checkpoint of step {step} could not be sealed: {error}. Training went on.")

    def _warn(self, message: str) -> None:
        """Say it now, and remember it for the end."""
        self.warnings.append(message)
        print(f"warning: {message}", file=sys.stderr)

    def _mourn(self, news: socket.socket) -> None:
        message = news.recv(1 << 16)
        if not message:
            raise ClusterError("the process that starts workers died. Run again; if it stays so, look at dmesg.")
        said = json.loads(message)
        if "node" not in said:
            return
        node, status = said["node"], said["status"]
        self.gone.add(node)
        if node not in self.done:
            raise WorkerLost(self._name(node), _cause(status))

    def _consider_stopping(self) -> None:
        if not self.begun:
            if self.signals:
                self._raise_interrupted()
            return
        if self.asked_to_stop:
            return  # some may already act on the reason given: it stays, and a second Ctrl-C ends everything at once
        if self.signals:
            self._ask_to_stop("interrupt", INTERRUPTED)
        elif self.order.seconds is not None and self._seconds() >= self.order.seconds:
            self._ask_to_stop("seconds", BUDGET_SPENT)
        elif self.order.scorer.target_reached():
            self._ask_to_stop("target", BUDGET_SPENT)

    def _ask_to_stop(self, reason: str, code: int) -> None:
        """Agree on a last step: past every step begun, so that nobody has to go back.

        From the moment the wish is visible no worker begins another step before it knows the last one. A worker may
        just have looked, so one step more than any begun is safe.
        """
        self.asked_to_stop, self.stopped_by = True, reason
        words = self.arena.words
        words.set(STOP_ASKED, code)
        begun = [words[self.plan.word("begun", w)] for w in range(self.plan.workers)]
        last = max((b for b in begun if b != NOTHING_MORE), default=0)
        # It also names the checkpoint of this moment, which must be the newest.
        words.announce(STOP_AT, max(last, words[SAVE_WANTED]) + 1)
        for node in range(self.plan.nodes):  # those who wait for the others to be done
            words.announce(self.plan.word("bell", node), 0)

    def _raise_interrupted(self) -> None:
        run = self.job.run
        newest = self.last_checkpoint or self.order.resumed_from
        where = (
            f"A checkpoint of step {newest} is in {run}; go on with {self.order.how_to_resume}"
            if newest
            else " ".join(["No checkpoint was written.", *self.warnings])
        )
        error = Interrupted(f"stopped by {self.signal_name or 'SIGINT'}. {where}")
        error.exit_code = 143 if self.signal_name == "SIGTERM" else 130  # type: ignore[misc]
        raise error

    def _end(self, news: socket.socket) -> None:
        """Give everyone a moment to go, then see that they do."""
        self.arena.words.announce(ABORT, 1)
        deadline = time.monotonic() + (_GRACE if self.signals < 2 else 0.0)
        killed = False
        news.settimeout(0.05)
        while len(self.gone) < self.plan.nodes:
            try:
                message = news.recv(1 << 16)
                if not message:
                    break
                said = json.loads(message)
                if "node" in said:
                    self.gone.add(said["node"])
            except TimeoutError:
                if time.monotonic() > deadline and not killed:
                    killed = True
                    news.send(b"k")
        news.close()

    def _name(self, node: int) -> str:
        return name_of(node, self.job.workers)


def _cause(status: int) -> str:
    if status >= 0:
        return f"it exited with code {status} without a word"
    name = signal.Signals(-status).name
    hint = " (possibly out of memory: see dmesg, or use a smaller batch or fewer workers)" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"
