# SPDX-License-Identifier: Apache-2.0
"""A node of a run in a process of its own: it sets up, begins together with the others, and trains or serves."""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from orchestra.core.comm import Comm
from orchestra.core.node import Node
from orchestra.core.ops import Transport
from orchestra.engine import checkpoint, compute_times, node_loop
from orchestra.engine.checkpoint_protocol import CoordinatedTransport, NodeCheckpointer
from orchestra.engine.control import Control
from orchestra.engine.middleware import Delayed, Metered
from orchestra.engine.spec import RunSpec
from orchestra.engine.tracing import Traced
from orchestra.runs import event_thinning
from orchestra.runs.events import EventLog, NodeStarted
from orchestra.runs.status import NodeStatus

Tell = Callable[[dict[str, Any]], None]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def run_node(
    spec: RunSpec,
    transport: CoordinatedTransport,
    control: Control,
    *,
    make_node: Callable[[Comm, EventLog], Node],
    tell: Tell,
    show: Callable[[NodeStatus], None],
    asked: float,
) -> bool:
    """Run one node to its end; return whether the run was interrupted. `asked`: when the process was requested."""
    rank = transport.rank
    torch.set_num_threads(spec.threads)

    def complain(error: OSError) -> None:
        tell({"kind": "log-failed", "node": rank, "error": str(error)})

    with contextlib.ExitStack() as files:
        limit = None if spec.trace else event_thinning.limit(spec.workers + spec.servers)
        log = files.enter_context(EventLog(spec.run / f"events-{rank}.jsonl", complain, limit=limit))
        paced: Transport = transport
        if spec.compute_time is not None:
            paced = Delayed(transport, compute_times.sampler(spec.compute_time, spec.seed, rank))
        meter = Metered(paced if not spec.trace else _traced(paced, spec, log, files, complain))
        node = make_node(Comm(meter, spec.view), log)
        runtime = node_loop.NodeRuntime(spec, node, meter, log, tell, show)
        if spec.checkpoint is not None:
            node_loop.restore(runtime, checkpoint.read_tree(spec.checkpoint / checkpoint.part_name(rank)))
            if isinstance(paced, Delayed):
                paced.step = node.steps  # the compute times go on where they were
        checkpointer = NodeCheckpointer(runtime, control, transport, log)
        _settle_memory()
        tell({"kind": "ready", "node": rank})
        waited = transport.traffic.waited
        transport.await_go()
        transport.traffic.waited = waited  # the clock starts now
        role, spend = ("server", node_loop.serve) if runtime.is_server else ("worker", node_loop.work)
        log.write(NodeStarted(node.now(), rank, role, time.perf_counter() - asked))
        spend(runtime, checkpointer)
    return runtime.interrupted


def _traced(
    transport: Transport, spec: RunSpec, log: EventLog, files: contextlib.ExitStack, complain: Callable[[OSError], None]
) -> Transport:
    trace = files.enter_context(EventLog(spec.run / f"trace-{transport.rank}.jsonl", complain))
    return Traced(transport, trace.write, log.write, apart=spec.strategy.layout.model_location == "apart")


def _settle_memory() -> None:
    """Return the memory that only setting up needed to the kernel; from now on keep what backward frees.

    Giving 40 MB back to the kernel at every step and faulting it in again costs 10 ms.
    """
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # another C library
        libc.malloc_trim(0)
        if not any(name.startswith("MALLOC_") for name in os.environ):  # else keep the user's settings
            libc.mallopt(_M_MMAP_THRESHOLD, 1 << 25)  # the most that glibc takes
            libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
