# SPDX-License-Identifier: Apache-2.0
"""One mini-batch, as pieces by position or by name, and its loss.

    (x, y)                              loss(model(x), y)
    (a, b, y)                           loss(model(a, b), y)
    {"input_ids": i, "labels": y}       loss(model(input_ids=i), y)
    loss=None                           model(*batch).loss or model(**batch).loss: the model gets the target as well

The target is the last piece; of a dict it is the entry "labels", "label", "targets", "target" or "y", whichever of them
comes first in this list, and the last entry where there is none of these names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

Loss = Callable[[Any, Any], Tensor]
Pieces = Sequence[Any] | Mapping[str, Any]

_TARGETS = ("labels", "label", "targets", "target", "y")


class NoLoss(TypeError):
    """Raised if no loss was given and the model computes none."""


def pieces(batch: Pieces) -> list[Any]:
    """Return the pieces, in order."""
    return [*batch.values()] if isinstance(batch, Mapping) else [*batch]


def like(batch: Pieces, values: Iterable[Any]) -> Pieces:
    """Return a batch with other pieces in place of its own."""
    return dict(zip(batch, values, strict=True)) if isinstance(batch, Mapping) else [*values]


def each(change: Callable[[Any], Any], batch: Pieces) -> Pieces:
    """Return a batch with `change` applied to every piece."""
    return like(batch, map(change, pieces(batch)))


def place_of_target(batch: Pieces) -> Any:
    """Return the name or the index of the target.

    >>> place_of_target({"label": 1, "text": 2})
    'label'
    >>> place_of_target((1, 2))
    -1
    """
    if not isinstance(batch, Mapping):
        return -1
    return next((name for name in _TARGETS if name in batch), [*batch][-1])


def target_of(batch: Any) -> Any:
    """Return the target of a batch or of a sample."""
    return batch[place_of_target(batch)]


def output_of(model: Callable[..., Any], batch: Pieces) -> Any:
    """Return the output of the model for the inputs of a batch."""
    if isinstance(batch, Mapping):
        target = place_of_target(batch)
        return model(**{name: piece for name, piece in batch.items() if name != target})
    return model(*batch[:-1])


def loss_of(model: Callable[..., Any], batch: Pieces, loss: Loss | None) -> Tensor:
    """Return the loss of a batch: by a function of output and target, or the model's own."""
    if loss is not None:
        return loss(output_of(model, batch), target_of(batch))
    output = model(**batch) if isinstance(batch, Mapping) else model(*batch)
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if own is None:
        raise NoLoss(
            f"must be given, such as F.cross_entropy: the model does not compute it in output.loss, as models of "
            f"Hugging Face do when they get labels, but gave {_kind(output)}"
        )
    value: Tensor = own
    return value


def _kind(output: Any) -> str:
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} of {', '.join(map(str, output)) or 'nothing'}"
    return f"a {type(output).__name__}"
