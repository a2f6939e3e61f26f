# SPDX-License-Identifier: Apache-2.0
"""The life of one node, in whatever world: train or serve, set aside what was learned."""

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

_REPORT_EVERY = 0.02  # seconds between a busy server's reports: they are for eyes


class Checkpointer(Protocol):
    """Sees to checkpoints, and to who stays for them; one for each node."""

    def after_step(self, before: int) -> None:
        """Save if it is time: the worker had done `before` steps a moment ago."""

    def after_steps(self) -> None:
        """Save once more after the last step, if the run saves at all: a larger budget goes on from there."""

    def interrupted(self) -> bool:
        """Whether the run is broken off, to go on another day."""
        ...

    def break_off(self) -> None:
        """Save this worker's part before it leaves."""

    def stay(self) -> bool:
        """Wait after a worker's last step while others may need it; False if the run is broken off meanwhile."""
        ...

    def after_service(self) -> bool:
        """A server's last duties; False if the run is broken off, so that there is no final model yet."""
        ...


@dataclass
class NodeRuntime:
    """One node and everything around it that its strategy does not see."""

    spec: RunSpec
    node: Node
    meter: Metered
    log: Log
    tell: Callable[[dict[str, Any]], None]  # to the coordinator
    show: Callable[[NodeStatus], None]  # to whoever watches
    state: Any = field(init=False)
    snapshots: int = 0
    interrupted: bool = False

    def __post_init__(self) -> None:
        self.state = self.spec.strategy.init(self.node)
        self.node.enter(self.spec.strategy, self.state)

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
        """Servers come after the workers."""
        return self.rank >= self.spec.workers


# Set up.


def worker(
    spec: RunSpec, rank: int, comm: Comm, log: Log, x: Tensor, g: Tensor, data: Any = None,
    check: ModelCheck | None = None,
) -> Node:  # fmt: skip
    """Return a worker whose x already holds the initial parameters. Several in one process may be given the same data.

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
    # On resume, another worker may already have put the saved x where all share it.
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
        fuses=spec.updated == "own range" or spec.torch_means,
        clip=spec.clip,
        tolerate=spec.tolerate,
        last_step=spec.last_step,
        validation=None if apart is None else _validation(spec, rank, replica, SampleStore(apart)),
    )


def _inner(
    spec: RunSpec, optimizer: Factory, x: Tensor, part: slice, layers: Sequence[nn.Parameter] | None = None
) -> FlatOptimizer:
    """The optimizer of a range of the model."""
    pieces = gradient_mask.pieces_of([math.prod(shape) for shape in spec.layers], part)
    fused = spec.parameters >= LARGE
    return FlatOptimizer(optimizer, x, layers=layers, pieces=pieces, schedule=spec.schedule, fused=fused)


def _validation(spec: RunSpec, rank: int, replica: Replica, apart: SampleStore) -> Callable[[], tuple[float, float]]:
    """The loss over this worker's share of the samples set apart."""
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
    """A server whose x already holds its range of the initial parameters."""
    optimizer, part = spec.optimizer, spec.range_of(rank)
    layers: list[nn.Parameter] | None = None
    if spec.layerwise:
        optimizer, layers = param_groups.on_range(optimizer, spec.layers, part, x)
    inner = _inner(spec, optimizer, x, part, layers)
    seed = fold(spec.seed, rank, 1)
    return Node(comm, inner, x, log=log, seed=seed, placement=spec.placement, clip=spec.clip)


# Train, serve.


def work(runtime: NodeRuntime, checkpointer: Checkpointer) -> None:
    """A worker's steps, then what its strategy still has to do."""
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
        checkpointer.break_off()
        node.comm.leave()
        end(runtime)
        return
    if not node.retired:
        checkpointer.after_steps()
        spec.strategy.finish(node, runtime.state)
        node.comm.leave()
    end(runtime)
    if checkpointer.stay():
        set_aside_the_end(runtime)


def serve(runtime: NodeRuntime, checkpointer: Checkpointer) -> None:
    """A server's life; what concerns the run as a whole happens between two messages."""
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
        set_aside_the_end(runtime)


def spent(runtime: NodeRuntime) -> bool:
    """Whether a worker has done its steps, or its epochs of a stream, or has made way for a server."""
    spec, node = runtime.spec, runtime.node
    if node.retired or (spec.last_step is not None and distance(runtime) >= spec.last_step):
        return True
    return spec.last_epoch is not None and node.feed is not None and node.feed.epoch >= spec.last_epoch


def distance(runtime: NodeRuntime) -> float:
    """A worker's steps, counted as if all that began were still there: budgets and snapshots go by these."""
    spec, node = runtime.spec, runtime.node
    if node.feed is None or len(node.comm.workers) == spec.workers or spec.steps_per_epoch is None:
        return node.steps
    return node.feed.distance(spec.steps_per_epoch)


def crossed(before: float, after: float, every: int | None) -> bool:
    """Whether a multiple of `every` lies in what was just done."""
    return every is not None and after // every > before // every


# Tell.


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
    """Show where this node is."""
    node, meter, traffic = runtime.node, runtime.meter, runtime.meter.traffic
    runtime.show(
        NodeStatus(
            node.steps, node.samples, node.loss, meter.compute, meter.communicate, meter.wait,
            traffic.sent, traffic.received, node.now(), math.inf if node.retired else distance(runtime),
        )
    )  # fmt: skip


def end(runtime: NodeRuntime) -> None:
    """Write the totals: the node has done its work."""
    report(runtime)
    node, meter, traffic = runtime.node, runtime.meter, runtime.meter.traffic
    totals = (meter.compute, meter.communicate, meter.wait, traffic.sent, traffic.received)
    by_node = {str(node): nbytes for node, nbytes in sorted(traffic.sent_to.items())}
    runtime.log.write(NodeEnded(node.now(), runtime.rank, node.steps, node.samples, *totals, by_node))


# Set aside.


def take_snapshot(runtime: NodeRuntime, number: int) -> None:
    """Set aside this node's part of a snapshot, if it holds anything. Number 0 is the initial model."""
    runtime.snapshots = number
    node = runtime.node
    try:
        if set_aside(runtime, runtime.spec.run / "snapshots" / f"{number:05d}"):
            runtime.log.write(SnapshotTaken(node.now(), runtime.rank, node.steps, node.samples, number))
            runtime.tell({"kind": "snapped", "node": runtime.rank, "number": number})
    except OSError as error:
        runtime.tell({"kind": "snapshot-failed", "node": runtime.rank, "step": node.steps, "error": str(error)})


def set_aside(runtime: NodeRuntime, folder: Path) -> bool:
    """Write this node's part of the model; False if it holds none."""
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


def set_aside_the_end(runtime: NodeRuntime) -> None:
    """Write this node's part of the final model: without room in the run folder, where `conclusion` looks as well."""
    spec, folder = runtime.spec, runtime.spec.run / snapshot.FINAL
    try:
        snapshot.trying_again(lambda: set_aside(runtime, folder))
    except OSError as error:
        if not snapshot.is_full(error):
            raise
        if not spec.one_memory and runtime.rank:  # another machine does not see it
            raise EnvironmentProblem(
                f"node {runtime.rank} could not write its part of the final model to {folder}: {error}. "
                "Make room, and resume."
            ) from None
        set_aside(runtime, snapshot.make_elsewhere(spec.launch) / snapshot.FINAL)


# All that changes.


def everything(runtime: NodeRuntime) -> dict[str, Any]:
    """All that changes during a run, on this node."""
    node, meter, traffic = runtime.node, runtime.meter, runtime.meter.traffic
    elsewhere = runtime.spec.shares_x and runtime.rank != 0
    return {
        "x": None if elsewhere else node.x,
        "buffers": node.replica.buffers() if node.replica is not None else {},
        "inner": node.optimizer.state(),
        "strategy": runtime.state,
        "feed": None if node.feed is None else [node.feed.epoch, node.feed.step, node.feed.shared_anew],
        "counts": [node.steps, node.samples, node.skipped, runtime.snapshots],
        "progress": [node.comm.progress, node.comm.known],
        "cost": [node.now(), meter.compute, meter.communicate, meter.wait, traffic.sent, traffic.received],
        "sent_to": {str(node): nbytes for node, nbytes in traffic.sent_to.items()},
        "node_rng": node.rng.get_state(),
        "rng": get_states(cuda=node.x.is_cuda),
    }


def restore(runtime: NodeRuntime, saved: dict[str, Any]) -> None:
    """Go back to what `everything` gave."""
    node, meter, traffic = runtime.node, runtime.meter, runtime.meter.traffic
    if saved["x"] is not None:
        node.x.copy_(saved["x"])
    if node.replica is not None:
        for name, buffer in node.replica.buffers().items():
            buffer.copy_(saved["buffers"][name])
    node.optimizer.restore(saved["inner"])
    if node.feed is not None:
        epoch, step, shared_anew = saved["feed"]
        if shared_anew is not None:
            node.feed.seek(*shared_anew[:2])
            node.feed.reshare(shared_anew[2])
        node.feed.seek(epoch, step)
    if runtime.state is not None:
        checkpoint.restore_into(runtime.state, saved["strategy"])
        node.enter(runtime.spec.strategy, runtime.state)
    node.steps, node.samples, node.skipped, runtime.snapshots = saved["counts"]
    node.comm.progress, node.comm.known = saved["progress"]
    _, meter.compute, meter.communicate, traffic.waited, traffic.sent, traffic.received = saved["cost"]
    traffic.sent_to.update({int(node): nbytes for node, nbytes in saved["sent_to"].items()})
    node.rng.set_state(saved["node_rng"])
    set_states(saved["rng"])
