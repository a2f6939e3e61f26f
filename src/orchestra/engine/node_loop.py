# SPDX-License-Identifier: Apache-2.0
"""The loop of one node, the same in every world: train or serve, take snapshots, write the final model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from orchestra.core import gradient_mask
from orchestra.core.comm import Comm
from orchestra.core.log import Log
from orchestra.core.node import Node
from orchestra.core.strategy import Layout
from orchestra.core.vectors import LARGE, ranges
from orchestra.core.view import View
from orchestra.data import samples
from orchestra.data.feed import SampleStore, fold, make_feed
from orchestra.data.random_state import get_states, seed_everything, set_states
from orchestra.engine import checkpoint, snapshot
from orchestra.engine.middleware import Metered
from orchestra.engine.spec import RunSpec
from orchestra.errors import EnvironmentProblem
from orchestra.model import param_groups
from orchestra.model.flat_optimizer import Factory, FlatOptimizer
from orchestra.model.replica import Replica
from orchestra.runs.events import NodeEnded, SnapshotTaken, Stepped
from orchestra.runs.status import NodeStatus

if TYPE_CHECKING:
    from orchestra.engine.fingerprint import ModelCheck

_REPORT_EVERY = 0.02  # seconds between a busy server's reports, which only people read


class Checkpointer(Protocol):
    """Saves checkpoints, and keeps a node waiting as long as others may need it; one for each node."""

    def after_step(self, before: int) -> None:
        """Save if a checkpoint is due; the worker had done `before` steps before this one."""

    def after_steps(self) -> None:
        """Save after the last step, if the run saves at all, so that it can be resumed with a larger budget."""

    def interrupted(self) -> bool:
        """Return whether the run is interrupted and may be resumed later."""
        ...

    def save_on_interrupt(self) -> None:
        """Save this worker's part before it leaves."""

    def stay(self) -> bool:
        """Wait after a worker's last step while others may need it; return False if the run is interrupted."""
        ...

    def after_service(self) -> bool:
        """Save a server's part at the end if needed; return False if the run is interrupted before a final model."""
        ...


@dataclass
class NodeRuntime:
    """One node, with everything that its strategy does not see."""

    spec: RunSpec
    node: Node
    meter: Metered
    log: Log
    tell: Callable[[dict[str, Any]], None]  # to the coordinator
    show: Callable[[NodeStatus], None]  # to watchers of the run
    state: Any = field(init=False)
    snapshots: int = 0
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.state = self.spec.strategy.init(self.node)
        self.node.adopt(self.spec.strategy, self.state)

    @property
    def rank(self) -> int:
        """Id of the node."""
        return self.node.rank

    @property
    def layout(self) -> Layout:
        """Where the model is now, and which nodes update it."""
        return self.spec.strategy.layout_at(self.state)

    @property
    def lockstep(self) -> bool:
        """Whether all workers finish a step before any begins the next one."""
        return self.layout.lockstep

    @property
    def is_server(self) -> bool:
        """Whether the node is a server: servers have the ranks after the workers."""
        return self.rank >= self.spec.workers


# Set up.


def worker(
    spec: RunSpec, rank: int, comm: Comm, log: Log, x: Tensor, g: Tensor, data: Any = None,
    check: ModelCheck | None = None,
) -> Node:  # fmt: skip
    """Return a worker whose x already holds the initial parameters. Workers in one process may share the data.

    `check` is given where the caller is another process.
    """
    seed_everything(spec.seed)
    module = spec.model().to(x.device)
    data = samples.read(spec.data()) if data is None else data
    apart = spec.validation_samples()
    if check is not None:
        check.require_same(module, data, apart, spec.seed)
    seed_everything(fold(spec.seed, rank + 1))
    replica = Replica(
        module, x, g, loss=spec.loss, bf16=spec.precision == "bf16", accumulate=spec.accumulate, cuts=spec.cuts,
        names=spec.names,
    )  # fmt: skip
    # On resume, another worker may already have written the saved x to the shared memory.
    if check is not None and replica.is_whole and spec.checkpoint is None:
        check.require_same_outputs(module, data, spec.seed)
    layers = list(replica.parameters) if spec.layerwise else None
    mine = ranges(x.numel(), spec.workers)[rank] if spec.updated == "own range" else slice(0, x.numel())
    return Node(
        comm,
        _inner(spec, spec.optimizer, x[mine], mine, layers),
        x,
        log=log,
        seed=fold(spec.seed, rank, 1),
        replica=replica,
        feed=make_feed(data, batch=spec.batch, seed=spec.seed, rank=rank, size=spec.workers, partition=spec.partition),
        placement=spec.placement,
        fuses=spec.fused,
        clip=spec.clip,
        tolerate=spec.tolerate,
        last_step=spec.last_step,
        validation=None if apart is None else _validation(spec, rank, replica, SampleStore(apart)),
    )


def _inner(
    spec: RunSpec, optimizer: Factory, x: Tensor, part: slice, layers: Sequence[nn.Parameter] | None = None
) -> FlatOptimizer:
    """Return the optimizer of a range of the model."""
    pieces = gradient_mask.pieces_of([math.prod(shape) for shape in spec.layers], part)
    fused = spec.parameters >= LARGE
    return FlatOptimizer(optimizer, x, layers=layers, pieces=pieces, schedule=spec.schedule, fused=fused)


def _validation(spec: RunSpec, rank: int, replica: Replica, apart: SampleStore) -> Callable[[], tuple[float, float]]:
    """Return a function that gives the loss over this worker's share of the validation samples."""
    mine = range(len(apart))[rank :: spec.workers]

    def total() -> tuple[float, float]:
        losses = [
            len(chosen) * replica.loss_of(apart.take(chosen))
            for start in range(0, len(mine), spec.batch)
            if (chosen := list(mine[start : start + spec.batch]))
        ]
        return sum(losses), float(len(mine))

    return total


def server(spec: RunSpec, rank: int, comm: Comm, log: Log, x: Tensor) -> Node:
    """Return a server whose x already holds its range of the initial parameters."""
    optimizer, part = spec.optimizer, spec.range_of(rank)
    layers: list[nn.Parameter] | None = None
    if spec.layerwise:
        optimizer, layers = param_groups.on_range(optimizer, spec.layers, part, x)
    inner = _inner(spec, optimizer, x, part, layers)
    seed = fold(spec.seed, rank, 1)
    return Node(comm, inner, x, log=log, seed=seed, placement=spec.placement, clip=spec.clip)


# Train, serve.


def work(runtime: NodeRuntime, checkpointer: Checkpointer) -> None:
    """Train: do a worker's steps, then let its strategy finish."""
    spec, node = runtime.spec, runtime.node
    while not spent(runtime):
        if not runtime.meter.proceed(node.steps, lockstep=runtime.lockstep):
            runtime.interrupted = checkpointer.interrupted()
            break
        before, far = node.steps, distance(runtime)
        spec.strategy.step(node, runtime.state)
        record(runtime)
        report(runtime)
        if spec.snapshot_steps is not None and crossed(far, distance(runtime), spec.snapshot_steps):
            take_snapshot(runtime, int(distance(runtime) // spec.snapshot_steps))
        checkpointer.after_step(before)
    if runtime.interrupted:
        checkpointer.save_on_interrupt()
        node.comm.leave()
        end(runtime)
        return
    if not node.retired:
        checkpointer.after_steps()
        spec.strategy.finish(node, runtime.state)
        node.comm.leave()
    end(runtime)
    if checkpointer.stay():
        write_final_model_part(runtime)


def serve(runtime: NodeRuntime, checkpointer: Checkpointer) -> None:
    """Serve until the workers are done. Snapshots and checkpoints are taken between two messages."""
    spec, node = runtime.spec, runtime.node

    def next_snapshot() -> float:
        # A server counts samples. The workers have used as many when they take the snapshot of the same number.
        every = spec.snapshot_steps
        return math.inf if every is None else spec.samples_by((runtime.snapshots + 1) * every)

    due, reported, holds = next_snapshot(), node.now(), runtime.layout.model_location == "servers"
    already = node.comm.between_messages

    def between() -> None:
        nonlocal due, reported, holds
        already()
        while node.samples >= due:
            if holds or node.samples == due:
                take_snapshot(runtime, runtime.snapshots + 1)
            else:  # it was due before this server held the model, and others took it
                runtime.snapshots += 1
            due = next_snapshot()
        holds = runtime.layout.model_location == "servers"
        if node.now() - reported > _REPORT_EVERY:
            report(runtime)
            reported = node.now()

    node.comm.between_messages = between
    spec.strategy.serve(node, runtime.state)
    end(runtime)
    if checkpointer.after_service():
        write_final_model_part(runtime)


def spent(runtime: NodeRuntime) -> bool:
    """Return whether a worker has done its steps, or its epochs of a stream, or has retired to become a server."""
    spec, node = runtime.spec, runtime.node
    if node.retired or (spec.last_step is not None and distance(runtime) >= spec.last_step):
        return True
    return spec.last_epoch is not None and node.feed is not None and node.feed.epoch >= spec.last_epoch


def distance(runtime: NodeRuntime) -> float:
    """Return a worker's steps as if no worker had retired: budgets and snapshots use this count."""
    spec, node = runtime.spec, runtime.node
    if node.feed is None or len(node.comm.workers) == spec.workers or spec.steps_per_epoch is None:
        return node.steps
    return node.feed.distance(spec.steps_per_epoch)


def crossed(before: float, after: float, every: int | None) -> bool:
    """Return whether a multiple of `every` lies after `before` and up to `after`."""
    return every is not None and after // every > before // every


# Report.


def record(runtime: NodeRuntime) -> None:
    """Log a worker's step and what it cost."""
    node, meter, traffic = runtime.node, runtime.meter, runtime.meter.traffic
    loss = node.loss if node.weight else None
    runtime.log.write(
        Stepped(
            node.now(), runtime.rank, node.steps, round(node.epochs, 4), node.samples, loss, node.lr,
            round(meter.compute, 6), round(meter.communicate, 6), round(meter.wait, 6), traffic.sent, traffic.received,
        )
    )  # fmt: skip


def report(runtime: NodeRuntime) -> None:
    """Report the progress of this node."""
    node, meter, traffic = runtime.node, runtime.meter, runtime.meter.traffic
    runtime.show(
        NodeStatus(
            node.steps, node.samples, node.loss, meter.compute, meter.communicate, meter.wait,
            traffic.sent, traffic.received, node.now(), math.inf if node.retired else distance(runtime),
        )
    )  # fmt: skip


def end(runtime: NodeRuntime) -> None:
    """Write the totals of a node that has done its work."""
    report(runtime)
    node, meter, traffic = runtime.node, runtime.meter, runtime.meter.traffic
    totals = (meter.compute, meter.communicate, meter.wait, traffic.sent, traffic.received)
    by_node = {str(node): nbytes for node, nbytes in sorted(traffic.sent_to.items())}
    runtime.log.write(NodeEnded(node.now(), runtime.rank, node.steps, node.samples, *totals, by_node))


# Snapshots.


def take_snapshot(runtime: NodeRuntime, number: int) -> None:
    """Write this node's part of a snapshot, if it has one. Number 0 is the initial model."""
    runtime.snapshots = number
    node = runtime.node
    try:
        if write_model_part(runtime, runtime.spec.run / "snapshots" / f"{number:05d}"):
            runtime.log.write(SnapshotTaken(node.now(), runtime.rank, node.steps, node.samples, number))
            runtime.tell({"kind": "snapped", "node": runtime.rank, "number": number})
    except OSError as error:
        runtime.tell({"kind": "snapshot-failed", "node": runtime.rank, "step": node.steps, "error": str(error)})


def write_model_part(runtime: NodeRuntime, folder: Path) -> bool:
    """Write this node's part of the model; return False if it has none."""
    spec, node, where = runtime.spec, runtime.node, runtime.layout.model_location
    equal = where in ("everywhere", "copies", "shared")
    holds = where == "servers" if runtime.is_server else where == "apart" or (equal and runtime.rank == 0)
    buffers = node.replica.buffers() if node.replica is not None else {}
    if node.retired or not (holds or buffers):
        return False
    start = spec.range_of(runtime.rank).start if runtime.is_server else 0
    x: Tensor | None = node.x if holds else None
    samples = spec.samples_by(node.steps) if equal else node.samples
    seen = node.samples if buffers else 0
    snapshot.write(
        folder, runtime.rank, snapshot.SnapshotPart(node.now(), node.steps, samples, start, x, buffers, where, seen)
    )
    return True


def write_final_model_part(runtime: NodeRuntime) -> None:
    """Write this node's part of the final model; if the disk is full, to a temporary folder that `conclusion` reads."""
    spec, folder = runtime.spec, runtime.spec.run / snapshot.FINAL
    try:
        snapshot.trying_again(lambda: write_model_part(runtime, folder))
    except OSError as error:
        if not snapshot.is_full(error):
            raise
        if not spec.one_memory and runtime.rank:  # the coordinator may be on another machine
            raise EnvironmentProblem(
                f"node {runtime.rank} could not write its part of the final model to {folder}: {error}. "
                "Make room, and resume."
            ) from None
        write_model_part(runtime, snapshot.make_elsewhere(spec.launch) / snapshot.FINAL)


# The state of a node.


def everything(runtime: NodeRuntime) -> dict[str, Any]:
    """Return all state of this node that changes during a run."""
    node, meter, traffic = runtime.node, runtime.meter, runtime.meter.traffic
    elsewhere = runtime.spec.shares_x and runtime.rank != 0
    return {
        "x": None if elsewhere else node.x,
        "buffers": node.replica.buffers() if node.replica is not None else {},
        "inner": node.optimizer.state(),
        "strategy": runtime.state,
        "view": node.comm.view.saved(),
        "feed": None if node.feed is None else [node.feed.epoch, node.feed.step, node.feed.dealt],
        "counts": [node.steps, node.samples, node.skipped, runtime.snapshots],
        "progress": [node.comm.progress, node.comm.known],
        "cost": [node.now(), meter.compute, meter.communicate, meter.wait, traffic.sent, traffic.received],
        "sent_to": {str(node): nbytes for node, nbytes in traffic.sent_to.items()},
        "node_rng": node.rng.get_state(),
        "rng": get_states(cuda=node.x.is_cuda),
    }


def restore(runtime: NodeRuntime, saved: dict[str, Any]) -> None:
    """Restore the state that `everything` returned."""
    node, meter, traffic = runtime.node, runtime.meter, runtime.meter.traffic
    if saved["x"] is not None:
        node.x.copy_(saved["x"])
    if node.replica is not None:
        for name, buffer in node.replica.buffers().items():
            buffer.copy_(saved["buffers"][name])
    node.optimizer.restore(saved["inner"])
    if node.feed is not None:
        epoch, step, dealt = saved["feed"]
        for at, within, places in dealt:
            node.feed.seek(at, within)
            node.feed.deal_to(places)
        node.feed.seek(epoch, step)
    node.comm.view = View.restored(saved["view"])
    if runtime.state is not None:
        checkpoint.restore_into(runtime.state, saved["strategy"])
        node.adopt(runtime.spec.strategy, runtime.state)
    node.steps, node.samples, node.skipped, runtime.snapshots = saved["counts"]
    node.comm.progress, node.comm.known = saved["progress"]
    _, meter.compute, meter.communicate, traffic.waited, traffic.sent, traffic.received = saved["cost"]
    traffic.sent_to.update({int(node): nbytes for node, nbytes in saved["sent_to"].items()})
    node.rng.set_state(saved["node_rng"])
    set_states(saved["rng"])
