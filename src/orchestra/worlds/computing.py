# SPDX-License-Identifier: Apache-2.0
"""Computation in the worlds of real time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestra.core.ops import Compute, Done, Handle, Sleep


def compute(op: Compute[Any], undisturbed: Callable[[Sleep], bool]) -> Handle[Any]:
    """Run the function of an op; check for its cancellation before and after, not in between."""
    if op.cancel_on is None:
        return Done(op.fn())
    glance = Sleep(0, op.cancel_on)
    if not undisturbed(glance):
        return Done(None)
    value = op.fn()
    return Done(value if undisturbed(glance) else None)
