# SPDX-License-Identifier: Apache-2.0
"""What a forked process does: take the job, live as one node, tell the coordinator how it went."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from orchestra import checkpoint, delays, run
from orchestra.errors import OrchestraError
from orchestra.events import Began, EventLog
from orchestra.job import Job
from orchestra.launch.keeper import LocalKeeper
from orchestra.node import Comm, Node
from orchestra.transports.local import LocalTransport
from orchestra.transports.memory import Arena, Plan
from orchestra.transports.middleware import Delayed, Metered
from orchestra.transports.waiting import Aborted

Tell = Callable[[dict[str, Any]], None]

_LONGEST = 10_000  # characters of a traceback; a datagram must hold them, at up to twelve bytes each as JSON
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


@dataclass(frozen=True)
class Handover:
    """What the coordinator gives to every process, as one pickle in memory they share."""

    plan: Plan
    job: bytes  # a pickle of its own: what it needs to be read is set up first
    path: list[str]
    folder: str
    environment: dict[str, str]
    asked: float  # when the processes were asked for
    patience: float  # seconds a node waits for another


def node_main(rank: int, fds: Sequence[int]) -> int:
    """Live as node `rank`; gives the exit code."""
    arena_fd, handover_fd, control_fd = fds
    control = socket.socket(fileno=control_fd)

    def tell(news: dict[str, Any]) -> None:
        control.send(json.dumps(news).encode())

    try:
        handover = _read(handover_fd)
        _move_in(handover)
        job: Job = pickle.loads(handover.job)
        arena = Arena(arena_fd, handover.plan)
        _live(job, arena, rank, tell, handover)
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


def _live(job: Job, arena: Arena, rank: int, tell: Tell, handover: Handover) -> None:
    """Set up, begin together with the others, train or serve."""
    torch.set_num_threads(job.threads)

    def complain(error: OSError) -> None:
        tell({"kind": "log-failed", "node": rank, "error": str(error)})

    with EventLog(job.run / f"events-{rank}.jsonl", complain) as log:
        transport = LocalTransport(arena, rank, patience=handover.patience, near=job.near(rank))
        paced = transport if job.delay is None else Delayed(transport, delays.sampler(job.delay, job.seed, rank))
        meter = Metered(paced)
        node = _node(job, arena, rank, Comm(meter, *job.groups), log)
        if job.torch_means and node.feed is not None:
            from orchestra.transports.torch_means import TorchMeans, file_store  # not needed otherwise

            store = file_store(job.run / f"nccl-{job.launch}", job.workers)
            transport.gpu_means = TorchMeans(store, rank, job.workers, node.x.device, patience=handover.patience)
        life = run.Life(job, node, meter, log, tell, partial(arena.report, rank))
        if job.resume is not None:
            run.restore(life, checkpoint.read_tree(job.resume / checkpoint.part_name(rank)))
            if isinstance(paced, Delayed):
                paced.step = node.steps  # the delays go on where they were
        keeper = LocalKeeper(life, arena, transport, log)
        _settle_memory()
        tell({"kind": "ready", "node": rank})
        waited = transport.traffic.waited
        transport.await_go()
        transport.traffic.waited = waited  # the clock starts now
        role, live = ("server", run.serve) if life.is_server else ("worker", run.work)
        log.write(Began(node.now(), rank, role, time.perf_counter() - handover.asked))
        live(life, keeper)
        if transport.gpu_means is not None:
            transport.gpu_means.close()
    tell({"kind": "done", "node": rank, "interrupted": life.interrupted})


def _node(job: Job, arena: Arena, rank: int, comm: Comm, log: EventLog) -> Node:
    plan = arena.plan
    start = arena.tensor(plan.start, plan.numel, plan.dtype)
    if rank >= job.workers:
        part = job.range_of(rank)
        x = arena.vector("x", rank, part.stop - part.start)
        x.copy_(start[part])
        return run.server(job, rank, comm, log, x)
    x, g = arena.vector("x", rank), arena.vector("g", rank)
    if not plan.shared_x:  # a shared one was written before anybody was there to read it
        x.copy_(start)
    if job.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        x, g = x.to(device), g.to(device)
        arena.pin(rank)
    return run.worker(job, rank, comm, log, x, g)


def _read(fd: int) -> Handover:
    """The hand-over comes from the process that forked this one, in memory nobody else can open."""
    # Mapped, not read: all nodes share one file position.
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as memory:
        handover: Handover = pickle.loads(memory)
    return handover


def _settle_memory() -> None:
    """Give back what setting up needed for a moment; from now on keep what backward frees.

    Giving 40 MB back to the kernel at every step and faulting it in again costs 10 ms.
    """
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # another C library
        libc.malloc_trim(0)
        if not any(name.startswith("MALLOC_") for name in os.environ):  # else the user has a wish of his own
            libc.mallopt(_M_MMAP_THRESHOLD, 1 << 25)  # the most that glibc takes
            libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _move_in(handover: Handover) -> None:
    """Be where the user's program is: its folder, its import path, its environment."""
    os.environ.clear()
    os.environ.update(handover.environment)
    sys.path[:] = handover.path
    os.chdir(handover.folder)
    torch.set_grad_enabled(True)
