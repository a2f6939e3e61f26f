# SPDX-License-Identifier: Apache-2.0
"""A worker whose gradients are computed by somebody else's loop.

    the loop                            the strategy, in a fiber
    optimizer.zero_grad()               at rest, between two steps
    model(x)                    →       step: up to where it asks for a gradient
    loss.backward()             ←
    optimizer.step()            →       goes on with the gradient, to the end of the step
                                ←       at rest

So a forward pass in training has the parameters at which the strategy wants the gradient, and everything else that the
loop does between two steps (evaluate, save, finish) finds the model as the strategy leaves it between two steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

import orchestra.core.fibers as fibers
from orchestra.data.feed import Batch
from orchestra.engine import node_loop
from orchestra.errors import ConfigError, OrchestraError, Problem
from orchestra.model.replica import Ready, Replica


class LoopFeed:
    """What the loop computes, as a feed: who asks for the next mini-batch is set aside until its gradient is there."""

    draws = False
    reshared = None
    shards = None

    def __init__(self, batch: int, position: Callable[[], float]) -> None:
        self.batch = batch
        self.epoch = self.step = 0
        self.steps_per_epoch: int | None = None
        self.park: Callable[[], None]
        self.size = 0  # samples behind the gradient
        self._position = position

    @property
    def epochs(self) -> float:
        """Passes over the data so far."""
        return self._position()

    def next(self) -> Batch:
        """Wait for the loop."""
        self.park()
        return [], self.size

    def seek(self, epoch: int, step: int) -> None:
        """The loader has a position of its own."""
        raise NotImplementedError("where a loop is in its data is the loop's business")

    def reshare(self, size: int) -> None:
        """The same."""
        raise NotImplementedError("a loop's samples cannot be shared anew")

    def distance(self, steps: int) -> float:
        """The same."""
        raise NotImplementedError("where a loop is in its data is the loop's business")


class AdoptedReplica(Replica):
    """The loop's own module: its gradients are there already."""

    def __init__(self, module: nn.Module, x: Tensor, g: Tensor, cuts: Sequence[int] = ()) -> None:
        super().__init__(module, x, g, loss=lambda output, target: output, cuts=cuts)
        self.known_loss: float | None = None
        # A storage for each parameter, in the same memory: libraries that save models take tensors with one storage for
        # one tensor, and drop all but the first.
        for p, part in zip(self.parameters, self._ranges, strict=True):
            if p.numel():
                p.data = from_dlpack(x[part]).view(p.shape)
        where = {p: p.data_ptr() for p in self.parameters}
        homes = ((name, part._parameters) for name, part in module.named_modules())
        self._homes = [
            (f"{name}.{key}".lstrip("."), home, key, p, where[p])
            for name, home in homes
            for key, p in home.items()
            if p is not None and p in where
        ]

    def require_in_place(self) -> None:
        """Refuse parameters that are no longer the module's, or no longer lie in x: they would be trained in vain."""
        for name, home, key, p, address in self._homes:
            if home.get(key) is not p or p.data_ptr() != address:
                raise OrchestraError(
                    f"parameter {name} of the model was put elsewhere since orchestra.prepare, so that nothing trains "
                    "it. Before that call, not after it, is the time for model.to(...), .half() and the like, "
                    "load_state_dict(assign=True), p.data = ... and flatten_parameters()."
                )

    def gradient(self, batch: Any, size: int, ready: Ready | None = None) -> float:
        """Take them. What the loss is not known to be is not held against it."""
        self.take()
        return 0.0 if self.known_loss is None else self.known_loss


class StepDriver:
    """A worker and its strategy, one step at a time."""

    def __init__(self, runtime: node_loop.NodeRuntime, feed: LoopFeed, replica: AdoptedReplica) -> None:
        self.runtime = runtime
        self.asking = False  # the strategy waits for a gradient; else it is at rest
        self.touched = False  # it has done something in this step that cannot be taken back
        self.playing = False  # the strategy is at work, not the loop
        self.over = False
        self._feed, self.replica = feed, replica
        feed.park = self._ask
        self.before_step: Callable[[], None] = lambda: None
        self._fiber = fibers.make("auto", self._play)

    def _play(self) -> None:
        runtime = self.runtime
        while True:
            runtime.spec.strategy.step(runtime.node, runtime.state)
            if self.replica.known_loss is None:
                runtime.node.loss = math.nan
            node_loop.record(runtime)
            self._fiber.park()

    def _ask(self) -> None:
        self.asking = True
        self._fiber.park()

    def _go_on(self) -> None:
        self.playing = True
        try:
            fibers.visit(self._fiber)
        finally:
            self.playing = False

    def _mark(self) -> tuple[int, int, int]:
        traffic = self.runtime.meter.traffic
        return self.runtime.node.x._version, traffic.sent, traffic.received

    def begin(self) -> None:
        """Go on to where the strategy asks for a gradient, if it is at rest."""
        if not self.asking:
            self.before_step()
            self.replica.before.keep()
        before = self._mark()
        while not self.asking:
            self._go_on()
            self.touched = self._mark() != before

    def step(self, size: int, loss: float | None) -> None:
        """Go on with the gradient that the loop has computed, of so many samples, to the end of the step."""
        if self.over:
            raise OrchestraError("the run is over since optimizer.finish(). Call orchestra.prepare anew to go on.")
        late = not self.asking
        self.begin()
        if late and size and self.touched:
            raise OrchestraError(
                f"{type(self.runtime.spec.strategy).__name__} moves the parameters or speaks with others before every "
                "gradient, but the model was not called in training: call model(x) itself, not a part of it, after "
                "model.train(), or optimizer.begin() before the forward pass."
            )
        if loss is None and size and self.runtime.spec.strategy.needs.training_loss:
            message = "the strategy looks at the loss of every mini-batch: say optimizer.step(loss=loss)"
            raise ConfigError([Problem("loss", None, message)])
        self._feed.size, self.replica.known_loss = size, loss
        self.asking = self.touched = False
        self._go_on()

    def spare_buffers(self) -> None:
        """Undo a forward pass whose gradient a GradScaler passes over, if the pass made buffers infinite or NaN.

        Others stay, as in plain PyTorch: a scale that is too large says nothing about the forward pass.
        """
        if self.asking and self.replica.before.spoiled():
            self.replica.before.restore()

    def rest(self) -> None:
        """Be between two steps: one that was begun without a gradient to follow ends with an empty mini-batch."""
        self.before_step()
        if self.asking and self.touched:
            self.step(0, None)
        elif self.asking:
            self.drop()

    def drop(self) -> None:
        """Forget a step that was begun."""
        if self.asking:
            self._fiber.kill()
            self._fiber = fibers.make("auto", self._play)
            self.asking = self.touched = False

    @torch.no_grad()
    def finish(self) -> None:
        """What the strategy still has to do after the last step."""
        node = self.runtime.node
        self.over = self.playing = True
        self._fiber.kill()
        self.runtime.spec.strategy.finish(node, self.runtime.state)
        self.playing = False
        node.comm.leave()
