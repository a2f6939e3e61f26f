# SPDX-License-Identifier: Apache-2.0
"""A transport that records every op of a node: its kind, its begin and end, the other node, and the bytes.

When models are averaged, it also logs the consensus distance ‖xᵢ − x̄‖ of this node.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from orchestra.core.ops import (
    Broadcast,
    Compute,
    Done,
    Gather,
    Handle,
    Mean,
    MeanUpdate,
    Message,
    Op,
    Recv,
    Send,
    Transport,
)
from orchestra.engine.middleware import TransportWrapper
from orchestra.runs.events import Logged, OpTraced

T = TypeVar("T")
_TOGETHER: dict[type[Any], str] = {Mean: "mean", MeanUpdate: "mean", Broadcast: "broadcast", Gather: "gather"}


class Traced(TransportWrapper):
    """Records every op when it is over; a send of a lent vector, when it was started."""

    def __init__(
        self, inner: Transport, write: Callable[[OpTraced], None], log: Callable[[Logged], None], *, apart: bool
    ) -> None:
        super().__init__(inner)
        self._write, self._log = write, log
        self._apart = apart  # each worker has its own model, so that a mean is one of models
        self._step = 0
        self.proceed = self._proceed

    def _proceed(self, step: int, *, lockstep: bool) -> bool:
        self._step = step
        return self.inner.proceed(step, lockstep=lockstep)

    def start(self, op: Op[T]) -> Handle[T]:
        """Pass the op on, and record it."""
        began = self.now()
        own = op.x.clone() if self._apart and type(op) is Mean and not op.x.is_meta else None
        handle = self.inner.start(op)
        if own is not None and isinstance(op, Mean):
            distance = float((own - op.x).norm())
            self._log(Logged(self.now(), self.rank, self._step, "consensus", distance))
        found = _described(op, handle)
        if found is not None:
            kind, peer, nbytes = found
            self._write(OpTraced(self.now(), self.rank, kind, began, peer, nbytes))
        return handle


def _described(op: Op[Any], handle: Handle[Any]) -> tuple[str, int | None, int] | None:
    """Return the kind of an op, the other node and the bytes between the two; None for ops that are not recorded."""
    kind: type[Any] = type(op)
    if isinstance(op, Send):
        return "send", op.to, op.x.nbytes
    if isinstance(op, Compute):
        return ("compute", None, 0) if op.work else None
    if isinstance(op, Recv):
        came = handle.wait() if isinstance(handle, Done) else None
        return ("receive", came.source, came.x.nbytes) if isinstance(came, Message) else None
    if kind not in _TOGETHER:
        return None
    return _TOGETHER[kind], None, (op.g if isinstance(op, MeanUpdate) else cast("Mean", op).x).nbytes
