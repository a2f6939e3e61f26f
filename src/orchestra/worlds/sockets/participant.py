# SPDX-License-Identifier: Apache-2.0
"""The processes of a run on many machines other than process 0: they train or serve as process 0 says."""

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
from orchestra.engine.node_process import Tell
from orchestra.engine.runner import RunOutcome
from orchestra.engine.spec import RunSpec
from orchestra.engine.supervisor import counting
from orchestra.errors import EnvironmentProblem, Interrupted, OrchestraError, Stopped, WorkerFailed, WorkerLost
from orchestra.runs.status import NodeStatus, RunStatus
from orchestra.worlds.sockets import control_messages
from orchestra.worlds.sockets.control_messages import COORDINATOR
from orchestra.worlds.sockets.file_transfer import FileReceiver, FileSender, largest_file, part_of
from orchestra.worlds.sockets.session import LONGEST_TRACEBACK, REPORT_EVERY, SIGNAL_ECHO, Session
from orchestra.worlds.sockets.wire import BadFrame

if TYPE_CHECKING:
    from orchestra.clusters.attached import Attached


class Participant:
    """One such process."""

    def __init__(
        self, spec: RunSpec, x0: Tensor, about: dict[str, Any], cluster: Attached, show: Callable[[RunStatus], None]
    ) -> None:
        self.spec, self.x0, self.about, self.cluster, self.show = spec, x0, about, cluster, show
        self.signals, self.signal_name = 0, ""
        self.assignment: dict[str, Any] | None = None
        self.outcome: dict[str, Any] | None = None
        self.model = bytearray()
        self.files: FileReceiver | None = None
        self._reported = 0.0
        self._signal_sent = False

    def run(self) -> RunOutcome:
        """Train or serve until process 0 sends the outcome."""
        asked = time.perf_counter()
        self.session = session = Session(self.spec, self.x0, self.cluster, self.about)
        with counting(self, echo=SIGNAL_ECHO), tempfile.TemporaryDirectory(prefix="orchestra-") as scratch:
            self.messenger, self.transport, self.rank = session.messenger, session.transport, session.rank
            self.messenger.listen(self)
            try:
                waiting_for = "worker 0 to say where the run folder is"
                self._await(lambda: self.assignment is not None or self.outcome is not None, waiting_for)
                if self.assignment is not None:  # otherwise the run was complete already
                    spec, tell = self._apply_assignment(self.assignment, Path(scratch))
                    interrupted = session.run_node(spec, tell=tell, show=self._show, asked=asked)
                    tell({"kind": "done", "node": self.rank, "interrupted": interrupted})
                self._await(lambda: self.outcome is not None and len(self.model) == self.outcome["bytes"], "worker 0")
            except BaseException as error:
                raise self._end_for_all(error) from None
            session.close()
        assert self.outcome is not None
        return RunOutcome(self.outcome["run"], self.outcome["metrics"], self.outcome["summary"], bytes(self.model))

    def _apply_assignment(self, given: dict[str, Any], scratch: Path) -> tuple[RunSpec, Tell]:
        """Return the spec with the run folder and the checkpoint that process 0 names, and how to report to it."""
        self.show(self._progress(Path(given["run"])))
        folder, launch, resume = Path(given["run"]), str(given["launch"]), given["resume"]
        self.transport.control.learn("save_wanted", int(given["resumed_from"]))
        if _reads(folder / f".launch-{launch}") == launch:
            saved = None if resume is None else folder / "checkpoints" / resume
            return replace(self.spec, run=folder, launch=launch, checkpoint=saved), self._tell
        mine, largest = part_of(self.rank), largest_file(self.x0)
        self.files = FileReceiver(scratch / "checkpoint", lambda source: mine, largest, _on_unwritable)
        sender = FileSender(self.messenger, scratch / "run", COORDINATOR)
        sender.folder.mkdir()
        self.messenger.send_control(COORDINATOR, {"kind": "not-shared", "node": self.rank})
        part = None if resume is None else self.files.folder / resume / checkpoint.part_name(self.rank)
        self._await(lambda: part is None or part.exists(), "worker 0 to send a checkpoint")

        def tell(message: dict[str, Any]) -> None:
            sender.send_new()
            self._tell(message)

        return replace(self.spec, run=sender.folder, launch=launch, checkpoint=part and part.parent), tell

    def _progress(self, folder: Path) -> RunStatus:
        """Return what this process knows of the run's status."""
        spec = self.spec
        shown = expression.show(spec.strategy)
        return RunStatus(folder, shown, spec.workers, spec.servers, spec.last_step, False, 0.0, ())

    def _tell(self, message: dict[str, Any]) -> None:
        self.messenger.send_control(COORDINATOR, message)

    def on_control(self, source: int, message: dict[str, Any]) -> None:
        """Handle a control message from another node."""
        control_messages.check(source, message)
        match message["kind"]:
            case "assignment":
                self.assignment = message
            case "file" if self.files is not None and source == COORDINATOR:
                self.files.expect(source, message)
            case "outcome":
                self.outcome = message
            case "stopped":
                raise Stopped(message["message"], message["code"])
            case _:
                self.transport.handle_control(message)
                asked = message["kind"] == "control" and message["field"] == "stop_asked"
                if asked and self.rank < self.session.workers:
                    self._tell({"kind": "begun", "step": self._begun()})

    def _begun(self) -> int:
        done = self.transport.control.is_done(self.rank)
        return NO_MORE_STEPS if done else self.transport.begun

    def on_file_piece(self, source: int, piece: bytes) -> None:
        """Take the next piece of the final model or of a file that another node has announced."""
        if self.outcome is not None and source == COORDINATOR:
            self.model += piece
            if len(self.model) > self.outcome["bytes"]:
                raise BadFrame(
                    f"node {source} sent more of the model than the {self.outcome['bytes']:,} bytes announced"
                )
        elif self.files is not None:
            self.files.take_in(source, piece)

    def on_reconnected(self, node: int, seconds: float, cause: str) -> None:
        """Log that a broken connection was replaced."""
        self.session.log_reconnected(node, seconds, cause)

    def _await(self, ready: Callable[[], bool], waiting_for: str) -> None:
        self.messenger.wait_until(ready, lambda: waiting_for, forever=True)

    def on_waiting(self) -> None:
        """Check, while this node waits, that the run still goes on; pass a signal on to process 0."""
        if self.outcome is None:
            self.session.require_all()
            if self.messenger.is_closing(COORDINATOR):
                raise Stopped("worker 0 left before it sent the outcome of the run: see its own message", 1)
        if self.signals and not self._signal_sent:
            self._signal_sent = True
            self._tell({"kind": "signal", "name": self.signal_name})

    def _show(self, row: NodeStatus) -> None:
        if time.perf_counter() - self._reported > REPORT_EVERY:
            self._reported = time.perf_counter()
            self._tell({"kind": "report", "status": row._asdict()})

    def raise_interrupted(self) -> None:
        """End this process at once, at a second signal."""
        raise Interrupted(f"stopped by {self.signal_name}.")

    def _end_for_all(self, error: BaseException) -> BaseException:
        """End the run in all processes: tell process 0 why, and the others which process failed."""
        error = self.session.cause_of(error)
        if isinstance(error, Stopped):
            self.session.close()
            return error
        code = error.exit_code if isinstance(error, OrchestraError) else 1
        if isinstance(error, WorkerLost | Interrupted):
            message = str(error)
        elif isinstance(error, OrchestraError):
            self._tell({"kind": "refused", "node": self.rank, "error": type(error).__name__, "message": str(error)})
            message = f"{self.session.name}: {error}"
        else:
            trace = traceback.format_exc()[-LONGEST_TRACEBACK:]
            self._tell({"kind": "failed", "node": self.rank, "traceback": trace})
            error, message = WorkerFailed(self.session.name, trace), f"{self.session.name} failed"
        self.session.abort(message, code)
        return error


def _on_unwritable(source: int, path: Path, error: OSError) -> None:
    raise EnvironmentProblem(f"the checkpoint that node {source} sent could not be written to {path}: {error}")


def _reads(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="ascii")
    return None
