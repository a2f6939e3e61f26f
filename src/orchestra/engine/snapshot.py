# SPDX-License-Identifier: Apache-2.0
"""Snapshots: the model at a moment of the run, written by the nodes and assembled outside the training time.

Each node that holds a part writes it: a server its range, workers their x and their buffers. The scored model is that
of the servers, or the mean of the workers' models; BatchNorm statistics are averaged over all workers in either case,
weighted by the number of samples that each worker saw.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save_file
from torch import Tensor, nn

from orchestra.engine import checkpoint
from orchestra.errors import EnvironmentProblem
from orchestra.model.replica import trainable
from orchestra.runs import files

FINAL, SNAPSHOTS, MODEL = "final", "snapshots", "model.safetensors"  # in a run folder
T = TypeVar("T")
_NAME = re.compile("([0-9]+)")


@dataclass(frozen=True)
class SnapshotPart:
    """The part of one node."""

    t: float  # seconds
    step: int
    samples: int
    start: int  # the range of x that this part holds
    x: Tensor | None
    buffers: dict[str, Tensor]
    where: str = "servers"  # location of the model at that time: see `Layout.model_location`
    seen: int = 0  # samples behind the buffers


def write(folder: Path, rank: int, part: SnapshotPart) -> None:
    """Add a node's part to a snapshot atomically. A deleted run folder stays deleted."""
    if folder.parent.name == SNAPSHOTS:
        folder.parent.mkdir(exist_ok=True)
    folder.mkdir(exist_ok=True)
    temporary = folder / f".{rank}.tmp"
    try:
        checkpoint.write_tree(temporary, part, durable=False)
        temporary.replace(folder / checkpoint.part_name(rank))
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def parts(*folders: Path) -> list[SnapshotPart]:
    """Return all parts of a snapshot, by node, from the folders that hold some of them."""
    found = {node: path for folder in folders for node, path in checkpoint.parts_in(folder).items()}
    return [SnapshotPart(**checkpoint.read_tree(found[node])) for node in sorted(found)]


# A full disk.


def is_full(error: OSError) -> bool:
    """Return whether there was no room for a file."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def elsewhere(launch: str) -> Path:
    """Return the temporary folder of this launch, for the model if the run folder has no room."""
    return Path(tempfile.gettempdir()) / f"orchestra-{launch}"


def is_ours(folder: Path) -> bool:
    """Return whether a folder exists, is no link, and belongs to this user alone."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def make_elsewhere(launch: str) -> Path:
    """Make the temporary folder of this launch; raise OSError if another user has put something there."""
    folder = elsewhere(launch)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not is_ours(folder):
        raise OSError(errno.EPERM, "is not a private folder of this user", str(folder))
    return folder


def trying_again(write: Callable[[], T]) -> T:
    """Call `write`; if the disk is full, try again a few times, some seconds apart."""
    for pause in files.PAUSES:
        try:
            return write()
        except OSError as error:
            if not is_full(error):
                raise
        time.sleep(pause)
    return write()


def holds_x(folder: Path, node: int) -> bool:
    """Return whether a node's part of a snapshot is more than its buffers."""
    return checkpoint.has_tensor(folder / checkpoint.part_name(node), "x")


def parts_present(folder: Path) -> set[int]:
    """Return the nodes whose parts are there."""
    return {*checkpoint.parts_in(folder)}


def numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the snapshots of a run in order."""
    yield from files.numbered(folder, _NAME)


def load_into(module: nn.Module, found: list[SnapshotPart]) -> None:
    """Load the parameters and buffers of a snapshot into a module."""
    holders = [part for part in found if part.x is not None]
    holders = [part for part in holders if part.where == holders[0].where]  # at a switch there may be two
    spread: dict[int, list[Tensor]] = {}
    for part in holders:
        assert part.x is not None
        spread.setdefault(part.start, []).append(part.x)
    x = torch.cat([_mean(vectors) for _, vectors in sorted(spread.items())])
    with torch.no_grad():
        start = 0
        for p in trainable(module).values():
            p.copy_(x[start : start + p.numel()].view(p.shape))
            start += p.numel()
        given = [part for part in found if part.buffers and part.seen] or [part for part in found if part.buffers]
        for name, buffer in module.named_buffers():
            values = {i: part.buffers[name] for i, part in enumerate(given) if name in part.buffers}
            if values:
                buffer.copy_(_mean([*values.values()], [given[i].seen for i in values]))


def _mean(values: list[Tensor], weights: Sequence[int] = ()) -> Tensor:
    """Average equal-shaped tensors, weighted if weights differ; of integers (BatchNorm's counter) return the first."""
    if len(values) == 1 or not values[0].is_floating_point():
        return values[0]
    stacked = torch.stack([v.double() for v in values])
    if len(set(weights)) < 2:
        return stacked.mean(0).to(values[0].dtype)
    shares = torch.tensor([weight / sum(weights) for weight in weights], dtype=torch.float64)
    return torch.einsum("i,i...->...", shares, stacked).to(values[0].dtype)


def export(module: nn.Module, path: Path) -> None:
    """Write weights that plain PyTorch loads: `module.load_state_dict(safetensors.torch.load_file(path))`.

    Extra state that is no tensor (`get_extra_state`) cannot be stored in such a file and is left out.
    """
    tensors: dict[str, Any] = {name: t for name, t in module.state_dict().items() if isinstance(t, Tensor)}
    state = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    temporary = path.with_name(path.name + ".tmp")
    try:
        save_file(state, temporary, metadata={"format": "pt"})
        checkpoint.sync(temporary)
        temporary.replace(path)
    except (SafetensorError, OSError) as error:
        temporary.unlink(missing_ok=True)
        number = re.search(r"os error (\d+)", str(error))
        if isinstance(error, OSError) or number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None


def export_or_rescue(module: nn.Module, folder: Path, launch: str) -> None:
    """Write the weights to a run folder. Without room there, write them elsewhere, and raise an error with the path."""
    try:
        trying_again(lambda: export(module, folder / MODEL))
    except OSError as error:
        if not is_full(error):
            raise
        other = make_elsewhere(launch) if launch else Path(tempfile.mkdtemp(prefix="orchestra-"))
        export(module, other / MODEL)
        shutil.rmtree(other / FINAL, ignore_errors=True)
        raise EnvironmentProblem(
            f"the disk of {folder} is full: {error.strerror}. The trained model was written to {other / MODEL} instead."
        ) from None


def read_exported(module: nn.Module, path: Path) -> bytes:
    """Read the file that `export` wrote; raise OSError for anything but a regular file of about the module's size."""
    size = sum(t.nbytes for t in module.state_dict().values() if isinstance(t, Tensor))
    return files.read_bytes(path, most=size + files.SMALL)


def adopt(module: nn.Module, exported: bytes) -> None:
    """Load the weights that `export` wrote into a module."""
    module.load_state_dict(parse_tensors(exported), strict=False)  # extra state is not in the file
