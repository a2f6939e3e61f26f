# SPDX-License-Identifier: Apache-2.0
"""How long a stream is: what a part of its epoch comes to in steps shows only when it has been read once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from orchestra.cli.patience import patiently

_LONGEST = 60.0  # seconds that a stream is read for


def samples_of(data: Callable[[], Any]) -> float | None:
    """Samples in one pass over a stream; infinite if it does not end within a minute. None of data with an index."""
    from torch.utils.data import IterableDataset

    from orchestra.data.random_state import seed_everything

    found = data()
    if not isinstance(found, IterableDataset):
        return None
    if hasattr(found, "__len__"):
        return float(len(found))
    seed_everything(0)  # samples may be drawn
    deadline, count = time.monotonic() + _LONGEST, 0
    with patiently("reading the stream once, to know its length ..."):
        for _ in found:
            count += 1
            if time.monotonic() > deadline:
                return math.inf
    return float(count)
