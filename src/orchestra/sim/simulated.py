# SPDX-License-Identifier: Apache-2.0
"""`Simulated`: a run on machines one does not have, in virtual time, with the strategies as they are."""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.utils.data import IterableDataset

from orchestra import delays, networks, run, snapshot
from orchestra.board import Progress, Report, name_of
from orchestra.cluster import Cluster, Device, Ending, Order
from orchestra.data.feed import IndexedFeed, Samples, is_tensors
from orchestra.delays import Delay, Trace
from orchestra.errors import ConfigError, Interrupted, OrchestraError, Problem, WorkerFailed
from orchestra.events import Began, Event, Stepped, encode, read
from orchestra.networks import Ethernet, Network
from orchestra.node import Comm, Node
from orchestra.ops import Compute
from orchestra.rng import exchange_states
from orchestra.sim import numerics
from orchestra.sim.fibers import Kind
from orchestra.sim.kernel import Kernel
from orchestra.sim.timing import timed
from orchestra.sim.transport import connect
from orchestra.sim.world import World
from orchestra.transports.middleware import Metered
from orchestra.vectors import ranges

if TYPE_CHECKING:
    from orchestra.request import Request

_GLANCE = 0.1  # real seconds between two looks at the board
_MANY = 4096  # events that a node may keep in memory


@dataclass(frozen=True, kw_only=True)
class Simulated(Cluster):
    """N virtual machines in one process: real gradients, virtual seconds.

    Same inputs, same events: a rehearsal can be repeated to the last digit, and so need not be resumed.
    """

    keeps_checkpoints = False

    workers: int = 8
    network: Network | str = field(default_factory=lambda: Ethernet(gbit=10))
    delay: Delay | str = "constant:0.05"  # how long a worker computes on a mini-batch
    device: Device = "cpu"
    numerics: Literal["real", "batched", "off"] = "real"  # batched: many gradients in one call; off: timing only
    fidelity: Literal["auto", "flows"] = "auto"  # flows: collectives never take the short way by a formula
    ties: int | None = None  # order of events at equal times: None first come first served, else drawn from this seed
    fibers: Kind = "auto"

    @classmethod
    def like(cls, run: str | Path, **more: Any) -> Simulated:
        """With the computing times of a run that took place, step by step, and its number of workers unless given."""
        times = recorded(Path(run))
        return cls(**{"workers": len(times.times), "delay": times, **more})

    def problems(self) -> Iterator[Problem]:
        """What cannot be rehearsed."""
        yield from super().problems()
        try:
            yield from self.get_network().problems()
        except ValueError as error:
            yield Problem("cluster.network", self.network, str(error))
        yield from delays.look(self.delay)
        choices = {
            "numerics": ("real", "batched", "off"),
            "fidelity": ("auto", "flows"),
            "fibers": ("auto", "greenlet", "thread"),
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                yield Problem(f"cluster.{name}", getattr(self, name), f"must be one of {', '.join(known)}")

    def misfits(self, request: Request, module: nn.Module, data: Any) -> Iterator[Problem]:
        """Whether gradients can be taken together, if they are to be."""
        if self.numerics != "batched":
            return
        if request.accumulate > 1 or request.precision != "float32":
            reason: str | None = "accumulate= and precision= need one gradient at a time"
        elif isinstance(data, IterableDataset):
            reason = "a stream is read one mini-batch at a time"
        else:
            reason = numerics.why_not(module, request.loss, Samples(data).take(range(min(4, request.batch))))
        if reason is not None:
            yield Problem("cluster.numerics", "batched", f'{reason}: use "real"')

    def get_network(self) -> Network:
        """The network, read if it was given as text."""
        return networks.parse(self.network) if isinstance(self.network, str) else self.network

    def get_delay(self) -> Delay:
        """The delays, read if they were given as text."""
        return delays.parse(self.delay) if isinstance(self.delay, str) else self.delay

    def about(self) -> dict[str, Any]:
        """What to remember of it."""
        return {
            "kind": "simulated",
            "network": str(self.get_network()),
            "delay": str(self.get_delay()),
            "numerics": self.numerics,
            "fidelity": self.fidelity,
            "ties": self.ties,
        }

    def carry_out(self, order: Order) -> Ending:
        """Rehearse the job from its beginning to its end."""
        return _Rehearsal(order, self).run()


def recorded(folder: Path) -> Trace:
    """How long each worker of a run computed in each of its steps."""
    found = []
    for path in sorted(folder.glob("events-*.jsonl"), key=lambda p: int(p.stem.removeprefix("events-"))):
        totals = [0.0, *(event.compute for event in read(path) if isinstance(event, Stepped))]
        if len(totals) > 1:  # servers take no steps
            found.append(tuple(b - a for a, b in pairwise(totals)))
    if not found:
        raise ConfigError([Problem("run", str(folder), "holds no events of workers: name the folder of a run")])
    return Trace(tuple(found))


class _Rehearsal:
    """One run in virtual time."""

    def __init__(self, order: Order, cluster: Simulated) -> None:
        self.order = order
        self.timing_only = cluster.numerics == "off"
        self.batched = cluster.numerics == "batched"
        # Without numbers there is nothing to set aside and score.
        self.job = job = replace(order.job, snapshot_every=None) if self.timing_only else order.job
        self.nodes = job.workers + job.servers
        self.kernel = Kernel(fiber=cluster.fibers, ties=cluster.ties)
        self.world = World(
            self.kernel, cluster.get_network(), self.nodes, job.workers, closed_forms=cluster.fidelity == "auto"
        )
        self.transports = connect(self.world, self.nodes)
        self.delay = cluster.get_delay()
        self.rows = [Report(0, 0, float("nan"), 0, 0, 0, 0, 0, 0) for _ in range(self.nodes)]
        self.warnings: list[str] = []
        self.stopped_by = "budget"
        self.shown = 0.0
        self.random: dict[int, Any] = {}  # where each node's generators stand
        self.at_dice = -1  # the node whose they are now

    def run(self) -> Ending:
        """Set up all nodes, then let virtual time pass."""
        # As many as a process of a real run would have: sums in other pieces would round otherwise.
        threads = torch.get_num_threads()
        torch.set_num_threads(self.job.threads)
        try:
            return self._run()
        finally:
            torch.set_num_threads(threads)

    def _run(self) -> Ending:
        lives = self._timed_lives() if self.timing_only else self._lives()
        for life in lives:
            self.kernel.spawn(name_of(life.rank, self.job.workers), self._living(life))
        if self.order.seconds is not None:
            self.kernel.at(self.order.seconds, self.stop, "seconds")
        try:
            self.kernel.run(self._glance)
        except KeyboardInterrupt:
            raise Interrupted(
                f"stopped at {self.kernel.now:.6g} virtual seconds. A rehearsal is not saved: the same call repeats it."
            ) from None
        finally:
            for life in lives:
                life.log.close()
        self._show()
        if self.timing_only:
            x0 = snapshot.Part(self.kernel.now, 0, 0, 0, self.order.x0, {})
            snapshot.write(self.job.run / snapshot.FINAL, 0, x0)
        return Ending(self.stopped_by, self.warnings)

    def stop(self, reason: str) -> None:
        """End soon: workers that go in step after the same step, the others where they are."""
        if self.world.stop_at is None:
            self.stopped_by = reason
            self.world.stop_at = max(t.begun for t in self.transports[: self.job.workers]) + 1

    # Nodes.

    def _lives(self) -> list[_Life]:
        """Every node with its own module, vectors and random numbers; the data are there once."""
        job, x0 = self.job, self.order.x0.to(self.job.device)
        shared = x0.clone() if job.owns_range else None
        data: Any = None
        lives = []
        for rank in range(self.nodes):
            log = _Log(job.run / f"events-{rank}.jsonl")
            meter, comm = self._connect(rank)
            if rank < job.workers:
                x = shared if shared is not None else x0.clone()
                node = run.worker(job, rank, comm, log, x, torch.zeros_like(x), data=data)
                data = _shared(node.feed, x0.device)
            else:
                part = ranges(x0.numel(), job.servers)[rank - job.workers]
                node = run.server(job, rank, comm, log, x0[part].clone())
            self.at_dice = rank
            self.random[rank] = exchange_states(None, cuda=x0.is_cuda)
            lives.append(self._life(node, meter, log))
        if self.batched:
            self._gather_gradients([life.node for life in lives[: job.workers]])
        return lives

    def _gather_gradients(self, nodes: list[Node]) -> None:
        """Let all workers' gradients be taken together."""
        first = nodes[0]
        assert first.replica is not None
        together = numerics.Batched(copy.deepcopy(first.replica.module), self.job.loss)
        for node in nodes:
            self.transports[node.rank].computing = partial(self._together, together, node)

    def _together(self, together: numerics.Batched, node: Node, op: Compute[Any]) -> Callable[[], Any]:
        if op.batch is None:
            return self._compute(node.rank, op)
        pending = together.begin(node.x, op.batch)

        def answer() -> float:
            g, loss = together.end(pending)
            node.g.copy_(g)
            return loss

        return answer

    def _timed_lives(self) -> list[_Life]:
        lives = []
        for rank in range(self.nodes):
            log = _Log(self.job.run / f"events-{rank}.jsonl")
            meter, comm = self._connect(rank)
            lives.append(self._life(timed(self.job, rank, comm, log, self.order.x0), meter, log))
        return lives

    def _connect(self, rank: int) -> tuple[Metered, Comm]:
        job, transport = self.job, self.transports[rank]
        transport.lockstep = job.strategy.synchronous
        transport.lasts = delays.sampler(self.delay, job.seed, rank)
        if not self.timing_only:
            transport.computing = partial(self._compute, rank)
        meter = Metered(transport)
        return meter, Comm(meter, *job.groups)

    def _life(self, node: Node, meter: Metered, log: _Log) -> _Life:
        def show(row: Report) -> None:
            self.rows[node.rank] = row

        return _Life(self.job, node, meter, log, self._hear, show)

    def _living(self, life: _Life) -> Callable[[], None]:
        name = name_of(life.rank, self.job.workers)

        def body() -> None:
            life.log.write(Began(0.0, life.rank, "server" if life.is_server else "worker", 0.0))
            keeper = _Keeper(self, life)
            try:
                run.serve(life, keeper) if life.is_server else run.work(life, keeper)
            except (OrchestraError, KeyboardInterrupt):
                raise
            except Exception:
                raise WorkerFailed(name, traceback.format_exc()) from None

        return body

    def _compute(self, rank: int, op: Compute[Any]) -> Callable[[], Any]:
        """Call something of a node's with that node's random numbers."""
        if self.at_dice != rank:
            self.random[self.at_dice] = exchange_states(self.random[rank], cuda=self.order.job.device == "cuda")
            self.at_dice = rank
        value = op.fn()
        return lambda: value

    # Whoever watches.

    def _hear(self, said: dict[str, Any]) -> None:
        name = name_of(said["node"], self.job.workers)
        self.warnings.append(f"{name} could not set aside the model at step {said['step']}: {said['error']}.")

    def _glance(self) -> None:
        if time.monotonic() - self.shown > _GLANCE:
            self._show()
            self.shown = time.monotonic()

    def _show(self) -> None:
        job = self.job
        what = (job.run, self.order.about["strategy"], job.workers, job.servers, job.last_step)
        self.order.show(Progress(*what, True, self.kernel.now, tuple(self.rows)))


def _shared(feed: Any, device: torch.device) -> Any:
    """The data of one worker for the next, where they will be needed; streams are each worker's own."""
    if not isinstance(feed, IndexedFeed):
        return None
    return tuple(t.to(device) for t in feed.data) if is_tensors(feed.data) else feed.data


class _Log:
    """Keeps events in memory and appends them to a file now and then: a thousand nodes cannot all hold one open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[Event] = []

    def write(self, event: Event) -> None:
        """Record an event."""
        self._waiting.append(event)
        if len(self._waiting) >= _MANY:
            self.close()

    def close(self) -> None:
        """Bring everything so far to the file."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(encode(event) for event in self._waiting))
        self._waiting.clear()


@dataclass
class _Life(run.Life):
    log: _Log


@dataclass
class _Keeper:
    """Nothing is kept: but a score may end the run, at the very virtual moment of its snapshot."""

    rehearsal: _Rehearsal
    life: _Life
    snapshots: int = 0

    def after_step(self, before: int) -> None:
        """Score what was just set aside, if a score could end the run."""
        order = self.rehearsal.order
        if order.has_target and self.life.snapshots > self.snapshots:
            self.snapshots = self.life.snapshots
            order.scorer.rest()
            if order.scorer.target_reached():
                self.rehearsal.stop("target")

    def interrupted(self) -> bool:
        """Never: Ctrl-C ends a rehearsal at once."""
        return False

    def break_off(self) -> None:
        """Nothing to save."""

    def stay(self) -> bool:
        """Without numbers there is no model to set aside."""
        return not self.rehearsal.timing_only

    def after_service(self) -> bool:
        """Likewise."""
        return not self.rehearsal.timing_only
