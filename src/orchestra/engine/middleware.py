# SPDX-License-Identifier: Apache-2.0
"""Wrappers around a transport: the one place where seconds are counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar, cast

from torch import Tensor

from orchestra.core.ops import Compute, Done, Handle, MeanUpdate, Op, Sleep, Transport

T = TypeVar("T")


class TransportWrapper:
    """A transport around another one."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.traffic = inner.traffic
        self.now = inner.now
        self.proceed = inner.proceed


class Delayed(TransportWrapper):
    """Emulates a slow machine: sleeps until each mini-batch has taken a given time."""

    def __init__(self, inner: Transport, lasts: Callable[[int], float], step: int = 0) -> None:
        super().__init__(inner)
        self._lasts = lasts
        self.step = step  # of the next mini-batch

    def start(self, op: Op[T]) -> Handle[T]:
        """Pass the op on; if it computes a gradient, sleep until the given time has passed."""
        if type(op) is not Compute or not op.work:
            return self.inner.start(op)
        due = self.now() + self._lasts(self.step)
        self.step += 1
        handle = self.inner.start(op)
        undisturbed = self.inner.start(Sleep(max(0.0, due - self.now()), op.cancel_on)).wait()
        return handle if undisturbed else cast("Handle[T]", Done(None))


class Metered(TransportWrapper):
    """Counts the seconds a node spends computing, communicating and waiting for others."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.compute = 0.0  # seconds
        self.communicate = 0.0  # seconds, waiting excluded

    @property
    def wait(self) -> float:
        """Seconds blocked on other nodes."""
        return self.traffic.waited

    def start(self, op: Op[T]) -> Handle[T]:
        """Pass the op on and count the seconds that it took."""
        if type(op) is MeanUpdate:
            op = cast("Op[T]", replace(op, apply=self._timed(op.apply)))
        now, traffic = self.now, self.traffic
        began, waited, computed = now(), traffic.waited, self.compute
        handle = self.inner.start(op)
        if took := now() - began:
            if type(op) is Compute:
                self.compute += took
            else:
                self.communicate += took - (traffic.waited - waited) - (self.compute - computed)
        return handle if isinstance(handle, Done) else _MeteredHandle(self, handle)

    def _timed(self, apply: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        """Count the optimizer's part of a fused op as computing, not as communicating."""

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
        """Wait for the op, and count the seconds that took."""
        meter = self.meter
        began, waited = meter.now(), meter.traffic.waited
        value = self.inner.wait()
        meter.communicate += meter.now() - began - (meter.traffic.waited - waited)
        return value
