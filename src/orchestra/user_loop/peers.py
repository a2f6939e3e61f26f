# SPDX-License-Identifier: Apache-2.0
"""The other processes of a loop that several processes run: their control messages, and the common end.

Workers in lockstep must do equally many steps. Each worker announces its step count when it finishes. A worker that has
begun a later step raises instead of waiting for a mean that will never complete.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestra.core.ops import Sleep
from orchestra.errors import ClusterError, OrchestraError, Stopped
from orchestra.formatting import plural
from orchestra.runs.status import name_of
from orchestra.user_loop.comparisons import WorkerComparisons
from orchestra.worlds.sockets import control_messages
from orchestra.worlds.sockets.file_transfer import FileReceiver
from orchestra.worlds.sockets.messenger import Messenger


class Peers:
    """The control messages of the other processes."""

    def __init__(self, messenger: Messenger, rank: int, workers: int, *, host: str = "127.0.0.1") -> None:
        self.host = host  # by which the others reach this process
        self._messenger, self._rank, self._workers = messenger, rank, workers
        self._finished: dict[int, int] = {}  # after how many steps
        self._ways: dict[int, tuple[str, str | None]] = {}  # how, and where a loader was left before its end
        self.shares_loader = False  # every worker has its share of one loader, and so equally many batches
        self.how = "finished"  # how this process ends
        self._begun: Callable[[], int | None] = lambda: None  # this worker's steps, if the workers are in lockstep
        self._settings: list[tuple[str, int, list[Any]]] = []  # received before `when_settings_change` was called
        self.about_state: list[tuple[int, str]] = []  # pending messages for `orchestra.user_loop.server_state`
        self._follow: Callable[[str, int, list[Any]], None] = lambda *said: self._settings.append(said)
        self._files: FileReceiver | None = None  # at worker 0, if it keeps a run folder
        self.scored: Callable[[int, dict[str, Any]], None] = lambda source, said: None  # a worker scored its model
        self.folder: tuple[Path | None, str] | None = None  # where worker 0 keeps the run, and a mark in it
        self.looked: set[int] = set()  # processes that have looked for the mark
        self.written: set[int] = set()  # processes that have written all their files
        self.hang_up: Callable[[], None] = lambda: None  # closes other connections of this process
        self.warnings: list[str] = []  # at worker 0
        self._comparisons = WorkerComparisons(workers)
        self._differing: str | None = None  # an error about a difference between workers
        self.name = name_of(rank, workers)
        self._parted = False
        messenger.listen(self)
        messenger.judge_only_while_waiting(range(workers))  # a loop may pause while a server waits for it

    @property
    def messenger(self) -> Messenger:
        """The connections to the other processes."""
        return self._messenger

    def go_in_step(self, begun: Callable[[], int | None]) -> None:
        """Require from now on that the others do as many steps as this worker, unless `begun` returns None."""
        self._begun = begun

    def when_settings_change(self, follow: Callable[[str, int, list[Any]], None]) -> None:
        """Call `follow` with every change of a setting, including those received already."""
        self._follow = follow
        for said in self._settings:
            follow(*said)

    def receive_files(self, files: FileReceiver) -> None:
        """Accept files of other processes from now on."""
        self._files = files

    def on_control(self, source: int, said: dict[str, Any]) -> None:
        """Handle a control message from another process."""
        control_messages.check(source, said)
        match said["kind"]:
            case "finished":
                self._finished[source] = said["steps"]
                self._ways[source] = said["how"], said["left"]
            case "settings":
                values = [tuple(value) if isinstance(value, list) else value for value in said["by_group"]]
                self._follow(said["name"], said["first_group"], values)
            case "send-state" | "load-state" | "state-loaded" as kind:
                self.about_state.append((source, kind))
            case "folder":
                self.folder = said["path"] and Path(said["path"]), str(said["mark"])
            case "looked":
                self.looked.add(source)
            case "written":
                self.written.add(source)
            case "file" if self._files is not None:
                self._files.expect(source, said)
            case "score":
                self.scored(source, said)
            case "gradient" | "rates":
                self._compare(source, said)
            case "stopped":
                raise Stopped(said["message"], said["code"])

    def on_file_piece(self, source: int, piece: bytes) -> None:
        """Take the next piece of a file that another process has announced."""
        if self._files is not None:
            self._files.take_in(source, piece)

    def on_reconnected(self, node: int, seconds: float, cause: str) -> None:
        """Do nothing: a loop records no reconnections."""

    def send_to_coordinator(self, said: dict[str, Any]) -> None:
        """Send a gradient or rates message to worker 0, which compares it with those of the others."""
        if self._rank == 0:
            self._compare(0, said)
            self.on_waiting()
        else:
            self._messenger.send_control(0, said)

    def _compare(self, source: int, said: dict[str, Any]) -> None:
        """Warn about equal gradients; record different rates, for which `on_waiting` then ends the run."""
        if said["kind"] == "rates":
            self._differing = self._differing or self._comparisons.rates(
                source, said["step"], said["by_group"], said["clip"]
            )
        elif (warning := self._comparisons.gradient(source, said["checksum"])) is not None:
            self.warn(warning)

    def warn(self, warning: str) -> None:
        """Print a warning, and keep it for the run folder."""
        self.warnings.append(warning)
        print(f"orchestra: warning: {warning}", file=sys.stderr)

    def on_waiting(self) -> None:
        """Raise if another process is lost, or if the workers' rates or step counts differ."""
        for error in self._messenger.lost.values():
            raise error.with_traceback(None)
        if self._differing is not None:
            self.give_up(self._differing, ClusterError.exit_code)
            raise ClusterError(self._differing)
        begun = self._begun()
        for node, steps in self._finished.items():
            if begun is not None and steps < begun:
                raise self._uneven(node, steps, begun)

    def _uneven(self, node: int, steps: int, begun: int) -> ClusterError:
        """Return the error for unequal step counts, after sending it to the others."""
        how, left = self._ways[node]
        remedy = "Give the loader to orchestra.prepare, or give every process equally many batches."
        if left is not None:
            how = f"left its loader in {left}, {how}"
        if left is not None or self.shares_loader:
            remedy = (
                "Leave the loop at the same step everywhere: decide by a value that all share, such as the number of "
                "steps, or optimizer.orchestra.mean(loss)."
            )
        message = (
            f"{name_of(node, self._workers)} {how} after {plural(steps, 'step')}, but {self.name} has begun step "
            f"{begun:,}: all must make equally many. {remedy}"
        )
        self.give_up(message, ClusterError.exit_code)
        return ClusterError(message)

    def tell_settings(self, servers: tuple[int, ...], name: str, values: list[Any]) -> None:
        """Send a setting of every group of the optimizer to servers, before the next push."""
        for first in range(0, len(values), control_messages.ENTRIES):
            some = values[first : first + control_messages.ENTRIES]
            for server in servers:
                self._messenger.send_control(
                    server, {"kind": "settings", "name": name, "first_group": first, "by_group": some}
                )

    def finish(self, steps: int, left: str | None) -> None:
        """Wait until every worker has done its last step. `left`: where the loader was left before its end, if so."""
        self._finished[self._rank] = steps
        self._messenger.send_control_to_all({"kind": "finished", "steps": steps, "how": self.how, "left": left})
        self._messenger.wait_until(
            lambda: len(self._finished) == self._workers, lambda: "the others to finish", forever=True
        )
        self.on_waiting()
        late = max(self._finished, key=lambda node: self._finished[node])
        if self._begun() is not None and self._finished[late] > steps:  # that worker will send the error
            self._messenger.wait_until(lambda: False, lambda: f"{name_of(late, self._workers)} to report its steps")

    @property
    def any_steps(self) -> bool:
        """Whether any worker that has finished did a step."""
        return any(self._finished.values())

    def listen(self, *, seconds: float = 0.0) -> None:
        """Handle pending messages; raise if one ends the run for this process."""
        self._messenger.sleep(Sleep(seconds))
        self._messenger.poll()
        self.on_waiting()

    def part(self) -> None:
        """Close the connections."""
        if not self._parted:
            self._parted = True
            self.hang_up()
            self._messenger.close()

    def give_up(self, message: str, code: int) -> None:
        """Tell the others why this process ends early, and close the connections."""
        with contextlib.suppress(OrchestraError, OSError):
            if not self._parted:
                self._messenger.send_control_to_all(
                    {"kind": "stopped", "message": message[-control_messages.LONGEST :], "code": code}
                )
        self.part()
