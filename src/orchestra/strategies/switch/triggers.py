# SPDX-License-Identifier: Apache-2.0
"""Triggers of a switch from one strategy to another: they fire on every worker after the same step.

    Plateau     the loss has settled: Provatas et al. 2025, as O.N.O. has it

        s = 1/(w−1) Σ_{i=1}^{w−1} |L_i − L_{i−1}| / L_{i−1}        over the last w rounds
        switch  ⇔  w rounds are recorded and s ≤ θ;      the paper has w = 6 and θ = 0.01

    AtShare     after a share of the budget: Li et al., "Sync-Switch", ICDCS 2021. https://arxiv.org/abs/2104.08364

The workers combine their losses of a round by an all-reduce, so that all decide alike. A training loss that tends to
zero never settles in relative terms: `latest` then switches after a share of the budget, or use the validation loss
(`loss="validation"`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch

from orchestra.core.node import Node
from orchestra.core.strategy import Needs, option

_LEAST = 1e-12  # smallest divisor for a relative change


@dataclass
class LossHistory:
    """The losses that a trigger has seen so far."""

    round: int = 0
    seen: list[float] = field(default_factory=lambda: [0.0, 0.0])  # Σ bᵢ Lᵢ and Σ bᵢ of this worker's round
    losses: list[float] = field(default_factory=list)  # of the last rounds, of all workers


class Trigger(ABC):
    """A rule that decides when to switch."""

    @property
    @abstractmethod
    def needs(self) -> Needs:
        """The inputs of the rule."""

    @abstractmethod
    def fires(self, node: Node, w: LossHistory) -> bool:
        """Return whether to switch after this step."""


@dataclass(frozen=True, kw_only=True)
class Plateau(Trigger):
    """Switch once the loss has settled."""

    window: int = option(6, "w: rounds that are compared", least=2)
    threshold: float = option(0.01, "θ: mean relative change of the loss from round to round", least=0)
    loss: Literal["training", "maximum", "validation"] = option(
        "training", "of a round: the workers' mean, the largest of theirs, or that of the validation samples"
    )
    every: float = option(1.0, "epochs of a round", least=1e-6)
    latest: float | None = option(None, "switch after this share of the budget at the latest", least=0, most=1)

    @cached_property
    def needs(self) -> Needs:
        """One of the two losses, and the budget if `latest` is given."""
        apart = self.loss == "validation"
        return Needs(validation_loss=apart, training_loss=not apart, budget=self.latest is not None)

    def fires(self, node: Node, w: LossHistory) -> bool:
        """Return whether s ≤ θ at the end of a round."""
        if node.weight:
            w.seen[0] += node.weight * node.loss
            w.seen[1] += node.weight
        number = math.floor(node.epochs / self.every + 1e-9)
        if number > w.round:
            w.round = number
            loss = self._agreed(node, w)
            w.seen = [0.0, 0.0]
            node.log("loss of the round", loss)
            if math.isfinite(loss):  # else no worker has one
                w.losses = [*w.losses, loss][-self.window :]
            if len(w.losses) == self.window and math.isfinite(loss):
                s = sum(abs(b - a) / max(abs(a), _LEAST) for a, b in pairwise(w.losses)) / (self.window - 1)
                node.log("s", s)
                if s <= self.threshold:
                    return True
        return self.latest is not None and node.budget >= self.latest

    def _agreed(self, node: Node, w: LossHistory) -> float:
        """Return the loss of a round, the same on every worker; NaN if no worker has one."""
        total, weight = node.validate() if self.loss == "validation" else w.seen
        mine = torch.tensor([total / weight if weight else math.nan], dtype=torch.float64)
        if self.loss == "maximum":
            found = [float(each) for each in node.comm.gather(mine)]
            return max((loss for loss in found if math.isfinite(loss)), default=math.nan)
        return float(mine) if node.comm.mean_(mine, weight=weight) else math.nan


@dataclass(frozen=True, kw_only=True)
class AtShare(Trigger):
    """Switch after a share of the budget."""

    share: float = option(0.25, "of the budget that the first strategy has", least=0, most=1)

    needs = Needs(budget=True)

    def fires(self, node: Node, w: LossHistory) -> bool:
        """Return whether that share is spent: every worker counts its own steps."""
        return node.budget >= self.share


TRIGGERS = (Plateau, AtShare)
