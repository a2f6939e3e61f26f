# SPDX-License-Identifier: Apache-2.0
"""What a strategy is: frozen hyper-parameters, a state apart, and one iteration of one worker.

    state = strategy.init(node)
    worker:  until the budget is spent:  strategy.step(node, state);   then  strategy.finish(node, state)
    server:  strategy.serve(node, state)      its whole life, ending when every worker has left

A strategy never knows where it runs. It has no clock, no global randomness and no process group: only the node.
"""

from __future__ import annotations

import dataclasses
import math
import types
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from orchestra.errors import Problem

if TYPE_CHECKING:
    from orchestra.core.node import Node

S = TypeVar("S")

Clipped = Literal["own", "mean"]
Where = Literal["everywhere", "copies", "shared", "servers", "apart"]
Placement = Literal["even", "layers"]


def knob(default: Any, about: str, *, least: float | None = None, most: float | None = None) -> Any:
    """A hyper-parameter: its default, what it means in a few words, and its range."""
    return dataclasses.field(default=default, metadata={"about": about, "least": least, "most": most})


class Strategy(ABC, Generic[S]):
    """How the workers agree. Subclasses are frozen, keyword-only dataclasses; `S` is all that changes."""

    short: ClassVar[str | None] = None
    """A second, shorter name on the command line."""

    tries: ClassVar[tuple[str, ...]] = ()
    """What `orchestra recommend` tries of it."""

    main: ClassVar[tuple[str, tuple[Any, ...]] | None] = None
    """Its main option, and the values that are worth a try where none is given; the usual one first."""

    servers: int = 0
    """How many server nodes this strategy needs beside the workers."""

    defining: ClassVar[str | None] = None
    """The figure it must log at least once to have been itself: a switch that never switched is reported."""

    placement: Placement = "even"
    """Where x is cut into the servers' ranges: `even`, or between `layers`."""

    colocated: bool = False
    """Whether servers live on the workers' machines, in turn, or on their own."""

    promotes: bool = False
    """Whether the workers that share a machine with a server make way for it in the course of a run."""

    @property
    def model_at(self) -> Where:
        """Where the model is between two steps.

        `everywhere`: all replicas are always equal, so one x may serve them all; x changes only by `mean_update`.
        `copies`: they are always equal, but each worker updates its own. `shared`: there is only one, in the memory of
        one machine, and every worker updates it. `servers`: each server holds a range. `apart`: each worker holds its
        own; the model is their mean.
        """
        return "apart"

    @property
    def synchronous(self) -> bool:
        """Whether the result is independent of who comes first."""
        return True

    @property
    def stale(self) -> bool:
        """Whether a server may apply a gradient to an x that is newer than the one it was computed at."""
        return False

    def updates(self, workers: int) -> float:
        """How many full steps of the optimizer as many gradients as there are workers make, one after the other."""
        return 1.0

    @property
    def clips(self) -> Clipped:
        """Whose norm `clip` bounds: every worker's `own` gradient, where it is computed, or the `mean` of an update."""
        return "own"

    @property
    def hands_over(self) -> bool:
        """Whether momenta go from workers to servers or back in the course of a run."""
        return False

    @property
    def meets(self) -> bool:
        """Whether all workers can come to the same step: not where some wait for those that go on."""
        return True

    @property
    def places(self) -> tuple[Where, ...]:
        """All places where it may be in the course of a run."""
        return (self.model_at,)

    @property
    def validates(self) -> bool:
        """Whether it looks at samples set apart (`node.validate`)."""
        return False

    @property
    def watches(self) -> bool:
        """Whether it looks at the loss of training (`node.loss`)."""
        return False

    @property
    def counts_down(self) -> bool:
        """Whether it goes by how much of the budget is spent (`node.budget`)."""
        return False

    def where(self, s: S) -> Where:
        """Where the model is now, if that changes during a run."""
        return self.model_at

    def in_force(self, s: S) -> tuple[Strategy[Any], Any]:
        """The strategy that makes the next step, and its state, if one strategy consists of several."""
        return self, s

    def resumes_as(self, s: S) -> tuple[Strategy[Any], Any]:
        """The strategy that a new run goes on with from here, and its state."""
        return self, s

    def optimizer_at(self, s: S) -> Literal["workers", "servers"]:
        """Which nodes step the optimizer now, and so hold its state."""
        return "servers" if self.servers else "workers"

    def in_step(self, s: S) -> bool:
        """Whether all workers go in step now, if that changes during a run: all then save and stop together."""
        return self.synchronous

    def demands(self, workers: int) -> Iterator[Problem]:
        """What this strategy cannot work with, beyond the ranges of its fields."""
        return iter(())

    @abstractmethod
    def init(self, node: Node) -> S:
        """The state at the start, on every node."""

    def attach(self, node: Node, s: S) -> None:
        """Put between the node and its messages what the strategy needs there, if anything."""

    @abstractmethod
    def step(self, node: Node, s: S) -> None:
        """One iteration of one worker."""

    def serve(self, node: Node, s: S) -> None:
        """A server's whole life."""
        raise NotImplementedError(f"{type(self).__name__} has no servers")

    def unused(self, s: S) -> int:
        """How many gradients a server holds for an update that will not follow."""
        return 0

    def finish(self, node: Node, s: S) -> None:
        """What remains to be done after a worker's last step."""


def check_fields(part: Any, where: str) -> Iterator[Problem]:
    """Every field whose type or range is wrong, nested parts included."""
    hints = get_type_hints(type(part))
    for field in dataclasses.fields(part):
        value, name = getattr(part, field.name), f"{where}.{field.name}"
        message = misfit(value, hints[field.name])
        least, most = field.metadata.get("least"), field.metadata.get("most")
        if message:
            yield Problem(name, value, message)
        elif value is None:
            continue  # allowed by its type, and in no range
        elif isinstance(value, float) and not math.isfinite(value):
            yield Problem(name, value, "must be a finite number")
        elif least is not None and value < least:
            yield Problem(name, value, f"must be at least {least:g}")
        elif most is not None and value > most:
            yield Problem(name, value, f"must be at most {most:g}")
        elif dataclasses.is_dataclass(value):
            yield from check_fields(value, name)


def misfit(value: Any, hint: Any) -> str | None:
    """Why a value does not fit an annotation, or None."""
    if get_origin(hint) is Literal:
        allowed = get_args(hint)
        return None if value in allowed else f"must be one of {', '.join(map(str, allowed))}"
    if isinstance(hint, types.UnionType):  # of a value and None
        found = [misfit(value, part) for part in get_args(hint) if part is not types.NoneType]
        return None if value is None or None in found else f"{found[0]}, or None"
    expected = get_origin(hint) or hint
    if expected is float:
        return None if isinstance(value, int | float) and not isinstance(value, bool) else "must be a number"
    if expected is int:
        return None if isinstance(value, int) and not isinstance(value, bool) else "must be a whole number"
    if isinstance(expected, type) and not isinstance(value, expected):
        return f"must be {_article(expected.__name__)}{_known(expected, value)}"
    if expected is tuple:
        return next((f"has {v!r}, which {why}" for v in value if (why := misfit(v, get_args(hint)[0]))), None)
    return None


def _known(kind: type[Any], value: Any) -> str:
    """The parts of a kind, for somebody who named none of them."""
    found, todo = [], [kind]
    while todo:
        todo += (cls := todo.pop()).__subclasses__()
        found += [cls.__name__.lower()] if dataclasses.is_dataclass(cls) and cls is not kind else []
    quoted = ", without quotes on the command line" if isinstance(value, str) else ""
    return f": {', '.join(sorted(found))}{quoted}" if found else ""


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "AEIOU" else f"a {name}"
