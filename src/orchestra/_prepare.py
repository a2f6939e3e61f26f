# SPDX-License-Identifier: Apache-2.0
"""The same strategies under a training loop of one's own.

    import orchestra                                                                        # 1
    model, optimizer, loader = orchestra.prepare(model, optimizer, loader, strategy="slowmo")   # 2
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    optimizer.finish()                                                                      # 3

Started once it is plain PyTorch; started several times (torchrun, `orchestra run`, `orchestra launch`, Slurm) every
process is a worker, or one of the strategy's servers.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader

from orchestra._version import __version__
from orchestra.clusters.attached import Attached
from orchestra.core.comm import Comm
from orchestra.core.log import Log
from orchestra.core.node import Node
from orchestra.core.ops import Traffic
from orchestra.core.strategy import Strategy
from orchestra.data.feed import fold
from orchestra.data.labels import distribution
from orchestra.engine import checkpoint, expression, fingerprint, node_loop, overrides, warnings
from orchestra.engine.environment import is_member
from orchestra.engine.middleware import Metered
from orchestra.engine.spec import RunSpec
from orchestra.engine.validate import refuse
from orchestra.errors import ConfigError, OrchestraError, Problem, Stopped
from orchestra.model.adjusted_optimizer import factor_of
from orchestra.model.flat_optimizer import FlatOptimizer
from orchestra.model.replica import flatten, persistent_buffers
from orchestra.runs import event_thinning
from orchestra.runs.events import Event, EventLog, NodeStarted
from orchestra.strategies.catalogue import row_of
from orchestra.user_loop.arguments import LoopArguments
from orchestra.user_loop.exit_hooks import interrupted, tell_in_short
from orchestra.user_loop.handle import PIECE, LoopHandle, spread_, spread_frozen_
from orchestra.user_loop.loader import Loader
from orchestra.user_loop.optimizer import PreparedOptimizer
from orchestra.user_loop.peers import Peers
from orchestra.user_loop.run_folder import LoopRunFolder
from orchestra.user_loop.server_process import serve
from orchestra.user_loop.step_driver import AdoptedReplica, LoopFeed, StepDriver
from orchestra.user_loop.wrappers import refuse_caller, refuse_later
from orchestra.worlds.sockets.messenger import Messenger
from orchestra.worlds.sockets.session import Session
from orchestra.worlds.sockets.transport import SocketTransport

M = TypeVar("M", bound=nn.Module)

_DOUBLE = 8  # bytes


@overload
def prepare(
    model: M,
    optimizer: optim.Optimizer,
    loader: None = None,
    *,
    strategy: Strategy[Any] | str = ...,
    cluster: Attached | None = ...,
    steps: int | None = ...,
    seed: int = ...,
    out: str | Path | None = ...,
    tolerate: int = ...,
    note: dict[str, Any] | None = ...,
) -> tuple[M, PreparedOptimizer]: ...


@overload
def prepare(
    model: M,
    optimizer: optim.Optimizer,
    loader: DataLoader[Any],
    *,
    strategy: Strategy[Any] | str = ...,
    cluster: Attached | None = ...,
    steps: int | None = ...,
    seed: int = ...,
    out: str | Path | None = ...,
    tolerate: int = ...,
    note: dict[str, Any] | None = ...,
) -> tuple[M, PreparedOptimizer, Loader]: ...


def prepare(
    model: M,
    optimizer: optim.Optimizer,
    loader: DataLoader[Any] | None = None,
    *,
    strategy: Strategy[Any] | str = "allreduce",
    cluster: Attached | None = None,
    steps: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    tolerate: int = 10,
    note: dict[str, Any] | None = None,
) -> tuple[M, PreparedOptimizer] | tuple[M, PreparedOptimizer, Loader]:
    """Let a strategy drive the optimizer of a loop that stays as it is; call `optimizer.finish()` after the loop.

    Every process of torchrun or `orchestra launch` is a worker; the last are the strategy's servers, if any: those
    serve in this call, and the script ends there. All begin with the model of worker 0. The loader is shared out among
    the workers: every sample once an epoch, in another order each time, batches of the size it was made with on each of
    them. Means are weighted by samples. Between two steps the parameters are the strategy's model as this worker has
    it. A parameter whose `.grad` is None stays as it is, as in PyTorch: in strategies that average gradients it must be
    None on all workers for that, or it counts as zero on those that have none.

    Args:
        model: stays the same object; its parameters become views of one vector.
        optimizer: over the model's parameters, with any schedulers, made before or after.
        loader: of the training samples. Without one every process reads its own, and `optimizer.step(samples=n)` says
            how many are behind a gradient, where not all have equally many.
        strategy: how the workers agree, as an object or as text: `"slowmo(tau=12)"`. What `orchestra run --strategy`
            says takes its place.
        cluster: `Attached(...)` with a token, patience and the like. Ranks stay as they were started. On a network that
            is `trusted`, torch takes the means of models that are not on GPUs.
        steps: how many each worker will make, for strategies that switch after a share of them.
        seed: of the order of samples, and of strategies that draw.
        out: a run folder, as `train` leaves it, at worker 0; machines that do not see it send their files there. None
            writes nothing.
        tolerate: gradients in a row that may be not finite before the run is given up.
        note: anything more to be kept in the run's configuration.

    """
    since = time.perf_counter()
    tell_in_short.install()
    try:
        own = {"strategy": strategy, "cluster": cluster, "seed": seed, "out": out, "note": note}
        said = overrides.of_a_loop({**own, "optimizer": lambda _: optimizer})
        asked = LoopArguments(
            model=model, optimizer=optimizer, loader=loader, cluster=_as_started(said["cluster"]), steps=steps,
            seed=said["seed"], strategy=_chosen(strategy, said["strategy"]), tolerate=tolerate,
            out=None if said["out"] is None else Path(said["out"]), note=said["note"] or {},
            lr_factor=factor_of(said["optimizer"]),
        )  # fmt: skip
        refuse(asked.problems())
        made, shared = _join_in(asked, since)
        return (model, made) if shared is None else (model, made, shared)
    except (OrchestraError, KeyboardInterrupt) as error:
        told = interrupted(error, "before the loop began.")
        raise (error if told is None else told).with_traceback(None) from None


def _as_started(cluster: Any) -> Attached:
    """A loop knows its processes by the ranks they were started with.

    By them it reads samples of its own before it comes here, and finds what it saved: they must not depend on how fast
    the network is today. So latencies are not measured to choose another order, as `train` does.
    """
    if isinstance(cluster, Attached) and not isinstance(cluster.order, str):
        message = "a loop goes by the ranks that its processes were started with: leave it out, and start them so"
        raise ConfigError([Problem("cluster.order", cluster.order, message)])
    if cluster is not None and not isinstance(cluster, Attached) and cluster.workers > 1:
        message = (
            "a loop runs once in every process that it is started in: start it with torchrun --nproc-per-node "
            f"{cluster.workers}, or with `orchestra launch`"
        )
        raise ConfigError([Problem("workers", cluster.workers, message)])
    return replace(cluster if isinstance(cluster, Attached) else Attached(), order="given")


def _chosen(own: Strategy[Any] | str, said: Strategy[Any] | str) -> Strategy[Any]:
    """The strategy: what the command line says takes the place of the script's own."""
    mine, chosen = (expression.parse(s) if isinstance(s, str) else s for s in (own, said))
    if chosen != mine and not is_member():
        words = f"{expression.show(chosen)}, as the command line says, in place of the script's {expression.show(mine)}"
        print(f"orchestra: strategy {words}", file=sys.stderr)
    return chosen


class _NoLog:
    """Keeps no events."""

    def write(self, event: Event) -> None:
        """Forget it."""


def _join_in(asked: LoopArguments, since: float) -> tuple[PreparedOptimizer, Loader | None]:
    """Join the others, who must not wait if this process cannot go on."""
    spec, x0 = asked.spec(), flatten(asked.model)
    transport, peers = _meet(asked, spec, x0.cpu())
    folder: LoopRunFolder | None = None
    try:
        folder = LoopRunFolder(peers, transport.exchange, asked.rank, asked.size, asked.out)
        log = _open_log(asked, spec, folder.path)
        spec = replace(spec, run=folder.path or Path())
        made, shared = _take_part(asked, spec, x0, transport, peers, folder, log, since)
        if made.orchestra.is_coordinator:
            peers.warnings += warnings.say(warnings.about_momentum(asked.strategy, asked.optimizer, spec.workers))
        return made, shared
    except (OrchestraError, KeyboardInterrupt) as error:
        told = interrupted(error, "before the loop began.") or error
        assert isinstance(told, OrchestraError)
        if not isinstance(error, Stopped):
            peers.give_up(f"{peers.name}: {told}", told.exit_code)
        if folder is not None:
            folder.leave(told)
        raise told from None


def _take_part(
    asked: LoopArguments, spec: RunSpec, x0: Tensor, transport: SocketTransport, peers: Peers,
    folder: LoopRunFolder, log: Log, since: float,
) -> tuple[PreparedOptimizer, Loader | None]:  # fmt: skip
    """Become a worker; or, as a server, serve, and end the script."""
    meter = Metered(transport)
    comm = Comm(meter, *spec.groups)
    if asked.rank >= asked.workers:
        serve(spec, comm, meter, log, peers, folder, x0.cpu())
    if spec.torch_means:
        from orchestra.user_loop.loop_collectives import LoopCollectives  # not needed otherwise

        patience = asked.cluster.patience
        transport.means = LoopCollectives(peers, transport.exchange, asked.rank, asked.workers, peers.host, patience)
    replica = AdoptedReplica(asked.model, x0, torch.zeros_like(x0), spec.cuts)
    spread_(comm, [x0, *persistent_buffers(asked.model).values()])
    spread_frozen_(comm, asked.frozen)
    if asked.rank == 0:
        for server, part in zip(comm.servers.members, spec.placement, strict=True):
            comm.send(server, x0[part])
    given = asked.loader
    shared = None if given is None else Loader(given, seed=asked.seed, rank=asked.rank, size=asked.workers)
    feed = LoopFeed(spec.batch, lambda: shared.position if shared is not None else 0.0)
    inner = FlatOptimizer.around(asked.optimizer, replica.parameters, asked.lr_factor)
    node = Node(
        comm, inner, x0, log=log, seed=fold(spec.seed, asked.rank, 1),
        replica=replica, feed=feed, placement=spec.placement, tolerate=spec.tolerate, last_step=spec.last_step,
    )  # fmt: skip
    runtime = node_loop.NodeRuntime(spec, node, meter, log, tell=lambda said: None, show=lambda row: None)
    driver = StepDriver(runtime, feed, replica)
    peers.go_in_step(lambda: node.steps if runtime.lockstep else None)
    handle = LoopHandle(driver, peers, folder, asked.model, shared)
    handle.hooks += [asked.model.register_forward_pre_hook(_StepHook(driver)), refuse_later(asked.model, asked.workers)]
    made = PreparedOptimizer(asked.optimizer, driver, handle, usual=1 if shared is None else spec.batch)
    if shared is not None:
        shared.fetched = made.fetched
    transport.begin()
    log.write(NodeStarted(0.0, asked.rank, "worker", transport.began - since))
    return made, shared


def _meet(asked: LoopArguments, spec: RunSpec, x0: Tensor) -> tuple[SocketTransport, Peers]:
    """This process's way to the others, if there are any."""
    if spec.workers + spec.servers > 1:
        longest = max(x0.numel(), sum(b.numel() for b in persistent_buffers(asked.model).values()))
        most = max(_DOUBLE * longest, PIECE if asked.frozen else 0)
        session = Session(spec, x0, asked.cluster, asked.in_common(spec), most=most)
        return session.transport, Peers(session.exchange, asked.rank, spec.workers, host=session.host)
    traffic = Traffic()
    nobody = Messenger(0, 1, 0, {}, largest=1, patience=asked.cluster.patience, traffic=traffic, summed=False)
    return SocketTransport(0, 1, nobody, traffic), Peers(nobody, 0, 1)


def _open_log(asked: LoopArguments, spec: RunSpec, folder: Path | None) -> Log:
    if folder is None:
        return _NoLog()
    if asked.rank == 0:
        config = asked.about(spec) | {
            "loop": True,
            "defining": row_of(asked.strategy).must_log,
            "stale": asked.strategy.layout.sees_stale_gradients,
            "labels": None if asked.loader is None else distribution(asked.loader.dataset),
            "parameters": spec.parameters,
            "initial": fingerprint.initial(flatten(asked.model)),
            "budget": [] if spec.last_step is None else [f"steps={spec.last_step}"],
            "threads": spec.threads,
            "cluster": asked.cluster.about() if asked.together else {"kind": "alone"},
            "versions": fingerprint.versions(__version__),
            "note": asked.note,
        }
        checkpoint.write_text(folder / "config.json", json.dumps(config, indent=1))
    limit = event_thinning.limit(spec.workers + spec.servers)
    return EventLog(folder / f"events-{asked.rank}.jsonl", _warn_once(), limit=limit)


def _warn_once() -> Callable[[OSError], None]:
    """Say once that events could not be written; a full disk does not end a loop."""
    told: list[OSError] = []

    def complain(error: OSError) -> None:
        if not told:
            told.append(error)
            print(f"warning: events could not be written: {error}. They are kept, and tried again.", file=sys.stderr)

    return complain


class _StepHook:
    """A hook: a forward pass in training begins a step; one under no_grad, or of a model in evaluation, does not."""

    def __init__(self, driver: StepDriver) -> None:
        self._driver = driver

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """The module is called."""
        refuse_caller()
        if module.training and torch.is_grad_enabled():
            self._driver.begin()

    def __reduce__(self) -> Any:
        # In a copy of the model, and in a file that holds the whole model, the hook does nothing. A method of the
        # standard library that does so lets the file be read where orchestra is not installed.
        return getattr, (contextlib.nullcontext(), "__exit__")


# What torch.compiler.disable does, without loading the compiler first: fibers cannot be traced.
setattr(_StepHook.__call__, "_torchdynamo_disable", True)  # noqa: B010
