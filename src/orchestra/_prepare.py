# SPDX-License-Identifier: Apache-2.0
"""`prepare`: strategies under the user's own training loop.

    import orchestra                                                                        # 1
    model, optimizer, loader = orchestra.prepare(model, optimizer, loader, strategy="slowmo")   # 2
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    optimizer.finish()                                                                      # 3

Started once, it is plain PyTorch; started several times (torchrun, `orchestra run`, `orchestra launch`, Slurm), every
process is a worker, or one of the strategy's servers.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, overload

from torch import nn, optim
from torch.utils.data import DataLoader

from orchestra.clusters.attached import Attached
from orchestra.core.strategy import Strategy
from orchestra.engine import overrides
from orchestra.engine.tracebacks import error_printer
from orchestra.engine.validate import refuse
from orchestra.errors import ConfigError, OrchestraError, Problem
from orchestra.model.adjusted_optimizer import factor_of
from orchestra.user_loop.arguments import LoopArguments, chosen_strategy
from orchestra.user_loop.exit_hooks import interrupted
from orchestra.user_loop.joining import join
from orchestra.user_loop.loader import Loader
from orchestra.user_loop.optimizer import PreparedOptimizer

M = TypeVar("M", bound=nn.Module)


@overload
def prepare(
    model: M,
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
) -> tuple[M, PreparedOptimizer]: ...


@overload
def prepare(
    model: M,
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
) -> tuple[M, PreparedOptimizer, Loader]: ...


def prepare(
    model: M,
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
) -> tuple[M, PreparedOptimizer] | tuple[M, PreparedOptimizer, Loader]:
    """Let a strategy do the optimizer steps of a loop; call `optimizer.finish()` after the loop.

    Every process of torchrun or `orchestra launch` is a worker; the last are the strategy's servers, if any: those
    serve in this call, and their script ends there. All begin with the model of worker 0. The loader is divided among
    the workers: every sample once per epoch, in another order each time, in batches of the loader's size on each
    worker. Means are weighted by samples. Between two steps the parameters are the strategy's model on this worker. A
    parameter whose `.grad` is None stays as it is, as in PyTorch: in strategies that average gradients this requires
    that it is None on all workers; otherwise it counts as zero on those where it is None.

    Args:
        model: stays the same object; its parameters become views of one vector.
        optimizer: over the model's parameters, with any schedulers, created before or after.
        loader: of the training samples. Without a loader every process reads its own samples; if their numbers differ,
            pass the number behind each gradient to `optimizer.step(samples=n)`.
        strategy: an object, or text such as `"slowmo(tau=12)"`. `orchestra run --strategy` replaces it.
        cluster: `Attached(...)` with a token, patience and the like. Ranks stay as they were started. On a `trusted`
            network, torch.distributed does the all-reduces of models that are not on GPUs.
        steps: the number of steps of each worker, for strategies that switch after a share of them.
        seed: of the order of samples, and of strategies that draw random numbers.
        out: a run folder at worker 0, with the same files as those of `train`; machines that cannot see it send their
            files there. None writes nothing.
        tolerate: how many gradients in a row may be not finite before the run fails.
        note: further entries for the run's configuration.

    """
    since = time.perf_counter()
    error_printer.install()
    try:
        own = {"strategy": strategy, "cluster": cluster, "seed": seed, "out": out, "note": note}
        said = overrides.of_a_loop({**own, "optimizer": lambda _: optimizer})
        asked = LoopArguments(
            model=model, optimizer=optimizer, loader=loader, cluster=_as_started(said["cluster"]), steps=steps,
            seed=said["seed"], strategy=chosen_strategy(strategy, said["strategy"]), tolerate=tolerate,
            out=None if said["out"] is None else Path(said["out"]), note=said["note"] or {},
            lr_factor=factor_of(said["optimizer"]),
        )  # fmt: skip
        refuse(asked.problems())
        made, shared = join(asked, since)
        return (model, made) if shared is None else (model, made, shared)
    except (OrchestraError, KeyboardInterrupt) as error:
        failure = interrupted(error, "before the loop began.")
        raise (error if failure is None else failure).with_traceback(None) from None


def _as_started(cluster: Any) -> Attached:
    """Return the cluster with the ranks with which the processes were started.

    A loop may use its rank before this call, to read its own samples and to find its files, so ranks must not depend on
    measured latencies, as they do in `train`.
    """
    if isinstance(cluster, Attached) and not isinstance(cluster.order, str):
        message = "a loop uses the ranks with which its processes were started: leave it out"
        raise ConfigError([Problem("cluster.order", cluster.order, message)])
    if cluster is not None and not isinstance(cluster, Attached) and cluster.workers > 1:
        message = (
            "a loop runs once in every process that it is started in: start it with torchrun --nproc-per-node "
            f"{cluster.workers}, or with `orchestra launch`"
        )
        raise ConfigError([Problem("workers", cluster.workers, message)])
    return replace(cluster if isinstance(cluster, Attached) else Attached(), order="given")
