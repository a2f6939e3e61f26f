# SPDX-License-Identifier: Apache-2.0
"""The work of a forked process: read the spec, run one node, report its end to the coordinator."""

from __future__ import annotations

import json
import mmap
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from orchestra.core.comm import Comm
from orchestra.core.node import Node
from orchestra.engine import node_loop
from orchestra.engine.node_process import Tell, run_node
from orchestra.engine.spec import RunSpec
from orchestra.engine.torch_settings import TorchSettings
from orchestra.errors import OrchestraError
from orchestra.runs.events import EventLog
from orchestra.worlds.shared_memory.caller_model import CallerModel
from orchestra.worlds.shared_memory.layout import Arena, ArenaLayout
from orchestra.worlds.shared_memory.transport import SharedMemoryTransport
from orchestra.worlds.shared_memory.waiting import Aborted

_LONGEST = 10_000  # characters of a traceback; a datagram must hold them, at up to twelve bytes each as JSON


@dataclass(frozen=True)
class ChildSetup:
    """The settings that the coordinator gives to every process, as one pickle in shared memory."""

    plan: ArenaLayout
    spec: bytes  # a separate pickle, since the environment must be set up before it is read
    path: list[str]
    folder: str
    environment: dict[str, str]
    origin: CallerModel
    torch_settings: TorchSettings
    asked: float  # when the processes were requested
    patience: float  # seconds for all nodes to be ready


def node_main(rank: int, fds: Sequence[int]) -> int:
    """Run node `rank`; return the exit code."""
    arena_fd, setup_fd, control_fd = fds
    control = socket.socket(fileno=control_fd)

    def tell(message: dict[str, Any]) -> None:
        control.send(json.dumps(message).encode())

    try:
        setup = _read(setup_fd)
        _enter_environment(setup)
        spec: RunSpec = pickle.loads(setup.spec)
        arena = Arena(arena_fd, setup.plan)
        _run_node(spec, arena, rank, tell, setup)
        return 0
    except Aborted:
        return 0
    except OrchestraError as error:
        tell({"kind": "refused", "node": rank, "error": type(error).__name__, "message": str(error)})
        return 1
    except BaseException:
        trace = traceback.format_exc()
        tell({"kind": "failed", "node": rank, "traceback": trace[-_LONGEST:]})
        return 1


def _run_node(spec: RunSpec, arena: Arena, rank: int, tell: Tell, setup: ChildSetup) -> None:
    """Set up, begin together with the others, train or serve."""
    transport = SharedMemoryTransport(arena, rank, patience=setup.patience, near=spec.near(rank))

    def make_node(comm: Comm, log: EventLog) -> Node:
        node = _node(spec, arena, rank, comm, log, setup.origin)
        if spec.uses_torch_collectives and node.feed is not None:
            from orchestra.worlds.torch_collectives import TorchCollectives, file_store  # not needed otherwise

            store = file_store(spec.run / f"nccl-{spec.launch}", spec.workers)
            transport.gpu_means = TorchCollectives(store, rank, spec.workers, node.x.device, patience=setup.patience)
        return node

    show = partial(arena.report, rank)
    interrupted = run_node(
        spec, transport, transport.control, make_node=make_node, tell=tell, show=show, asked=setup.asked
    )
    if transport.gpu_means is not None:
        transport.gpu_means.close()
    tell({"kind": "done", "node": rank, "interrupted": interrupted})


def _node(spec: RunSpec, arena: Arena, rank: int, comm: Comm, log: EventLog, origin: CallerModel) -> Node:
    plan = arena.plan
    start = arena.tensor(plan.start, plan.numel, plan.dtype)
    if rank >= spec.workers:
        part = spec.range_of(rank)
        x = arena.vector("x", rank, part.stop - part.start)
        x.copy_(start[part])
        return node_loop.server(spec, rank, comm, log, x)
    x, g = arena.vector("x", rank), arena.vector("g", rank)
    if not plan.shared_x:  # a shared x was initialised by the coordinator
        x.copy_(start)
    if spec.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        x, g = x.to(device), g.to(device)
        arena.pin(rank)
    return node_loop.worker(spec, rank, comm, log, x, g, check=origin)


def _read(fd: int) -> ChildSetup:
    """Read the setup, which the coordinator wrote to memory that no other process can open."""
    # Mapped, not read: all nodes share one file position.
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
        setup: ChildSetup = pickle.loads(memory)
    return setup


def _enter_environment(setup: ChildSetup) -> None:
    """Take over the folder, the import path and the environment of the user's program."""
    os.environ.clear()
    os.environ.update(setup.environment)
    sys.path[:] = setup.path
    os.chdir(setup.folder)
    torch.set_grad_enabled(True)
    setup.torch_settings.apply()
