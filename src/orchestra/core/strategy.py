# SPDX-License-Identifier: Apache-2.0
"""What a strategy is: frozen hyper-parameters, a state apart, and one iteration of one worker.

    state = strategy.init(node)
    worker:  until the budget is spent:  strategy.step(node, state);   then  strategy.finish(node, state)
    server:  strategy.serve(node, state)      its whole life, ending when every worker has left

A strategy cannot tell in which world it runs. It has no clock, no global randomness and no process group: only the
node.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from orchestra.errors import Problem

if TYPE_CHECKING:
    from orchestra.core.codec import Codec
    from orchestra.core.node import Node

S = TypeVar("S")

ModelLocation = Literal["everywhere", "copies", "shared", "servers", "apart"]


def option(default: Any, about: str, *, least: float | None = None, most: float | None = None) -> Any:
    """Declare a hyper-parameter: its default, what it means in a few words, and its range."""
    return dataclasses.field(default=default, metadata={"about": about, "least": least, "most": most})


@dataclass(frozen=True, kw_only=True)
class Updates:
    """How gradients become updates of x."""

    synchronous: bool = True
    """Whether the result is independent of which node is faster."""

    stale: bool = False
    """Whether a gradient may be applied to an x that is newer than the one at which it was computed."""

    can_meet: bool = True
    """Whether all workers can reach the same step: not where some of them wait for those that go on."""

    clip: Literal["own", "mean"] = "own"
    """Whose norm `clip` bounds: that of every worker's own gradient, where it is computed, or the mean's."""

    per_round: float = 1.0
    """Optimizer updates per round of gradients, one from each worker."""

    gradients: int | None = None
    """Gradients in an update, where that does not depend on the number of workers; `per_round` is then unused."""

    def per_round_of(self, workers: int) -> float:
        """Return how many optimizer updates a round of gradients makes: 1 if they are averaged, N if each is applied.

        >>> Updates().per_round_of(8), Updates(gradients=1).per_round_of(8), Updates(gradients=4).per_round_of(8)
        (1.0, 8.0, 2.0)
        """
        return self.per_round if self.gradients is None else workers / self.gradients


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the model is, and which nodes update it."""

    model_location: ModelLocation = "apart"
    """Where the model is between two steps.

    `everywhere`: all replicas are always equal, so one x may serve them all; x changes only by `mean_update`.
    `copies`: the replicas are always equal, but each worker updates its own. `shared`: there is only one x, in the
    memory of one machine, and every worker updates it. `servers`: each server holds a range. `apart`: each worker
    holds its own x; the model is their mean.
    """

    servers: int = 0
    """Server nodes beside the workers."""

    placement: Literal["even", "layers"] = "even"
    """Where x is cut into the servers' ranges: into equal ones, or between layers."""

    colocated: bool = False
    """Whether servers are on the workers' machines, in turn, or on their own."""

    optimizer_on_servers: bool = True
    """Whether the servers, where they hold the model, apply the optimizer to it."""

    promoted: int = 0
    """Workers that stop training since the servers take over their machines: the last ones."""

    updates: Updates = field(default_factory=Updates)

    always_lockstep: bool = False
    """Whether all workers finish step n before any begins step n + 1, although `updates` are not synchronous."""

    then: Layout | None = None
    """The layout after a switch of strategies, if there is one to come."""

    @property
    def lockstep(self) -> bool:
        """Whether all workers finish step n before any begins step n + 1: then all save and stop at the same step."""
        return self.updates.synchronous or self.always_lockstep

    @property
    def optimizer_at(self) -> Literal["workers", "servers"]:
        """Which nodes apply the optimizer, and so hold its state."""
        return "servers" if self.model_location == "servers" and self.optimizer_on_servers else "workers"

    @property
    def sees_stale_gradients(self) -> bool:
        """Whether a gradient may meet an x that other workers have changed since."""
        return self.updates.stale or self.model_location == "shared"

    @property
    def promotes(self) -> bool:
        """Whether workers become servers in the course of a run."""
        return any(layout.promoted for layout in self.phases())

    def phases(self) -> Iterator[Layout]:
        """Yield this layout and those that follow it in the course of a run."""
        yield self
        if self.then is not None:
            yield from self.then.phases()


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a strategy asks of a run beyond gradients."""

    training_loss: bool = False
    """`node.loss`, of every mini-batch."""

    validation_loss: bool = False
    """`node.validate`: the loss over samples set apart."""

    budget: bool = False
    """`node.budget`: the share of the run that is done."""

    momenta: bool = False
    """An optimizer whose momenta can go from workers to servers, or back, in the course of a run."""

    def __or__(self, other: Needs) -> Needs:
        """Return the needs of both."""
        mine, theirs = vars(self), vars(other)
        return Needs(**{name: mine[name] or theirs[name] for name in mine})


_APART, _NOTHING = Layout(), Needs()


class Strategy(ABC, Generic[S]):
    """How the workers agree. Subclasses are frozen, keyword-only dataclasses; `S` is all that changes."""

    @property
    def layout(self) -> Layout:
        """Where the model is at the start of a run, and how many servers the whole run has."""
        return _APART

    def layout_at(self, s: S) -> Layout:
        """Return where the model is now, if that changes during a run."""
        return self.layout

    @property
    def needs(self) -> Needs:
        """What it asks of a run beyond gradients."""
        return _NOTHING

    def problems(self, workers: int) -> Iterator[Problem]:
        """Yield what this strategy cannot work with, beyond the ranges of its fields."""
        return iter(())

    @abstractmethod
    def init(self, node: Node) -> S:
        """Return the state at the start, on every node."""

    @abstractmethod
    def step(self, node: Node, s: S) -> None:
        """Make one iteration of one worker."""

    def serve(self, node: Node, s: S) -> None:
        """Serve until every worker has left: a server's whole life."""
        raise NotImplementedError(f"{type(self).__name__} has no servers")

    def finish(self, node: Node, s: S) -> None:
        """Do what remains after a worker's last step."""

    def codec(self, node: Node, s: S) -> Codec | None:
        """Return what encodes and decodes the messages of this node, if they are not sent as they are."""
        return None

    def phase(self, s: S) -> tuple[Strategy[Any], Any]:
        """Return the strategy that makes the next step, and its state, if this one consists of several."""
        return self, s
