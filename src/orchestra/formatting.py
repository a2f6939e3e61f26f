# SPDX-License-Identifier: Apache-2.0
"""Numbers and lists as text for people."""

from __future__ import annotations

from collections.abc import Sequence


def size(nbytes: float) -> str:
    """Return a number of bytes with its unit.

    >>> size(950), size(12_300), size(7_900_000)
    ('950 B', '12.3 kB', '7.9 MB')
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"


def plural(count: float, noun: str) -> str:
    """Return a count with its noun, in the plural where the count asks for it.

    >>> plural(1, "worker"), plural(4, "worker"), plural(2, "process"), plural(3, "strategy"), plural(0.5, "day")
    ('1 worker', '4 workers', '2 processes', '3 strategies', '0.5 days')
    """
    many = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{many} {noun if count == 1 else _in_plural(noun)}"


def _in_plural(noun: str) -> str:
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return noun + ("es" if noun.endswith("s") else "s")


def rough_duration(seconds: float) -> str:
    """Return an estimated time in words, to one or two digits.

    >>> rough_duration(0.2), rough_duration(47), rough_duration(200), rough_duration(9000)
    ('about 1 s', 'about 47 s', 'about 3 min', 'about 2.5 h')
    """
    if seconds < 90:
        return f"about {max(1, float(f'{seconds:.2g}')):.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.2g} h"


def listed(texts: Sequence[str]) -> str:
    """Join texts by commas and a final "and".

    >>> listed(["a"]), listed(["a", "b"]), listed(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return " and ".join([*filter(None, [", ".join(texts[:-1])]), *texts[-1:]])


def percents(shares: Sequence[float]) -> list[int]:
    """Round shares of a whole to percent; append the rest of the whole, so that the sum is exactly 100.

    Shares that were measured separately may add up to more than 1, and one made by subtraction may be negative.

    >>> percents([0.333, 0.333, 0.333]), percents([0.7, -0.01, 0.35])
    ([34, 33, 33, 0], [67, 0, 33, 0])
    """
    parts = [max(0.0, share) for share in shares]
    parts.append(max(0.0, 1 - sum(parts)))
    exact = [100 * part / sum(parts) for part in parts]
    whole = [int(part) for part in exact]
    nearest = sorted(
        range(len(whole)), key=lambda i: whole[i] - exact[i]
    )  # those that were rounded down the most; of equals, the first
    for i in nearest[: 100 - sum(whole)]:
        whole[i] += 1
    return whole
