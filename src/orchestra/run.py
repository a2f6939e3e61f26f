# SPDX-License-Identifier: Apache-2.0
"""The life of one node: set up, train or serve, set aside what was learned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orchestra import checkpoint, snapshot
from orchestra.data.feed import fold, make_feed
from orchestra.events import Began, Ended, EventLog, Saved, Snapped, Stepped
from orchestra.inner import Inner
from orchestra.job import Job
from orchestra.node import Comm, Node
from orchestra.ops import Group
from orchestra.replica import Replica
from orchestra.rng import get_states, seed_everything, set_states
from orchestra.transports.local import LocalTransport
from orchestra.transports.memory import NOTHING_MORE, SAVE_WANTED, STOP_ASKED, STOP_AT, Arena, Report
from orchestra.transports.middleware import Metered
from orchestra.vectors import LARGE, ranges

# Values of STOP_ASKED.
BUDGET_SPENT, INTERRUPTED = 1, 2


@dataclass
class Life:
    """One node and everything around it that its strategy does not see."""

    job: Job
    arena: Arena
    rank: int
    tell: Callable[[dict[str, Any]], None]  # to the coordinator
    log: EventLog
    transport: LocalTransport
    meter: Metered
    node: Node
    state: Any = None
    snapshots: int = 0
    saved_as: int = 0  # label of this node's newest part of a checkpoint
    interrupted: bool = False

    @property
    def is_server(self) -> bool:
        """Servers come after the workers."""
        return self.rank >= self.job.workers


def live(job: Job, arena: Arena, rank: int, tell: Callable[[dict[str, Any]], None], setup: Callable[[], float]) -> None:
    """Everything a process does for its node."""
    torch.set_num_threads(job.threads)
    with EventLog(job.run / f"events-{rank}.jsonl") as log:
        life = prepare(job, arena, rank, tell, log)
        tell({"kind": "ready", "node": rank})
        waited = life.transport.traffic.waited
        life.transport.await_go()
        life.transport.traffic.waited = waited  # the clock starts now
        log.write(Began(life.node.now(), rank, "server" if life.is_server else "worker", setup()))
        if life.is_server:
            serve(life)
        else:
            work(life)
        if life.transport.gpu_means is not None:
            life.transport.gpu_means.close()
    tell({"kind": "done", "node": rank, "interrupted": life.interrupted})


# Set up.


def prepare(job: Job, arena: Arena, rank: int, tell: Callable[[dict[str, Any]], None], log: EventLog) -> Life:
    """Build the node: model, data, optimizer, transport, and the state of a checkpoint if there is one."""
    transport = LocalTransport(arena, rank, patience=job.patience, lockstep=job.strategy.synchronous)
    meter = Metered(transport)
    comm = Comm(meter, Group(tuple(range(job.workers))), Group(tuple(range(job.workers, job.workers + job.servers))))
    make = _server if rank >= job.workers else _worker
    node = make(job, arena, rank, comm, log)
    if job.own_gpu and rank < job.workers:
        from orchestra.transports.nccl import NcclMeans  # torch.distributed is not needed otherwise

        transport.gpu_means = NcclMeans(job.run / f"nccl-{job.launch}", rank, job.workers, node.x.device)
    life = Life(job, arena, rank, tell, log, transport, meter, node)
    life.state = job.strategy.init(node)
    if job.resume is not None:
        restore(life, checkpoint.read_tree(job.resume / checkpoint.part_name(rank)))
        life.saved_as = arena.words[SAVE_WANTED]
    return life


def _worker(job: Job, arena: Arena, rank: int, comm: Comm, log: EventLog) -> Node:
    seed_everything(job.seed)
    module = job.model()
    data = job.data()
    seed_everything(fold(job.seed, rank + 1))
    x, g = arena.vector("x", rank), arena.vector("g", rank)
    if not arena.plan.shared_x:  # a shared one was written before anybody was there to read it
        x.copy_(arena.tensor(arena.plan.start, arena.plan.numel, arena.plan.dtype))
    if job.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        module, x, g = module.to(device), x.to(device), g.to(device)
        arena.pin(rank)
    replica = Replica(module, x, g, loss=job.loss, bf16=job.bf16, accumulate=job.accumulate)
    mine = x[ranges(x.numel(), job.workers)[rank]] if job.owns_range else x
    layers = list(replica.parameters) if job.layerwise else None
    return Node(
        comm,
        Inner(job.optimizer, mine, layers=layers, schedule=job.schedule, clip=job.clip, fused=x.numel() >= LARGE),
        x,
        log=log,
        seed=fold(job.seed, rank, 1),
        replica=replica,
        feed=make_feed(data, batch=job.batch, seed=job.seed, rank=rank, size=job.workers, partition=job.partition),
        owns_range=job.owns_range,
        tolerate=job.tolerate,
    )


def _server(job: Job, arena: Arena, rank: int, comm: Comm, log: EventLog) -> Node:
    part = ranges(arena.plan.numel, job.servers)[rank - job.workers]
    x = arena.vector("x", rank, part.stop - part.start)
    x.copy_(arena.tensor(arena.plan.start, arena.plan.numel, arena.plan.dtype)[part])
    large = arena.plan.numel >= LARGE
    inner = Inner(job.optimizer, x, schedule=job.schedule, clip=job.clip, fused=large)
    return Node(comm, inner, x, log=log, seed=fold(job.seed, rank, 1), samples_per_epoch=job.samples_per_epoch)


# Train, serve.


def work(life: Life) -> None:
    """A worker's steps, then what its strategy still has to do."""
    job, node = life.job, life.node
    while not _spent(life):
        if not life.transport.proceed(node.steps):
            life.interrupted = life.arena.words[STOP_ASKED] == INTERRUPTED
            break
        before = node.steps
        job.strategy.step(node, life.state)
        report(life)
        if _crossed(before, node.steps, job.snapshot_every):
            take_snapshot(life)
        _save_if_due(life, before)
    if life.interrupted:
        _save_once(life, life.arena.words[STOP_AT])
        node.comm.leave()
        end(life)
        return
    job.strategy.finish(node, life.state)
    node.comm.leave()
    end(life)
    if not job.strategy.synchronous and not _linger(life):
        return
    set_aside(life, job.run / snapshot.FINAL)


def serve(life: Life) -> None:
    """A server's life; what concerns the run as a whole happens between two messages."""
    job, node = life.job, life.node

    def between() -> None:
        # A server counts samples. The workers have used as many when they take the snapshot of the same number.
        every = job.snapshot_every
        if every is not None and node.samples >= job.samples_by((life.snapshots + 1) * every):
            take_snapshot(life)
        _save_with_workers(life)
        report(life)

    life.transport.mailbox.between_messages = between
    job.strategy.serve(node, life.state)
    end(life)
    if not job.strategy.synchronous and life.arena.words[STOP_ASKED] == INTERRUPTED:
        _await_lingerers(life)
    _save_with_workers(life)
    words = life.arena.words
    if words[STOP_ASKED] != INTERRUPTED or life.saved_as != words[STOP_AT]:
        set_aside(life, job.run / snapshot.FINAL)


def _spent(life: Life) -> bool:
    job, node = life.job, life.node
    if job.last_step is not None and node.steps >= job.last_step:
        return True
    return job.last_epoch is not None and node.feed is not None and node.feed.epoch >= job.last_epoch


def _crossed(before: int, after: int, every: int | None) -> bool:
    return every is not None and after // every > before // every


# Tell.


def report(life: Life) -> None:
    """Write what the step cost, to the log and to the board."""
    node, meter, traffic = life.node, life.meter, life.transport.traffic
    t = node.now()
    if not life.is_server:
        loss = node.loss if node.weight else None
        life.log.write(
            Stepped(
                t, life.rank, node.steps, round(node.epochs, 4), node.samples, loss, node.lr, round(meter.compute, 6),
                round(meter.communicate, 6), round(meter.wait, 6), traffic.sent, traffic.received,
            )
        )  # fmt: skip
    life.arena.report(
        life.rank,
        Report(
            node.steps, node.samples, node.loss, meter.compute, meter.communicate, meter.wait,
            traffic.sent, traffic.received, t,
        ),
    )  # fmt: skip


def end(life: Life) -> None:
    """Write the totals: the node has done its work."""
    report(life)
    node, meter, traffic = life.node, life.meter, life.transport.traffic
    totals = (meter.compute, meter.communicate, meter.wait, traffic.sent, traffic.received)
    life.log.write(Ended(node.now(), life.rank, node.steps, node.samples, *totals))


# Set aside.


def take_snapshot(life: Life) -> None:
    """Set aside this node's part of the next snapshot, if snapshots are wanted and it holds anything."""
    if life.job.snapshot_every is None:
        return
    life.snapshots += 1  # number 0 is the initial model, scored before anything runs
    number = life.snapshots
    node = life.node
    try:
        if set_aside(life, life.job.run / "snapshots" / f"{number:05d}"):
            life.log.write(Snapped(node.now(), life.rank, node.steps, node.samples, number))
    except OSError as error:
        life.tell({"kind": "snapshot-failed", "node": life.rank, "step": node.steps, "error": str(error)})


def set_aside(life: Life, folder: Path) -> bool:
    """Write this node's part of the model; False if it holds none."""
    node, where = life.node, life.job.strategy.model_at
    holds = life.is_server or where == "apart" or (where == "everywhere" and life.rank == 0)
    buffers = node.replica.buffers() if node.replica is not None else {}
    if not holds and not buffers:
        return False
    start = ranges(life.arena.plan.numel, life.job.servers)[life.rank - life.job.workers].start if life.is_server else 0
    x: Tensor | None = node.x if holds else None
    samples = life.job.samples_by(node.steps) if where == "everywhere" else node.samples
    snapshot.write(folder, life.rank, snapshot.Part(node.now(), node.steps, samples, start, x, buffers))
    return True


# Checkpoint.


def save(life: Life, label: int) -> None:
    """Write this node's part of a checkpoint. A full disk does not end the training: the coordinator is told."""
    life.saved_as = label
    life.log.flush()  # what a resumed run remembers must not be less than what it has done
    try:
        folder = checkpoint.open_draft(life.job.run / "checkpoints", label)
        checkpoint.write_tree(folder / checkpoint.part_name(life.rank), everything(life))
    except OSError as error:
        life.tell({"kind": "save-failed", "node": life.rank, "step": label, "error": str(error)})
    else:
        life.log.write(Saved(life.node.now(), life.rank, label))
        life.tell({"kind": "saved", "node": life.rank, "step": label})
    life.arena.words.announce(life.arena.plan.word("saved", life.rank), label)


def everything(life: Life) -> dict[str, Any]:
    """All that changes during a run, on this node."""
    node, meter, traffic = life.node, life.meter, life.transport.traffic
    shared = life.arena.plan.shared_x and life.rank != 0
    return {
        "x": None if shared else node.x,
        "buffers": node.replica.buffers() if node.replica is not None else {},
        "inner": node.inner.state(),
        "strategy": life.state,
        "feed": None if node.feed is None else [node.feed.epoch, node.feed.step],
        "counts": [node.steps, node.samples, node.skipped, life.snapshots],
        "cost": [node.now(), meter.compute, meter.communicate, meter.wait, traffic.sent, traffic.received],
        "node_rng": node.rng.get_state(),
        "rng": get_states(cuda=life.job.device == "cuda" and not life.is_server),
    }


def restore(life: Life, saved: dict[str, Any]) -> None:
    """Go back to what `everything` wrote."""
    node, meter, traffic = life.node, life.meter, life.transport.traffic
    if saved["x"] is not None:
        node.x.copy_(saved["x"])
    if node.replica is not None:
        for name, buffer in node.replica.buffers().items():
            buffer.copy_(saved["buffers"][name])
    node.inner.restore(saved["inner"])
    if life.state is not None:
        checkpoint.restore_into(life.state, saved["strategy"])
    if node.feed is not None:
        node.feed.seek(*saved["feed"])
    node.steps, node.samples, node.skipped, life.snapshots = saved["counts"]
    _, meter.compute, meter.communicate, traffic.waited, traffic.sent, traffic.received = saved["cost"]
    node.rng.set_state(saved["node_rng"])
    set_states(saved["rng"])


def _save_if_due(life: Life, before: int) -> None:
    """Save when it is time.

    In step, it is time for all workers at once. Where each goes its own pace, the first worker that is not done asks
    the others, who save at the end of the step they are in: nobody waits for another to catch up.
    """
    words, plan, node = life.arena.words, life.arena.plan, life.node
    due = _crossed(before, node.steps, life.job.checkpoint_every) and not _spent(life)
    if life.job.strategy.synchronous:
        if due:
            _save_with_servers(life, node.steps)
        return
    first = all(words[plan.word("begun", w)] == NOTHING_MORE for w in range(life.rank))
    if due and first and words[SAVE_WANTED] == life.saved_as:
        words.set(SAVE_WANTED, max(node.steps, life.saved_as + 1))
        life.transport.ring_everybody()
    if words[SAVE_WANTED] > life.saved_as:
        _save_with_servers(life, words[SAVE_WANTED])


def _save_once(life: Life, label: int) -> None:
    if life.saved_as != label:
        save(life, label)


def _save_with_servers(life: Life, label: int) -> None:
    """Save, and wait until the servers have saved as well: with every worker here, nothing is in flight."""
    save(life, label)
    for server in life.node.comm.servers.members:
        life.transport.mailbox.ring(server)
        life.transport.await_saved(server, label)


def _save_with_workers(life: Life) -> None:
    """Save when every worker has saved under the same label, and so waits or has left."""
    words, plan = life.arena.words, life.arena.plan
    labels = {words[plan.word("saved", w)] for w in range(plan.workers)}
    label = min(labels)
    if len(labels) == 1 and label > life.saved_as:
        save(life, label)


def _await_lingerers(life: Life) -> None:
    """Wait for workers that left long ago to save as well, unless all were done before the run was stopped."""
    words, plan = life.arena.words, life.arena.plan

    def settled() -> bool:
        saved = [words[plan.word("saved", w)] for w in range(plan.workers)]
        begun = [words[plan.word("begun", w)] for w in range(plan.workers)]
        at = words[STOP_AT]
        return at != 0 and (all(s == at for s in saved) or all(b == NOTHING_MORE for b in begun))

    life.transport.await_bell(settled)


def _linger(life: Life) -> bool:
    """Stay after the last step until all workers are done, so that a checkpoint is still possible.

    False if the run is stopped before that: then this worker's part is saved, and there is no final model yet.
    """
    words, plan = life.arena.words, life.arena.plan
    words.set(plan.word("begun", life.rank), NOTHING_MORE)
    life.transport.ring_everybody()

    def all_done() -> bool:
        return all(words[plan.word("begun", w)] == NOTHING_MORE for w in range(plan.workers))

    def interrupted() -> bool:
        return words[STOP_AT] != 0 and words[STOP_ASKED] == INTERRUPTED

    while not all_done():
        life.transport.await_bell(lambda: all_done() or interrupted() or words[SAVE_WANTED] > life.saved_as)
        if interrupted():
            _save_once(life, words[STOP_AT])
            life.transport.ring_everybody()
            return False
        if words[SAVE_WANTED] > life.saved_as:
            save(life, words[SAVE_WANTED])
            life.transport.ring_everybody()
    return True
