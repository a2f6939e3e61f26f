# SPDX-License-Identifier: Apache-2.0
"""Data sets by name: bundled ones that need nothing, and fetched ones, each verified by checksum.

>>> from orchestra import data
>>> inputs, labels = data.digits("train")
>>> len(inputs)
1437
>>> data.find("digits").licence
'CC BY 4.0'

The loaders bring torch with them and are imported when first used; the catalogue alone is quick to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestra.data.sets import CATALOGUE, DataSet, find

if TYPE_CHECKING:
    from orchestra.data.load import alphabet, appliances, digits, fashion_mnist, mnist, shakespeare

__all__ = [
    "CATALOGUE",
    "DataSet",
    "alphabet",
    "appliances",
    "digits",
    "fashion_mnist",
    "find",
    "mnist",
    "shakespeare",
]

_LOADERS = frozenset({"alphabet", "appliances", "digits", "fashion_mnist", "mnist", "shakespeare"})


def __getattr__(name: str) -> Any:
    if name not in _LOADERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from orchestra.data import load

    return getattr(load, name)
