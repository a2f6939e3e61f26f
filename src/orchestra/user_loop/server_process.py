# SPDX-License-Identifier: Apache-2.0
"""A server's process in a script with a loop: it serves inside `prepare`, and never reaches the loop."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

from orchestra.core.comm import Comm
from orchestra.core.log import Log
from orchestra.core.ops import ReservedTag
from orchestra.engine import node_loop
from orchestra.engine.middleware import Metered
from orchestra.engine.spec import RunSpec
from orchestra.runs.events import EventLog, NodeStarted
from orchestra.user_loop.exit_hooks import Exit
from orchestra.user_loop.handle import CLIP
from orchestra.user_loop.peers import Peers
from orchestra.user_loop.run_folder import LoopRunFolder
from orchestra.user_loop.server_state import OnServer


@dataclass
class ServerFinisher:
    """A server's checkpointer, which saves nothing, and sends the model to the workers at the end."""

    runtime: node_loop.NodeRuntime
    folder: LoopRunFolder

    def after_step(self, before: int) -> None:
        """Do nothing: servers do no steps."""

    def after_steps(self) -> None:
        """Do nothing: servers do no steps."""

    def interrupted(self) -> bool:
        """Return False: a loop has no checkpoints."""
        return False

    def save_on_interrupt(self) -> None:
        """Do nothing: a loop has no checkpoints."""

    def stay(self) -> bool:
        """Return False: only workers stay."""
        return False

    def after_service(self) -> bool:
        """Send this server's range of the model to every worker, after all have left."""
        if isinstance(self.runtime.log, EventLog):
            self.runtime.log.flush()
        self.folder.deliver()
        comm = self.runtime.node.comm
        comm.use(None)
        for worker in range(self.runtime.spec.workers):
            comm.send(worker, self.runtime.node.x, tag=ReservedTag.FINAL)
        return False


def serve(
    spec: RunSpec, comm: Comm, meter: Metered, log: Log, peers: Peers, folder: LoopRunFolder, x0: Tensor
) -> NoReturn:
    """Serve until every worker has finished, and end the script."""
    began = time.perf_counter()
    hook = Exit(peers, how_far=lambda: "while it served.")
    x = x0[spec.range_of(comm.rank)].clone()
    x.copy_(comm.recv(0).x)
    node = node_loop.server(spec, comm.rank, comm, log, x)

    def follow(name: str, first: int, values: list[Any]) -> None:
        if name == CLIP:
            node.clip = values[0] or None
        else:
            node.optimizer.follow(name, first, values)

    peers.when_settings_change(follow)
    runtime = node_loop.NodeRuntime(spec, node, meter, log, tell=lambda said: None, show=lambda row: None)
    states = OnServer(runtime, peers)
    peers.messenger.listen_idle(states)
    node.comm.between_messages = states.settle
    log.write(NodeStarted(node.now(), node.rank, "server", time.perf_counter() - began))
    peers.messenger.begin()
    node_loop.serve(runtime, ServerFinisher(runtime, folder))
    hook.close()
    peers.part()
    raise SystemExit(0)
