# SPDX-License-Identifier: Apache-2.0
"""The distribution of labels, which gives the score of a model that only guesses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from orchestra.data import samples
from orchestra.data.batches import target_of

_MOST = 100_000  # labels that are counted, spread over the data


def distribution(data: Any) -> dict[str, Any] | None:
    """Count the labels of a classification: `classes`, `count`, and `largest`, the share of the most frequent one.

    Return None if the labels can only be read sample by sample, or if they are no whole numbers.

    >>> distribution((torch.zeros(4, 2), torch.tensor([0, 1, 1, 2])))
    {'classes': 3, 'count': 4, 'largest': 0.5}
    """
    labels = _labels(data)
    if labels is None or labels.is_floating_point() or labels.is_complex() or not labels.numel():
        return None
    every = labels.detach().reshape(-1)
    some = every[:: max(1, -(-every.numel() // _MOST))]
    counts = torch.unique(some, return_counts=True)[1]
    if len(counts) < 2:
        return None
    return {"classes": len(counts), "count": some.numel(), "largest": float(counts.max()) / some.numel()}


def _labels(data: Any) -> Tensor | None:
    data = samples.read(data)
    if samples.is_columns(data):
        labels: Tensor = target_of(data)
        return labels
    if isinstance(data, TensorDataset):
        return data.tensors[-1]
    targets = getattr(data, "targets", None)  # as data sets of torchvision have it
    if isinstance(targets, list) and targets and all(isinstance(label, int) for label in targets):
        return torch.tensor(targets)
    return targets if isinstance(targets, Tensor) else None
