# SPDX-License-Identifier: Apache-2.0
"""Groups of layers that an optimizer treats differently, where whoever updates them has only a range of x.

Biases without weight decay, a head that learns faster: what holds for a layer holds for every piece of it, wherever x
is cut. A range is then a row of pieces of layers, each in the group of its layer. A layer in no group never changes.
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

_OF_LAYERS = ("params", "param_names")  # what of a group is no setting


def is_one(optimizer: optim.Optimizer, layers: Sequence[nn.Parameter]) -> bool:
    """Whether all layers are in one group, so that none is treated differently."""
    return len(optimizer.param_groups) == 1 and None not in members(optimizer, layers)


def members(optimizer: optim.Optimizer, layers: Sequence[nn.Parameter]) -> list[int | None]:
    """The group of each layer; None if it is in none.

    >>> a, b = nn.Linear(3, 2).parameters()
    >>> members(optim.SGD([{"params": [b]}, {"params": [a], "weight_decay": 0.1}], lr=0.1), [a, b])
    [1, 0]
    """
    found = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return [found.get(p) for p in layers]


def settings(group: dict[str, Any]) -> dict[str, Any]:
    """What holds for the layers of a group."""
    return {name: value for name, value in group.items() if name not in _OF_LAYERS}


def like(optimizer: optim.Optimizer, belong: Sequence[int | None], layers: Sequence[nn.Parameter]) -> optim.Optimizer:
    """One with the same groups, each with those of other layers that belong to it; there may be none."""
    made, known = type(optimizer), inspect.signature(type(optimizer)).parameters
    filled = [
        settings(group) | {"params": [p for p, i in zip(layers, belong, strict=True) if i == number]}
        for number, group in enumerate(optimizer.param_groups)
    ]
    return made(filled, **{name: value for name, value in optimizer.defaults.items() if name in known})


def cut(shapes: Sequence[tuple[int, ...]], part: slice) -> Iterator[tuple[int, slice, bool]]:
    """The layers in a range of x: the number of each, where in x its piece lies, and whether that is all of it.

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
    """The pieces of layers that a range of the model is made of, as views of x; and what makes their optimizer."""
    pieces, whose = [], []
    for i, piece, uncut in cut(shapes, part):
        values = x[piece.start - part.start : piece.stop - part.start]
        pieces.append(nn.Parameter(values.view(shapes[i]) if uncut else values))
        whose.append(i)
    if len(pieces) == len(shapes) and x.numel() == sum(map(math.prod, shapes)):
        return factory, pieces  # none is missing, none is cut
    whole = [nn.Parameter(x.new_zeros(()).expand(shape)) for shape in shapes]  # to see which goes where
    made = factory(whole)
    if is_one(made, whole):
        return factory, pieces
    groups = members(made, whole)
    return partial(like, made, [groups[i] for i in whose]), pieces
