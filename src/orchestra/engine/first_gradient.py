# SPDX-License-Identifier: Apache-2.0
"""One small gradient on a copy of the model before any process starts, since errors would occur on every worker."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from orchestra.data.batches import Loss, Pieces, loss_of, output_of, pieces, place_of_target, target_of
from orchestra.data.random_state import left_alone
from orchestra.data.samples import SampleStore, collate, is_columns
from orchestra.engine import warnings
from orchestra.errors import Problem
from orchestra.model import error_hints
from orchestra.model.replica import trainable

_FEW = 8  # samples


def try_gradient(
    module: nn.Module, data: Any, loss: Loss | None, batch: int, warn: Callable[[str], object]
) -> Iterator[Problem]:
    """Compute one small gradient on a copy of the model.

    Yield known mistakes as problems; let other exceptions of the user's code pass. Call `warn` about a loss that is a
    sum.
    """
    few = min(batch, _FEW)
    try:
        samples = _some(data, few)
    except StopIteration:
        yield Problem("data", type(data).__name__, f"the stream ended before {few} samples")
        return
    if samples and not isinstance(samples[0], tuple | list | Mapping):
        message = "a sample must be a tuple, the inputs and, last, the target; or a dict of them by name"
        yield Problem("data", type(samples[0]).__name__, message)
        return
    streamed = isinstance(data, IterableDataset)
    sample = collate(samples) if streamed else SampleStore(data).take(range(min(few, len(SampleStore(data)))))
    unfit = [*_pieces_missing(sample, loss), *_arguments(module, sample, loss)]
    yield from unfit
    if unfit:
        return
    twin = copy.deepcopy(module)
    found = [*_one_gradient(twin.train(), sample, loss, data)]
    yield from found or _at_the_ends(twin.eval(), sample, loss, data)
    if not found and (summed := warnings.about_loss(twin, sample, loss)) is not None:
        warn(summed)


def _some(data: Any, few: int) -> list[Any]:
    """Return samples to check: of a stream the first few, of a Dataset the first, of columns none."""
    if isinstance(data, IterableDataset):
        stream = iter(data)
        return [next(stream) for _ in range(few)]
    return [] if is_columns(data) else [data[0]]


def _pieces_missing(sample: Pieces, loss: Loss | None) -> Iterator[Problem]:
    if len(sample) < (1 if loss is None else 2):
        message = "a sample must have at least an input and a target; for an autoencoder give the input twice, (x, x)"
        yield Problem("data", len(sample), message)


def _arguments(module: nn.Module, sample: Pieces, loss: Loss | None) -> Iterator[Problem]:
    """Yield entries of a dict that the model does not take, and a missing loss that the model does not compute."""
    signature, target = inspect.signature(module.forward), place_of_target(sample)
    call = f"{type(module).__name__}.forward({', '.join(signature.parameters)})"
    own = f"must be given, such as F.cross_entropy: without it the model gets the target as well, but {call} does not"
    if not isinstance(sample, Mapping):
        if loss is None and not _binds(signature, len(sample)) and _binds(signature, len(sample) - 1):
            yield Problem("loss", None, f"{own} take {len(sample)} arguments")
        return
    for name in sample:
        if _takes(signature, name) or (loss is not None and name == target):
            continue
        if name == target:
            yield Problem("loss", None, f"{own} take {name!r}")
        else:
            message = f"is no argument of {call}, which gets the entries of a dict by name: rename or remove it"
            yield Problem(f"data[{name!r}]", name, message)


def _binds(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _takes(signature: inspect.Signature, name: str) -> bool:
    """Return whether there is an argument of this name, or one for all names."""
    parameters = signature.parameters.values()
    named = (p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return name in named or any(p.kind is p.VAR_KEYWORD for p in parameters)


def _one_gradient(module: nn.Module, sample: Pieces, loss: Loss | None, data: Any) -> Iterator[Problem]:
    output: Any = None
    try:
        if loss is not None:
            output = output_of(module, sample)
            wrong = [*_classes(loss, output, data)]
            if wrong:
                yield from wrong
                return
        value = loss_of(module, sample, None) if loss is None else loss(output, target_of(sample))
        yield from _judge(module, value)
    except Exception as error:
        explained = [*error_hints.explain(error, module, sample, output, loss)]
        yield from explained
        if not explained:
            error.add_note(
                f"This was one gradient on {len(pieces(sample)[0])} samples, tried before any process was started: "
                "model, data and loss do not go together."
            )
            raise


def _judge(module: nn.Module, value: Any) -> Iterator[Problem]:
    """Yield the reasons why a loss cannot be trained with."""
    if not isinstance(value, Tensor) or value.dim() != 0:
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        yield Problem("loss", shape, "must give one number (a tensor without dimensions): take its mean")
        return
    if not value.requires_grad:
        yield Problem("loss", value.item(), "does not depend on the trainable parameters")
        return
    torch.autograd.backward(value)
    for name, p in trainable(module).items():
        if p.grad is not None and p.grad.layout is not torch.strided:
            yield Problem(f"model.{name}", "sparse gradient", "is not supported: use sparse=False in its layer")


def _classes(loss: Any, output: Any, data: Any) -> Iterator[Problem]:
    """Yield class numbers beyond the model's outputs, if the loss is known to take class numbers."""
    takes_classes = loss in (nn.functional.cross_entropy, nn.functional.nll_loss) or isinstance(
        loss, nn.CrossEntropyLoss | nn.NLLLoss
    )
    if not takes_classes or not is_columns(data) or not isinstance(output, Tensor) or output.dim() < 2:
        return
    target, classes = target_of(data), output.shape[1]
    if target.is_floating_point():
        return
    ignored = getattr(loss, "ignore_index", error_hints.IGNORED)
    wrong = ((target < 0) | (target >= classes)) & (target != ignored)
    if bool(wrong.any()):
        index = int(wrong.reshape(len(target), -1).any(1).nonzero()[0])
        yield Problem(
            f"data[{place_of_target(data)!r}][{index}]",
            target[index].tolist(),
            f"is no class of the model, whose {classes} outputs are 0 to {classes - 1}",
        )


@torch.no_grad()
def _at_the_ends(module: nn.Module, sample: Pieces, loss: Loss | None, data: Any) -> Iterator[Problem]:
    """Yield labels out of range, found by the loss of the samples with the smallest and the largest label.

    Only an error that names a label counts; other errors show in training.
    """
    labels, seen = _labels(data), target_of(sample)
    if labels is None or not error_hints.is_classes(seen) or len(labels) != len(SampleStore(data)):
        return
    ends = [int(labels.argmin()), int(labels.argmax())]
    if min(seen.min().item(), 0) <= int(labels[ends[0]]) and int(labels[ends[1]]) <= seen.max().item():
        return
    output: Any = None
    taken = sample
    try:
        with left_alone():
            taken = SampleStore(data).take(ends)
            output = None if loss is None else output_of(module, taken)
            loss_of(module, taken, None) if loss is None else loss(output, target_of(taken))
    except Exception as error:
        if (found := error_hints.about_labels(error, taken, output, loss)) is not None:
            yield found


def _labels(data: Any) -> Tensor | None:
    """Return the label of every sample as one tensor of class numbers, if all are in memory; else None."""
    if isinstance(data, IterableDataset):
        return None
    known = data.tensors if type(data) is TensorDataset else data
    labels = target_of(known) if is_columns(known) else getattr(data, "targets", None)
    try:
        whole = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        return None
    return whole if error_hints.is_classes(whole) and whole.dim() == 1 and len(whole) else None
