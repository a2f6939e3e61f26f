# SPDX-License-Identifier: Apache-2.0
"""The settings of a run as text, to compare with a checkpoint or with the settings on another machine."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import orchestra.runs.budget as budgets
from orchestra.core.strategy import Strategy
from orchestra.data.feed import SampleStore
from orchestra.engine import checkpoint, expression
from orchestra.engine.spec import RunSpec, TrainArguments
from orchestra.model import param_groups, schedules
from orchestra.model.replica import persistent_buffers, trainable
from orchestra.runs.budget import Target

_LOOKED_AT = 16  # samples
_MOST = 12_000  # bytes about a model, its initial values, an optimizer, or its groups
_OPENING = 1 << 16  # elements
_SOON = 2.0  # seconds
_ADDRESS = re.compile(" at 0x[0-9a-f]+")  # of a function, say, in a module's settings
_PACKAGE = Path(__file__).resolve().parents[1]


class ModelCheck(Protocol):
    """Compares this process's model and data with those of the caller."""

    def require_same(self, module: nn.Module, data: Any, apart: Any, seed: int) -> None:
        """Raise if the model, the data or the validation samples differ from the caller's."""

    def require_same_outputs(self, module: nn.Module, data: Any, seed: int) -> None:
        """Raise if the model computes other outputs than the caller's with the same parameters."""


def initial(x: Tensor) -> str:
    """Return a hash of the initial parameters."""
    return hashlib.sha256(x.detach().cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()[:16]


def samples(data: Any) -> str | None:
    """Return a hash of some samples, if they hold tensors; None for a stream."""
    some = [field for _, fields in _some(data) for field in fields.values()]
    return _sum(some) if some else None


def about(spec: RunSpec, module: nn.Module) -> dict[str, Any]:
    """Return the settings under which a checkpoint can be resumed."""
    shapes = {name: (p.shape, p.dtype) for name, p in trainable(module).items()}
    found = {
        "strategy": expression.show(spec.strategy),
        "workers": spec.workers,
        "servers": spec.servers,
        "batch": spec.batch,
        "seed": spec.seed,
        "model": checkpoint.fingerprint(shapes),
        "data": "a stream" if spec.samples_per_epoch is None else f"{spec.samples_per_epoch} samples",
        "optimizer": settings_of(spec.optimizer(list(trainable(module).values()))),
        "schedule": expression.show(s) if isinstance(s := spec.schedule, schedules.Curve) else None,
        "precision": spec.precision,
        "clip": spec.clip,
        "accumulate": spec.accumulate,
        "partition": repr(spec.partition) if spec.partition is not None else "IID()",
        # The division of x among the nodes depends on the device.
        "device": f"{spec.device}, one each" if spec.uses_torch_collectives and spec.one_memory else spec.device,
    }
    if spec.one_memory:
        return found
    return found | {"x": "on every machine", "means": "by torch" if spec.uses_torch_collectives else "by messages"}


def fingerprint(version: str, spec: RunSpec, module: nn.Module, data: Any) -> dict[str, Any]:
    """Return what all processes of a run must have in common, part by part, the most informative differences first."""
    made_by = (spec.model, spec.data, spec.loss, spec.optimizer, spec.evaluate)
    optimizer = spec.optimizer(list(trainable(module).values()))
    return {
        **code(version, made_by),
        **in_parts(about(spec, module), spec.strategy, module, optimizer),
        "cluster": spec.cluster.about(),
        "budget": budget_of(spec),
        "tolerate": spec.tolerate,
        "loss": getattr(spec.loss, "__qualname__", type(spec.loss).__qualname__),
        "evaluate_every": repr(spec.evaluate_every),
        "checkpoint_every": repr(spec.checkpoint_every),
        **parts_of_beginning(module),
        **parts_of_data(data),
        **parts_of_validation(spec.validation_samples()),
    }


def code(version: str, given: Iterable[Any]) -> dict[str, Any]:
    """Return versions, and hashes of this package, of the script, and of the modules that define the given objects."""
    return {
        "version of orchestra": version,
        "version of torch": torch.__version__.partition("+")[0],
        "sources of orchestra": _sources(_PACKAGE),
        "script": _scripts(given),
    }


def versions(version: str) -> dict[str, str]:
    """Return the versions for people to read, and the commit of the working directory if it is in a repository."""
    found = {"orchestra": version, "torch": torch.__version__, "python": platform.python_version()}
    commit = _commit()
    return found if commit is None else found | {"the working directory": commit}


@lru_cache  # imported code does not change during the process
def _commit() -> str | None:
    """Return the commit of the working directory, and whether files differ from it; None if git does not answer."""
    how = ("--porcelain=v2", "--branch", "--no-ahead-behind", "--untracked-files=no", "--ignore-submodules=dirty")
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "status", *how]
    try:
        said = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_SOON, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    lines = said.decode(errors="replace").splitlines()
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    changed = any(not line.startswith("#") for line in lines)
    return None if commit == "(initial)" else commit[:12] + (" with changes" if changed else "")


@lru_cache
def _sources(folder: Path) -> dict[str, str]:
    """Return a hash for every file, so that the first that differs can be named."""
    return {path.relative_to(folder).as_posix(): _digest(path) for path in sorted(folder.rglob("*.py"))}


def _scripts(given: Iterable[Any]) -> dict[str, str]:
    """Return hashes of the user's own files, without their paths. Installed packages have a version instead."""
    installed = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    modules = {"__main__", *(_module_of(thing) for thing in given)}
    found = {}
    for name in sorted(modules):
        path = Path(getattr(sys.modules.get(name), "__file__", None) or "")
        if path.suffix == ".py" and path.is_file():
            whole = path.resolve()
            if not any(whole.is_relative_to(folder) for folder in (_PACKAGE, *installed)):
                found[path.name if name == "__main__" else name] = _digest(path)
    return found


def _module_of(thing: Any) -> str:
    """Return the module in which a function, a class, or the class of an object is defined."""
    while isinstance(thing, partial):
        thing = thing.func
    return str(getattr(thing, "__module__", None) or type(thing).__module__)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]


def budget_of(given: TrainArguments) -> list[str]:
    """Return a budget as text."""

    def value(part: Any) -> Any:
        return f"{part.metric}:{part.value}" if isinstance(part, Target) else part.count

    return [f"{type(part).__name__.lower()}={value(part)}" for part in budgets.parts(given.budget)]


def _some(data: Any) -> Iterator[tuple[int, dict[Any, Tensor]]]:
    """Yield samples spread over the data, each with its index and its fields by name or place; none of a stream."""
    if isinstance(data, IterableDataset):
        return
    whole = SampleStore(data)
    step = max(1, len(whole) // _LOOKED_AT)
    for index in range(0, len(whole), step)[:_LOOKED_AT]:
        # One by one: their shapes may differ, so that they form no batch.
        taken = whole.take([index])
        fields = taken.items() if isinstance(taken, Mapping) else enumerate(taken)
        yield index, {name: field for name, field in fields if isinstance(field, Tensor)}


def _sum(tensors: Iterable[Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:16]


def settings_of(optimizer: torch.optim.Optimizer) -> str:
    """Return an optimizer's class and hyper-parameters."""
    found = [dict(sorted(param_groups.settings(group).items())) for group in optimizer.param_groups]
    return f"{type(optimizer).__name__} {found}"


# Part by part, so that the first difference has a name.


def in_parts(
    about: dict[str, Any], strategy: Strategy[Any], module: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return the settings of a run, with composite settings replaced by their parts."""
    parts = {
        "strategy": parts_of_strategy(strategy),
        "model": parts_of_model(module),
        "optimizer": parts_of_optimizer(optimizer) | parts_of_groups(optimizer, module),
    }
    found: dict[str, Any] = {}
    for name, value in about.items():
        found |= parts.get(name, {name: value})
    return found


def parts_of_strategy(strategy: Any) -> dict[str, Any]:
    """Return the name of a strategy and each of its settings.

    >>> parts_of_strategy(expression.parse("localsgd(tau=3)"))
    {'strategy': 'localsgd', 'tau of the strategy': 3}
    """
    found = {field.name: getattr(strategy, field.name) for field in fields(strategy)}
    shown = {name: expression.show(v) if is_dataclass(v) else _plain(v) for name, v in found.items()}
    called = expression.show(strategy).partition("(")[0]
    return {"strategy": called} | {f"{name} of the strategy": value for name, value in shown.items()}


def parts_of_model(module: nn.Module) -> dict[str, str]:
    """Return the shape of every parameter and buffer, frozen ones included, and the class and settings of every module.

    >>> parts_of_model(nn.Linear(3, 2, bias=False))
    {'parameter weight': '2×3 float32', 'model': 'Linear(in_features=3, out_features=2, bias=False)'}
    """
    found = {f"parameter {name}": shape_of(p) for name, p in module.named_parameters()}
    found |= {f"buffer {name}": shape_of(b) for name, b in persistent_buffers(module).items()}
    found |= modules_of(module)
    return _no_longer_than(_MOST, found, "what else the model has")


def modules_of(module: nn.Module) -> dict[str, str]:
    """Return the class of every module, in order, and its settings as it prints them."""
    found = {}
    for name, part in module.named_modules(remove_duplicate=False):
        try:
            settings = _ADDRESS.sub("", part.extra_repr())
        except Exception:  # of user code
            settings = ""
        found[f"module {name}" if name else "model"] = type(part).__name__ + (f"({settings})" if settings else "")
    return found


def parts_of_beginning(module: nn.Module) -> dict[str, str]:
    """Return a hash of every parameter and buffer before the first step."""
    found = {**dict(module.named_parameters()), **persistent_buffers(module)}
    sums = {f"sum of the initial {name}": _sum([tensor])[:8] for name, tensor in found.items()}
    return _no_longer_than(_MOST, sums, "what else the model begins with")


def parts_of_validation(apart: Any) -> dict[str, str | int]:
    """Return the number of validation samples, if there are any, and the shapes and a hash of some."""
    if apart is None:
        return {}
    return {"number of validation samples": len(SampleStore(apart)), **parts_of_data(apart, "validation sample")}


def parts_of_data(data: Any, what: str = "sample") -> dict[str, str]:
    """Return the shapes and a hash of some samples.

    >>> parts_of_data((torch.zeros(2, 3), torch.tensor([1, 2])))["sample 1"]
    '3 float32, a number int64, in sum 772ba160'
    """
    return {
        f"{what} {index}": ", ".join([*map(_field, sample.items()), f"in sum {_sum(sample.values())[:8]}"])
        for index, sample in _some(data)
    }


def _field(entry: tuple[Any, Tensor]) -> str:
    """Return the shape of a field of a sample, with its name if it has one."""
    name, field = entry
    return f"{name} {shape_of(field[0])}" if isinstance(name, str) else shape_of(field[0])


def parts_of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return an optimizer's class and every hyper-parameter; of further groups those that differ from the first.

    >>> parts_of_optimizer(torch.optim.Rprop(nn.Linear(3, 2).parameters(), lr=0.1))["lr of the optimizer"]
    0.1
    """
    first, *others = [
        {name: _plain(value) for name, value in sorted(param_groups.settings(group).items())}
        for group in optimizer.param_groups
    ]
    found: dict[str, Any] = {"optimizer": type(optimizer).__name__, "groups of the optimizer": 1 + len(others)}
    found |= {f"{name} of the optimizer": value for name, value in first.items()}
    for number, group in enumerate(others, start=1):
        own = {name: value for name, value in group.items() if value != first.get(name)}
        found |= {f"{name} of group {number} of the optimizer": value for name, value in own.items()}
    return _no_longer_than(_MOST, found, "what else the optimizer has")


def parts_of_groups(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return the group of every layer; nothing if there is only one group."""
    layers = trainable(module)
    if param_groups.is_one(optimizer, [*layers.values()]):
        return {}
    numbers = param_groups.members(optimizer, [*layers.values()])
    found = {f"group of {name}": number for name, number in zip(layers, numbers, strict=True)}
    return _no_longer_than(_MOST, found, "the groups of what else there is")


def shape_of(p: Tensor) -> str:
    """Return shape and dtype as text, and whether a parameter is frozen."""
    frozen = ", frozen" if isinstance(p, nn.Parameter) and not p.requires_grad else ""
    return f"{'×'.join(map(str, p.shape)) or 'a number'} {str(p.dtype).removeprefix('torch.')}{frozen}"


def opening_sum(tensor: Tensor) -> str:
    """Return a hash of the first elements of a tensor, which may be very large."""
    return _sum([tensor.reshape(-1)[:_OPENING]])


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, int | float | str) else str(value)


def _no_longer_than(most: int, found: dict[str, Any], rest: str) -> dict[str, Any]:
    """Return the entries that fit into `most` bytes, and a hash of the rest under the name `rest`."""
    kept: dict[str, Any] = {}
    for name, value in found.items():
        most -= len(json.dumps({name: value}))
        if most < 0:
            break
        kept[name] = value
    if len(kept) == len(found):
        return kept
    others = [entry for entry in found.items() if entry[0] not in kept]
    return kept | {rest: hashlib.sha256(repr(others).encode()).hexdigest()[:16]}
