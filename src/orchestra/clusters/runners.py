# SPDX-License-Identifier: Apache-2.0
"""What carries runs out on each kind of cluster: the table from descriptions to runners."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from orchestra.clusters.attached import Attached
from orchestra.clusters.local import Local
from orchestra.clusters.simulated import Simulated
from orchestra.engine.cluster import Cluster
from orchestra.engine.environment import STARTED_BY, STARTED_ON
from orchestra.engine.runner import Ending, PreparedRun, Runner, RunOutcome
from orchestra.worlds.simulated.kernel import Kernel
from orchestra.worlds.simulated.supervisor import Simulation

if TYPE_CHECKING:
    from orchestra.engine.spec import RunSpec
    from orchestra.runs.status import RunStatus

# The coordinators of processes are imported when a run starts: simulations do not need what they import.


@dataclass(frozen=True)
class LocalRunner(Runner):
    """Runs in processes of this machine."""

    cluster: Local

    def carry_out(self, prepared: PreparedRun) -> Ending:
        """Start the processes, and train."""
        from orchestra.worlds.shared_memory.coordinator import LocalCoordinator

        return LocalCoordinator(prepared, patience=self.cluster.patience).run()


@dataclass(frozen=True)
class AttachedRunner(Runner):
    """Runs in processes of many machines, of which this process is one."""

    cluster: Attached

    def carry_out(self, prepared: PreparedRun) -> Ending:
        """As process 0: coordinate the run, and train as worker 0."""
        from orchestra.worlds.sockets.coordinator import Coordinator

        return Coordinator(prepared, cluster=self.cluster).run()

    def participate(
        self, spec: RunSpec, x0: Tensor, fingerprint: dict[str, Any], show: Callable[[RunStatus], None]
    ) -> RunOutcome:
        """As any other process: train or serve as process 0 says, until it sends the outcome."""
        from orchestra.worlds.sockets.participant import Participant

        return Participant(spec, x0, fingerprint, self.cluster, show).run()

    def announce_finished(self, spec: RunSpec, x0: Tensor, fingerprint: dict[str, Any], outcome: RunOutcome) -> None:
        """As process 0 of a run that is already complete: send its outcome to the others."""
        from orchestra.worlds.sockets.coordinator import announce_finished

        announce_finished(spec, x0, fingerprint, self.cluster, outcome)

    def how_to_resume(self, run: Path) -> str:
        """Return the command that started the run, with `resume` in it: it is the same on every machine."""
        cluster, words = self.cluster, ["resume", str(run)]
        if on := os.environ.get(STARTED_ON):
            return f"orchestra {shlex.join(words)} {on}"
        words += ["--trusted-network"] if cluster.trusted else []
        if started := os.environ.get(STARTED_BY):
            return f"{started} {shlex.join(words)}"
        words += ["--token-file", str(cluster.token_file)] if cluster.token_file else []
        command, place = f"orchestra {shlex.join(words)}", cluster.place
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            return f"`{command}`, started in {place.size} processes as this run was"
        if place.one_machine:
            return f"torchrun --standalone --nproc-per-node {place.size} -m {command}"
        return f"`torchrun ... -m {command}` on every machine, with the options of torchrun that this run had"

    def how_to_have(self, workers: int, servers: int) -> str:
        """Return how to start so many processes."""
        nodes = workers + servers
        return (
            f"Start {nodes} processes, of which {self.cluster.place.size} were started now: by torchrun, --nnodes "
            f"times --nproc-per-node must be {nodes}; by `orchestra launch`, the slots of all hosts."
        )


@dataclass(frozen=True)
class SimulatedRunner(Runner):
    """Runs in this process, in virtual time."""

    cluster: Simulated

    def carry_out(self, prepared: PreparedRun) -> Ending:
        """Simulate the run from its beginning to its end."""
        cluster = self.cluster
        kernel = Kernel(fiber=cluster.fibers, ties=cluster.ties)
        numerics = "real" if cluster.numerics == "auto" else cluster.numerics
        closed_forms = cluster.fidelity == "auto"
        return Simulation(prepared, kernel, cluster.get_network(), numerics, closed_forms=closed_forms).run()


RUNNERS: dict[type[Cluster], Callable[[Any], Runner]] = {
    Local: LocalRunner,
    Attached: AttachedRunner,
    Simulated: SimulatedRunner,
}


def runner_of(cluster: Cluster) -> Runner:
    """Return what carries runs out on a cluster."""
    return next(RUNNERS[kind] for kind in type(cluster).__mro__ if kind in RUNNERS)(cluster)
