# SPDX-License-Identifier: Apache-2.0
"""The caller's model and data, for its processes to compare with their own.

Every process calls the factories of model and data itself. Sets of texts have another order in every program, so that
layers registered from a set come in another order; a label map made from a set gives other labels.

    parameters in x           matched by name: every process takes them in the caller's order (`Job.names`)
    frozen ones, buffers      matched by name: every process takes over the caller's values
    samples                   compared: their number and a sum of some of them
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from orchestra.data.feed import Samples
from orchestra.errors import ClusterError
from orchestra.fingerprint import opening_sum, parts_of_data, shape_of
from orchestra.rng import seed_everything

_CARRIED = 64 << 20  # bytes of frozen parameters and buffers; of more, only a sum is compared


@dataclass(frozen=True)
class Origin:
    """What the caller has."""

    shapes: dict[str, str]  # of parameters and buffers
    values: dict[str, Tensor | str]  # of those that are not in x
    samples: dict[str, str | int]
    hashed: int  # a text, by the caller's hash seed

    @classmethod
    def of(cls, module: nn.Module, data: Any, seed: int) -> Origin:
        """Describe the caller's model and data."""
        shapes, every = _shapes(module), _fixed(module)
        fixed = {name: every[name] for name in shapes if name in every}
        small = sum(tensor.nbytes for tensor in fixed.values()) <= _CARRIED
        values = {name: t.detach().cpu().clone() if small else opening_sum(t) for name, t in fixed.items()}
        first, second = (_samples(data, seed) for _ in range(2))
        # A sample that the caller itself reads differently the second time is drawn: no process can have the same.
        known = {name: value for name, value in first.items() if second[name] == value}
        return cls(shapes, values, known, hash(__name__))

    @torch.no_grad()
    def require_same(self, module: nn.Module, data: Any, seed: int) -> None:
        """Raise if this process has another model or other data; take over the caller's values of what is not in x."""
        self._compare_model(module)
        fixed = _fixed(module)
        for name, value in self.values.items():
            if isinstance(value, Tensor):
                fixed[name].copy_(value)
            elif opening_sum(fixed[name]) != value:
                raise self._differs(f"the initial {name} has other values in the caller than in the processes")
        here = _samples(data, seed)
        for name, sample in self.samples.items():
            if here.get(name) != sample:
                raise self._differs(f"{name} is {sample!r} in the caller and {here.get(name)!r} in the processes")

    def _compare_model(self, module: nn.Module) -> None:
        every = _everything(module)
        taken: dict[int, str] = {}
        for name, shape in self.shapes.items():
            if name not in every:
                raise self._differs(f"{name} ({shape}) is in the caller only")
            if (there := shape_of(every[name])) != shape:
                raise self._differs(f"{name} is {shape!r} in the caller and {there!r} in the processes")
            if (other := taken.setdefault(id(every[name]), name)) != name:
                raise self._differs(f"{other} and {name} are two in the caller and one and the same in the processes")
        for name, tensor in every.items():
            if id(tensor) not in taken:
                raise self._differs(f"{name} is in the processes only")

    def _differs(self, how: str) -> ClusterError:
        """Name a difference and what to do about it."""
        if self.hashed == hash(__name__):
            advice = "The factories of model and data must make the same in every process."
        else:
            advice = (
                "Sets of texts have another order in every program: where the model or the data are made from a set, "
                "sort it, or start the program with PYTHONHASHSEED=0 in its environment."
            )
        return ClusterError(f"the caller and its processes have made different things: {how}. {advice}")


def _everything(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, under every name that they have."""
    found: dict[str, Tensor] = {f"parameter {n}": p for n, p in module.named_parameters(remove_duplicate=False)}
    return found | {f"buffer {n}": b for n, b in module.named_buffers(remove_duplicate=False)}


def _shapes(module: nn.Module) -> dict[str, str]:
    """The shape of every parameter and buffer, each once."""
    found = {f"parameter {n}": shape_of(p) for n, p in module.named_parameters()}
    return found | {f"buffer {n}": shape_of(b) for n, b in module.named_buffers()}


def _fixed(module: nn.Module) -> dict[str, Tensor]:
    """What is not in x."""
    return {name: t for name, t in _everything(module).items() if not t.requires_grad}


def _samples(data: Any, seed: int) -> dict[str, str | int]:
    """The number of samples, and of some the shapes and a sum; nothing of a stream, which may be read only once."""
    if isinstance(data, IterableDataset):
        return {}
    seed_everything(seed)  # samples may be drawn
    return {"number of samples": len(Samples(data)), **parts_of_data(data)}
