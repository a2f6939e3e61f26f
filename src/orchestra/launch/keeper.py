# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: who saves when, agreed upon through words that all nodes can read.

    in step             all workers save after the same step and wait for the servers, which save when every worker has;
                        after the last step as well
    each at its pace    the first worker that is not done asks the others, who save at the end of the step they are in:
                        nobody waits for another to catch up; or before a step that others do not let them begin
    with one x          worker 0 saves it for all, when the others have saved and wait for that, or are done

Workers that are done stay, so that they can be asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from orchestra import checkpoint
from orchestra.events import EventLog, Saved
from orchestra.ops import Transport
from orchestra.run import Life, crossed, everything, report, spent
from orchestra.transports.memory import NOTHING_MORE, SAVE_WANTED, STOP_ASKED, STOP_AT, Plan

# Values of STOP_ASKED.
BUDGET_SPENT, INTERRUPTED = 1, 2


class Words(Protocol):
    """Numbers that all nodes can read, each with one writer at a time."""

    def __getitem__(self, index: int) -> int: ...

    def set(self, index: int, value: int) -> None:
        """Write, to be seen by whoever looks."""

    def announce(self, index: int, value: int) -> None:
        """Write, and wake who waits for it."""


class Box(Protocol):
    """Where a node's messages arrive."""

    when_idle: Callable[[], None]
    when_at_rest: Callable[[], None]

    def has_mail(self) -> bool:
        """Whether a message from anybody lies here unread."""
        ...

    def ring(self, node: int) -> None:
        """Make a node look around."""


class Together(Transport, Protocol):
    """A transport whose nodes can wait for each other's words."""

    @property
    def mailbox(self) -> Box:
        """Where messages arrive."""
        ...

    def await_go(self) -> None:
        """Block until every node is ready."""

    def await_saved(self, node: int, label: int, *, in_step: bool) -> None:
        """Block until a server has saved a checkpoint, which it does when every worker has."""

    def await_bell(self, ready: Callable[[], bool]) -> None:
        """Block, for as long as it takes, until something happens that concerns this node."""

    def ring_everybody(self) -> None:
        """Make every node look around."""


class NodeKeeper:
    """One node's share of it."""

    def __init__(self, life: Life, words: Words, plan: Plan, transport: Together, log: EventLog) -> None:
        self._life = life
        self._words = words
        self._plan = plan
        self._transport = transport
        self._log = log
        self._saved_as = words[SAVE_WANTED]  # label of this node's newest part of a checkpoint
        self._one_x = life.job.strategy.model_at == "shared"
        if life.is_server:
            transport.mailbox.when_idle = self._while_idle
        else:
            transport.mailbox.when_at_rest = self._while_at_rest

    # A worker's side.

    def after_step(self, before: int) -> None:
        """Save if it is time: the worker had done `before` steps a moment ago."""
        words, life = self._words, self._life
        due = crossed(before, life.node.steps, life.job.checkpoint_every) and not spent(life)
        if self._life.in_step:
            if due:
                self._save_in_step()
            return
        first = all(self._begun(w) == NOTHING_MORE for w in range(life.rank))
        if due and first and words[SAVE_WANTED] == self._saved_as:
            words.set(SAVE_WANTED, max(life.node.steps, self._saved_as + 1))
            self._transport.ring_everybody()
        if words[SAVE_WANTED] > self._saved_as:
            self._save_with_servers(words[SAVE_WANTED])

    def after_steps(self) -> None:
        """Save the end as well, where all stand at the same step; of others, the newest there is has to do."""
        life, steps = self._life, self._life.node.steps
        if life.job.checkpoint_every is None or not life.in_step or steps <= self._saved_as:
            return
        # Who is to break off after this very step would be taken to have done so: all see alike whether that is asked.
        if self._transport.proceed(steps, in_step=True) or not self.interrupted():
            self._save_in_step()

    def _save_in_step(self) -> None:
        self._words.set(SAVE_WANTED, self._life.node.steps)  # for those that have retired
        self._transport.ring_everybody()
        self._save_with_servers(self._life.node.steps)

    def _while_at_rest(self) -> None:
        """Save if asked to while another lets this worker wait: it might do so until this one has saved."""
        wanted, began = self._words[SAVE_WANTED], self._life.node.now()
        if wanted > self._saved_as and not self._life.in_step:
            self._save_with_servers(wanted)
            self._transport.traffic.waited -= self._life.node.now() - began  # it will be taken for waiting

    def interrupted(self) -> bool:
        """Whether the run is broken off, to go on another day."""
        return self._words[STOP_ASKED] == INTERRUPTED

    def break_off(self) -> None:
        """Save this worker's part before it leaves."""
        label = self._words[STOP_AT]
        if self._saved_as != label:
            self._save(label)
        self._transport.ring_everybody()

    def stay(self) -> bool:
        """Wait after the last step until all workers are done, so that a checkpoint is still possible.

        False if the run is broken off before that: then this worker's part is saved, and there is no final model yet.
        Whether it is, everybody sees alike: some worker stopped with steps left to do.
        """
        words, plan = self._words, self._plan
        words.set(plan.word("begun", self._life.rank), NOTHING_MORE)
        self._transport.ring_everybody()

        def all_done() -> bool:
            return all(self._begun(w) == NOTHING_MORE for w in range(plan.workers))

        def broken_off() -> bool:
            return words[STOP_AT] != 0 and self.interrupted()

        while not all_done():
            self._transport.await_bell(lambda: all_done() or broken_off() or words[SAVE_WANTED] > self._saved_as)
            if broken_off():
                self._transport.await_bell(self._settled)
                if all_done():
                    return True
                self.break_off()
                return False
            if words[SAVE_WANTED] > self._saved_as:
                self._save(words[SAVE_WANTED])
                self._transport.ring_everybody()
        return True

    # A server's side.

    def after_service(self) -> bool:
        """Save once more if the run is broken off; False then, since there is no final model yet."""
        if self.interrupted():
            self._await_lingerers()
        self._save_with_workers()
        return not self.interrupted() or self._saved_as != self._words[STOP_AT]

    def _while_idle(self) -> None:
        began = self._life.node.now()
        if self._save_with_workers():
            self._transport.traffic.waited -= self._life.node.now() - began  # it will be taken for waiting
        report(self._life)

    def _save_with_workers(self) -> bool:
        """Save when every worker has saved under the same label, and so waits or has left."""
        labels = {self._saved(w) for w in range(self._plan.workers)}
        label = min(labels)
        if len(labels) > 1 or label <= self._saved_as:
            return False
        if self._transport.mailbox.has_mail():
            return False  # pushed before its worker saved, and not yet part of this server's x
        self._save(label)
        return True

    def _await_lingerers(self) -> None:
        """Wait for workers that left long ago to save as well, unless all were done before the run was stopped."""
        self._transport.await_bell(self._settled)
        workers = range(self._plan.workers)
        if any(self._begun(w) != NOTHING_MORE for w in workers):
            self._transport.await_bell(lambda: all(self._saved(w) == self._words[STOP_AT] for w in workers))

    # Both.

    def _save(self, label: int) -> None:
        """Write this node's part of a checkpoint. A full disk does not end the training: the coordinator is told."""
        life = self._life
        self._saved_as = label
        if self._one_x and life.rank == 0:
            self._await_writers(label)
        self._log.flush()  # what a resumed run remembers must not be less than what it has done
        try:
            folder = checkpoint.open_draft(life.job.run / "checkpoints", label)
            checkpoint.write_tree(folder / checkpoint.part_name(life.rank), everything(life))
        except OSError as error:
            life.tell({"kind": "save-failed", "node": life.rank, "step": label, "error": str(error)})
        else:
            self._log.write(Saved(life.node.now(), life.rank, label))
            life.tell({"kind": "saved", "node": life.rank, "step": label})
        self._words.announce(self._plan.word("saved", life.rank), label)

    def _save_with_servers(self, label: int) -> None:
        """Save, and wait until whoever holds x has saved as well: with every worker here, nothing is in flight."""
        self._save(label)
        life, waited = self._life, self._transport.traffic.waited
        for holder in (0,) if self._one_x and life.rank else life.node.comm.servers.members:
            self._transport.mailbox.ring(holder)
            self._transport.await_saved(holder, label, in_step=life.in_step)
        self._transport.traffic.waited = waited  # that was saving, no part of the strategy

    def _await_writers(self, label: int) -> None:
        """Wait until nobody else writes to x any more: then it holds the very updates that the others have saved."""
        waited, others = self._transport.traffic.waited, range(1, self._plan.workers)
        self._transport.await_bell(
            lambda: all(self._begun(w) == NOTHING_MORE or self._saved(w) >= label for w in others)
        )
        self._transport.traffic.waited = waited

    def _settled(self) -> bool:
        """Whether every worker has either done all its steps or saved because it must stop."""
        at = self._words[STOP_AT]
        return at != 0 and all(
            self._begun(w) == NOTHING_MORE or self._saved(w) == at for w in range(self._plan.workers)
        )

    def _saved(self, worker: int) -> int:
        return self._words[self._plan.word("saved", worker)]

    def _begun(self, worker: int) -> int:
        return self._words[self._plan.word("begun", worker)]
