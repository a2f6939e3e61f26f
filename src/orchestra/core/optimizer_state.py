# SPDX-License-Identifier: Apache-2.0
"""The state of an optimizer for a range of x: an outline that JSON can hold, and the vectors.

    {"exp_avg": "vector", "step": {"tensor": 7.0}}                          the same for the whole range
    {"ranges": [[0, 6, {"exp_avg": "vector", "step": ...}], [6, 9, {}]]}    by range, where layers have lacked gradients

Vectors are as long as the whole range, one for each name, in the order of the names; zero where a range has none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Outline = dict[str, Any]
Range = tuple[int, int, Outline]

_VECTOR, _RANGES = "vector", "ranges"


def outline(state: Mapping[str, Any], length: int) -> Outline:
    """Return the outline of the state for `length` elements."""
    return {name: _outline(value, length) for name, value in sorted(state.items())}


def _outline(value: Any, length: int) -> Any:
    """Return the outline of one entry: a vector, a tensor without dimensions, or a plain value."""
    if isinstance(value, Tensor):
        return _VECTOR if is_vector(value, length) else {"tensor": value.item()}
    return value


def is_vector(value: Any, length: int) -> bool:
    """Return whether a value is a tensor with one number for each of `length` elements."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == length


def ranges(whole: Outline, length: int) -> list[Range]:
    """Return an outline as a list of ranges."""
    if _RANGES in whole:
        return [(start, stop, state) for start, stop, state in whole[_RANGES]]
    return [(0, length, whole)]


def by_range(found: Iterable[Range]) -> Outline:
    """Return the outline of adjacent ranges from 0 on; a single one if all are equal."""
    left = list(found)
    if not left:  # a server may hold an empty range
        return {}
    states = [state for _, _, state in left]
    return states[0] if all(state == states[0] for state in states) else {_RANGES: left}


def within(whole: Outline, part: slice, length: int) -> Outline:
    """Return the outline of a part of a vector of this length, from that of the whole."""
    clipped = ((max(a, part.start), min(b, part.stop), state) for a, b, state in ranges(whole, length))
    return by_range((a - part.start, b - part.start, state) for a, b, state in clipped if a < b)


def names(whole: Outline) -> list[str]:
    """Return the names of the vectors."""
    states = [state for _, _, state in ranges(whole, 0)]
    return sorted({name for state in states for name, value in state.items() if value == _VECTOR})


def joined(
    parts: Sequence[slice], outlines: Sequence[Outline], vectors: Sequence[Sequence[Tensor]]
) -> tuple[Outline, list[Tensor]]:
    """Join the outlines and the vectors of parts that several nodes have kept."""
    lengths = [part.stop - part.start for part in parts]
    whole = by_range(
        (part.start + a, part.start + b, state)
        for part, length, outline in zip(parts, lengths, outlines, strict=True)
        for a, b, state in ranges(outline, length)
    )
    known = [dict(zip(names(outline), given, strict=True)) for outline, given in zip(outlines, vectors, strict=True)]
    like = next((v for given in vectors for v in given), torch.empty(0))
    found = []
    for name in names(whole):
        pieces = zip(known, lengths, strict=True)
        found.append(torch.cat([given[name] if name in given else like.new_zeros(n) for given, n in pieces]))
    return whole, found


def of_pieces(
    pieces: Sequence[slice], states: Sequence[Mapping[str, Any]], like: Tensor
) -> tuple[Outline, list[Tensor]]:
    """Return the outline and the vectors of a whole, from the optimizer's state for each of its pieces."""
    rows = [
        (piece, outline(state, piece.stop - piece.start), state) for piece, state in zip(pieces, states, strict=True)
    ]
    whole = by_range((piece.start, piece.stop, words) for piece, words, _ in rows)
    vectors = []
    for name in names(whole):
        vector = torch.zeros_like(like)
        for piece, words, state in rows:
            if words.get(name) == _VECTOR:
                vector[piece] = state[name]
        vectors.append(vector)
    return whole, vectors


def state(outline: Outline, vectors: Mapping[str, Tensor], part: slice) -> dict[str, Any]:
    """Return the optimizer's state for a range, from its outline and the vectors of the whole."""
    return {name: vectors[name][part] if value == _VECTOR else _value(value) for name, value in outline.items()}


def _value(outline: Any) -> Any:
    return torch.tensor(outline["tensor"]) if isinstance(outline, dict) else outline
