# SPDX-License-Identifier: Apache-2.0
"""The checkpoint protocol: when each node saves, agreed upon through values that all nodes can read.

    lockstep            all workers save after the same step and wait for the servers, which save when every worker has;
                        after the last step as well
    own pace            the first worker that is not done asks the others, which save at the end of their current step
                        without waiting for each other, or before a step that other workers keep them from beginning
    one shared x        worker 0 saves x for all, when the others have saved and wait, or are done

Workers that are done stay until the end, so that they can still save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from orchestra.core.ops import Transport
from orchestra.engine import checkpoint
from orchestra.engine.control import INTERRUPTED, NO_MORE_STEPS, Control
from orchestra.engine.node_loop import NodeRuntime, crossed, everything, report, spent
from orchestra.runs.events import EventLog, Saved


class IdleListener(Protocol):
    """What a node does before it sleeps because there is no message."""

    def on_idle(self, *, at_rest: bool) -> None:
        """Do what is due. `at_rest`: nothing happened on this node since its last step."""


class Inbox(Protocol):
    """The messages of a node that were not read yet."""

    def listen_idle(self, listener: IdleListener) -> None:
        """From now on, tell a listener when this node is about to sleep because there is no message."""

    def has_mail(self) -> bool:
        """Return whether there is an unread message."""
        ...

    def ring(self, node: int) -> None:
        """Wake a node, so that it checks the shared values."""


class CoordinatedTransport(Transport, Protocol):
    """A transport whose nodes can wait for each other."""

    @property
    def mailbox(self) -> Inbox:
        """Where messages arrive."""
        ...

    def await_go(self) -> None:
        """Block until every node is ready."""

    def await_saved(self, node: int, label: int, *, lockstep: bool) -> None:
        """Block until a node has saved a checkpoint, which it does when every worker has."""

    def wait_for_wakeup(self, ready: Callable[[], bool]) -> None:
        """Block until `ready`, which is checked whenever this node is woken; there is no time-out."""

    def wake_all(self) -> None:
        """Wake every node."""


class NodeCheckpointer:
    """The checkpoint protocol of one node."""

    def __init__(self, runtime: NodeRuntime, control: Control, transport: CoordinatedTransport, log: EventLog) -> None:
        self._runtime = runtime
        self._control = control
        self._transport = transport
        self._log = log
        self._saved_as = control.save_wanted  # label of this node's newest part of a checkpoint
        self._one_x = runtime.spec.strategy.layout.model_location == "shared"
        transport.mailbox.listen_idle(self)

    def on_idle(self, *, at_rest: bool) -> None:
        """Save if it is time: a server whenever it has no message, a worker only if it is at rest."""
        if self._runtime.is_server:
            self._while_idle()
        elif at_rest:
            self._while_at_rest()

    # A worker's side.

    def after_step(self, before: int) -> None:
        """Save if a checkpoint is due or wanted; the worker had done `before` steps before this one."""
        control, runtime = self._control, self._runtime
        due = crossed(before, runtime.node.steps, runtime.spec.checkpoint_steps) and not spent(runtime)
        if self._runtime.lockstep:
            if due:
                self._save_together()
            return
        first = all(map(control.is_done, range(runtime.rank)))
        if due and first and control.save_wanted == self._saved_as:
            control.write("save_wanted", max(runtime.node.steps, self._saved_as + 1))
            self._transport.wake_all()
        if control.save_wanted > self._saved_as:
            self._save_with_servers(control.save_wanted)

    def after_steps(self) -> None:
        """Save after the last step if workers are in lockstep; otherwise the newest checkpoint has to do."""
        runtime, steps = self._runtime, self._runtime.node.steps
        if runtime.spec.checkpoint_steps is None or not runtime.lockstep or steps <= self._saved_as:
            return
        # If the run is stopped after this very step, `save_on_interrupt` saves instead. All workers decide alike.
        if self._transport.proceed(steps, lockstep=True) or not self.interrupted():
            self._save_together()

    def _save_together(self) -> None:
        self._control.write("save_wanted", self._runtime.node.steps)  # for those that have retired
        self._transport.wake_all()
        self._save_with_servers(self._runtime.node.steps)

    def _while_at_rest(self) -> None:
        """Save if asked to while this worker waits for another, which may itself wait for this checkpoint."""
        wanted, began = self._control.save_wanted, self._runtime.node.now()
        if wanted > self._saved_as and not self._runtime.lockstep:
            self._save_with_servers(wanted)
            self._transport.traffic.waited -= self._runtime.node.now() - began  # the caller counts it as waiting

    def interrupted(self) -> bool:
        """Return whether the run is interrupted and may be resumed later."""
        return self._control.stop_asked == INTERRUPTED

    def save_on_interrupt(self) -> None:
        """Save this worker's part before it leaves."""
        label = self._control.stop_at
        if self._saved_as != label:
            self._save(label)
        self._transport.wake_all()

    def stay(self) -> bool:
        """Wait after the last step until all workers are done, so that a checkpoint is still possible.

        Return False if the run is interrupted before that: then this worker's part is saved, and there is no final
        model yet. All nodes decide alike, by whether some worker stopped with steps left to do.
        """
        control, workers = self._control, range(self._runtime.spec.workers)
        control.write("begun", NO_MORE_STEPS, self._runtime.rank)
        self._transport.wake_all()

        def all_done() -> bool:
            return all(map(control.is_done, workers))

        def interrupted_now() -> bool:
            return control.stop_at != 0 and self.interrupted()

        while not all_done():
            self._transport.wait_for_wakeup(
                lambda: all_done() or interrupted_now() or control.save_wanted > self._saved_as
            )
            if interrupted_now():
                self._transport.wait_for_wakeup(self._all_done_or_saved)
                if all_done():
                    return True
                self.save_on_interrupt()
                return False
            if control.save_wanted > self._saved_as:
                self._save(control.save_wanted)
                self._transport.wake_all()
        return True

    # A server's side.

    def after_service(self) -> bool:
        """Save once more and return False if the run is interrupted: there is no final model yet."""
        if self.interrupted():
            self._await_lingerers()
        self._save_with_workers()
        return not self.interrupted() or self._saved_as != self._control.stop_at

    def _while_idle(self) -> None:
        began = self._runtime.node.now()
        if self._save_with_workers():
            self._transport.traffic.waited -= self._runtime.node.now() - began  # the caller counts it as waiting
        report(self._runtime)

    def _save_with_workers(self) -> bool:
        """Save once every worker has saved under the same label, and so waits or has left; return whether it saved."""
        labels = {self._control.saved(w) for w in range(self._runtime.spec.workers)}
        label = min(labels)
        if len(labels) > 1 or label <= self._saved_as:
            return False
        if self._transport.mailbox.has_mail():
            return False  # pushed before its worker saved, and not yet part of this server's x
        self._save(label)
        return True

    def _await_lingerers(self) -> None:
        """Wait until workers that are done have saved as well, unless all were done before the run was stopped."""
        self._transport.wait_for_wakeup(self._all_done_or_saved)
        workers = range(self._runtime.spec.workers)
        if any(not self._control.is_done(w) for w in workers):
            self._transport.wait_for_wakeup(
                lambda: all(self._control.saved(w) == self._control.stop_at for w in workers)
            )

    # Both.

    def _save(self, label: int) -> None:
        """Write this node's part of a checkpoint. A full disk does not end the training: the coordinator warns."""
        runtime = self._runtime
        self._saved_as = label
        if self._one_x and runtime.rank == 0:
            self._await_writers(label)
        self._log.flush()  # the log of a resumed run must reach up to its checkpoint
        try:
            folder = checkpoint.open_draft(runtime.spec.run / "checkpoints", label)
            checkpoint.write_tree(folder / checkpoint.part_name(runtime.rank), everything(runtime))
        except OSError as error:
            runtime.tell({"kind": "save-failed", "node": runtime.rank, "step": label, "error": str(error)})
        else:
            self._log.write(Saved(runtime.node.now(), runtime.rank, label))
            runtime.tell({"kind": "saved", "node": runtime.rank, "step": label})
        self._control.write("saved", label, runtime.rank, wake=True)

    def _save_with_servers(self, label: int) -> None:
        """Save, and wait until the holders of x have saved: while every worker waits here, no message is in flight."""
        self._save(label)
        runtime, waited = self._runtime, self._transport.traffic.waited
        for holder in (0,) if self._one_x and runtime.rank else runtime.node.comm.servers.members:
            self._transport.mailbox.ring(holder)
            self._transport.await_saved(holder, label, lockstep=runtime.lockstep)
        self._transport.traffic.waited = waited  # saving is no part of the strategy

    def _await_writers(self, label: int) -> None:
        """Wait until no other worker writes to x: then x holds the same updates as the others' saved states."""
        waited, others = self._transport.traffic.waited, range(1, self._runtime.spec.workers)
        self._transport.wait_for_wakeup(
            lambda: all(self._control.is_done(w) or self._control.saved(w) >= label for w in others)
        )
        self._transport.traffic.waited = waited

    def _all_done_or_saved(self) -> bool:
        """Return whether every worker has either done all its steps or saved because it must stop."""
        at = self._control.stop_at
        return at != 0 and all(
            self._control.is_done(w) or self._control.saved(w) == at for w in range(self._runtime.spec.workers)
        )
