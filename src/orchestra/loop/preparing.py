# SPDX-License-Identifier: Apache-2.0
"""The same strategies under a training loop of one's own.

    import orchestra                                                                        # 1
    model, optimizer, loader = orchestra.prepare(model, optimizer, loader, strategy="slowmo")   # 2
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    optimizer.finish()                                                                      # 3

Started once it is plain PyTorch; started several times (torchrun, `orchestra launch`, Slurm) every process is a worker.
"""

from __future__ import annotations

import inspect
import json
import platform
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, IterableDataset

import orchestra
from orchestra import checkpoint, checks, environment, expression, overrides, run
from orchestra.attached import Attached
from orchestra.errors import ConfigError, OrchestraError, Problem
from orchestra.events import Began, Event, EventLog
from orchestra.fingerprint import settings_of
from orchestra.inner import ELEMENTWISE, Inner
from orchestra.job import Job
from orchestra.launch.party import Party
from orchestra.loop import loader as loaders
from orchestra.loop.company import Company
from orchestra.loop.loader import Loader
from orchestra.loop.optimizer import Prepared
from orchestra.loop.player import Given, Player, Taken
from orchestra.loop.seat import Seat, spread_
from orchestra.loop.serving import serve
from orchestra.node import Comm, Log, Node
from orchestra.ops import Traffic
from orchestra.replica import flatten, persistent_buffers, problems_of, trainable
from orchestra.strategy import Strategy
from orchestra.transports.attached import AttachedTransport
from orchestra.transports.exchange import Exchange
from orchestra.transports.middleware import Metered

_DOUBLE = 8  # bytes


@overload
def prepare(
    model: nn.Module,
    optimizer: optim.Optimizer,
    loader: None = None,
    *,
    strategy: Strategy[Any] | str = ...,
    cluster: Attached | None = ...,
    steps: int | None = ...,
    seed: int = ...,
    out: str | Path | None = ...,
    tolerate: int = ...,
    note: dict[str, Any] | None = ...,
) -> tuple[nn.Module, Prepared]: ...


@overload
def prepare(
    model: nn.Module,
    optimizer: optim.Optimizer,
    loader: DataLoader[Any],
    *,
    strategy: Strategy[Any] | str = ...,
    cluster: Attached | None = ...,
    steps: int | None = ...,
    seed: int = ...,
    out: str | Path | None = ...,
    tolerate: int = ...,
    note: dict[str, Any] | None = ...,
) -> tuple[nn.Module, Prepared, Loader]: ...


def prepare(
    model: nn.Module,
    optimizer: optim.Optimizer,
    loader: DataLoader[Any] | None = None,
    *,
    strategy: Strategy[Any] | str = "allreduce",
    cluster: Attached | None = None,
    steps: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    tolerate: int = 10,
    note: dict[str, Any] | None = None,
) -> tuple[nn.Module, Prepared] | tuple[nn.Module, Prepared, Loader]:
    """Let a strategy drive the optimizer of a loop that stays as it is; call `optimizer.finish()` after the loop.

    Every process of torchrun or `orchestra launch` is a worker, or one of the strategy's servers: those serve in this
    call, and the script ends there. All begin with the model of worker 0. The loader is shared out among the workers:
    every sample once an epoch, in another order each time, batches of the size it was made with on each of them. Means
    are weighted by samples. Between two steps the parameters are the strategy's model as this worker has it. A parameter
    without a gradient has gradient zero.

    Args:
        model: stays the same object; its parameters become views of one vector.
        optimizer: over the model's parameters, with any schedulers, made before or after.
        loader: of the training samples. Without one every process reads its own, and `optimizer.step(samples=n)` says
            how many are behind a gradient, where not all have equally many.
        strategy: how the workers agree, as an object or as text: `"slowmo(tau=12)"`.
        cluster: `Attached(...)` with a token, patience and the like.
        steps: how many each worker will make, for strategies that switch after a share of them.
        seed: of the order of samples, and of strategies that draw.
        out: a run folder, as `train` leaves it; None writes nothing.
        tolerate: gradients in a row that may be not finite before the run is given up.
        note: anything more to be kept in the run's configuration.

    """
    asked = time.perf_counter()
    given = {"strategy": strategy, "cluster": cluster, "seed": seed, "out": out, "note": note or {}}
    changes = {name: change for name, change in overrides.current().items() if name in given}
    preparing = _Preparing(
        model, optimizer, loader, steps=steps, tolerate=tolerate, **given | overrides.changed(given, changes)
    )
    try:
        return preparing.run(asked)
    except OrchestraError as error:
        raise error.with_traceback(None) from None


class _Nowhere:
    """Keeps no events."""

    def write(self, event: Event) -> None:
        """Forget it."""


class _Preparing:
    """One call of `prepare`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        loader: DataLoader[Any] | None,
        *,
        strategy: Strategy[Any] | str,
        cluster: Attached | None,
        steps: int | None,
        seed: int,
        out: str | Path | None,
        tolerate: int,
        note: dict[str, Any],
    ) -> None:
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self.strategy = expression.parse(strategy) if isinstance(strategy, str) else strategy
        self.cluster = cluster or Attached()
        self.together = environment.launched()
        self.place = self.cluster.place if self.together else None
        size = self.place.size if self.place is not None else 1
        self.rank = self.place.rank if self.place is not None else 0
        self.workers = size - self.strategy.servers
        self.steps, self.seed, self.tolerate, self.note = steps, seed, tolerate, note
        self.out = None if out is None else Path(out)
        problems = [*self._problems(size)]
        if problems:
            raise ConfigError(problems)

    # Whether it can be.

    def _problems(self, size: int) -> Iterator[Problem]:
        if self.workers < 1:
            message = f"{type(self.strategy).__name__} has {self.strategy.servers} servers beside the workers: " + (
                f"start more than {size} processes" if self.together else "start with torchrun or `orchestra launch`"
            )
            yield Problem("WORLD_SIZE", size, message)
            return
        if self.together:
            yield from self.cluster.joined(self.strategy).problems()
        yield from checks.check_strategy(self.strategy, self.workers, None)
        unfit = [*problems_of(self.model)]
        yield from unfit
        if not unfit:
            yield from self._problems_of_model()
        if self.loader is not None:
            yield from loaders.problems_of(self.loader, self.workers)
        yield from self._problems_of_strategy()
        if self.rank == 0 and self.out is not None and self.out.exists():
            if not self.out.is_dir() or any(self.out.iterdir()):
                yield Problem("out", str(self.out), "is not empty, or a file: choose a new folder")

    def _problems_of_model(self) -> Iterator[Problem]:
        own = {*self.model.parameters()}
        groups = self.optimizer.param_groups
        strange = sum(p not in own for group in groups for p in group["params"])
        if strange:
            message = f"has {strange} parameters that are not the model's: make it from model.parameters()"
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
        if isinstance(self.model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            yield Problem("model", type(self.model).__name__, "leave the wrapper out: the strategy does its work")
        if self.strategy.servers:
            yield from checks.check_optimizer(self._factory(), self.model, self.strategy)

    def _problems_of_strategy(self) -> Iterator[Problem]:
        strategy, name = self.strategy, type(self.strategy).__name__
        if strategy.model_at == "shared":
            yield Problem(
                "strategy", name, "its workers share one x in one memory: use orchestra.train with Local(...)"
            )
        if strategy.promotes:
            yield Problem("strategy.promote", True, "cannot give the samples of a loop to other workers: leave it out")
        if strategy.validates:
            message = "looks at samples set apart, which a loop has for itself: use loss=training, or orchestra.train"
            yield Problem("strategy", name, message)
        if strategy.hands_over:
            message = "cannot hand over the momenta of an optimizer that stays with the loop: use momenta=reset"
            yield Problem("strategy", name, message)
        if strategy.watches and self.loader is None:
            yield Problem("loader", None, "must be given: the strategy looks at the loss of every epoch")
        if strategy.counts_down and self.steps is None:
            yield Problem("steps", None, "must be given: the strategy switches after a share of them")

    # What is to be done.

    def _factory(self) -> partial[optim.Optimizer]:
        """Makes an optimizer like the one given, for a server's range."""
        kind, group = type(self.optimizer), self.optimizer.param_groups[0]
        known = inspect.signature(kind).parameters
        return partial(kind, **{name: value for name, value in group.items() if name in known and name != "params"})

    def _job(self) -> Job:
        samples = None
        if self.loader is not None and not isinstance(self.loader.dataset, IterableDataset):
            samples = len(self.loader.sampler)  # type: ignore[arg-type]
        return Job(
            model=lambda: self.model,
            data=lambda: None,
            loss=lambda output, target: output,
            optimizer=self._factory(),
            strategy=self.strategy,
            workers=self.workers,
            batch=(self.loader.batch_size if self.loader is not None else None) or 1,
            seed=self.seed,
            device=next(iter(trainable(self.model).values())).device.type,
            one_memory=False,
            own_gpu=False,
            run=self.out or Path(),
            launch="",
            last_step=self.steps,
            last_epoch=None,
            schedule=None,
            validation=None,
            partition=None,
            clip=None,
            accumulate=1,
            bf16=False,
            tolerate=self.tolerate,
            snapshot_every=None,
            checkpoint_every=None,
            steps_per_epoch=None,
            samples_per_epoch=samples,
            shards=None,
            layers=tuple(tuple(p.shape) for p in trainable(self.model).values()),
            layerwise=type(self.optimizer) not in ELEMENTWISE or len(self.optimizer.param_groups) > 1,
            resume=None,
            threads=torch.get_num_threads(),
            delay=None,
        )

    def _about(self, job: Job) -> dict[str, Any]:
        """What all processes must have in common, the most telling first."""
        shapes = {name: (p.shape, p.dtype) for name, p in trainable(self.model).items()}
        return {
            "version of orchestra": orchestra.__version__,
            "version of torch": torch.__version__.partition("+")[0],
            "strategy": expression.show(self.strategy),
            "workers": job.workers,
            "servers": job.servers,
            "batch": job.batch,
            "seed": job.seed,
            "model": checkpoint.fingerprint(shapes),
            "data": "the loop's" if job.samples_per_epoch is None else f"{job.samples_per_epoch} samples",
            "optimizer": settings_of(self.optimizer),
            "steps": job.last_step,
            "tolerate": job.tolerate,
        }

    # Together.

    def run(self, asked: float) -> Any:
        """Join the others; as a server, serve, and end the script."""
        job, x0 = self._job(), flatten(self.model)
        transport, company = self._join(job, x0.cpu())
        log = self._open_log(job)
        meter = Metered(transport)
        comm = Comm(meter, *job.groups)
        if self.rank >= self.workers:
            serve(job, comm, meter, log, company, x0.cpu())
        replica = Taken(self.model, x0, torch.zeros_like(x0))
        spread_(comm, [x0, *persistent_buffers(self.model).values()])
        if self.rank == 0:
            for server, part in zip(comm.servers.members, job.placement, strict=True):
                comm.send(server, x0[part])
        shared = None
        if self.loader is not None:
            shared = Loader(self.loader, seed=self.seed, rank=self.rank, size=self.workers)
        feed = Given(job.batch, lambda: shared.position if shared is not None else 0.0)
        player = Player(self._life(job, comm, meter, log, replica, feed), feed, replica)
        company.go_in_step(lambda: player.life.node.steps if player.life.in_step else None)
        seat = Seat(player, company, self.model, shared)
        made = Prepared(self.optimizer, player, seat, usual=1 if shared is None else job.batch)
        self.model.register_forward_pre_hook(_begins(made))
        traffic = transport.traffic
        traffic.sent, traffic.received, traffic.waited = 0, 0, 0.0
        transport.began = time.perf_counter()
        log.write(Began(0.0, self.rank, "worker", transport.began - asked))
        if shared is None:
            return self.model, made
        shared.fetched = made.fetched
        return self.model, made, shared

    def _join(self, job: Job, x0: torch.Tensor) -> tuple[AttachedTransport, Company]:
        """This process's way to the others, if there are any."""
        buffers = sum(b.numel() for b in persistent_buffers(self.model).values())
        if job.workers + job.servers > 1:
            most = _DOUBLE * max(buffers, x0.numel())
            party = Party(job, x0, self.cluster, self._about(job), most=most)
            return party.transport, Company(party.exchange, self.rank, job.workers)
        traffic = Traffic()
        nobody = Exchange(0, 1, 0, {}, largest=1, patience=self.cluster.patience, traffic=traffic, summed=False)
        return AttachedTransport(0, 1, nobody, traffic), Company(nobody, 0, 1)

    def _open_log(self, job: Job) -> Log:
        if self.out is None:
            return _Nowhere()
        self.out.mkdir(parents=True, exist_ok=True)
        if self.rank == 0:
            config = self._about(job) | {
                "defining": self.strategy.defining,
                "parameters": job.parameters,
                "budget": [] if job.last_step is None else [f"steps={job.last_step}"],
                "threads": job.threads,
                "cluster": self.cluster.about() if self.together else {"kind": "alone"},
                "versions": {"torch": torch.__version__, "python": platform.python_version()},
                "note": self.note,
            }
            checkpoint.write_text(self.out / "config.json", json.dumps(config, indent=1))
        return EventLog(self.out / f"events-{self.rank}.jsonl")

    def _life(self, job: Job, comm: Comm, meter: Metered, log: Log, replica: Taken, feed: Given) -> run.Life:
        node = Node(
            comm,
            Inner.around(self.optimizer, replica.parameters),
            replica.x,
            log=log,
            seed=run.fold(job.seed, self.rank, 1),
            replica=replica,
            feed=feed,
            placement=job.placement,
            tolerate=job.tolerate,
            last_step=job.last_step,
        )
        return run.Life(job, node, meter, log, tell=lambda said: None, show=lambda row: None)


def _begins(optimizer: Prepared) -> Any:
    """A forward pass in training begins a step; one under no_grad, or of a model in evaluation, does not."""

    @torch.compiler.disable
    def begin(module: nn.Module, inputs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            optimizer.begin()

    return begin
