# SPDX-License-Identifier: Apache-2.0
"""Where a run takes place: what every cluster is asked, and how it answers."""

from __future__ import annotations

import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from orchestra.engine.compute_times import Delay
from orchestra.errors import Problem

if TYPE_CHECKING:
    from orchestra.core.strategy import Strategy
    from orchestra.engine.job import Job
    from orchestra.engine.request import Request
    from orchestra.runs.status import RunStatus

Device = Literal["cpu", "cuda", "auto"]


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a cluster is asked to carry out."""

    job: Job
    x0: Tensor  # the initial parameters
    module: nn.Module  # the caller's own
    data: Any  # likewise
    about: dict[str, Any]  # for the manifest of checkpoints
    seconds: float | None  # budget by the clock
    resumed_at: float  # seconds of training before
    resumed_from: int  # label of the checkpoint, 0 if there is none
    how_to_resume: str
    show: Callable[[RunStatus], None]
    scorer: Scoring
    has_target: bool  # a score may end the run
    fingerprint: dict[str, Any]  # what every process of the run must have in common


class Scoring(Protocol):
    """Scores the snapshots of a run."""

    def start(self, *, apart: bool = False) -> None:
        """Score them as they appear, beside the run; `apart`, in another process: the caller trains in this one."""

    def rest_now(self) -> None:
        """Score all that are there and not scored yet, while the run goes on."""

    def target_reached(self) -> bool:
        """Whether a score so far was good enough."""
        ...


@dataclass(frozen=True)
class RunOutcome:
    """What every process of a run is told at its end."""

    run: str
    metrics: dict[str, float]
    summary: dict[str, Any]
    model: bytes  # as a safetensors file


@dataclass(frozen=True)
class Ending:
    """How it ended."""

    stopped_by: str
    warnings: list[str]
    tell: Callable[[Callable[[], RunOutcome]], None] = lambda told: (
        None
    )  # the other processes, if each made the same call
    close: Callable[[], None] = lambda: None


class Cluster(ABC):
    """A world to train in. Subclasses are frozen, keyword-only dataclasses."""

    workers: int
    device: Device
    keeps_checkpoints: ClassVar[bool] = True
    one_memory: ClassVar[bool] = True  # workers can share one x

    def problems(self) -> Iterator[Problem]:
        """What cannot be run there."""
        if not isinstance(self.workers, int) or isinstance(self.workers, bool) or self.workers < 1:
            yield Problem("cluster.workers", self.workers, "must be a whole number of at least 1")
        if self.device not in ("cpu", "cuda", "auto"):
            yield Problem("cluster.device", self.device, 'must be "cpu", "cuda" or "auto"')
        elif self.device == "cuda" and not torch.cuda.is_available():
            yield Problem("cluster.device", self.device, 'no CUDA device is visible here: use "cpu" or "auto"')

    def resolve_device(self) -> str:
        """`auto` takes CUDA where there is any."""
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        return self.device

    @abstractmethod
    def carry_out(self, order: Order) -> Ending:
        """Run the job to its end. Raises what ended it early; leaves nothing behind but the run folder."""

    @property
    def is_coordinator(self) -> bool:
        """Whether this process keeps the run folder, and tells other processes what to do."""
        return True

    def for_strategy(self, strategy: Strategy[Any]) -> Cluster:
        """The same, knowing with what it is to be shared out."""
        return self

    def participate(self, job: Job, x0: Tensor, about: dict[str, Any], show: Callable[[RunStatus], None]) -> RunOutcome:
        """Take part in a run that another process keeps, to its end."""
        raise NotImplementedError

    def announce_finished(self, job: Job, x0: Tensor, about: dict[str, Any], told: RunOutcome) -> None:
        """Let other processes, which came to go on with a run, know that it is over. Here there are none."""
        return

    def how_to_resume(self, run: Path) -> str:
        """The command that goes on with a run there."""
        return shlex.join(["orchestra", "resume", str(run)])

    def how_to_have(self, workers: int, servers: int) -> str:
        """What to do for so many nodes."""
        return f"Resume with as many: --workers {workers}, or cluster=Local(workers={workers})."

    def get_delay(self) -> Delay | None:
        """How long a worker takes for a mini-batch, if that is not left to the machine."""
        return None

    def about(self) -> dict[str, Any]:
        """What to remember of it."""
        return {"kind": type(self).__name__.lower()}

    def check_model(self, request: Request, module: nn.Module, data: Any) -> Iterator[Problem]:
        """What of a request cannot be done there, now that model and data exist."""
        return iter(())

    @property
    def trains(self) -> bool:
        """Whether anything is learned there: not where only time passes."""
        return True

    def resolved(self, request: Request, strategy: Strategy[Any], module: nn.Module, data: Any) -> Cluster:
        """The same with every choice made, now that model and data exist."""
        return self

    def one_gpu_each(self) -> bool:
        """Whether every worker has a GPU of its own."""
        return False

    def means_by_torch(self) -> bool:
        """Whether means are taken by torch.distributed: between GPUs that is NCCL."""
        return self.one_gpu_each()

    def threads_for(self, nodes: int) -> int:
        """Threads of each of `nodes` processes."""
        return max(1, len(os.sched_getaffinity(0)) // nodes)
