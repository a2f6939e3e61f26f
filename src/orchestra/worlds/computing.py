# SPDX-License-Identifier: Apache-2.0
"""How a node computes where that simply takes as long as it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestra.core.ops import Compute, Done, Handle, Sleep


def compute(op: Compute[Any], undisturbed: Callable[[Sleep], bool]) -> Handle[Any]:
    """Call it; what is not wanted any more is found out before and after, not in the middle."""
    if op.cancel_on is None:
        return Done(op.fn())
    glance = Sleep(0, op.cancel_on)
    if not undisturbed(glance):
        return Done(None)
    value = op.fn()
    return Done(value if undisturbed(glance) else None)
