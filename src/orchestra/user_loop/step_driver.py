# SPDX-License-Identifier: Apache-2.0
"""A worker whose gradients the user's loop computes.

    the loop                            the strategy, in a fiber
    optimizer.zero_grad()               at rest, between two steps
    model(x)                    →       step: up to its request for a gradient
    loss.backward()             ←
    optimizer.step()            →       continues with the gradient, to the end of the step
                                ←       at rest

So a forward pass in training uses the parameters at which the strategy wants the gradient, and everything else that the
loop does between two steps (evaluate, save, finish) uses the model as the strategy leaves it between two steps.
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
    """A feed for the user's loop: `next` parks the strategy until the loop has computed a gradient."""

    draws = False
    dealt = ()
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
        """The number of passes over the data so far."""
        return self._position()

    def next(self) -> Batch:
        """Wait for the loop, and return an empty batch with the number of samples."""
        self.park()
        return [], self.size

    def seek(self, epoch: int, step: int) -> None:
        """Raise: the loader has its own position."""
        raise NotImplementedError("a loop keeps the position in its data itself")

    def deal_to(self, places: Sequence[int]) -> None:
        """Raise: the samples belong to the loop."""
        raise NotImplementedError("a loop's samples cannot be divided among fewer workers")

    def distance(self, steps: int) -> float:
        """Raise: this is only used after `deal_to`."""
        raise NotImplementedError("a loop keeps the position in its data itself")


class AdoptedReplica(Replica):
    """A replica around the loop's own module, whose gradients the loop computes."""

    def __init__(self, module: nn.Module, x: Tensor, g: Tensor, cuts: Sequence[int] = ()) -> None:
        super().__init__(module, x, g, loss=lambda output, target: output, cuts=cuts)
        self.known_loss: float | None = None
        # A separate storage object for each parameter, in the same memory: libraries that save models treat tensors
        # with one storage as a single tensor, and drop all but the first.
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
        """Raise if parameters no longer belong to the module, or no longer lie in x, so that training has no effect."""
        for name, home, key, p, address in self._homes:
            if home.get(key) is not p or p.data_ptr() != address:
                raise OrchestraError(
                    f"parameter {name} of the model was replaced after orchestra.prepare, so that it is not trained. "
                    "Call model.to(...), .half() and the like, load_state_dict(assign=True), p.data = ... and "
                    "flatten_parameters() before orchestra.prepare."
                )

    def gradient(self, batch: Any, size: int, ready: Ready | None = None) -> float:
        """Copy the gradients that the user's backward left into g; return the loss, or 0 if it is unknown."""
        self.take()
        return 0.0 if self.known_loss is None else self.known_loss


class StepDriver:
    """A worker and its strategy, one step at a time."""

    def __init__(self, runtime: node_loop.NodeRuntime, feed: LoopFeed, replica: AdoptedReplica) -> None:
        self.runtime = runtime
        self.asking = False  # whether the strategy waits for a gradient; else it is between two steps
        self.touched = False  # whether the strategy has changed x or sent messages in this step
        self.stepping = False  # whether the strategy runs, not the loop
        self.over = False
        self._feed, self.replica = feed, replica
        feed.park = self._ask
        self.before_step: Callable[[], None] = lambda: None
        self._fiber = fibers.make("auto", self._run)

    def _run(self) -> None:
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
        self.stepping = True
        try:
            fibers.visit(self._fiber)
        finally:
            self.stepping = False

    def _mark(self) -> tuple[int, int, int]:
        traffic = self.runtime.meter.traffic
        return self.runtime.node.x._version, traffic.sent, traffic.received

    def begin(self) -> None:
        """Run the strategy up to its request for a gradient, if it is between two steps."""
        if not self.asking:
            self.before_step()
            self.replica.before.keep()
        before = self._mark()
        while not self.asking:
            self._go_on()
            self.touched = self._mark() != before

    def step(self, size: int, loss: float | None) -> None:
        """Run the strategy to the end of the step, with the gradient of `size` samples that the loop has computed."""
        if self.over:
            raise OrchestraError(
                "optimizer.finish() was already called. Call orchestra.prepare again to train further."
            )
        late = not self.asking
        self.begin()
        if late and size and self.touched:
            raise OrchestraError(
                f"{type(self.runtime.spec.strategy).__name__} moves the parameters or sends messages before every "
                "gradient, but the model was not called in training: call model(x) itself, not a part of it, after "
                "model.train(), or optimizer.begin() before the forward pass."
            )
        if loss is None and size and self.runtime.spec.strategy.needs.training_loss:
            message = "the strategy needs the loss of every mini-batch: call optimizer.step(loss=loss)"
            raise ConfigError([Problem("loss", None, message)])
        self._feed.size, self.replica.known_loss = size, loss
        self.asking = self.touched = False
        self._go_on()

    def spare_buffers(self) -> None:
        """Restore buffers that became infinite or NaN in a forward pass whose gradient a GradScaler skips.

        Other buffers stay, as in plain PyTorch: a scale that is too large does not affect the forward pass.
        """
        if self.asking and self.replica.before.spoiled():
            self.replica.before.restore()

    def rest(self) -> None:
        """Leave no step half done: a step without a gradient ends with an empty mini-batch, or is dropped."""
        self.before_step()
        if self.asking and self.touched:
            self.step(0, None)
        elif self.asking:
            self.drop()

    def drop(self) -> None:
        """Discard a step that was begun."""
        if self.asking:
            self._fiber.kill()
            self._fiber = fibers.make("auto", self._run)
            self.asking = self.touched = False

    @torch.no_grad()
    def finish(self) -> None:
        """Do the strategy's final work after the last step."""
        node = self.runtime.node
        self.over = self.stepping = True
        self._fiber.kill()
        self.runtime.spec.strategy.finish(node, self.runtime.state)
        self.stepping = False
        node.comm.leave()
