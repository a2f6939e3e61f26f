# SPDX-License-Identifier: Apache-2.0
"""The interface of a strategy: frozen hyper-parameters, a separate state, and one iteration of one worker.

    state = strategy.init(node)
    worker:  until the budget is spent:  strategy.step(node, state);   then  strategy.finish(node, state)
    server:  strategy.serve(node, state)      until every worker has left

A strategy does not know in which world it runs. It has no clock, no global randomness and no process group: only the
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
    """Declare a hyper-parameter: its default, its meaning in a few words, and its range."""
    return dataclasses.field(default=default, metadata={"about": about, "least": least, "most": most})


@dataclass(frozen=True, kw_only=True)
class Updates:
    """How gradients become updates of x."""

    synchronous: bool = True
    """Whether the result is independent of which node is faster."""

    stale: bool = False
    """Whether a gradient may be applied to an x that is newer than the one at which it was computed."""

    can_meet: bool = True
    """Whether all workers can reach the same step: False if some wait for others that may have stopped."""

    clip: Literal["own", "mean"] = "own"
    """The norm that `clip` bounds: that of every worker's own gradient, or that of the mean."""

    per_round: float = 1.0
    """Optimizer updates per round of gradients, one from each worker."""

    gradients: int | None = None
    """Gradients in an update, if that does not depend on the number of workers; `per_round` is then unused."""

    def per_round_of(self, workers: int) -> float:
        """Return the optimizer updates per round of N gradients: 1 if they are averaged, N if each is applied.

        >>> Updates().per_round_of(8), Updates(gradients=1).per_round_of(8), Updates(gradients=4).per_round_of(8)
        (1.0, 8.0, 2.0)
        """
        return self.per_round if self.gradients is None else workers / self.gradients


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The location of the model, and the nodes that update it."""

    model_location: ModelLocation = "apart"
    """The location of the model between two steps.

    `everywhere`: all replicas are always equal, so one x may serve them all; x changes only by `mean_update`.
    `copies`: the replicas are always equal, but each worker updates its own. `shared`: there is only one x, in the
    memory of one machine, and every worker updates it. `servers`: each server holds a range. `apart`: each worker
    holds its own x; the model is their mean.
    """

    servers: int = 0
    """The number of servers beside the workers."""

    placement: Literal["even", "layers"] = "even"
    """How x is cut into the servers' ranges: into equal ones, or between layers."""

    colocated: bool = False
    """Whether servers share the workers' machines, in turn, or have their own."""

    optimizer_on_servers: bool = True
    """Whether servers that hold the model apply the optimizer to it."""

    promoted: int = 0
    """The number of workers, the last ones, that stop training because servers take over their machines."""

    updates: Updates = field(default_factory=Updates)

    always_lockstep: bool = False
    """Whether all workers finish step n before any begins step n + 1, although `updates` are not synchronous."""

    then: Layout | None = None
    """The layout after a switch of strategies, if one follows."""

    @property
    def lockstep(self) -> bool:
        """Whether all workers finish step n before any begins step n + 1, so that all save and stop together."""
        return self.updates.synchronous or self.always_lockstep

    @property
    def optimizer_at(self) -> Literal["workers", "servers"]:
        """The nodes that apply the optimizer, and so hold its state."""
        return "servers" if self.model_location == "servers" and self.optimizer_on_servers else "workers"

    @property
    def sees_stale_gradients(self) -> bool:
        """Whether a gradient may be applied to an x that other workers have changed since it was computed."""
        return self.updates.stale or self.model_location == "shared"

    @property
    def promotes(self) -> bool:
        """Whether workers become servers during a run."""
        return any(layout.promoted for layout in self.phases())

    def phases(self) -> Iterator[Layout]:
        """Yield this layout and those that follow it during a run."""
        yield self
        if self.then is not None:
            yield from self.then.phases()


@dataclass(frozen=True, kw_only=True)
class Needs:
    """The inputs that a strategy needs beyond gradients."""

    training_loss: bool = False
    """`node.loss`, of every mini-batch."""

    validation_loss: bool = False
    """`node.validate`: the loss over the validation samples."""

    budget: bool = False
    """`node.budget`: the share of the run that is done."""

    momenta: bool = False
    """An optimizer whose momenta can be transferred from workers to servers, or back, during a run."""

    def __or__(self, other: Needs) -> Needs:
        """Return the needs of both."""
        mine, theirs = vars(self), vars(other)
        return Needs(**{name: mine[name] or theirs[name] for name in mine})


_APART, _NOTHING = Layout(), Needs()


class Strategy(ABC, Generic[S]):
    """A distributed training algorithm. Subclasses are frozen, keyword-only dataclasses; `S` is the mutable state."""

    @property
    def layout(self) -> Layout:
        """The location of the model at the start of a run, and the number of servers of the whole run."""
        return _APART

    def layout_at(self, s: S) -> Layout:
        """Return the present layout, if it changes during a run."""
        return self.layout

    @property
    def needs(self) -> Needs:
        """The inputs that the strategy needs beyond gradients."""
        return _NOTHING

    def problems(self, workers: int) -> Iterator[Problem]:
        """Yield the problems of this strategy with that many workers, beyond the ranges of its fields."""
        return iter(())

    @abstractmethod
    def init(self, node: Node) -> S:
        """Return the state at the start, on every node."""

    @abstractmethod
    def step(self, node: Node, s: S) -> None:
        """Do one iteration of one worker."""

    def serve(self, node: Node, s: S) -> None:
        """Serve until every worker has left."""
        raise NotImplementedError(f"{type(self).__name__} has no servers")

    def finish(self, node: Node, s: S) -> None:
        """Do the final work after a worker's last step."""

    def codec(self, node: Node, s: S) -> Codec | None:
        """Return a codec for the messages of this node, or None to send them unchanged."""
        return None

    def phase(self, s: S) -> tuple[Strategy[Any], Any]:
        """Return the strategy that does the next step, and its state, if this one consists of several."""
        return self, s
