# SPDX-License-Identifier: Apache-2.0
"""What wraps a transport: the one place where seconds are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

from torch import Tensor

from orchestra.ops import Compute, Done, Handle, MeanUpdate, Op, Transport

T = TypeVar("T")


class Metered:
    """Counts the seconds a node spends computing, communicating and waiting for others."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.traffic = inner.traffic
        self.now = inner.now
        self.proceed = inner.proceed
        self.compute = 0.0  # seconds
        self.communicate = 0.0  # seconds, waiting excluded

    @property
    def wait(self) -> float:
        """Seconds blocked on other nodes."""
        return self.traffic.waited

    def start(self, op: Op[T]) -> Handle[T]:
        """Pass the op on and note how long it took."""
        if isinstance(op, MeanUpdate):
            op = cast("Op[T]", replace(op, apply=self._timed(op.apply)))
        began, waited, computed = self.now(), self.traffic.waited, self.compute
        handle = self.inner.start(op)
        took = self.now() - began
        if type(op) is Compute:
            self.compute += took
        else:
            self.communicate += took - (self.traffic.waited - waited) - (self.compute - computed)
        return handle if isinstance(handle, Done) else _MeteredHandle(self, handle)

    def _timed(self, apply: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """The optimizer's part of a fused op is computing, not communicating."""

        def timed(mean: Tensor) -> None:
            began = self.now()
            apply(mean)
            self.compute += self.now() - began

        return timed


@dataclass(slots=True)
class _MeteredHandle(Generic[T]):
    meter: Metered
    inner: Handle[T]

    def wait(self) -> T:
        """Wait, and note how long that took."""
        meter = self.meter
        began, waited = meter.now(), meter.traffic.waited
        value = self.inner.wait()
        meter.communicate += meter.now() - began - (meter.traffic.waited - waited)
        return value
