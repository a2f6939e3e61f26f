# SPDX-License-Identifier: Apache-2.0
"""Two strategies, one after the other: what they are together, for everybody who asks a strategy what it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from orchestra.core.strategy import Clipped, Placement, Strategy, Where
from orchestra.strategies.switch.triggers import LossHistory, Trigger


@dataclass
class SwitchState:
    """Where the run is, and the states of both strategies."""

    switched: bool
    watch: LossHistory
    first: Any
    then: Any


class Phases(Strategy[SwitchState]):
    """Two strategies, one after the other."""

    first: Strategy[Any]
    then: Strategy[Any]
    when: Trigger
    promote: bool
    momentum: float | None

    @property
    def watches(self) -> bool:
        """If its trigger does."""
        return self.when.watches

    @property
    def validates(self) -> bool:
        """If its trigger does."""
        return self.when.validates

    @property
    def counts_down(self) -> bool:
        """If its trigger does."""
        return self.when.counts_down

    @property
    def promotes(self) -> bool:  # type: ignore[override]
        """If told to."""
        return self.promote

    @property
    def colocated(self) -> bool:  # type: ignore[override]
        """Servers that were workers are where those were."""
        return self.promote or (self.then if self.then.servers else self.first).colocated

    @property
    def servers(self) -> int:  # type: ignore[override]
        """As many as either needs."""
        return max(self.first.servers, self.then.servers)

    @property
    def placement(self) -> Placement:  # type: ignore[override]
        """That of whichever has servers."""
        return self.then.placement if self.then.servers else self.first.placement

    def updates(self, workers: int) -> float:
        """Those of the first: at the switch the learning rate follows."""
        return self.first.updates(workers)

    @property
    def clips(self) -> Clipped:
        """As the first does: `attach` says what the strategy in force does."""
        return self.first.clips

    @property
    def synchronous(self) -> bool:
        """If both are."""
        return self.first.synchronous and self.then.synchronous

    @property
    def model_at(self) -> Where:
        """In copies before the switch, where one x might serve all: momenta must be whole to be handed over."""
        return "copies" if self.first.model_at == "everywhere" else self.first.model_at

    @property
    def places(self) -> tuple[Where, ...]:
        """Where either has it."""
        return (self.model_at, *self.then.places)

    def in_force(self, s: SwitchState) -> tuple[Strategy[Any], Any]:
        """The strategy of this phase, and its state."""
        return (self.then, s.then) if s.switched else (self.first, s.first)

    def unused(self, s: SwitchState) -> int:
        """As the strategy in force has it."""
        strategy, state = self.in_force(s)
        return strategy.unused(state)

    def resumes_as(self, s: SwitchState) -> tuple[Strategy[Any], Any]:
        """After a switch to or from servers the second alone: the servers of a new run begin with the first."""
        return (self.then, s.then) if s.switched and self.servers else (self, s)

    def where(self, s: SwitchState) -> Where:
        """As the strategy in force has it."""
        return self.then.where(s.then) if s.switched else self.model_at

    def optimizer_at(self, s: SwitchState) -> Literal["workers", "servers"]:
        """As the strategy in force has it."""
        strategy, state = self.in_force(s)
        return strategy.optimizer_at(state)

    def in_step(self, s: SwitchState) -> bool:
        """Until the switch: all must come to it."""
        return self.then.in_step(s.then) if s.switched else True
