# SPDX-License-Identifier: Apache-2.0
"""Wrappers of torch.distributed, which must not be used with a prepared model: their averages replace the strategy's.

torch calls a hook whenever a module becomes part of another, so a wrapper around a prepared model is refused while it
is constructed. A wrapper from before `orchestra.prepare` is refused when it calls the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from orchestra.engine.checks import check_layers
from orchestra.engine.validate import refuse
from orchestra.errors import Problem

# By name: FSDP takes long to import, and other packages have wrappers of the same names.
_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}


def problems_of(model: nn.Module, workers: int) -> Iterator[Problem]:
    """Yield wrappers, and layers that need a process group of torch.distributed."""
    for name, part in model.named_modules():
        if _is_wrapper(part):
            yield _wrapped(part, name)
    yield from check_layers(model, workers)


def refuse_caller() -> None:
    """Raise if the model is called by a DistributedDataParallel wrapper."""
    wrapper = DistributedDataParallel._active_ddp_module  # set by the wrapper for as long as it calls its module
    if wrapper is not None:
        refuse([_wrapped(wrapper, "")])


def refuse_later(model: nn.Module, workers: int) -> RemovableHandle:
    """Raise as soon as a wrapper is put around the model or a part of it, or a SyncBatchNorm layer into it."""
    there = weakref.ref(model)

    def look(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is None or not (_is_wrapper(parent) or isinstance(child, nn.SyncBatchNorm)):
            return
        ours = there()
        if ours is None or {*ours.modules(), *ours.parameters()}.isdisjoint(
            [parent, *child.modules(), *child.parameters()]
        ):
            return  # this is another model
        refuse([_wrapped(parent, "")] if _is_wrapper(parent) else check_layers(child, workers, name))

    return register_module_module_registration_hook(look)


def _is_wrapper(module: nn.Module) -> bool:
    return any(kind.__name__ in _WRAPPERS for kind in type(module).__mro__)


def _wrapped(wrapper: nn.Module, name: str) -> Problem:
    message = (
        "averages the gradients or parameters at every step, which turns any strategy into all-reduce: leave the "
        "wrapper out, and train the module itself under orchestra.prepare"
    )
    return Problem(f"model.{name}".rstrip("."), type(wrapper).__name__, message)
