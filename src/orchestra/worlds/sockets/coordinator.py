# SPDX-License-Identifier: Apache-2.0
"""Process 0 of a run on many machines: the coordinator, which is a worker as well.

    process 0       keeps the run folder; handles the others' control messages; decides when the run begins and ends
    the others      do as process 0 says: see `participant`

There is no thread for that: a node handles control messages whenever it waits for a message, and before each step. To
stop, process 0 asks all workers; each answers with the step that it is in, and begins no other until process 0 has
named the last one.
"""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from orchestra.engine import checkpoint
from orchestra.engine.control import NO_MORE_STEPS
from orchestra.engine.runner import Ending, RunOutcome
from orchestra.engine.snapshot import FINAL, make_elsewhere
from orchestra.engine.spec import RunSpec
from orchestra.engine.supervisor import RunSupervisor, counting
from orchestra.errors import EnvironmentProblem, OrchestraError, Stopped, WorkerFailed
from orchestra.runs.status import NodeStatus
from orchestra.worlds.sockets import control_messages, rank_order
from orchestra.worlds.sockets.control_messages import COORDINATOR
from orchestra.worlds.sockets.file_transfer import FileReceiver, files_of, largest_file
from orchestra.worlds.sockets.messenger import Messenger
from orchestra.worlds.sockets.session import LONGEST_TRACEBACK, REPORT_EVERY, SIGNAL_ECHO, Session

if TYPE_CHECKING:
    from orchestra.clusters.attached import Attached


@dataclass
class Coordinator(RunSupervisor):
    """Coordinates a run, and trains as worker 0."""

    cluster: Attached = field(kw_only=True)
    marker: Path | None = None  # a file by which the others see whether they share the run folder
    reports: dict[int, NodeStatus] = field(default_factory=dict)
    answers: dict[int, int] = field(default_factory=dict)  # the step that each worker was in when asked to stop
    warned_of_full_disk: bool = False
    shown: float = 0.0  # when the status of the run was last shown

    def run(self) -> Ending:
        """Train together with the others. Raises the error that ended the run early."""
        asked, spec = time.perf_counter(), self.spec
        self.prepared.scorer.start(apart=True)  # before there are connections, which its process would keep open
        self.session = session = Session(spec, self.prepared.x0, self.cluster, self.prepared.fingerprint)
        with counting(self, echo=SIGNAL_ECHO):
            self.messenger, self.transport = session.messenger, session.transport
            largest = largest_file(self.prepared.x0)
            rescue = partial(make_elsewhere, spec.launch)
            self.files = FileReceiver(spec.run, files_of, largest, self._on_unwritable, rescue)
            self.messenger.listen(self)
            self.transport.control.learn("save_wanted", self.prepared.resumed_from)
            try:
                self._send_assignment()
                interrupted = session.run_node(spec, tell=self.handle_message, show=self._show, asked=asked)
                self.handle_message({"kind": "done", "node": COORDINATOR, "interrupted": interrupted})
                self.messenger.wait_until(lambda: len(self.done) == self.nodes, lambda: "the others", forever=True)
                self.settle()
            except BaseException as error:
                raise self._end_for_all(error) from None
        return Ending(self.stopped_by, self.warnings, tell=self._tell, close=self._close)

    def _send_assignment(self) -> None:
        """Tell the others what only process 0 knows; processes that do not share the run folder send their files."""
        spec = self.spec
        spec.run.mkdir(parents=True, exist_ok=True)
        self._record_order()
        self.marker = spec.run / f".launch-{spec.launch}"
        self.marker.write_text(spec.launch, encoding="ascii")
        resume = None if spec.checkpoint is None else spec.checkpoint.name
        self.messenger.send_control_to_all(
            {"kind": "assignment", "run": str(spec.run), "launch": spec.launch, "resume": resume,
             "resumed_from": self.prepared.resumed_from}
        )  # fmt: skip

    def _record_order(self) -> None:
        """Record which process is which node, and why, where another order was possible."""
        order, links = self.session.order, self.session.links
        if links is None and order == sorted(order):
            return
        record = {"order": order, "words": rank_order.describe(order, self.spec.workers, links)}
        measured = {} if links is None else {"latency": links.latency, "rate": links.rate}  # seconds, bytes a second
        text = json.dumps(record | measured).replace("Infinity", "null")
        checkpoint.write_text(self.spec.run / "topology.json", text)

    def on_control(self, source: int, message: dict[str, Any]) -> None:
        """Handle a control message from another node."""
        control_messages.check(source, message)
        match message["kind"]:
            case "not-shared":
                self._send_part(source)
            case "file":
                self.files.expect(source, message)
            case "report":
                self.reports[source] = NodeStatus(**message["status"])
            case "begun":
                self.answers[source] = message["step"]
                self._name_last_step()
            case "signal":
                self.signals = self.signals or 1
                self.signal_name = self.signal_name or message["name"]
            case "stopped":
                raise Stopped(message["message"], message["code"])
            case "failed" | "refused":
                raise self._failure_of(message | {"node": source})
            case "saved" if (error := self.files.failed.pop(self._part(source, message["step"]), None)) is not None:
                self.handle_message(
                    {"kind": "save-failed", "node": source, "step": message["step"], "error": str(error)}
                )
            case _ if not self.transport.handle_control(message):
                self.handle_message(message | {"node": source})

    def on_file_piece(self, source: int, piece: bytes) -> None:
        """Take the next piece of a file that another node has announced."""
        self.files.take_in(source, piece)

    def on_reconnected(self, node: int, seconds: float, cause: str) -> None:
        """Log that a broken connection was replaced."""
        self.session.log_reconnected(node, seconds, cause)

    def _failure_of(self, message: dict[str, Any]) -> OrchestraError:
        """Return the error that another process raised, with the exit code of one that ended as a consequence."""
        try:
            self.handle_message(message)
        except OrchestraError as error:
            error.exit_code = Stopped.exit_code  # type: ignore[misc]
            return error
        raise AssertionError(message)

    def _part(self, node: int, step: int) -> Path:
        return checkpoint.draft(self.spec.run / "checkpoints", step) / checkpoint.part_name(node)

    def _on_unwritable(self, source: int, path: Path, error: OSError) -> None:
        """Warn that another node's file could not be written here; raise only if it is a part of the final model."""
        if path.parent.name == FINAL:
            raise EnvironmentProblem(
                f"the model of {self.name(source)} could not be written to {path}: {error}. Make room, and resume."
            )
        if path.parent.parent.name != "checkpoints" and not self.warned_of_full_disk:  # of those, nodes warn themselves
            self.warned_of_full_disk = True
            self._warn(
                f"{path.name} of {self.name(source)} could not be written here: {error}. Training goes on without it "
                "and without other files for which there is no room."
            )

    def _send_part(self, to: int) -> None:
        """Send a node that does not share the run folder its part of the checkpoint."""
        if " resume " in self.prepared.how_to_resume:  # the command reads the run's configuration on every host
            self.beforehand = " (hosts that do not share this folder need its config.json at the same path first)"
        if self.spec.checkpoint is not None:
            name = f"{self.spec.checkpoint.name}/{checkpoint.part_name(to)}"
            data = (self.spec.checkpoint / checkpoint.part_name(to)).read_bytes()
            self.messenger.send_control(to, {"kind": "file", "path": name, "bytes": len(data)})
            self.messenger.send_file(to, data)

    # The run as a whole.

    def begin(self) -> None:
        """Start the clock, and let all nodes begin."""
        if self.marker is not None:
            self.marker.unlink(missing_ok=True)
        self.messenger.send_control_to_all({"kind": "go", "at": self.prepared.resumed_at})
        self.transport.go(self.prepared.resumed_at)

    def seconds(self) -> float:
        """Return the seconds of training so far."""
        return self.transport.now()

    def rows(self) -> tuple[NodeStatus, ...]:
        """Return the latest status of every node."""
        nothing = NodeStatus(*[0.0] * len(NodeStatus._fields))
        return tuple(self.reports.get(node, nothing) for node in range(self.nodes))

    def ask_to_stop(self, code: int) -> None:
        """Ask the workers which step they are in; none begins another step before it knows the last one."""
        self.transport.control.write("stop_asked", code)
        self._name_last_step()

    def _name_last_step(self) -> None:
        """Name the last step, once every worker has answered."""
        control = self.transport.control
        self.answers[COORDINATOR] = NO_MORE_STEPS if control.is_done(COORDINATOR) else self.transport.begun
        if len(self.answers) == self.session.workers and not control.stop_at:
            control.write("stop_at", control.last_step([*self.answers.values()]))

    def on_waiting(self) -> None:
        """Check, while this node waits, whether every node is still connected and whether it is time to stop."""
        self.session.require_all()
        self.consider_stopping()
        now = time.perf_counter()
        if now - self.shown > REPORT_EVERY:
            self.shown = now
            self.prepared.show(self.progress())

    def _show(self, row: NodeStatus) -> None:
        self.reports[COORDINATOR] = row

    # The end.

    def _tell(self, outcome: Callable[[], RunOutcome]) -> None:
        """Send the outcome to the others."""
        _send_outcome(self.messenger, self.nodes, outcome())

    def _close(self) -> None:
        self.session.close()

    def _end_for_all(self, error: BaseException) -> BaseException:
        """End the run in all processes; return the error that this one raises."""
        error = self.session.cause_of(error)
        if not isinstance(error, OrchestraError | KeyboardInterrupt):
            error = WorkerFailed(self.session.name, traceback.format_exc()[-LONGEST_TRACEBACK:])
        if self.marker is not None:
            self.marker.unlink(missing_ok=True)
        code = error.exit_code if isinstance(error, OrchestraError) else 130
        message = f"{error.node} failed" if isinstance(error, WorkerFailed) else str(error) or "stopped by SIGINT"
        self.session.abort(message, code)
        return error


def announce_finished(spec: RunSpec, x0: Tensor, about: dict[str, Any], cluster: Attached, outcome: RunOutcome) -> None:
    """As process 0 of a run that is already complete: send its outcome to the others."""
    with contextlib.closing(Session(spec, x0, cluster, about)) as session:
        _send_outcome(session.messenger, spec.workers + spec.servers, outcome)


def _send_outcome(messenger: Messenger, nodes: int, outcome: RunOutcome) -> None:
    message = asdict(outcome)
    model = message.pop("model")
    for node in range(1, nodes):
        with contextlib.suppress(OrchestraError):  # a process that is lost now has done its part
            messenger.send_control(node, {"kind": "outcome", **message, "bytes": len(model)})
            messenger.send_file(node, model)
