# SPDX-License-Identifier: Apache-2.0
"""The interface of runners, which carry runs out on a cluster: their input and their output."""

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
        """Score snapshots as they appear, beside the run; `apart`: in another process, if the caller trains in this."""

    def rest_now(self) -> None:
        """Score all snapshots that are not scored yet, while the run goes on."""

    def target_reached(self) -> bool:
        """Return whether a score so far reached a target."""
        ...


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that is ready to start: its settings, and objects that only the process that called `train` has."""

    spec: RunSpec
    x0: Tensor  # the initial parameters
    module: nn.Module  # the caller's own
    data: Any  # likewise
    about: dict[str, Any]  # for the manifest of checkpoints
    seconds: float | None  # budget in seconds
    resumed_at: float  # seconds of training before
    resumed_from: int  # label of the checkpoint, 0 if there is none
    how_to_resume: str
    show: Callable[[RunStatus], None]
    scorer: Scoring
    has_target: bool  # a score may end the run
    fingerprint: dict[str, Any]  # what every process of the run must have in common


@dataclass(frozen=True)
class RunOutcome:
    """The outcome of a run, which every process receives at its end."""

    run: str
    metrics: dict[str, float]
    summary: dict[str, Any]
    model: bytes  # as a safetensors file


@dataclass(frozen=True)
class Ending:
    """How a run ended."""

    stopped_by: str
    warnings: list[str]
    # Sends the outcome to the other processes, if each of them called `train`.
    tell: Callable[[Callable[[], RunOutcome]], None] = lambda told: None
    close: Callable[[], None] = lambda: None


class Runner(ABC):
    """Carries out runs on one kind of cluster."""

    @abstractmethod
    def carry_out(self, prepared: PreparedRun) -> Ending:
        """Carry the run out to its end, or raise what ended it early; leave nothing behind but the run folder."""

    def participate(
        self, spec: RunSpec, x0: Tensor, fingerprint: dict[str, Any], show: Callable[[RunStatus], None]
    ) -> RunOutcome:
        """Take part in a run that another process coordinates, until its end."""
        raise NotImplementedError

    def announce_finished(self, spec: RunSpec, x0: Tensor, fingerprint: dict[str, Any], outcome: RunOutcome) -> None:
        """Tell other processes, started to resume a run, that it is already complete. By default there are none."""
        return

    def how_to_resume(self, run: Path) -> str:
        """Return the command that resumes a run."""
        return shlex.join(["orchestra", "resume", str(run)])

    def how_to_have(self, workers: int, servers: int) -> str:
        """Return advice on how to resume with that many nodes."""
        return f"Resume with as many: --workers {workers}, or cluster=Local(workers={workers})."
