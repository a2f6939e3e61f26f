# SPDX-License-Identifier: Apache-2.0
"""Numbers as people read them."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes as people read them.

    >>> size(950), size(12_300), size(7_900_000)
    ('950 B', '12.3 kB', '7.9 MB')
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"


def plural(count: float, noun: str) -> str:
    """A number of things.

    >>> plural(1, "worker"), plural(4, "worker"), plural(2, "process"), plural(0.5, "epoch")
    ('1 worker', '4 workers', '2 processes', '0.5 epochs')
    """
    many = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{many} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")
