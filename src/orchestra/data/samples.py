# SPDX-License-Identifier: Apache-2.0
"""Samples in all the forms that a `data` function may return, as columns of tensors or one by one.

    columns         a tuple or a dict of tensors or NumPy arrays, or one of them; samples along the first dimension
    Dataset         anything with a length and an index, whose items are tuples or dicts

NumPy arrays become tensors of the same dtype in the same memory. Samples are only read, so a read-only array or a
memory-mapped file needs no copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from orchestra.data.batches import Pieces, each, pieces, target_of
from orchestra.errors import Problem


def read(data: Any) -> Any:
    """Return data with tensors in place of NumPy arrays; unsuitable data unchanged, for `problems_of` to name."""
    if isinstance(data, Tensor | np.ndarray):
        data = (data,)
    if not _may_be_columns(data) or [*problems_of(data)]:
        return data
    found = each(_tensor, data)
    return found if isinstance(found, Mapping) else tuple(found)


def problems_of(data: Any) -> Iterator[Problem]:
    """Yield the reasons why data that look like columns cannot be used."""
    if isinstance(data, Mapping) and not data:
        yield Problem("data", {}, "is empty: a dict must have at least an input and a target, by name")
    if not _may_be_columns(data):
        return
    for place, column in data.items() if isinstance(data, Mapping) else enumerate(data):
        where = f"data[{place!r}]"
        if isinstance(data, Mapping) and not isinstance(place, str):
            yield Problem(where, place, "must have a text for its name, that of an argument of the model")
        if not isinstance(column, Tensor | np.ndarray):
            message = "must be a tensor or a NumPy array, with the samples along its first dimension"
            yield Problem(where, type(column).__name__, message)
        elif isinstance(column, np.ndarray) and isinstance(column, np.ma.MaskedArray):  # np.ma takes time to import
            yield Problem(where, "masked array", "has no tensor of its kind: fill the gaps, e.g. column.filled(0)")
        elif isinstance(column, np.ndarray) and not _has_tensor(column.dtype):
            message = 'has no tensor of its kind: give an array of numbers, e.g. column.astype("float32")'
            yield Problem(where, f"dtype {column.dtype}", message)


def is_columns(data: Any) -> bool:
    """Return whether data are a tuple or a dict of tensors."""
    return (
        isinstance(data, tuple | list | Mapping)
        and len(data) > 0
        and all(isinstance(column, Tensor) for column in pieces(data))
    )


def collate(samples: Sequence[Any]) -> Pieces:
    """Return a batch of samples that are tuples or dicts. Lists of numbers in a dict become rows of a tensor."""
    if not isinstance(samples[0], Mapping):
        return list(default_collate([*samples]))
    rows = [{name: _row(value) for name, value in sample.items()} for sample in samples]
    return dict(default_collate(rows))


class SampleStore:
    """Columns or a map-style Dataset, by index."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._columns = pieces(data) if is_columns(data) else None

    def __len__(self) -> int:
        return len(self._data if self._columns is None else self._columns[0])

    def take(self, indices: Sequence[int]) -> Any:
        """Return a batch of the samples with these indices."""
        if self._columns is None:
            return collate([self._data[i] for i in indices])
        picked = torch.as_tensor(indices, dtype=torch.int64, device=self._columns[0].device)
        return each(lambda column: column.index_select(0, picked), self._data)

    def labels(self) -> Tensor:
        """Return the target of every sample, for partitions by label."""
        if self._columns is not None:
            labels: Tensor = target_of(self._data)
            return labels
        return torch.as_tensor([int(target_of(self._data[i])) for i in range(len(self))])


def _may_be_columns(data: Any) -> bool:
    """Return whether data are a dict, or a sequence that begins with a tensor or an array."""
    if isinstance(data, Mapping):
        return len(data) > 0
    return isinstance(data, tuple | list) and len(data) > 0 and isinstance(data[0], Tensor | np.ndarray)


def _has_tensor(dtype: np.dtype[Any]) -> bool:
    try:
        torch.from_numpy(np.empty(0, dtype.newbyteorder("=")))
    except TypeError:
        return False
    return True


def _tensor(column: Any) -> Tensor:
    if isinstance(column, Tensor):
        return column
    if not column.dtype.isnative:
        column = column.astype(column.dtype.newbyteorder("="))
    if any(stride < 0 for stride in column.strides):
        column = np.ascontiguousarray(column)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nothing here writes to it
        return torch.from_numpy(column)


def _row(value: Any) -> Any:
    """Return a list of numbers as a tensor, as Hugging Face's collators do; other values unchanged."""
    return torch.as_tensor(value) if isinstance(value, list) and not _holds_text(value) else value


def _holds_text(value: Any) -> bool:
    return isinstance(value, str | bytes) or (isinstance(value, list) and any(map(_holds_text, value)))


__all__ = ["SampleStore", "collate", "is_columns", "problems_of", "read"]
