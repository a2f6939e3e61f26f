# SPDX-License-Identifier: Apache-2.0
"""Strategy-Switch: one strategy until the model has settled, then another.

Provatas, Chalas, Konstantinou, Koziris. "Strategy-Switch", IEEE Access 13, pages 9510-9523, 2025; the rule as the
project O.N.O. has it. https://ieeexplore.ieee.org/document/10836684
Li et al. "Sync-Switch", ICDCS 2021 (after a share of the budget). https://arxiv.org/abs/2104.08364

    repeat
        one step of `first` (all-reduce) with rate γ and momentum μ
        if `when` fires (s ≤ θ), on every worker after the same step:
            the workers agree on x; its next holders receive x and the optimizer's momenta
            momenta are kept, forgotten, or divided by N
            r ← updates per gradient before / updates per gradient after         (1/N from all-reduce to asp)
            μ' ← `momentum`, by default 0 if a round of gradients makes more updates than before, else μ
            γ ← `scale` γ, by default r (1 − μ')/(1 − μ) γ;   μ ← μ'
    repeat
        one step of `then` (an asynchronous parameter server)

γ/(1 − μ) is how far one gradient moves x in total, so x moves as far per sample as before. Why μ' = 0: a gradient that
is N − 1 updates old is added to a newer velocity, and the two oscillate with hardly any damping: on a curvature c with
c γ/(1 − μ) = 1.2, N = 8 and μ = 0.9, the oscillation decays by 1 % in N updates, by 22 % without momentum, and by 5 %
under all-reduce. With some seeds noise amplifies it until training diverges. Without momentum, decrease the rate: the
digits end at 87 to 97 % with a constant one, at 96 to 97.5 % with one that decreases linearly to zero.
Optimizers without momentum, Adam among them, get r γ and are otherwise left alone. So is one worker: r = 1.
The schedule goes on by samples seen. Any two strategies in either order, with equally many servers if both have any.
Between all-reduce and synchronous servers r = 1: a switch changes nothing, bit for bit.

Servers start with the run and wait for the switch, on machines of their own. With `promote` they use those of the last
M workers, which stop training at the switch: their samples go to the other N − M, in the middle of an epoch, and the
budget is counted as if all had continued.

Bytes: those of `first` up to the switch and of `then` after it; a number to and from each worker in every round; at
the switch S for x and S for every momentum, from a worker to each range's server or back; none if servers are promoted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from orchestra.core.node import Node
from orchestra.core.strategy import Layout, Needs, Strategy, option
from orchestra.core.view import View
from orchestra.errors import Problem
from orchestra.strategies.all_reduce import AllReduce
from orchestra.strategies.parameter_server.consistency import ASP
from orchestra.strategies.parameter_server.server import ParameterServer
from orchestra.strategies.switch import transfer
from orchestra.strategies.switch.triggers import LossHistory, Plateau, Trigger


@dataclass
class SwitchState:
    """Whether the switch has happened, the trigger's history, and the states of both strategies."""

    switched: bool
    watch: LossHistory
    first: Any
    then: Any


@dataclass(frozen=True, kw_only=True)
class StrategySwitch(Strategy[SwitchState]):
    """One strategy until the model has settled, then another."""

    first: Strategy[Any] = field(default_factory=AllReduce, metadata={"about": "the strategy to begin with"})
    then: Strategy[Any] = field(
        default_factory=lambda: ParameterServer(consistency=ASP()), metadata={"about": "the strategy to go on with"}
    )
    when: Trigger = field(default_factory=Plateau, metadata={"about": "when to switch"})
    momenta: Literal["keep", "reset", "scale"] = option("keep", "momenta at the switch: kept, forgotten, divided by N")
    momentum: float | None = option(
        None, "μ after the switch; None: 0 if a round makes more updates than before", least=0, most=0.999
    )
    scale: float | None = option(
        None, "of the learning rate at the switch; None: by updates per gradient and μ", least=0
    )
    promote: bool = option(False, "the last workers become the servers; their samples go to the other workers")

    @cached_property
    def layout(self) -> Layout:
        """The layout of `first`, with the servers of both; all workers reach the switch at the same step."""
        first, then = self.first.layout, self.then.layout
        served = then if then.servers else first
        return replace(
            first,
            # `copies`, since in `everywhere` a worker may hold only a part of the momenta, which must be transferred.
            model_location="copies" if first.model_location == "everywhere" else first.model_location,
            servers=max(first.servers, then.servers),
            placement=served.placement,
            colocated=self.promote or served.colocated,  # servers that were workers stay on their machines
            updates=replace(
                first.updates, synchronous=first.updates.synchronous and then.updates.synchronous,
                stale=first.updates.stale or then.updates.stale,
            ),
            always_lockstep=True,
            then=replace(then, promoted=then.servers if self.promote else 0),
        )  # fmt: skip

    def layout_at(self, s: SwitchState) -> Layout:
        """Return the layout of the strategy in force."""
        return self.layout.then if s.switched and self.layout.then is not None else self.layout

    @cached_property
    def needs(self) -> Needs:
        """The inputs of the trigger, and momenta that can be transferred, unless they are reset."""
        moved = bool(self.first.layout.servers) != bool(self.then.layout.servers)
        return self.when.needs | Needs(momenta=moved and self.momenta != "reset")

    def problems(self, workers: int) -> Iterator[Problem]:
        """Yield the problems of both strategies, and of the transfer between them."""
        servers = self.then.layout.servers
        left = workers - servers if self.promote else workers
        yield from self.first.problems(workers)
        yield from self.then.problems(max(1, left))
        yield from transfer.problems(self.first, self.then)
        if self.promote and (self.first.layout.servers or not servers):
            yield Problem("strategy.promote", True, "needs a first strategy without servers, and a second with some")
        if left < 1:
            message = f"would leave none of {workers} workers: promote fewer, or add workers"
            yield Problem("strategy.then.servers", servers, message)

    def phase(self, s: SwitchState) -> tuple[Strategy[Any], Any]:
        """Return the strategy in force and its state."""
        return (self.then, s.then) if s.switched else (self.first, s.first)

    def init(self, node: Node) -> SwitchState:
        """Initialise both strategies; the second is initialised again at the switch."""
        return SwitchState(False, LossHistory(), self.first.init(node), self.then.init(node))

    def step(self, node: Node, s: SwitchState) -> None:
        """Do a step of the strategy in force; then switch if the trigger fires."""
        if s.switched:
            self.then.step(node, s.then)
            return
        self.first.step(node, s.first)
        if self.when.fires(node, s.watch) and node.budget < 1:  # else no step is left for the second strategy
            given = (self.momentum, self.scale) != (None, None) or self.momenta != "keep"
            if self.first == self.then and not self.layout.servers and not given:
                s.then, s.switched = s.first, True
                node.log("switched", node.steps)
                return
            self.first.finish(node, s.first)
            workers = len(node.comm.workers)
            transfer.from_worker(node, self._next_view(node), self.first.layout, self.then.layout, keep=self._keeps)
            self._begin_second(node, s, workers)

    def serve(self, node: Node, s: SwitchState) -> None:
        """Serve the first strategy, if it has servers; then the second, if the run switches."""
        if not s.switched:
            if self.first.layout.servers:
                self.first.serve(node, s.first)
            view, workers = self._next_view(node), len(node.comm.workers)
            if transfer.at_server(node, view, self.first.layout, self.then.layout, keep=self._keeps):
                self._begin_second(node, s, workers)
        if s.switched and self.then.layout.servers:
            self.then.serve(node, s.then)
        for _ in node.comm.inbox():  # a server without work stays until all workers have left
            pass

    @property
    def _keeps(self) -> bool:
        return self.momenta != "reset"

    def _next_view(self, node: Node) -> View:
        return node.comm.view.without_last(self.then.layout.servers if self.promote else 0)

    def _begin_second(self, node: Node, s: SwitchState, workers: int) -> None:
        left = len(node.comm.workers)
        for v in node.optimizer.first_moments() if self.momenta == "scale" else ():
            v.div_(workers)
        if node.retired:
            node.log("retired", node.steps)
        before = self.first.layout.updates.per_round_of(workers)
        after = self.then.layout.updates.per_round_of(left)
        r = before * left / (after * workers)
        momentum = 0.0 if self.momentum is None and after > before else self.momentum
        transfer.set_pace(node, momentum, r if self.scale is None else self.scale, given=self.scale is not None)
        s.then, s.switched = self.then.init(node), True
        node.adopt(self, s)
        node.log("switched", node.steps)

    def finish(self, node: Node, s: SwitchState) -> None:
        """Finish the strategy in force."""
        strategy, state = self.phase(s)
        strategy.finish(node, state)
