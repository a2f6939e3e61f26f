# SPDX-License-Identifier: Apache-2.0
"""A message when something takes long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from orchestra.cli import summary

_SECONDS = 3.0  # before a message


@contextmanager
def patiently(text: str, after: float = _SECONDS) -> Iterator[None]:
    """Print what is being done if it takes longer than some seconds."""
    timer = threading.Timer(after, summary.say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # no message after the next one
