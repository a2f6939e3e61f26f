# SPDX-License-Identifier: Apache-2.0
"""Strategies around strategies, for measuring only."""

from __future__ import annotations

import functools
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from orchestra import Node
from orchestra.core.strategy import Layout, Strategy

_LOOK = 0.02  # seconds between two looks at the gate


@dataclass
class PacedState:
    """The state of the strategy inside, and when each step of this turn began."""

    base: Any
    began: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Around(Strategy[Any]):
    """A strategy in most things like the one it is around."""

    base: Strategy[Any]

    @property
    def layout(self) -> Layout:
        return self.base.layout


@dataclass(frozen=True, kw_only=True)
class Paced(Around):
    """Stops at a gate every so many steps, so that a real run can take turns with its peers.

    Before the first step of turn k a worker writes the seconds of turn k - 1's steps to GATE/done-k-RANK, then waits
    for GATE/go-k. A step is taken from where it begins to where the next one does, so all that surrounds it is counted.
    """

    gate: str
    every: int  # steps

    def init(self, node: Node) -> PacedState:
        return PacedState(self.base.init(node))

    def step(self, node: Node, s: PacedState) -> None:
        s.began.append(time.perf_counter())
        if node.steps % self.every == 0:
            self._wait_at_gate(node, s)
        self.base.step(node, s.base)

    def _wait_at_gate(self, node: Node, s: PacedState) -> None:
        gate, number = Path(self.gate), node.steps // self.every
        seconds = [later - former for former, later in zip(s.began, s.began[1:], strict=False)]
        partial = gate / f"part-{number}-{node.rank}"
        partial.write_text(json.dumps(seconds))
        partial.rename(gate / f"done-{number}-{node.rank}")
        opened = gate / f"go-{number}"
        while not opened.exists():
            time.sleep(_LOOK)
        s.began[:] = [time.perf_counter()]

    def serve(self, node: Node, s: PacedState) -> None:
        self.base.serve(node, s.base)

    def finish(self, node: Node, s: PacedState) -> None:
        self.base.finish(node, s.base)


@dataclass(frozen=True, kw_only=True)
class WithoutGradient(Around):
    """A strategy whose workers have their gradient for nothing: what is left is the exchange."""

    def init(self, node: Node) -> Any:
        if node.feed is not None:
            node.gradient = functools.partial(_same_again, node)  # type: ignore[method-assign]
            node.g.fill_(1e-6)
        return self.base.init(node)

    def step(self, node: Node, s: Any) -> None:
        self.base.step(node, s)

    def serve(self, node: Node, s: Any) -> None:
        self.base.serve(node, s)

    def finish(self, node: Node, s: Any) -> None:
        self.base.finish(node, s)


def _same_again(node: Node) -> Tensor:
    node.steps += 1
    node.weight, node.loss = 1.0, 0.0
    return node.g
