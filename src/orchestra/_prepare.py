# SPDX-License-Identifier: Apache-2.0
"""The same strategies under a training loop of one's own.

    import orchestra                                                                        # 1
    model, optimizer, loader = orchestra.prepare(model, optimizer, loader, strategy="slowmo")   # 2
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
    optimizer.finish()                                                                      # 3

Started once it is plain PyTorch; started several times (torchrun, `orchestra run`, `orchestra launch`, Slurm) every
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
from orchestra.engine.validate import refuse
from orchestra.errors import ConfigError, OrchestraError, Problem
from orchestra.model.adjusted_optimizer import factor_of
from orchestra.user_loop.arguments import LoopArguments, chosen_strategy
from orchestra.user_loop.exit_hooks import interrupted, tell_in_short
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
    """Let a strategy drive the optimizer of a loop that stays as it is; call `optimizer.finish()` after the loop.

    Every process of torchrun or `orchestra launch` is a worker; the last are the strategy's servers, if any: those
    serve in this call, and the script ends there. All begin with the model of worker 0. The loader is shared out among
    the workers: every sample once an epoch, in another order each time, batches of the size it was made with on each of
    them. Means are weighted by samples. Between two steps the parameters are the strategy's model as this worker has
    it. A parameter whose `.grad` is None stays as it is, as in PyTorch: in strategies that average gradients it must be
    None on all workers for that, or it counts as zero on those that have none.

    Args:
        model: stays the same object; its parameters become views of one vector.
        optimizer: over the model's parameters, with any schedulers, made before or after.
        loader: of the training samples. Without one every process reads its own, and `optimizer.step(samples=n)` says
            how many are behind a gradient, where not all have equally many.
        strategy: how the workers agree, as an object or as text: `"slowmo(tau=12)"`. What `orchestra run --strategy`
            says takes its place.
        cluster: `Attached(...)` with a token, patience and the like. Ranks stay as they were started. On a network that
            is `trusted`, torch takes the means of models that are not on GPUs.
        steps: how many each worker will make, for strategies that switch after a share of them.
        seed: of the order of samples, and of strategies that draw.
        out: a run folder, as `train` leaves it, at worker 0; machines that do not see it send their files there. None
            writes nothing.
        tolerate: gradients in a row that may be not finite before the run is given up.
        note: anything more to be kept in the run's configuration.

    """
    since = time.perf_counter()
    tell_in_short.install()
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
        told = interrupted(error, "before the loop began.")
        raise (error if told is None else told).with_traceback(None) from None


def _as_started(cluster: Any) -> Attached:
    """A loop knows its processes by the ranks they were started with.

    By them it reads samples of its own before it comes here, and finds what it saved: they must not depend on how fast
    the network is today. So latencies are not measured to choose another order, as `train` does.
    """
    if isinstance(cluster, Attached) and not isinstance(cluster.order, str):
        message = "a loop goes by the ranks that its processes were started with: leave it out, and start them so"
        raise ConfigError([Problem("cluster.order", cluster.order, message)])
    if cluster is not None and not isinstance(cluster, Attached) and cluster.workers > 1:
        message = (
            "a loop runs once in every process that it is started in: start it with torchrun --nproc-per-node "
            f"{cluster.workers}, or with `orchestra launch`"
        )
        raise ConfigError([Problem("workers", cluster.workers, message)])
    return replace(cluster if isinstance(cluster, Attached) else Attached(), order="given")
