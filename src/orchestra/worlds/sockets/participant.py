# SPDX-License-Identifier: Apache-2.0
"""Every process of a run on many machines but process 0: train or serve as process 0 says, and end with it."""

from __future__ import annotations

import contextlib
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from orchestra.engine import checkpoint, expression
from orchestra.engine.control import NO_MORE_STEPS
from orchestra.engine.runner import RunOutcome
from orchestra.engine.spec import RunSpec
from orchestra.engine.supervisor import counting
from orchestra.errors import EnvironmentProblem, Interrupted, OrchestraError, Stopped, WorkerFailed, WorkerLost
from orchestra.runs.status import NodeStatus, RunStatus
from orchestra.worlds.sockets import control_messages
from orchestra.worlds.sockets.control_messages import HOME
from orchestra.worlds.sockets.file_transfer import FileReceiver, FileSender, largest_file, part_of
from orchestra.worlds.sockets.session import LONGEST_TRACEBACK, REPORT_EVERY, SIGNAL_ECHO, Session
from orchestra.worlds.sockets.wire import BadFrame

if TYPE_CHECKING:
    from orchestra.clusters.attached import Attached


class Participant:
    """Any other process."""

    def __init__(
        self, spec: RunSpec, x0: Tensor, about: dict[str, Any], cluster: Attached, show: Callable[[RunStatus], None]
    ) -> None:
        self.spec, self.x0, self.about, self.cluster, self.show = spec, x0, about, cluster, show
        self.signals, self.signal_name = 0, ""
        self.order: dict[str, Any] | None = None
        self.over: dict[str, Any] | None = None
        self.model = bytearray()
        self.files: FileReceiver | None = None
        self._reported = 0.0
        self._told_of_signal = False

    def run(self) -> RunOutcome:
        """Take part to the end."""
        asked = time.perf_counter()
        self.session = session = Session(self.spec, self.x0, self.cluster, self.about)
        with counting(self, echo=SIGNAL_ECHO), tempfile.TemporaryDirectory(prefix="orchestra-") as scratch:
            self.messenger, self.transport, self.rank = session.messenger, session.transport, session.rank
            self.messenger.listen(self)
            try:
                whom = "worker 0 to say where the run folder is"
                self._await(lambda: self.order is not None or self.over is not None, whom)
                if self.order is not None:  # else all was done another day
                    spec, tell = self._receive_order(self.order, Path(scratch))
                    broken_off = session.run_node(spec, tell=tell, show=self._show, asked=asked)
                    tell({"kind": "done", "node": self.rank, "interrupted": broken_off})
                self._await(lambda: self.over is not None and len(self.model) == self.over["bytes"], "worker 0")
            except BaseException as error:
                raise self._end_for_all(error) from None
            session.close()
        assert self.over is not None
        return RunOutcome(self.over["run"], self.over["metrics"], self.over["summary"], bytes(self.model))

    def _receive_order(self, order: dict[str, Any], scratch: Path) -> tuple[RunSpec, Callable[[dict[str, Any]], None]]:
        """What only home knows: the run folder, and what to go on from."""
        self.show(self._progress(Path(order["run"])))
        folder, launch, resume = Path(order["run"]), str(order["launch"]), order["resume"]
        self.transport.control.learn("save_wanted", int(order["resumed_from"]))
        if _reads(folder / f".launch-{launch}") == launch:
            saved = None if resume is None else folder / "checkpoints" / resume
            return replace(self.spec, run=folder, launch=launch, checkpoint=saved), self._tell
        mine, largest = part_of(self.rank), largest_file(self.x0)
        self.files = FileReceiver(scratch / "checkpoint", lambda source: mine, largest, _could_not_keep)
        sender = FileSender(self.messenger, scratch / "run", HOME)
        sender.folder.mkdir()
        self.messenger.send_control(HOME, {"kind": "far-off", "node": self.rank})
        part = None if resume is None else self.files.folder / resume / checkpoint.part_name(self.rank)
        self._await(lambda: part is None or part.exists(), "worker 0 to send a checkpoint")

        def tell(said: dict[str, Any]) -> None:
            sender.bring()
            self._tell(said)

        return replace(self.spec, run=sender.folder, launch=launch, checkpoint=part and part.parent), tell

    def _progress(self, folder: Path) -> RunStatus:
        """All that this process can show of the run."""
        spec = self.spec
        shown = expression.show(spec.strategy)
        return RunStatus(folder, shown, spec.workers, spec.servers, spec.last_step, False, 0.0, ())

    def _tell(self, said: dict[str, Any]) -> None:
        self.messenger.send_control(HOME, said)

    def on_control(self, source: int, said: dict[str, Any]) -> None:
        """Handle a control message from another node."""
        control_messages.check(source, said)
        match said["kind"]:
            case "order":
                self.order = said
            case "file" if self.files is not None and source == HOME:
                self.files.expect(source, said)
            case "over":
                self.over = said
            case "stopped":
                raise Stopped(said["message"], said["code"])
            case _:
                self.transport.hear(said)
                asked = said["kind"] == "control" and said["field"] == "stop_asked"
                if asked and self.rank < self.session.workers:
                    self._tell({"kind": "begun", "step": self._begun()})

    def _begun(self) -> int:
        done = self.transport.control.is_done(self.rank)
        return NO_MORE_STEPS if done else self.transport.begun

    def on_file_piece(self, source: int, piece: bytes) -> None:
        """Take the next piece of the final model or of a file that another node has announced."""
        if self.over is not None and source == HOME:
            self.model += piece
            if len(self.model) > self.over["bytes"]:
                raise BadFrame(f"node {source} sent more of the model than the {self.over['bytes']:,} bytes announced")
        elif self.files is not None:
            self.files.take_in(source, piece)

    def on_reconnected(self, node: int, seconds: float, cause: str) -> None:
        """Log that a broken connection was replaced."""
        self.session.log_reconnected(node, seconds, cause)

    def _await(self, ready: Callable[[], bool], whom: str) -> None:
        self.messenger.wait_until(ready, lambda: whom, forever=True)

    def on_waiting(self) -> None:
        """Check, while this node waits, that the run still goes on; pass a signal on to process 0."""
        if self.over is None:
            self.session.require_everybody()
            if self.messenger.is_gone(HOME):
                raise Stopped("worker 0 left before it told how the run went: see what it said", 1)
        if self.signals and not self._told_of_signal:
            self._told_of_signal = True
            self._tell({"kind": "signal", "name": self.signal_name})

    def _show(self, row: NodeStatus) -> None:
        if time.perf_counter() - self._reported > REPORT_EVERY:
            self._reported = time.perf_counter()
            self._tell({"kind": "report", "status": row._asdict()})

    def raise_interrupted(self) -> None:
        """A second signal: go at once."""
        raise Interrupted(f"stopped by {self.signal_name}.")

    def _end_for_all(self, error: BaseException) -> BaseException:
        """This process cannot go on: home is told why, the others who it was."""
        error = self.session.cause_of(error)
        if isinstance(error, Stopped):
            self.session.close()
            return error
        code = error.exit_code if isinstance(error, OrchestraError) else 1
        if isinstance(error, WorkerLost | Interrupted | Stopped):
            said = {"message": str(error), "code": code}
        elif isinstance(error, OrchestraError):
            self._tell({"kind": "refused", "node": self.rank, "error": type(error).__name__, "message": str(error)})
            said = {"message": f"{self.session.name}: {error}", "code": code}
        else:
            trace = traceback.format_exc()[-LONGEST_TRACEBACK:]
            self._tell({"kind": "failed", "node": self.rank, "traceback": trace})
            error, said = WorkerFailed(self.session.name, trace), {"message": f"{self.session.name} failed", "code": 1}
        self.session.give_up(said)
        return error


def _could_not_keep(source: int, path: Path, error: OSError) -> None:
    raise EnvironmentProblem(f"the checkpoint that node {source} sent could not be written to {path}: {error}")


def _reads(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii")
    return None
