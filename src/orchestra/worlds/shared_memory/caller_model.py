# SPDX-License-Identifier: Apache-2.0
"""A description of the caller's model and data, with which its processes compare their own.

Every process calls the factories of model and data itself. Sets of strings have another order in every program, so
layers registered from a set may differ in order, and a label map made from a set gives other labels.

    modules                   matched by name: every process puts those of a container into the caller's order
    parameters in x           matched by name: every process uses the caller's order (`RunSpec.names`)
    frozen ones, buffers      matched by name: every process copies the caller's values
    kinds of modules          compared, with their settings: not all have parameters
    samples                   compared: their number and a hash of some of them; also the validation samples
    outputs                   compared, for a few samples: a forward pass may still use another order
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset

from orchestra.data.batches import each, output_of
from orchestra.data.feed import SampleStore
from orchestra.data.random_state import left_alone, seed_everything
from orchestra.engine.fingerprint import modules_of, opening_sum, parts_of_data, parts_of_validation, shape_of
from orchestra.errors import ClusterError

_CARRIED = 64 << 20  # maximum bytes of frozen parameters and buffers to send; beyond, only a hash is compared
_FEW = 4  # samples whose outputs are compared
_NUMBERS = 4096  # elements of an output that are compared
_ROUNDING = 0.01  # tolerance relative to the outputs' norm; processes may round differently, or use a GPU


@dataclass(frozen=True)
class CallerModel:
    """The description of the caller's model and data."""

    shapes: dict[str, str]  # of parameters and buffers
    modules: dict[str, str]  # class and settings of each
    values: dict[str, Tensor | str]  # of frozen parameters and buffers
    children: dict[str, list[str]]  # of every module, in order
    samples: dict[str, str | int]
    drawn: bool  # samples differ from one reading to the next
    outputs: list[Tensor]  # of the model for a few samples; empty if they are drawn
    hashed: int  # the hash of a string, which shows the caller's hash seed

    @classmethod
    def of(cls, module: nn.Module, data: Any, apart: Any, seed: int) -> CallerModel:
        """Describe the caller's model and data."""
        shapes, every = _shapes(module), _fixed(module)
        fixed = {name: every[name] for name in shapes if name in every}
        small = sum(tensor.nbytes for tensor in fixed.values()) <= _CARRIED
        values = {name: t.detach().cpu().clone() if small else opening_sum(t) for name, t in fixed.items()}
        first, second = (_samples(data, apart, seed) for _ in range(2))
        # Samples that differ at a second reading are drawn at random, so that no process can have the same.
        drawn = first != second
        known = {name: _shape_alone(value) for name, value in first.items()} if drawn else first
        outputs = [] if drawn else _outputs(module, data, seed)
        if not _are_near(outputs, _outputs(module, data, seed), 0.0):
            outputs = []
        return cls(shapes, modules_of(module), values, _children(module), known, drawn, outputs, hash(__name__))

    @torch.no_grad()
    def require_same(self, module: nn.Module, data: Any, apart: Any, seed: int) -> None:
        """Raise if this process has another model or other data; copy the caller's frozen parameters and buffers.

        `apart`: the validation samples, if there are any.
        """
        self._compare_model(module)
        self._put_in_order(module)
        fixed = _fixed(module)
        for name, value in self.values.items():
            if isinstance(value, Tensor):
                fixed[name].copy_(value)
            elif opening_sum(fixed[name]) != value:
                raise self._differs(f"the initial {name} has other values in the caller than in the processes")
        here = _samples(data, apart, seed)
        for name, sample in self.samples.items():
            there = here.get(name, "")
            if (_shape_alone(there) if self.drawn else there) != sample:
                raise self._differs(f"{name} is {sample!r} in the caller and {there!r} in the processes")

    def require_same_outputs(self, module: nn.Module, data: Any, seed: int) -> None:
        """Raise if the model computes other outputs in this process with the caller's parameters."""
        if self.outputs and (here := _outputs(module, data, seed)) and not _are_near(self.outputs, here, _ROUNDING):
            caller, process = (f"{float(outputs[0].norm()):.6g}" for outputs in (self.outputs, here))
            how = (
                "with the same parameters the model computes something else for the same samples; the norm of its "
                f"output is {caller} in the caller and {process} in the processes"
            )
            raise self._differs(how)

    def _put_in_order(self, module: nn.Module) -> None:
        """Put the modules of every container into the caller's order, in which the container may call them."""
        for name, part in module.named_modules():
            names = self.children.get(name, [])
            if names != [*part._modules] and {*names} == {*part._modules}:
                ordered = {child: part._modules[child] for child in names}
                part._modules.clear()
                part._modules.update(ordered)

    def _compare_model(self, module: nn.Module) -> None:
        every = _everything(module)
        taken: dict[int, str] = {}
        for name, shape in self.shapes.items():
            if name not in every:
                raise self._differs(f"{name} ({shape}) is in the caller only")
            if (there := shape_of(every[name])) != shape:
                raise self._differs(f"{name} is {shape!r} in the caller and {there!r} in the processes")
            if (other := taken.setdefault(id(every[name]), name)) != name:
                raise self._differs(f"{other} and {name} are separate in the caller and one tensor in the processes")
        for name, tensor in every.items():
            if id(tensor) not in taken:
                raise self._differs(f"{name} is in the processes only")
        here = modules_of(module)
        for name in [*self.modules, *here]:
            if (mine := self.modules.get(name, "")) != (there := here.get(name, "")):
                raise self._differs(f"{name} is {mine!r} in the caller and {there!r} in the processes")

    def _differs(self, how: str) -> ClusterError:
        """Return an error that names a difference and its remedy."""
        if self.hashed == hash(__name__):
            advice = "The factories of model and data must make the same in every process."
        else:
            advice = (
                "Sets of texts have another order in every program: where the model or the data are made from a set, "
                "sort it, or start the program with PYTHONHASHSEED=0 in its environment."
            )
        return ClusterError(f"the model or the data of the processes differ from the caller's: {how}. {advice}")


def _everything(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, under every name that they have."""
    found: dict[str, Tensor] = {f"parameter {n}": p for n, p in module.named_parameters(remove_duplicate=False)}
    return found | {f"buffer {n}": b for n, b in module.named_buffers(remove_duplicate=False)}


def _shapes(module: nn.Module) -> dict[str, str]:
    """Return the shape of every parameter and buffer, each once."""
    found = {f"parameter {n}": shape_of(p) for n, p in module.named_parameters()}
    return found | {f"buffer {n}": shape_of(b) for n, b in module.named_buffers()}


def _fixed(module: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters and the buffers."""
    return {name: t for name, t in _everything(module).items() if not t.requires_grad}


def _samples(data: Any, apart: Any, seed: int) -> dict[str, str | int]:
    """Return the number of samples, and shapes and hashes of some; nothing of a stream, which can be read only once."""
    seed_everything(seed)  # samples may be drawn
    found = parts_of_validation(apart)
    if isinstance(data, IterableDataset):
        return found
    return {"number of samples": len(SampleStore(data)), **parts_of_data(data), **found}


def _shape_alone(sample: str | int) -> str | int:
    return sample if isinstance(sample, int) else sample.partition(", in sum ")[0]


def _children(module: nn.Module) -> dict[str, list[str]]:
    """Return the names of the modules in every module that has several."""
    return {name: [*part._modules] for name, part in module.named_modules() if len(part._modules) > 1}


def _outputs(module: nn.Module, data: Any, seed: int) -> list[Tensor]:
    """Return the model's outputs in evaluation mode for a few samples; nothing if that fails."""
    if isinstance(data, IterableDataset):
        return []
    try:
        with left_alone(), torch.no_grad():
            seed_everything(seed)
            samples = SampleStore(data)
            device = next(module.parameters()).device
            batch = each(lambda piece: piece.to(device), samples.take(range(min(_FEW, len(samples)))))
            found = output_of(copy.deepcopy(module).eval(), batch)
    except Exception:  # of user code, which was not written for this; training itself reports what is wrong
        return []
    tensors = [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return [tensor.detach().cpu().reshape(-1)[:_NUMBERS].double() for tensor in tensors]


def _are_near(mine: list[Tensor], others: list[Tensor], rounding: float) -> bool:
    """Return whether outputs are equal up to a fraction of their norm."""
    if [a.shape for a in mine] != [b.shape for b in others]:
        return False
    pairs = [(a, b) for a, b in zip(mine, others, strict=True) if bool(a.isfinite().all())]
    return all(bool((a - b).norm() <= rounding * a.norm()) for a, b in pairs)
