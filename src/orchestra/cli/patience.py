# SPDX-License-Identifier: Apache-2.0
"""A word to who waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from orchestra.cli import summary

_SECONDS = 3.0  # that nobody minds


@contextmanager
def patiently(text: str, after: float = _SECONDS) -> Iterator[None]:
    """Say what is being done if it is not done within some seconds."""
    timer = threading.Timer(after, summary.say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # nothing is said after what comes next
