# SPDX-License-Identifier: Apache-2.0
"""Parameter groups on nodes that update only a range of x.

Settings of a layer, such as no weight decay for biases or a larger rate for the head, hold for every piece of the
layer, wherever x is cut. A range consists of pieces of layers, each in the group of its layer. A layer in no group is
never updated.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn, optim

_Factory = Callable[..., optim.Optimizer]

_OF_LAYERS = ("params", "param_names")  # entries of a group that are no settings


def is_one(optimizer: optim.Optimizer, layers: Sequence[nn.Parameter]) -> bool:
    """Return whether all layers are in one group."""
    return len(optimizer.param_groups) == 1 and None not in members(optimizer, layers)


def members(optimizer: optim.Optimizer, layers: Sequence[nn.Parameter]) -> list[int | None]:
    """Return the group of each layer; None if it is in none.

    >>> a, b = nn.Linear(3, 2).parameters()
    >>> members(optim.SGD([{"params": [b]}, {"params": [a], "weight_decay": 0.1}], lr=0.1), [a, b])
    [1, 0]
    """
    found = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return [found.get(p) for p in layers]


def settings(group: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group."""
    return {name: value for name, value in group.items() if name not in _OF_LAYERS}


def like(optimizer: optim.Optimizer, belong: Sequence[int | None], layers: Sequence[nn.Parameter]) -> optim.Optimizer:
    """Return an optimizer with the same groups, filled with other layers by `belong`; groups may be empty."""
    made, known = type(optimizer), inspect.signature(type(optimizer)).parameters
    filled = [
        settings(group) | {"params": [p for p, i in zip(layers, belong, strict=True) if i == number]}
        for number, group in enumerate(optimizer.param_groups)
    ]
    return made(filled, **{name: value for name, value in optimizer.defaults.items() if name in known})


def cut(shapes: Sequence[tuple[int, ...]], part: slice) -> Iterator[tuple[int, slice, bool]]:
    """Yield the layers in a range of x: the number of each, the range of its piece in x, and whether it is whole.

    >>> list(cut([(2, 3), (2,)], slice(4, 8)))
    [(0, slice(4, 6, None), False), (1, slice(6, 8, None), True)]
    """
    for i, (start, stop) in enumerate(pairwise(accumulate(map(math.prod, shapes), initial=0))):
        low, high = max(start, part.start), min(stop, part.stop)
        if low < high or part.start <= start < part.stop:
            yield i, slice(low, high), (low, high) == (start, stop)


def on_range(
    factory: _Factory, shapes: Sequence[tuple[int, ...]], part: slice, x: Tensor
) -> tuple[_Factory, list[nn.Parameter]]:
    """Return a factory for an optimizer of a range of the model, and the pieces of layers in it, as views of x."""
    pieces, whose = [], []
    for i, piece, uncut in cut(shapes, part):
        values = x[piece.start - part.start : piece.stop - part.start]
        pieces.append(nn.Parameter(values.view(shapes[i]) if uncut else values))
        whose.append(i)
    if len(pieces) == len(shapes) and x.numel() == sum(map(math.prod, shapes)):
        return factory, pieces  # none is missing, none is cut
    whole = [nn.Parameter(x.new_zeros(()).expand(shape)) for shape in shapes]  # to find the group of each layer
    made = factory(whole)
    if is_one(made, whole):
        return factory, pieces
    groups = members(made, whole)
    return partial(like, made, [groups[i] for i in whose]), pieces
