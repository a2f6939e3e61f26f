# SPDX-License-Identifier: Apache-2.0
"""One run in virtual time: every node is set up as in a process of its own, and runs as a task of the kernel."""

from __future__ import annotations

import copy
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from orchestra.core.comm import Comm
from orchestra.core.node import Node
from orchestra.core.ops import Compute, Transport
from orchestra.data import samples
from orchestra.data.batches import each
from orchestra.data.feed import IndexedFeed
from orchestra.data.random_state import exchange_states, left_alone
from orchestra.engine import compute_times, node_loop, snapshot
from orchestra.engine.middleware import Metered
from orchestra.engine.runner import Ending, PreparedRun
from orchestra.engine.tracing import Traced
from orchestra.errors import Deadlock, Interrupted, OrchestraError, RunFolderGone, WorkerFailed
from orchestra.runs import event_thinning, files, run_lock
from orchestra.runs.events import Event, EventLog, NodeStarted
from orchestra.runs.status import NodeStatus, RunStatus, name_of
from orchestra.worlds.simulated.kernel import Kernel, Promise
from orchestra.worlds.simulated.network import VirtualNetwork
from orchestra.worlds.simulated.networks import Network
from orchestra.worlds.simulated.numerics import Batched
from orchestra.worlds.simulated.timing import momenta_of, timed
from orchestra.worlds.simulated.transport import connect

_GLANCE = 0.1  # real seconds between two updates of the display
_STILL = 20  # heartbeats per node without progress of virtual time that count as a standstill
_MANY = 4096  # events that a node may keep in memory


class Simulation:
    """One run in virtual time."""

    def __init__(
        self, prepared: PreparedRun, kernel: Kernel, network: Network, numerics: str, *, closed_forms: bool = True
    ) -> None:
        self.prepared = prepared
        self.timing_only = numerics == "off"
        self.batched = numerics == "batched"
        # Without numerics there is no model to save and score.
        self.spec = spec = replace(prepared.spec, snapshot_steps=None) if self.timing_only else prepared.spec
        self.nodes = spec.workers + spec.servers
        self.kernel = kernel
        self.world = VirtualNetwork(
            kernel, network, self.nodes, spec.workers, machines=spec.machines, closed_forms=closed_forms
        )
        self.transports = connect(self.world, self.nodes)
        assert spec.compute_time is not None
        self.compute_time = spec.compute_time
        self.rows = [NodeStatus(0, 0, float("nan"), 0, 0, 0, 0, 0, 0, 0) for _ in range(self.nodes)]
        self.warnings = (
            ["the workers share one x in the memory of one machine: no network was used."]
            if spec.strategy.layout.model_location == "shared"
            else []
        )
        self.stopped_by = "budget"
        self.began = time.monotonic()
        self.shown = 0.0
        self.had_folder = not run_lock.is_gone(spec.run)
        self.seen_at, self.still = 0.0, 0
        self.random: dict[int, Any] = {}  # the random state of each node
        self.rng_owner = -1  # the node whose state the global generators have
        self.traces: list[_BufferedLog] = []
        self.snapped = Counter[int]()  # workers that have written their part of a snapshot, by its number
        self.done: list[Promise[None]] = []  # of workers that wait until the others are done

    def run(self) -> Ending:
        """Set up all nodes, then let virtual time pass."""
        # As many as a process of a real run has, since sums round differently with other numbers of threads.
        threads = torch.get_num_threads()
        torch.set_num_threads(self.spec.threads)
        try:
            return self._run()
        finally:
            torch.set_num_threads(threads)

    def _run(self) -> Ending:
        nodes = self._timed_nodes() if self.timing_only else self._nodes()
        for node, meter, log in nodes:
            self.kernel.spawn(name_of(node.rank, self.spec.workers), self._body_of(node, meter, log))
        if self.prepared.seconds is not None:
            self.kernel.at(self.prepared.seconds, self.stop, "seconds")
        try:
            self.kernel.run(self._heartbeat)
        except KeyboardInterrupt:
            raise Interrupted(
                f"stopped at {self.kernel.now:.6g} virtual seconds. It is not saved: the same call repeats it."
            ) from None
        finally:
            self._close([*(log for _, _, log in nodes), *self.traces])
        self._show()
        if self.timing_only:
            x0 = snapshot.SnapshotPart(self.kernel.now, 0, 0, 0, self.prepared.x0, {})
            snapshot.write(self.spec.run / snapshot.FINAL, 0, x0)
        return Ending(self.stopped_by, self.warnings)

    def _close(self, logs: list[_BufferedLog]) -> None:
        for log in logs:
            log.close()
        for pause in files.PAUSES:
            if again := [log for log in logs if log.error is not None]:
                time.sleep(pause)
                for log in again:
                    log.close()
        if failed := [log.error for log in logs if log.error is not None]:
            self.warnings.append(f"{len(failed)} of {len(logs)} files of events could not be written: {failed[0]}.")

    def stop(self, reason: str) -> None:
        """Stop the run soon: workers in lockstep after the same step, others after their present step."""
        if self.world.stop_at is None:
            self.stopped_by = reason
            self.world.stop_at = max(t.begun for t in self.transports[: self.spec.workers]) + 1

    def await_others(self) -> None:
        """Let a worker that has done its steps wait for the others."""
        mine: Promise[None] = Promise(self.kernel, lambda: "the other workers to be done")
        self.done.append(mine)
        if len(self.done) == self.spec.workers:
            for worker in self.done:
                worker.keep(None)
        mine.wait()

    # Nodes.

    def _nodes(self) -> list[tuple[Node, Metered, _BufferedLog]]:
        """Return every node with its own module, vectors and random state; the data are shared."""
        spec, x0 = self.spec, self.prepared.x0.to(self.spec.device)
        shared = x0.clone() if spec.updated != "whole" else None
        data: Any = None
        nodes = []
        for rank in range(self.nodes):
            log = self._log(rank)
            meter, comm = self._connect(rank, log)
            if rank < spec.workers:
                x = shared if shared is not None else x0.clone()
                node = node_loop.worker(spec, rank, comm, log, x, torch.zeros_like(x), data=data)
                data = _shared(node.feed, x0.device)
            else:
                node = node_loop.server(spec, rank, comm, log, x0[spec.range_of(rank)].clone())
            self.rng_owner = rank
            self.random[rank] = exchange_states(None, cuda=x0.is_cuda)
            nodes.append((node, meter, log))
        if self.batched:
            self._gather_gradients(
                [node for node, _, _ in nodes[: spec.workers]], data if samples.is_columns(data) else None
            )
        return nodes

    def _gather_gradients(self, nodes: list[Node], data: Any) -> None:
        """Compute the gradients of all workers in one call, and select their samples together if these are tensors."""
        first = nodes[0]
        assert first.replica is not None
        together = Batched(copy.deepcopy(first.replica.module), self.spec.loss, data)
        for node in nodes:
            self.transports[node.rank].computing = partial(self._together, together, node)
            if data is not None:
                assert isinstance(node.feed, IndexedFeed)
                node.feed.give_indices()

    def _together(self, together: Batched, node: Node, op: Compute[Any]) -> Callable[[], Any]:
        if op.batch is None:
            return self._compute(node.rank, op)
        # The gradient is taken at the present x; a shared x is copied, since others will write to it.
        x = node.x.clone() if self.spec.strategy.layout.model_location == "shared" else node.x
        pending = together.begin(x, op.batch)

        def answer() -> float:
            g, loss = together.end(pending)
            node.g.copy_(g)
            if node.replica is not None:
                node.replica.present()
            return loss

        return answer

    def _timed_nodes(self) -> list[tuple[Node, Metered, _BufferedLog]]:
        spec, x0 = self.spec, self.prepared.x0
        data, momenta = samples.read(spec.data()), momenta_of(spec, x0)
        nodes = []
        for rank in range(self.nodes):
            log = self._log(rank)
            meter, comm = self._connect(rank, log)
            at_once = not self.world.host(rank).number
            nodes.append((timed(spec, rank, comm, log, x0, data, momenta, at_once=at_once), meter, log))
        return nodes

    def _log(self, rank: int) -> _BufferedLog:
        limit = None if self.spec.trace else event_thinning.limit(self.nodes)
        return _BufferedLog(self.spec.run / f"events-{rank}.jsonl", limit)

    def _connect(self, rank: int, log: _BufferedLog) -> tuple[Metered, Comm]:
        spec, transport = self.spec, self.transports[rank]
        transport.lasts = compute_times.sampler(self.compute_time, spec.seed, rank)
        if not self.timing_only:
            transport.computing = partial(self._compute, rank)
        traced: Transport = transport
        if spec.trace:
            self.traces.append(_BufferedLog(spec.run / f"trace-{rank}.jsonl"))
            apart = spec.strategy.layout.model_location == "apart"
            traced = Traced(transport, self.traces[-1].write, log.write, apart=apart)
        meter = Metered(traced)
        return meter, Comm(meter, spec.view)

    def _body_of(self, node: Node, meter: Metered, log: _BufferedLog) -> Callable[[], None]:
        name = name_of(node.rank, self.spec.workers)

        def show(row: NodeStatus) -> None:
            self.rows[node.rank] = row

        def body() -> None:
            log.write(NodeStarted(0.0, node.rank, "worker" if node.rank < self.spec.workers else "server", 0.0))
            try:
                self._use_rng(node.rank)
                runtime = _SimulatedRuntime(self.spec, node, meter, log, self._handle_message, show)
                checkpointer = _ScoreWatch(self, runtime)
                node_loop.serve(runtime, checkpointer) if runtime.is_server else node_loop.work(runtime, checkpointer)
            except (OrchestraError, KeyboardInterrupt):
                raise
            except Exception:
                raise WorkerFailed(name, traceback.format_exc()) from None

        return body

    def _compute(self, rank: int, op: Compute[Any]) -> Callable[[], Any]:
        """Run a node's function, with the node's random state if the function may draw."""
        if op.draws:
            self._use_rng(rank)
        value = op.fn()
        self._glance()
        return lambda: value

    def _use_rng(self, rank: int) -> None:
        """Set the global generators to a node's random state."""
        if self.rng_owner != rank and rank in self.random:
            self.random[self.rng_owner] = exchange_states(self.random[rank], cuda=self.prepared.spec.device == "cuda")
            self.rng_owner = rank

    # Progress.

    def _handle_message(self, said: dict[str, Any]) -> None:
        name = name_of(said["node"], self.spec.workers)
        if said["kind"] == "snapshot-failed":
            what = "could not write its part of a snapshot"
            self.warnings.append(f"{name} {what} at step {said['step']}: {said['error']}.")

    def _heartbeat(self) -> None:
        """Show the progress of the run, and raise if virtual time stands still in a run that only time can end."""
        self._glance()
        self.still = self.still + 1 if self.kernel.now == self.seen_at else 0
        self.seen_at = self.kernel.now
        endless = self.spec.last_step is None and self.spec.last_epoch is None
        if endless and self.still > _STILL * self.nodes:
            raise Deadlock(
                f"virtual time stands still at {self.kernel.now:.6g} s: steps take no time, so a budget in seconds is "
                "never spent. Give --compute-time a duration, or a budget in steps."
            )

    def _glance(self) -> None:
        if time.monotonic() - self.shown > _GLANCE:
            if self.had_folder and run_lock.is_gone(self.spec.run):
                raise RunFolderGone(self.spec.run)
            self._show()
            self.shown = time.monotonic()

    def _show(self) -> None:
        spec = self.spec
        what = (spec.run, self.prepared.about["strategy"], spec.workers, spec.servers, spec.last_step)
        self.prepared.show(RunStatus(*what, True, self.kernel.now, tuple(self.rows), time.monotonic() - self.began))


def _shared(feed: Any, device: torch.device) -> Any:
    """Return the data of one worker for the next, on the device; None for a stream, which each worker opens itself."""
    if not isinstance(feed, IndexedFeed):
        return None
    return each(lambda t: t.to(device), feed.data) if samples.is_columns(feed.data) else feed.data


class _BufferedLog:
    """A log that keeps events in memory and appends them to a file in batches: a thousand files cannot all be open.

    A file of more than `limit` bytes is thinned out.
    """

    def __init__(self, path: Path, limit: int | None = None) -> None:
        self._path = path
        self._limit = limit
        self._waiting: list[Event] = []
        self.error: OSError | None = None  # why the last attempt to write failed

    def write(self, event: Event) -> None:
        """Record an event."""
        self._waiting.append(event)
        if len(self._waiting) % _MANY == 0:
            self.close()

    def close(self) -> None:
        """Write all events to the file; if the disk is full, keep them in memory for the next attempt."""
        self.error = None
        try:
            log = EventLog(self._path, self._complain, limit=self._limit)
        except FileNotFoundError:
            raise RunFolderGone(self._path.parent) from None
        with closing(log):
            log.write_together(self._waiting)
        if self.error is None:
            self._waiting.clear()

    def _complain(self, error: OSError) -> None:
        self.error = error


@dataclass
class _SimulatedRuntime(node_loop.NodeRuntime):
    log: _BufferedLog


@dataclass
class _ScoreWatch:
    """A checkpointer that saves nothing, and stops the run when a score reaches the target, at the snapshot's time."""

    simulation: Simulation
    runtime: _SimulatedRuntime
    snapshots: int = 0

    def after_step(self, before: int) -> None:
        """Score a new snapshot: at once if a score may end the run, else when the last worker has written its part."""
        simulation, prepared = self.simulation, self.simulation.prepared
        if self.runtime.snapshots <= self.snapshots:
            return
        self.snapshots = self.runtime.snapshots
        simulation.snapped[self.snapshots] += 1
        if not prepared.has_target and simulation.snapped[self.snapshots] < simulation.spec.workers:
            return
        with left_alone():  # the random state is this worker's
            prepared.scorer.rest_now()
        if prepared.scorer.target_reached():
            simulation.stop("target")

    def after_steps(self) -> None:
        """Do nothing: a simulation has no checkpoints."""

    def interrupted(self) -> bool:
        """Return False: Ctrl-C ends a simulation at once."""
        return False

    def save_on_interrupt(self) -> None:
        """Do nothing: a simulation has no checkpoints."""

    def stay(self) -> bool:
        """Wait for other workers that write to the same x; return whether there is a final model to write."""
        if self.runtime.spec.strategy.layout.model_location == "shared":
            self.simulation.await_others()
        return not self.simulation.timing_only

    def after_service(self) -> bool:
        """Return whether there is a final model to write."""
        return not self.simulation.timing_only
