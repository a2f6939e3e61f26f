# SPDX-License-Identifier: Apache-2.0
"""Warnings before a run starts, about settings that work but are probably a mistake."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn, optim

from orchestra.core.strategy import Strategy
from orchestra.data.batches import Pieces, each, loss_of, pieces
from orchestra.data.partitions import Dirichlet, Partition
from orchestra.data.random_state import left_alone
from orchestra.engine.expression import show
from orchestra.formatting import plural
from orchestra.strategies.catalogue import StrategySwitch

_EXACT = 1e-3  # relative error up to which a loss counts as the sum of the losses of two parts
_CLEAR = 1e-2  # relative error above which it is not their mean, and relative size above which a part matters
_NAMED = 8  # workers without samples that are named
_LARGE = 0.9  # momentum
_said: set[str] = set()  # by this process
_silent: ContextVar[bool] = ContextVar("orchestra-silent", default=False)
_once: ContextVar[bool] = ContextVar("orchestra-once", default=False)
_momentum_tuned: ContextVar[bool] = ContextVar("orchestra-momentum-tuned", default=False)


def say(*warnings: str | None) -> list[str]:
    """Print the warnings that are not None to standard error, and return them."""
    found = [warning for warning in warnings if warning is not None]
    for warning in () if _silent.get() else found:
        if not (_once.get() and was_said(warning)):
            print(f"warning: {warning}", file=sys.stderr)
            _said.add(warning)
    return found


def was_said(warning: str) -> bool:
    """Return whether this process has printed a warning already."""
    return warning in _said


@contextmanager
def silent() -> Iterator[None]:
    """Print no warnings inside."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


@contextmanager
def once(*, momentum_tuned: bool) -> Iterator[None]:
    """Print no warning a second time. If momentum was tuned, do not warn about it: momentum 0 was tried as well."""
    tokens = _once.set(True), _momentum_tuned.set(momentum_tuned)
    try:
        yield
    finally:
        _once.reset(tokens[0])
        _momentum_tuned.reset(tokens[1])


def about_shards(shards: Sequence[int] | None, partition: Partition | None) -> str | None:
    """Warn about workers whose shard is empty.

    >>> about_shards([9, 0, 4], Dirichlet(alpha=0.01))
    'worker 1 of 3 has no samples (partition Dirichlet(alpha=0.01)): it only takes part in the exchange, and its \
BatchNorm statistics have weight zero. Use a larger alpha, fewer workers, or another seed.'
    """
    empty = [worker for worker, count in enumerate(shards or ()) if not count]
    if not empty or shards is None:
        return None
    one = len(empty) == 1
    names = ", ".join(map(str, empty[:_NAMED])) + (", …" if len(empty) > _NAMED else "")
    which = f"worker {names} of {len(shards)} has" if one else f"workers {names} of {len(shards)} have"
    does = "it only takes" if one else "they only take"
    remedy = "a larger alpha" if isinstance(partition, Dirichlet) else "another partition"
    return (
        f"{which} no samples (partition {partition}): {does} part in the exchange, and {'its' if one else 'their'} "
        f"BatchNorm statistics have weight zero. Use {remedy}, fewer workers, or another seed."
    )


def about_momentum(
    strategy: Strategy[Any], optimizer: optim.Optimizer, workers: int, *, options: bool = False
) -> str | None:
    """Warn about momentum of 0.9 or more where a server applies stale gradients; `options`: of a command line.

    The two together swing with hardly any damping, until noise throws the model out: see `StrategySwitch`. Without
    momentum and with γ/(1 − μ), divided by N where each gradient is an update, x moves as far and the swing is damped.
    """
    for group in optimizer.param_groups if workers > 1 and not _momentum_tuned.get() else ():
        for part, momentum, given in _phases(strategy, group.get("momentum") or 0.0, workers):
            if part.layout.updates.stale and momentum >= _LARGE:
                rate = group["lr"] / (1 - momentum) / part.layout.updates.per_round_of(workers)
                typed = f"--momentum 0 --lr {rate:.2g}" if options else f"momentum=0 and lr={rate:.2g} in the optimizer"
                remedy = "momentum=0 in the strategy" if given else typed
                name = show(part) if options else type(part).__name__
                return (
                    f"{name} applies gradients that are several updates old, and momentum "
                    f"{momentum:g} amplifies them: training may collapse, with some seeds and not with others. "
                    f"Use {remedy}, or a learning rate far below that of allreduce."
                )
    return None


def _phases(strategy: Strategy[Any], own: float, workers: int) -> Iterator[tuple[Strategy[Any], float, bool]]:
    """Yield each phase's strategy, its momentum, and whether the momentum is an option of the strategy."""

    def updates(part: Strategy[Any]) -> float:
        return part.layout.updates.per_round_of(workers)

    if not isinstance(strategy, StrategySwitch):
        yield strategy, own, False
        return
    yield strategy.first, own, False
    if strategy.momentum is not None:
        yield strategy.then, strategy.momentum if own else 0.0, True
    elif updates(strategy.then) <= updates(strategy.first):  # else there will be no momentum
        yield strategy.then, own, False


def about_loss(module: nn.Module, batch: Pieces, loss: Any) -> str | None:
    """Warn about a loss that is a sum over the samples; `module` is a copy that may be changed.

    A mean over a batch is the weighted mean of the losses of two parts of it, a sum is their sum. This compares both
    parts of two cuts, in evaluation mode, so that a sample's loss does not depend on the others. It says nothing about
    a loss that is neither, or that raises.
    """
    try:
        with left_alone(), torch.no_grad():
            found = list(_losses(module.eval(), batch, copy.deepcopy(loss)))
    except Exception:  # of user code, which was not written for this; training itself reports what is wrong
        return None
    if not found or not (all(map(_is_sum, found)) or all(map(_is_sum, _without_constant(found)))):
        return None
    count, (whole, first, second, _) = len(pieces(batch)[0]), found[0]
    return (
        f"the loss of {plural(count, 'sample')} is {whole:.4g}, the sum of the losses of its two parts, {first:.4g} "
        f"and {second:.4g}: the loss is a sum over the samples, not their mean, so steps grow with the batch. Use "
        'reduction="mean", or divide by the number of samples.'
    )


def _losses(module: nn.Module, batch: Pieces, loss: Any) -> Iterator[tuple[float, float, float, float]]:
    """Yield for several cuts: the loss of a batch, those of its two parts, and the share of the first part."""
    count = len(pieces(batch)[0])

    def of(start: int, stop: int) -> float:
        return float(loss_of(module, each(lambda piece: piece[start:stop], batch), loss))

    whole = of(0, count)
    for cut in sorted({count // 2, count // 4} - {0}, reverse=True):
        yield whole, of(0, cut), of(cut, count), cut / count


def _without_constant(found: list[tuple[float, float, float, float]]) -> list[tuple[float, float, float, float]]:
    """Subtract a constant that is added to every loss, such as a penalty on the parameters."""
    constant = math.fsum(first + second - whole for whole, first, second, _ in found) / len(found)
    if len(found) < 2:  # nothing to compare it with
        return [(0.0, 0.0, 0.0, 0.0)]
    return [(whole - constant, first - constant, second - constant, share) for whole, first, second, share in found]


def _is_sum(losses: tuple[float, float, float, float]) -> bool:
    """Return whether a loss is the sum of the losses of two parts, and clearly not their weighted mean."""
    whole, first, second, share = losses
    if not all(map(math.isfinite, losses)):
        return False
    size = abs(whole)
    is_sum = abs(first + second - whole) <= _EXACT * size
    is_mean = abs(share * first + (1 - share) * second - whole) <= _CLEAR * size
    return is_sum and not is_mean and min(abs(first), abs(second)) > _CLEAR * size
