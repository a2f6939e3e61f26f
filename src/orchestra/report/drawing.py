# SPDX-License-Identifier: Apache-2.0
"""Scales, axes and marks as SVG: enough for the figures of a report, without a plotting library."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

INK, SOFT, LINE = "#1b1f24", "#57606a", "#d8dee4"
_SINE, _COSINE = math.sin(math.pi / 3), 0.5


@dataclass(frozen=True)
class Scale:
    """A map from numbers to pixels."""

    low: float
    high: float
    start: float  # pixels
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        a, b, x = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (x - a) / ((b - a) or 1.0)

    def ticks(self) -> list[float]:
        """Return about five round numbers within the scale."""
        if self.log:
            tens = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [f * 10.0**k for k in tens for f in (1, 3) if self.low <= f * 10.0**k <= self.high]
            if len(found) > 1:
                return found if len(found) <= 8 else found[:: math.ceil(len(found) / 8)]
        return _round_numbers(self.low, self.high)


def scale(values: Sequence[float], start: float, end: float, *, zero: bool = False, log: bool = False) -> Scale:
    """Return a scale that covers these values."""
    low, high = min(values), max(values)
    if zero:
        low = min(0.0, low)
    if low == high:
        high = low + (abs(low) or 1.0)
    return Scale(low, high, start, end, log=log and low > 0)


def _round_numbers(low: float, high: float) -> list[float]:
    """Return about five round numbers in a range.

    >>> _round_numbers(0.0, 1.0)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def number(value: float) -> str:
    """Format a number for people.

    >>> number(12000.0), number(0.25), number(0.0)
    ('12,000', '0.25', '0')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


@dataclass
class Drawing:
    """A figure: a title, a frame for the data, and the marks drawn so far."""

    title: str
    width: float = 640
    height: float = 400
    left: float = 64
    right: float = 150
    top: float = 44
    bottom: float = 52
    parts: list[str] = field(default_factory=list)

    @property
    def across(self) -> tuple[float, float]:
        """The left and the right end of the frame."""
        return self.left, self.width - self.right

    @property
    def upwards(self) -> tuple[float, float]:
        """The bottom and the top of the frame."""
        return self.height - self.bottom, self.top

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "start", size: float = 12, colour: str = INK,
        bold: bool = False,
    ) -> None:  # fmt: skip
        """Draw text."""
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size:g}" fill="{colour}"{weight}>'
            f"{html.escape(text)}</text>"
        )

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, *, width: float = 1, opacity: float = 1,
        dashes: str = "",
    ) -> None:  # fmt: skip
        """Draw straight lines from point to point."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}" '
            f'stroke-opacity="{opacity:g}"{dashed}/>'
        )

    def bar(self, x: float, y: float, width: float, height: float, colour: str, *, edge: str = "none") -> None:
        """Draw a rectangle."""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}" fill="{colour}" '
            f'stroke="{edge}" stroke-width="2.5"/>'
        )

    def mark(self, x: float, y: float, marker: str, colour: str, *, hollow: bool = False, r: float = 5) -> None:
        """Draw a strategy's marker."""
        fill, edge = ("#ffffff", colour) if hollow else (colour, "#ffffff")
        shape = f'<path d="{_shape(marker, r)}"' if marker != "circle" else f'<circle r="{r:g}"'
        self.parts.append(
            f'{shape} transform="translate({x:.1f},{y:.1f})" fill="{fill}" stroke="{edge}" '
            f'stroke-width="{1.75 if hollow else 0.75}"/>'
        )

    def x_axis(self, x: Scale, label: str, *, grid: bool = False, ticks: Sequence[float] | None = None) -> None:
        """Draw the axis at the bottom."""
        bottom, top = self.upwards
        for tick in x.ticks() if ticks is None else ticks:
            self.line([(x(tick), top if grid else bottom), (x(tick), bottom + 5)], LINE)
            self.text(x(tick), bottom + 18, number(tick), anchor="middle", size=11, colour=SOFT)
        self.text(self.across[1], bottom + 38, f"{label} →", anchor="end", colour=SOFT)

    def y_axis(self, y: Scale, label: str) -> None:
        """Draw the axis on the left."""
        left, right = self.across
        for tick in y.ticks():
            self.line([(left, y(tick)), (right, y(tick))], LINE)
            self.text(left - 7, y(tick) + 4, number(tick), anchor="end", size=11, colour=SOFT)
        self.text(6, self.top - 8, f"↑ {label}", colour=SOFT)

    def svg(self) -> str:
        """Return the figure as an SVG file."""
        fits = max(7, min(14, 1.65 * self.width / len(self.title)))  # a title may contain a long condition
        heading = (
            f'<text x="6" y="18" font-size="{fits:.3g}" font-weight="600" fill="{INK}">{html.escape(self.title)}</text>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'width="{self.width:g}" height="{self.height:g}" role="img" font-family="system-ui, sans-serif">'
            f'<title>{html.escape(self.title)}</title><rect width="100%" height="100%" fill="#ffffff"/>'
            f"{heading}{''.join(self.parts)}</svg>\n"
        )


def _shape(marker: str, r: float) -> str:
    """Return a path around the origin that looks as large as a circle of radius r."""
    match marker:
        case "square":
            return _ring([(-r, -r), (r, -r), (r, r), (-r, r)], 0.9)
        case "triangle":
            return _ring([(0, -r), (r * _SINE, r * _COSINE), (-r * _SINE, r * _COSINE)], 1.3)
        case "nabla":
            return _ring([(0, r), (r * _SINE, -r * _COSINE), (-r * _SINE, -r * _COSINE)], 1.3)
        case "diamond":
            return _ring([(0, -1.4 * r), (0.85 * r, 0), (0, 1.4 * r), (-0.85 * r, 0)])
        case "star":
            turns = [(math.pi * k / 5, r * (1.45 if k % 2 == 0 else 0.58)) for k in range(10)]
            return _ring([(d * math.sin(a), -d * math.cos(a)) for a, d in turns])
        case "cross":
            a, b = 0.42 * r, 1.25 * r
            half = [(-a, -b), (a, -b), (a, -a), (b, -a), (b, a), (a, a)]
            return _ring([*half, *((-x, -y) for x, y in half)])
        case _:  # wye: three arms
            arms = [(math.pi * (k / 3 + 1 / 3), r * (1.4 if k % 2 == 0 else 0.5)) for k in range(6)]
            return _ring([(d * math.sin(a), -d * math.cos(a)) for a, d in arms])


def _ring(points: Sequence[tuple[float, float]], factor: float = 1.0) -> str:
    return "M" + "L".join(f"{factor * x:.2f},{factor * y:.2f}" for x, y in points) + "Z"
