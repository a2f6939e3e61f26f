# SPDX-License-Identifier: Apache-2.0
"""One process of a run on many machines: join the others, live as one node, end together with them.

    process 0 (home)    keeps the run folder; hears what the others tell, decides when the run begins, stops and is over
    the others          do as it says

There is no thread for that: a node hears what concerns the run whenever it waits for a message, and before each step.
To stop, home asks; every worker answers with the step it is in, and begins none before home has named the last one.
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
from orchestra.worlds.sockets.control_messages import HOME
from orchestra.worlds.sockets.file_transfer import FileReceiver, files_of, largest_file
from orchestra.worlds.sockets.messenger import Messenger
from orchestra.worlds.sockets.session import LONGEST_TRACEBACK, REPORT_EVERY, SIGNAL_ECHO, Session

if TYPE_CHECKING:
    from orchestra.clusters.attached import Attached


@dataclass
class Coordinator(RunSupervisor):
    """Process 0: a worker as well."""

    cluster: Attached = field(kw_only=True)
    marker: Path | None = None  # a file by which others find out whether they see the run folder
    reports: dict[int, NodeStatus] = field(default_factory=dict)
    answers: dict[int, int] = field(default_factory=dict)  # the step that each worker was in when asked to stop
    is_full: bool = False  # and that was said

    def run(self) -> Ending:
        """Train, together with the others. Raises what ended the run early."""
        asked, spec = time.perf_counter(), self.spec
        self.prepared.scorer.start(apart=True)  # before there are connections, which another process would hold open
        self.session = session = Session(spec, self.prepared.x0, self.cluster, self.prepared.fingerprint)
        with counting(self, echo=SIGNAL_ECHO):
            self.messenger, self.transport = session.messenger, session.transport
            largest = largest_file(self.prepared.x0)
            rescue = partial(make_elsewhere, spec.launch)
            self.files = FileReceiver(spec.run, files_of, largest, self._could_not_keep, rescue)
            self.messenger.listen(self)
            self.transport.control.learn("save_wanted", self.prepared.resumed_from)
            try:
                self._share_order()
                broken_off = session.run_node(spec, tell=self.hear, show=self._show, asked=asked)
                self.hear({"kind": "done", "node": HOME, "interrupted": broken_off})
                self.messenger.wait_until(lambda: len(self.done) == self.nodes, lambda: "the others", forever=True)
                self.settle()
            except BaseException as error:
                raise self._end_for_all(error) from None
        return Ending(self.stopped_by, self.warnings, tell=self._tell, close=self._close)

    def _share_order(self) -> None:
        """Tell the others what only home knows; whoever cannot see the run folder sends its files."""
        spec = self.spec
        spec.run.mkdir(parents=True, exist_ok=True)
        self._note_order()
        self.marker = spec.run / f".launch-{spec.launch}"
        self.marker.write_text(spec.launch, encoding="ascii")
        resume = None if spec.checkpoint is None else spec.checkpoint.name
        self.messenger.send_control_to_all(
            {"kind": "order", "run": str(spec.run), "launch": spec.launch, "resume": resume,
             "resumed_from": self.prepared.resumed_from}
        )  # fmt: skip

    def _note_order(self) -> None:
        """Keep which process is which node, and why, where they could have been others."""
        order, links = self.session.order, self.session.links
        if links is None and order == sorted(order):
            return
        record = {"order": order, "words": rank_order.describe(order, self.spec.workers, links)}
        measured = {} if links is None else {"latency": links.latency, "rate": links.rate}  # seconds, bytes a second
        text = json.dumps(record | measured).replace("Infinity", "null")
        checkpoint.write_text(self.spec.run / "topology.json", text)

    def on_control(self, source: int, said: dict[str, Any]) -> None:
        """Handle a control message from another node."""
        control_messages.check(source, said)
        match said["kind"]:
            case "far-off":
                self._send_part(source)
            case "file":
                self.files.expect(source, said)
            case "report":
                self.reports[source] = NodeStatus(**said["status"])
            case "begun":
                self.answers[source] = said["step"]
                self._name_last_step()
            case "signal":
                self.signals = self.signals or 1
                self.signal_name = self.signal_name or said["name"]
            case "stopped":
                raise Stopped(said["message"], said["code"])
            case "failed" | "refused":
                raise self._told_of_failure(said | {"node": source})
            case "saved" if (error := self.files.failed.pop(self._part(source, said["step"]), None)) is not None:
                self.hear({"kind": "save-failed", "node": source, "step": said["step"], "error": str(error)})
            case _ if not self.transport.hear(said):
                self.hear(said | {"node": source})

    def on_file_piece(self, source: int, piece: bytes) -> None:
        """Take the next piece of a file that another node has announced."""
        self.files.take_in(source, piece)

    def on_reconnected(self, node: int, seconds: float, cause: str) -> None:
        """Log that a broken connection was replaced."""
        self.session.log_reconnected(node, seconds, cause)

    def _told_of_failure(self, said: dict[str, Any]) -> OrchestraError:
        """What another raised. Its own process ends with the error's exit code, this one as a consequence."""
        try:
            self.hear(said)
        except OrchestraError as error:
            error.exit_code = Stopped.exit_code  # type: ignore[misc]
            return error
        raise AssertionError(said)

    def _part(self, node: int, step: int) -> Path:
        return checkpoint.draft(self.spec.run / "checkpoints", step) / checkpoint.part_name(node)

    def _could_not_keep(self, source: int, path: Path, error: OSError) -> None:
        """Another node's file could not be written here. Only the result itself cannot do without."""
        if path.parent.name == FINAL:
            raise EnvironmentProblem(
                f"the model of {self.name(source)} could not be written to {path}: {error}. Make room, and resume."
            )
        if path.parent.parent.name != "checkpoints" and not self.is_full:  # of a checkpoint its own node tells
            self.is_full = True
            self._warn(
                f"{path.name} of {self.name(source)} could not be written here: {error}. Training goes on without it "
                "and whatever else finds no room."
            )

    def _send_part(self, to: int) -> None:
        """Send a node, which cannot see the run folder, its part of the checkpoint."""
        if " resume " in self.prepared.how_to_resume:  # a command, which reads there what to do
            self.beforehand = " (hosts that do not see this folder need its config.json at the same path first)"
        if self.spec.checkpoint is not None:
            name = f"{self.spec.checkpoint.name}/{checkpoint.part_name(to)}"
            data = (self.spec.checkpoint / checkpoint.part_name(to)).read_bytes()
            self.messenger.send_control(to, {"kind": "file", "path": name, "bytes": len(data)})
            self.messenger.send_file(to, data)

    # The run as a whole.

    def begin(self) -> None:
        """Start the clock, and let the nodes go."""
        if self.marker is not None:
            self.marker.unlink(missing_ok=True)
        self.messenger.send_control_to_all({"kind": "go", "at": self.prepared.resumed_at})
        self.transport.go(self.prepared.resumed_at)

    def seconds(self) -> float:
        """Of training so far."""
        return self.transport.now()

    def rows(self) -> tuple[NodeStatus, ...]:
        """What every node last reported."""
        nothing = NodeStatus(*[0.0] * len(NodeStatus._fields))
        return tuple(self.reports.get(node, nothing) for node in range(self.nodes))

    def ask_to_stop(self, code: int) -> None:
        """Ask the workers where they are: from then on none begins another step before it knows the last one."""
        self.transport.control.write("stop_asked", code)
        self._name_last_step()

    def _name_last_step(self) -> None:
        """Once every worker has answered."""
        control = self.transport.control
        self.answers[HOME] = NO_MORE_STEPS if control.is_done(HOME) else self.transport.begun
        if len(self.answers) == self.session.workers and not control.stop_at:
            control.write("stop_at", control.last_step([*self.answers.values()]))

    def on_waiting(self) -> None:
        """Check, while this node waits, whether every node is still connected and whether it is time to stop."""
        self.session.require_everybody()
        self.consider_stopping()
        now = time.perf_counter()
        if now - self._shown > REPORT_EVERY:
            self._shown = now
            self.prepared.show(self.progress())

    _shown = 0.0

    def _show(self, row: NodeStatus) -> None:
        self.reports[HOME] = row

    # The end.

    def _tell(self, told: Callable[[], RunOutcome]) -> None:
        """Tell the others how it went."""
        _tell_all(self.messenger, self.nodes, told())

    def _close(self) -> None:
        self.session.close()

    def _end_for_all(self, error: BaseException) -> BaseException:
        """The run ends here: what everybody is told, and what this process raises."""
        error = self.session.cause_of(error)
        if not isinstance(error, OrchestraError | KeyboardInterrupt):
            error = WorkerFailed(self.session.name, traceback.format_exc()[-LONGEST_TRACEBACK:])
        if self.marker is not None:
            self.marker.unlink(missing_ok=True)
        code = error.exit_code if isinstance(error, OrchestraError) else 130
        message = f"{error.who} failed" if isinstance(error, WorkerFailed) else str(error) or "stopped by SIGINT"
        self.session.give_up({"message": message, "code": code})
        return error


def announce_finished(spec: RunSpec, x0: Tensor, about: dict[str, Any], cluster: Attached, told: RunOutcome) -> None:
    """As home of a run that is over already: tell the others."""
    with contextlib.closing(Session(spec, x0, cluster, about)) as session:
        _tell_all(session.messenger, spec.workers + spec.servers, told)


def _tell_all(messenger: Messenger, nodes: int, told: RunOutcome) -> None:
    said = asdict(told)
    model = said.pop("model")
    for node in range(1, nodes):
        with contextlib.suppress(OrchestraError):  # who is lost now has done its part
            messenger.send_control(node, {"kind": "over", **said, "bytes": len(model)})
            messenger.send_file(node, model)
