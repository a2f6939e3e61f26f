# SPDX-License-Identifier: Apache-2.0
"""How a run is carried out on a cluster: what its runner is given, and what the runner returns."""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from orchestra.engine.spec import RunSpec
    from orchestra.runs.status import RunStatus


class Scoring(Protocol):
    """Scores the snapshots of a run."""

    def start(self, *, apart: bool = False) -> None:
        """Score them as they appear, beside the run; `apart`, in another process: the caller trains in this one."""

    def rest_now(self) -> None:
        """Score all that are there and not scored yet, while the run goes on."""

    def target_reached(self) -> bool:
        """Return whether a score so far was good enough."""
        ...


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that is ready to start: its settings, and what only the process that called `train` holds."""

    spec: RunSpec
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


@dataclass(frozen=True)
class RunOutcome:
    """What every process of a run receives at its end."""

    run: str
    metrics: dict[str, float]
    summary: dict[str, Any]
    model: bytes  # as a safetensors file


@dataclass(frozen=True)
class Ending:
    """How a run ended."""

    stopped_by: str
    warnings: list[str]
    # Sends the outcome to the other processes, where each made the same call.
    tell: Callable[[Callable[[], RunOutcome]], None] = lambda told: None
    close: Callable[[], None] = lambda: None


class Runner(ABC):
    """Carries runs out on one kind of cluster."""

    @abstractmethod
    def carry_out(self, prepared: PreparedRun) -> Ending:
        """Run to the end. Raise what ended the run early; leave nothing behind but the run folder."""

    def participate(
        self, spec: RunSpec, x0: Tensor, fingerprint: dict[str, Any], show: Callable[[RunStatus], None]
    ) -> RunOutcome:
        """Take part, to its end, in a run that another process coordinates."""
        raise NotImplementedError

    def announce_finished(self, spec: RunSpec, x0: Tensor, fingerprint: dict[str, Any], outcome: RunOutcome) -> None:
        """Tell other processes, started to resume a run, that it is already complete. By default there are none."""
        return

    def how_to_resume(self, run: Path) -> str:
        """Return the command that resumes a run."""
        return shlex.join(["orchestra", "resume", str(run)])

    def how_to_have(self, workers: int, servers: int) -> str:
        """Return what to do for so many nodes."""
        return f"Resume with as many: --workers {workers}, or cluster=Local(workers={workers})."
