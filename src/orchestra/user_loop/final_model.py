# SPDX-License-Identifier: Apache-2.0
"""The check that all workers end with one model.

each worker gathers the checksum of every parameter from all workers
a checksum differs:   worker 0 broadcasts its values; each worker sends its distance from them
    above rounding    an error that names the parameter and the workers
    below             all use the values of worker 0
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from orchestra.core.comm import Comm
from orchestra.core.vectors import checksum
from orchestra.errors import ConfigError, Problem
from orchestra.formatting import plural
from orchestra.model.replica import persistent_buffers

_PIECE = 1 << 12  # bytes of a parameter per message, which any connection can send


def named(also: Iterable[nn.Module | Tensor]) -> dict[str, Tensor]:
    """Return the parameters and buffers of modules, and tensors, by a name with their place among the arguments."""
    return {name: tensor for place, one in enumerate(also) for name, tensor in _parts(f"also[{place}]", one)}


def running(also: Iterable[nn.Module | Tensor]) -> list[Tensor]:
    """Return the floating-point buffers of modules: statistics of the samples that a worker saw."""
    modules = [one for one in also if isinstance(one, nn.Module)]
    return [b for one in modules for b in persistent_buffers(one).values() if b.is_floating_point()]


def _parts(place: str, one: nn.Module | Tensor) -> Iterator[tuple[str, Tensor]]:
    if isinstance(one, Tensor) and not one.is_complex():
        yield place, one
    elif isinstance(one, nn.Module):
        for name, tensor in (*one.named_parameters(), *persistent_buffers(one).items()):
            yield f"{place}.{name}", tensor
    else:
        raise ConfigError([Problem(place, type(one).__name__, "must be a module or a tensor of real numbers")])


def other_layout(comm: Comm, tensors: Mapping[str, Tensor]) -> Problem | None:
    """Return a problem that names workers that gave other tensors to `finish(also=...)` than worker 0."""
    text = "; ".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items())
    rows = _gather(comm, torch.tensor([zlib.crc32(text.encode()), len(tensors)]))
    odd = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if not odd:
        return None
    message = (
        f"holds {plural(int(rows[0][1]), 'tensor')} on worker 0, and others on {_workers(odd)} "
        f"({', '.join(str(int(rows[rank][1])) for rank in odd)}): give the same modules in every process"
    )
    return Problem("also", [*tensors], message)


@torch.no_grad()
def differing(comm: Comm, parameters: Mapping[str, Tensor]) -> str | None:
    """Compare parameters over the workers; copy worker 0's up to rounding, else return a message on the difference."""
    if len(comm.workers) == 1:
        return None
    rows = _gather(comm, torch.tensor([checksum(p) for p in parameters.values()]))
    found = []
    for place, (name, p) in enumerate(parameters.items()):
        if len({row[place] for row in rows}) > 1:
            first = p.detach().clone(memory_format=torch.contiguous_format)
            for piece in torch.split(first.reshape(-1).view(torch.uint8), _PIECE):
                comm.broadcast_(piece)
            apart = [row[0] for row in _gather(comm, torch.tensor([_distance(p, first)], dtype=torch.float64))]
            if odd := [rank for rank, value in enumerate(apart) if value > _rounding(p.dtype)]:
                most = max(apart[rank] for rank in odd)
                found.append(f"parameter {name} on {_workers(odd)} is up to {most:.2g} times its largest value away")
            else:
                p.copy_(first)
    more = f" ({plural(len(found) - 1, 'more parameter')} as well)" if len(found) > 1 else ""
    return f"{found[0]} from that of worker 0{more}" if found else None


def about_left_out(workers: Sequence[int]) -> str:
    """Return a warning about buffers that are not part of the mean."""
    return (
        f"buffers of {_workers(workers)} (BatchNorm's running statistics) became infinite or NaN, so they are not "
        "part of the mean over the workers. Call model(x) itself, not a part of it: then what a forward pass with such "
        "a sample does to buffers is undone. Look for bad samples."
    )


def _gather(comm: Comm, row: Tensor) -> list[list[float]]:
    return [[*found.tolist()] for found in comm.gather(row)]


def _distance(mine: Tensor, first: Tensor) -> float:
    """Return the distance of two tensors, relative to the largest magnitude in them; NaN equals NaN."""
    a, b = (t.detach().reshape(-1).to("cpu", torch.float64) for t in (mine, first))
    differ = (a != b) & ~(a.isnan() & b.isnan())
    if not bool(differ.any()):
        return 0.0
    apart = float((a - b)[differ].abs().max())
    scale = max(float(t[t.isfinite()].abs().max()) if bool(t.isfinite().any()) else 0.0 for t in (a, b))
    return apart / scale if scale and math.isfinite(apart) else math.inf


def _rounding(dtype: torch.dtype) -> float:
    """Return the relative difference that rounding may cause over many steps: √ε."""
    return math.sqrt(torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


def _workers(ranks: Sequence[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
