# SPDX-License-Identifier: Apache-2.0
"""How a process with its own training loop joins a run: connect, take part as a worker or serve, open the events."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from orchestra._version import __version__
from orchestra.core.comm import Comm
from orchestra.core.log import Log
from orchestra.core.node import Node
from orchestra.core.ops import Traffic
from orchestra.data.feed import fold
from orchestra.data.labels import distribution
from orchestra.engine import checkpoint, fingerprint, node_loop, overrides, warnings
from orchestra.engine.middleware import Metered
from orchestra.engine.spec import RunSpec
from orchestra.errors import OrchestraError, Stopped
from orchestra.model.flat_optimizer import FlatOptimizer
from orchestra.model.replica import flatten, persistent_buffers
from orchestra.runs import event_thinning
from orchestra.runs.events import Event, EventLog, NodeStarted
from orchestra.strategies.catalogue import row_of
from orchestra.user_loop.arguments import LoopArguments
from orchestra.user_loop.exit_hooks import interrupted
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

_DOUBLE = 8  # bytes


class _NoLog:
    """A log that discards events."""

    def write(self, event: Event) -> None:
        """Discard the event."""


def join(asked: LoopArguments, since: float) -> tuple[PreparedOptimizer, Loader | None]:
    """Join the other processes; if that fails, tell them, so that they do not wait."""
    spec, x0 = asked.spec(), flatten(asked.model)
    transport, peers = _meet(asked, spec, x0.cpu())
    folder: LoopRunFolder | None = None
    try:
        folder = LoopRunFolder(peers, transport.messenger, asked.rank, asked.size, asked.out)
        log = _open_log(asked, spec, folder.path)
        spec = replace(spec, run=folder.path or Path())
        made, shared = _take_part(asked, spec, x0, transport, peers, folder, log, since)
        overrides.note_handle(made.orchestra)
        if made.orchestra.is_coordinator:
            peers.warnings += warnings.say(warnings.about_momentum(asked.strategy, asked.optimizer, spec.workers))
        return made, shared
    except (OrchestraError, KeyboardInterrupt) as error:
        failure = interrupted(error, "before the loop began.") or error
        assert isinstance(failure, OrchestraError)
        if not isinstance(error, Stopped):
            peers.give_up(f"{peers.name}: {failure}", failure.exit_code)
        if folder is not None:
            folder.leave(failure)
        raise failure from None


def _take_part(
    asked: LoopArguments, spec: RunSpec, x0: Tensor, transport: SocketTransport, peers: Peers,
    folder: LoopRunFolder, log: Log, since: float,
) -> tuple[PreparedOptimizer, Loader | None]:  # fmt: skip
    """Set up a worker; or, as a server, serve, and end the script."""
    meter = Metered(transport)
    comm = Comm(meter, spec.view)
    if asked.rank >= asked.workers:
        serve(spec, comm, meter, log, peers, folder, x0.cpu())
    if spec.uses_torch_collectives:
        from orchestra.user_loop.loop_collectives import LoopCollectives  # not needed otherwise

        patience = asked.cluster.patience
        transport.means = LoopCollectives(peers, transport.messenger, asked.rank, asked.workers, peers.host, patience)
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
    """Connect to the other processes, if there are any; return the transport and the peers."""
    if spec.workers + spec.servers > 1:
        longest = max(x0.numel(), sum(b.numel() for b in persistent_buffers(asked.model).values()))
        most = max(_DOUBLE * longest, PIECE if asked.frozen else 0)
        session = Session(spec, x0, asked.cluster, asked.in_common(spec), most=most)
        return session.transport, Peers(session.messenger, asked.rank, spec.workers, host=session.host)
    traffic = Traffic()
    alone = Messenger(0, 1, 0, {}, largest=1, patience=asked.cluster.patience, traffic=traffic, summed=False)
    return SocketTransport(0, 1, alone, traffic), Peers(alone, 0, 1)


def _open_log(asked: LoopArguments, spec: RunSpec, folder: Path | None) -> Log:
    if folder is None:
        return _NoLog()
    if asked.rank == 0:
        config = asked.about(spec) | {
            "loop": True,
            "must_log": row_of(asked.strategy).must_log,
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
    """Return a callback that warns once that events could not be written; a full disk does not end a loop."""
    failure: list[OSError] = []

    def complain(error: OSError) -> None:
        if not failure:
            failure.append(error)
            print(f"warning: events could not be written: {error}. They are kept, and tried again.", file=sys.stderr)

    return complain


class _StepHook:
    """A forward hook: a pass in training begins a step; one under no_grad, or in evaluation mode, does not."""

    def __init__(self, driver: StepDriver) -> None:
        self._driver = driver

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Begin a step if the module is called in training."""
        refuse_caller()
        if module.training and torch.is_grad_enabled():
            self._driver.begin()

    def __reduce__(self) -> Any:
        # In copies of the model, and in files of the whole model, the hook does nothing. A method of the standard
        # library that does nothing lets such a file be read without orchestra.
        return getattr, (contextlib.nullcontext(), "__exit__")


# What torch.compiler.disable does, without loading the compiler first: fibers cannot be traced.
setattr(_StepHook.__call__, "_torchdynamo_disable", True)  # noqa: B010
