# SPDX-License-Identifier: Apache-2.0
"""Waiting for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until a condition holds; raise if it does not hold after so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"what was waited for did not happen within {seconds:g} s")
        time.sleep(0.01)
