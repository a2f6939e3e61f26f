# SPDX-License-Identifier: Apache-2.0
"""The arguments of `prepare`: their checks, and the `RunSpec` made from them."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from orchestra._version import __version__
from orchestra.clusters.attached import Attached
from orchestra.core.strategy import Strategy
from orchestra.engine import checkpoint, checks, environment, expression
from orchestra.engine.fingerprint import code, in_parts, parts_of_data, settings_of
from orchestra.engine.spec import RunSpec
from orchestra.errors import Problem
from orchestra.formatting import plural
from orchestra.model import param_groups
from orchestra.model.adjusted_optimizer import Adjusted
from orchestra.model.flat_optimizer import ELEMENTWISE
from orchestra.model.replica import problems_of, trainable
from orchestra.runs import run_lock
from orchestra.user_loop import loader as loaders
from orchestra.user_loop import ranks, wrappers
from orchestra.user_loop.earlier_calls import EARLIER, problems_of_group


def problems_of_strategy(strategy: Strategy[Any], *, loader: bool, steps: bool) -> Iterator[Problem]:
    """Yield what a strategy needs that a loop lacks; a loader and the number of steps may be given."""
    name = type(strategy).__name__
    if strategy.layout.model_location == "shared":
        yield Problem("strategy", name, "its workers share one x in one memory: use orchestra.train with Local(...)")
    if strategy.layout.promotes:
        yield Problem("strategy.promote", True, "cannot give the samples of a loop to other workers: leave it out")
    if strategy.needs.validation_loss:
        message = "needs validation samples, which a loop does not share: use loss=training, or orchestra.train"
        yield Problem("strategy", name, message)
    if strategy.needs.momenta:
        message = "cannot transfer the momenta of an optimizer that stays with the loop: use momenta=reset"
        yield Problem("strategy", name, message)
    if strategy.needs.training_loss and not loader:
        yield Problem("loader", None, "must be given: the strategy looks at the loss of every epoch")
    if strategy.needs.budget and not steps:
        yield Problem("steps", None, "must be given: the strategy switches after a share of them")


@dataclass(frozen=True, kw_only=True)
class LoopArguments:
    """The arguments of `prepare`."""

    model: nn.Module
    optimizer: optim.Optimizer
    loader: DataLoader[Any] | None
    strategy: Strategy[Any]
    cluster: Attached
    steps: int | None
    seed: int
    out: Path | None
    tolerate: int
    note: dict[str, Any]
    lr_factor: float = 1.0  # on the rates of the optimizer, applied only during its steps

    @property
    def together(self) -> bool:
        """Whether a launcher started this process as one of several."""
        return environment.launched()

    @property
    def size(self) -> int:
        """The number of processes, servers included."""
        return self.cluster.place.size if self.together else 1

    @property
    def rank(self) -> int:
        """The rank of this process; workers come first."""
        return self.cluster.place.rank if self.together else 0

    @property
    def workers(self) -> int:
        """The number of processes that are no servers."""
        return self.size - self.strategy.layout.servers

    @property
    def device(self) -> str:
        """The device of the model."""
        return next(iter(trainable(self.model).values())).device.type

    @property
    def frozen(self) -> list[nn.Parameter]:
        """The parameters that are not trained."""
        return [p for p in self.model.parameters() if not p.requires_grad and p.numel()]

    @property
    def uses_torch_collectives(self) -> bool:
        """Whether torch.distributed does the all-reduces: on a trusted network, for models that are not on GPUs."""
        if not self.together or self.device != "cpu":
            return False
        return self.cluster.for_strategy(self.strategy).resources(self.size).uses_torch_collectives

    # Checks.

    def problems(self) -> Iterator[Problem]:
        """Yield all problems of the arguments."""
        found = [*self._problems()]
        yield from found
        if found and self.strategy.needs.training_loss:  # otherwise only the first step would report it
            message = "must be given as well, at every step: optimizer.step(loss=loss)"
            yield Problem("loss", type(self.strategy).__name__, message)

    def _problems(self) -> Iterator[Problem]:
        yield from environment.half_set()
        if self.together:
            yield from EARLIER.problems(self.strategy)
            yield from problems_of_group(self.strategy)
        yield from self._problems_of_processes()
        yield from checks.check_strategy(self.strategy, self.workers, None)
        unfit = [*problems_of(self.model)]
        yield from unfit
        if not unfit:
            yield from self._problems_of_model()
        if self.loader is not None:
            yield from loaders.problems_of(self.loader, max(1, self.workers))
        yield from problems_of_strategy(self.strategy, loader=self.loader is not None, steps=self.steps is not None)
        if self.rank == 0 and self.out is not None and _is_taken(self.out):
            yield Problem("out", str(self.out), "is not empty, or a file: choose a new folder")

    def _problems_of_processes(self) -> Iterator[Problem]:
        name, servers = type(self.strategy).__name__, self.strategy.layout.servers
        if self.workers < 1:
            start = f"torchrun --nproc-per-node {servers + 2}"
            message = (
                f"{name} has {plural(servers, 'server')}, each a process of its own, beside the workers: start more "
                f"than {plural(servers, 'process')}, such as {start} for 2 workers"
            )
            yield Problem("WORLD_SIZE", self.size, message)
            return
        if os.environ.get(environment.WORKERS, str(self.workers)) != str(self.workers):
            message = f"{name} has {plural(servers, 'server')} beside them: say --servers {servers} as well"
            yield Problem("workers", int(os.environ[environment.WORKERS]), message)
        if (problem := ranks.other_answer(self.strategy, self.workers)) is not None:
            yield problem
        if self.together:
            yield from self.cluster.for_strategy(self.strategy).problems()

    def _problems_of_model(self) -> Iterator[Problem]:
        own = {*self.model.parameters()}
        strange = sum(p not in own for group in self.optimizer.param_groups for p in group["params"])
        if strange:
            message = f"has {plural(strange, 'parameter')} not of the model: make it from model.parameters()"
            yield Problem("optimizer", type(self.optimizer).__name__, message)
        closure = inspect.signature(self.optimizer.step).parameters.get("closure")
        needs_closure = closure is not None and closure.default is closure.empty
        if isinstance(self.optimizer, optim.SparseAdam | optim.LBFGS) or needs_closure:
            message = "evaluates the loss several times a step, or takes sparse gradients: use SGD, Adam, ..."
            yield Problem("optimizer", type(self.optimizer).__name__, message)
        for what, found in (
            ("dtype", sorted({str(p.dtype) for p in trainable(self.model).values()})),
            ("device", sorted({str(p.device) for p in trainable(self.model).values()})),
        ):
            if len(found) > 1:
                message = f"trainable parameters must have one {what} in common, not {', '.join(found)}"
                yield Problem("model", type(self.model).__name__, message)
        yield from wrappers.problems_of(self.model, self.workers)
        if self.strategy.layout.servers:
            unfit = checks.check_optimizer(self.factory(), self.model, self.strategy)
            # A schedule that was created before may begin with zero.
            yield from (p for p in unfit if (p.where, p.value) != ("optimizer.lr", 0.0))

    # The spec.

    def factory(self) -> partial[optim.Optimizer]:
        """Return a factory of optimizers like the given one, for the model's layers, or for any if it has one group."""
        layers = [*trainable(self.model).values()]
        if not param_groups.is_one(self.optimizer, layers):
            return partial(param_groups.like, self.optimizer, param_groups.members(self.optimizer, layers))
        kind, group = type(self.optimizer), self.optimizer.param_groups[0]
        known = inspect.signature(kind).parameters
        return partial(kind, **{name: value for name, value in group.items() if name in known and name != "params"})

    def spec(self) -> RunSpec:
        """Return the spec for every node."""
        samples, layers = None, [*trainable(self.model).values()]
        if self.loader is not None and not isinstance(self.loader.dataset, IterableDataset):
            samples = len(self.loader.sampler)  # type: ignore[arg-type]
        return RunSpec(
            model=lambda: self.model,
            data=lambda: None,
            loss=lambda output, target: output,
            optimizer=self.factory() if self.lr_factor == 1 else Adjusted(self.factory(), self.lr_factor),
            strategy=self.strategy,
            workers=self.workers,
            batch=(self.loader.batch_size if self.loader is not None else None) or 1,
            seed=self.seed,
            device=self.device,
            cluster=self.cluster,
            uses_torch_collectives=self.uses_torch_collectives,
            run=self.out or Path(),
            last_step=self.steps,
            tolerate=self.tolerate,
            samples_per_epoch=samples,
            names=tuple(trainable(self.model)),
            layers=tuple(tuple(p.shape) for p in layers),
            layerwise=type(self.optimizer) not in ELEMENTWISE or not param_groups.is_one(self.optimizer, layers),
            threads=torch.get_num_threads(),
        )

    def about(self, spec: RunSpec) -> dict[str, Any]:
        """Return the settings of the run, for its folder."""
        shapes = {name: (p.shape, p.dtype) for name, p in trainable(self.model).items()}
        return {
            "version of orchestra": __version__,
            "version of torch": torch.__version__.partition("+")[0],
            "strategy": expression.show(self.strategy),
            "workers": spec.workers,
            "servers": spec.servers,
            "batch": spec.batch,
            "seed": spec.seed,
            "model": checkpoint.fingerprint(shapes),
            "data": "the loop's" if spec.samples_per_epoch is None else f"{spec.samples_per_epoch} samples",
            "optimizer": settings_of(self.optimizer),
            "steps": spec.last_step,
            "tolerate": spec.tolerate,
            "means": "by torch" if spec.uses_torch_collectives else "by messages",
            **({} if self.lr_factor == 1 else {"lr_factor": self.lr_factor}),
        }

    def in_common(self, spec: RunSpec) -> dict[str, Any]:
        """Return what must be equal in all processes, part by part, the most informative differences first."""
        found = code(__version__, [self.model])
        found |= in_parts(self.about(spec), self.strategy, self.model, self.optimizer)
        # Samples of other kinds may be drawn at random, and so differ between processes.
        data = self.loader.dataset if self.loader is not None else None
        return found | parts_of_data(data) if type(data) is TensorDataset else found


def _is_taken(out: Path) -> bool:
    return out.exists() and (not out.is_dir() or (any(out.iterdir()) and not run_lock.never_began(out)))


def chosen_strategy(own: Strategy[Any] | str, said: Strategy[Any] | str) -> Strategy[Any]:
    """Return the strategy of the command line if it names one, else the script's own."""
    mine, chosen = (expression.parse(s) if isinstance(s, str) else s for s in (own, said))
    if chosen != mine and not environment.is_member():
        words = f"{expression.show(chosen)}, as the command line says, in place of the script's {expression.show(mine)}"
        print(f"orchestra: strategy {words}", file=sys.stderr)
    return chosen
