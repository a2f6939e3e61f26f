# SPDX-License-Identifier: Apache-2.0
"""Explanations of torch's errors about model, data and loss that do not match.

There is an explanation only for a known error whose cause the values show: labels without an output of the model, or a
dtype that the layers do not take.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orchestra.data.batches import NoLoss, Pieces, place_of_target, target_of
from orchestra.errors import Problem

IGNORED = -100  # torch's ignore_index

_NO_SUCH_CLASS = re.compile(r"Target -?\d+ is out of bounds")  # of cross_entropy and nll_loss
_NO_SUCH_INDEX = re.compile(r"is out of bounds for dimension|Class values must be|target out of range")  # of others
_OTHER_DTYPE = re.compile(r"same dtype|scalar type|target dtype|Found dtype|should be the same")


def explain(error: Exception, module: nn.Module, batch: Pieces, output: Any, loss: Any) -> Iterator[Problem]:
    """Yield why model and loss failed on a batch, if that is known; `output` is the model's, if it returned one."""
    found = about_labels(error, batch, output, loss)
    if found is not None:
        yield found
    elif isinstance(error, NoLoss):
        yield Problem("loss", None, str(error))
    elif isinstance(error, RuntimeError) and _OTHER_DTYPE.search(str(error)):
        yield from _dtypes(module, batch, str(error))


def about_labels(error: Exception, batch: Pieces, output: Any = None, loss: Any = None) -> Problem | None:
    """Return a problem that names labels out of range, if they caused an error."""
    labels, said = target_of(batch), str(error)
    if not isinstance(error, IndexError | RuntimeError) or not is_classes(labels) or not labels.numel():
        return None
    classes = _classes(output)
    ignored = getattr(loss, "ignore_index", IGNORED)
    used = labels[labels != ignored]
    outside = bool(used.numel()) and classes is not None and not 0 <= int(used.min()) <= int(used.max()) < classes
    if not _NO_SUCH_CLASS.search(said) and not (outside and _NO_SUCH_INDEX.search(said)):
        return None
    low, high = (int(used.min()), int(used.max())) if used.numel() else (ignored, ignored)
    return Problem(f"data[{place_of_target(batch)!r}]", f"{low} to {high}", _remedy(low, high, classes, said))


def add_note(error: Exception, batch: Pieces) -> None:
    """Add a note to an error during training if labels are, or may be, its cause; `batch` is not on a GPU."""
    labels = target_of(batch)
    if (found := about_labels(error, batch)) is not None:
        error.add_note(str(found))
    elif "device-side assert" in str(error) and is_classes(labels) and not labels.is_cuda and labels.numel():
        error.add_note(
            "A GPU fails in this way at a label that the model has no output for, among other causes. The labels of "
            f"this mini-batch are {int(labels.min())} to {int(labels.max())}: they must be 0 to the number of the "
            "model's outputs less one."
        )


def _remedy(low: int, high: int, classes: int | None, said: str) -> str:
    last = said.splitlines()[0].rstrip(".")
    if classes is None:
        message = f"the loss has no such class ({last}): labels must be 0 to the number of the model's outputs less one"
    else:
        message = f"labels must be 0 to {classes - 1}, because the model has {classes} outputs"
    more = f", or give the model {high + 1} outputs" if classes is not None and high >= classes and low >= 0 else ""
    ignore = f"; to leave a sample out, label it {IGNORED}" if low < 0 else ""
    return f"{message}: count the classes from 0{more}{ignore}"


def is_classes(labels: Any) -> bool:
    """Return whether these may be class numbers."""
    whole = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    return isinstance(labels, Tensor) and labels.dtype in whole


def _classes(output: Any) -> int | None:
    """Return the number of classes of a plain classifier's output."""
    scores = getattr(output, "logits", output)
    return scores.shape[1] if isinstance(scores, Tensor) and scores.dim() == 2 else None


def _dtypes(module: nn.Module, batch: Pieces, said: str) -> Iterator[Problem]:
    """Yield a target that is not int64 if the loss takes class numbers, else floats of another dtype than the model."""
    target = target_of(batch)
    if "Long" in said and isinstance(target, Tensor) and target.dtype != torch.int64:
        message = 'class numbers must be int64: use tensor.long() or array.astype("int64")'
        yield Problem(f"data[{place_of_target(batch)!r}]", _name(target.dtype), message)
        return
    own = {p.dtype for p in module.parameters() if p.is_floating_point()}
    for place, piece in batch.items() if isinstance(batch, Mapping) else enumerate(batch):
        if isinstance(piece, Tensor) and piece.is_floating_point() and len(own) == 1 and piece.dtype not in own:
            (wanted,) = map(_name, own)
            message = f"the model's parameters are {wanted}: convert the data, e.g. tensor.to(torch.{wanted}) or "
            yield Problem(f"data[{place!r}]", _name(piece.dtype), f'{message}array.astype("{wanted}")')


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
