# SPDX-License-Identifier: Apache-2.0
"""Scores of a model on a data set: plain functions `(model, data) -> {name: value}`.

`data` is what `orchestra.train` takes, except streams: a tuple or a dict of tensors or NumPy arrays, or a map-style
`Dataset` of tuples or dicts. Of an output with `.logits`, as models of Hugging Face return it, the logits are scored.
Each function scores in evaluation mode and restores the mode of every module, computes no gradients, and reads the data
in order, so the same model gets the same numbers. Sums are in double precision, so the batch size does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestra.data.batches import each, output_of, target_of
from orchestra.data.samples import SampleStore, read

BATCH = 1024  # samples scored at once


def accuracy(model: nn.Module, data: Any) -> dict[str, float]:
    """Return the share of samples whose highest-scored class is right, and the mean cross-entropy in nats."""
    return _classification(model, data, batch=BATCH)


def next_character(model: nn.Module, data: Any) -> dict[str, float]:
    """Return the share of characters predicted right, and the cross-entropy in nats per character; for sequences."""
    return _classification(model, data, batch=BATCH // 8)


def regression_scores(model: nn.Module, data: Any) -> dict[str, float]:
    """Return the mean absolute and mean squared error over all outputs, the mean R² of the outputs, and the lowest R².

    R² of an output is 1 - (squared error) / (squared deviation of the target from its mean over `data`).
    """
    pairs = [(output.double(), target.double()) for output, target in _scored(model, data, BATCH)]
    output, target = (torch.cat(column).flatten(1) for column in zip(*pairs, strict=True))
    error = output - target
    r2 = 1 - error.square().sum(0) / (target - target.mean(0)).square().sum(0)
    return {
        "mae": error.abs().mean().item(),
        "mse": error.square().mean().item(),
        "r2": r2.mean().item(),
        "r2_min": r2.min().item(),
    }


def _classification(model: nn.Module, data: Any, *, batch: int) -> dict[str, float]:
    right, loss, count = 0, 0.0, 0
    for output, target in _scored(model, data, batch):
        scores, classes = output.flatten(0, -2).float(), target.flatten()
        right += int((scores.argmax(-1) == classes).sum())
        loss += F.cross_entropy(scores, classes, reduction="none").double().sum().item()
        count += classes.numel()
    return {"accuracy": right / count, "loss": loss / count}


def _scored(model: nn.Module, data: Any, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield outputs and targets batch by batch, in order, on the device of the model."""
    device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    with _evaluating(model), torch.inference_mode():
        samples = SampleStore(read(data))
        for start in range(0, len(samples), batch):
            taken = samples.take(range(start, min(start + batch, len(samples))))
            moved = each(lambda tensor: tensor.to(device), taken)
            output = output_of(model, moved)
            yield getattr(output, "logits", output), target_of(moved)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode; afterwards restore the mode of each module, as some may be frozen."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
