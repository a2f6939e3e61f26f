# SPDX-License-Identifier: Apache-2.0
"""One colour and one marker for each strategy, in every figure.

The colours are those of Okabe and Ito, which colour-blind people can distinguish. Each has a name; the page and the
figures map it to a light and a dark shade. A strategy has the colour of its place in the sorted catalogue, so it looks
the same in all reports. Where two strategies of a report would look alike, as variants of one strategy do, the second
takes a free colour, and when all colours are taken, the next marker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

COLOURS = {  # on white, and on black
    "blue": ("#0072b2", "#4aa8e8"),
    "sky": ("#56b4e9", "#9fdcff"),
    "purple": ("#cc79a7", "#e39cc4"),
    "yellow": ("#b5a000", "#f0e442"),
    "green": ("#009e73", "#2cc79b"),
    "orange": ("#e69f00", "#ffb733"),
    "vermillion": ("#d55e00", "#ff8438"),
    "black": ("#222222", "#e8e8e8"),
}
MARKERS = ("circle", "square", "triangle", "diamond", "star", "cross", "nabla", "wye")
_INSTEAD = ("sky", "purple", "orange", "green", "vermillion", "blue", "yellow", "black")  # the most different first


@dataclass(frozen=True)
class Style:
    """The colour and the marker of a strategy."""

    colour: str
    marker: str

    def as_dict(self) -> dict[str, Any]:
        """Return the style for JSON."""
        return asdict(self)


def looks(names: Sequence[str], catalogue: Sequence[str]) -> dict[str, Style]:
    """Return a style for each of these strategies, no two alike while styles last.

    >>> looks(["slowmo", "allreduce"], ["allreduce", "slowmo"])["allreduce"]
    Style(colour='blue', marker='circle')
    """
    places = {name: i for i, name in enumerate(catalogue)}
    found: dict[str, Style] = {}
    for name in sorted(names, key=lambda name: ("(" in name, name)):  # plain ones have the first choice
        place = places.get(name.partition("(")[0], len(places))
        found[name] = next(look for look in _choices(place) if _is_free(look, found))
    return {name: found[name] for name in names}


def _choices(place: int) -> list[Style]:
    """Return all styles in order of preference for a place in the catalogue."""
    colours, own = [*COLOURS], place % len(COLOURS)
    ordered = [colours[own], *(c for c in _INSTEAD if c != colours[own])]
    markers = [MARKERS[(place + i) % len(MARKERS)] for i in range(len(MARKERS))]
    fresh = [Style(colour, MARKERS[(colours.index(colour)) % len(MARKERS)]) for colour in ordered]
    return [*fresh, *(Style(colour, marker) for marker in markers for colour in ordered), fresh[0]]


def _is_free(look: Style, taken: dict[str, Style]) -> bool:
    others = [*taken.values()]
    if look in others:
        return len(set(others)) >= len(COLOURS) * len(MARKERS)
    return len({o.colour for o in others}) >= len(COLOURS) or look.colour not in {o.colour for o in others}
