# SPDX-License-Identifier: Apache-2.0
"""How good a model is on a data set: plain functions `(model, data) -> {name: value}`.

`data` is what `orchestra.train` takes, but for streams: a tuple or a dict of tensors or NumPy arrays, or a map-style
`Dataset` of tuples or dicts. An output with `.logits`, as models of Hugging Face give it, counts as its logits. All of
them score in evaluation mode and put every module's mode back, keep no gradients, and go through the data in order: the
same model gives the same numbers. Sums are kept in double precision, so the size of a batch does not show.
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
    """Share of samples whose best-scored class is right, and the mean cross-entropy in nats."""
    return _classification(model, data, batch=BATCH)


def next_character(model: nn.Module, data: Any) -> dict[str, float]:
    """For sequences: cross-entropy in nats per character, and the share of characters guessed right."""
    return _classification(model, data, batch=BATCH // 8)


def regression_scores(model: nn.Module, data: Any) -> dict[str, float]:
    """Mean absolute and mean squared error over all outputs; R² as the mean over outputs, and that of the worst one.

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
    """Outputs and targets, batch by batch, in order, where the model is."""
    where = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
    with _evaluating(model), torch.inference_mode():
        samples = SampleStore(read(data))
        for start in range(0, len(samples), batch):
            taken = samples.take(range(start, min(start + batch, len(samples))))
            here = each(lambda piece: piece.to(where), taken)
            output = output_of(model, here)
            yield getattr(output, "logits", output), target_of(here)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards each module gets its own mode back, as a model may be part frozen."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
