# SPDX-License-Identifier: Apache-2.0
"""The length of a stream, which is known only after it has been read once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from orchestra.cli.patience import patiently

_LONGEST = 60.0  # seconds that reading may take


def samples_of(data: Callable[[], Any]) -> float | None:
    """Return the samples in one pass over a stream, infinite if it lasts over a minute; None for data with an index."""
    from torch.utils.data import IterableDataset

    from orchestra.data.random_state import seed_everything

    found = data()
    if not isinstance(found, IterableDataset):
        return None
    if hasattr(found, "__len__"):
        return float(len(found))
    seed_everything(0)  # samples may be drawn
    deadline, count = time.monotonic() + _LONGEST, 0
    with patiently("reading the stream once for its length ..."):
        for _ in found:
            count += 1
            if time.monotonic() > deadline:
                return math.inf
    return float(count)
