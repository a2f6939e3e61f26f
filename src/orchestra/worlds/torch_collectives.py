# SPDX-License-Identifier: Apache-2.0
"""All-reduce by torch.distributed: Gloo between processors, NCCL between GPUs; overlapped with backward if possible.

    every worker, from the end of x to its beginning, a bucket at a time, as soon as it is final
        s ← wᵢ xᵢ / W                    W: the expected sum of the weights; s: a separate buffer
        s ← Σᵢ s                         while this worker computes
    with the last bucket
        Σᵢ wᵢ and Σᵢ bᵢ                  bᵢ: whether xᵢ or its weight changed after parts of it were sent
    Σ bᵢ > 0:  repeat all of it, now that every worker knows its weight
    x̄ ← s W / Σ wᵢ                       unless W = Σ wᵢ

The buckets and their order are the same on every worker, with or without a gradient. A worker may find that its
gradient is not finite after parts of it were sent: its weight is then 0 and bᵢ is 1, and since x is unchanged, the sums
are discarded.

Each worker sends 2 (N−1)/N S for a vector of S bytes, and some bytes for the weights.

Neither Gloo nor NCCL nor their store has a password or encryption: anything on the run's network can read and change
gradients. They listen only at the given address. Use them only on trusted networks.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import FileStore, ProcessGroupGloo, Store, TCPStore, Work

from orchestra.core.gradient_mask import ABSENT
from orchestra.core.ops import All
from orchestra.errors import Stalled
from orchestra.worlds.sockets.addresses import listen
from orchestra.worlds.sockets.messenger import Messenger

_BUCKET = 1 << 22  # bytes
_THREADS = 2  # of Gloo: the number of concurrent buckets
_HEAD = 16  # elements before a vector, which keep it aligned to cache lines; the last two are summed with it
_SLICE = 0.2  # seconds between two calls of `on_waiting`
_NEVER = timedelta(days=365)  # time-out of torch, since the waiting process itself finds out which one is missing
_EXACT = (torch.float32, torch.float64)  # dtypes that hold sums of sample counts exactly


class _Backend(Protocol):
    """The common interface of Gloo and NCCL."""

    def allreduce(self, tensors: list[Tensor]) -> Work:
        """Start an all-reduce that sums."""
        ...

    def shutdown(self) -> None:
        """Close the connections after all sums."""

    def abort(self) -> None:
        """Close the connections at once."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of sums."""


# Rendezvous.


def file_store(path: Path, workers: int) -> Store:
    """Return a store for the processes of one machine: a file in the run folder instead of a port, for safety."""
    return FileStore(str(path), workers)


def tcp_store(messenger: Messenger, rank: int, workers: int, host: str, patience: float) -> Callable[[], Store]:
    """Return a function that connects to a store on the first worker, which listens only at `host`.

    The other workers receive its address by a message of the run. Connecting may take long between machines, so the
    caller chooses when.
    """
    limit = timedelta(seconds=patience)
    if rank:
        address, _, port = bytes(messenger.receive_piece(0).x.tolist()).decode().rpartition(":")
        return lambda: TCPStore(address, int(port), is_master=False, wait_for_workers=False, timeout=limit)
    door = listen(host)
    door_port = door.getsockname()[1]
    store = TCPStore(
        host, door_port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=door.detach()
    )
    where = torch.tensor(list(f"{host}:{door_port}".encode()), dtype=torch.uint8)
    All([messenger.send_piece(other, where, 1.0) for other in range(1, workers)]).wait()
    return lambda: store


def _backend(store: Store, rank: int, workers: int, device: torch.device, host: str, patience: timedelta) -> _Backend:
    if device.type == "cuda":
        from torch._C._distributed_c10d import ProcessGroupNCCL  # torch has none where there is no CUDA

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = patience
        return ProcessGroupNCCL(store, rank, workers, nccl)  # type: ignore[return-value]
    gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [ProcessGroupGloo.create_device(hostname=host, lazy_init=False)]
    gloo._timeout = patience
    gloo._threads = _THREADS
    return ProcessGroupGloo(store, rank, workers, gloo)  # type: ignore[return-value]


# Sums.


def _await(work: Work, meanwhile: Callable[[], None]) -> None:
    """Wait in Python, calling `meanwhile`: a wait inside Gloo handles neither signals nor messages."""
    if not work.is_completed():
        over = threading.Lock()
        over.acquire()
        work.get_future().add_done_callback(lambda _: over.release())
        while not over.acquire(timeout=_SLICE):
            meanwhile()
    work.wait()  # raises if it failed


def _await_gpu(meanwhile: Callable[[], None]) -> None:
    """Wait in Python until the GPU has done all work so far, since NCCL handles neither signals nor messages."""
    stream, looked = torch.cuda.current_stream(), time.monotonic()
    while not stream.query():
        time.sleep(0.0)  # other threads of this process may go on
        if time.monotonic() - looked > _SLICE:
            meanwhile()
            looked = time.monotonic()


def _never_end(backend: _Backend) -> None:
    """Keep a backend alive forever: its destructor would wait for pending work, whose other members may have ended."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


class _Sum:
    """The sum Σ wᵢ xᵢ / W in progress."""

    def __init__(
        self,
        backend: _Backend,
        x: Tensor,
        room: Tensor,
        weight: float,
        whole: float,
        wait: Callable[[list[Work]], None],
    ) -> None:
        self._backend, self._wait = backend, wait
        self._x, self._room = x, room
        self._weight, self.whole = weight, whole
        self._length = _BUCKET // x.element_size()
        self._count = max(1, -(-x.numel() // self._length))  # buckets
        self._missing = {k: self._length for k in range(self._count - 1)}  # elements; the last is sent at the end
        self._ready: set[int] = set()
        self._again = False
        self._works: list[Work] = []

    def ready(self, part: slice) -> None:
        """Note that a range of x is final, and send complete buckets."""
        if part.start in self._ready:
            self._again = True  # the range has changed after it was sent
            return
        self._ready.add(part.start)
        n, length = self._x.numel(), self._length
        for k in range((n - part.stop) // length, min(-(-(n - part.start) // length), self._count - 1)):
            stop = n - k * length
            self._missing[k] -= min(part.stop, stop) - max(part.start, stop - length)
        while self._missing.get(len(self._works)) == 0:
            self._send()

    @property
    def sent(self) -> int:
        """The number of buckets sent."""
        return len(self._works)

    def _send(self) -> None:
        """Send the next bucket, from the end; the last one includes the head before the vector."""
        k, n = len(self._works), self._x.numel()
        stop = n - k * self._length
        start = max(0, stop - self._length)
        mine, ours = self._x[start:stop], self._room[_HEAD + start : _HEAD + stop]
        if self._weight:
            torch.mul(mine, self._weight / self.whole, out=ours)
        else:
            ours.fill_(ABSENT)  # x may hold anything
        first = start + _HEAD if start or self._x.dtype not in _EXACT else _HEAD - 2
        self._works.append(self._backend.allreduce([self._room[first : _HEAD + stop]]))

    def finish(self, weight: float) -> tuple[float, bool]:
        """Send the remaining buckets and wait; return the sum of the weights, and whether all must be repeated."""
        again = self._again or weight != self._weight
        self._room[_HEAD - 2 : _HEAD] = torch.tensor([weight, float(again)])
        while len(self._works) < self._count:
            self._send()
        self._wait(self._works)
        total, wrong = self._room[_HEAD - 2 : _HEAD].tolist()
        return total, wrong > 0


class TorchCollectives:
    """Weighted means over all workers by torch.distributed.

    `host` is this machine's address in the run's network, where Gloo listens. `on_waiting` is called repeatedly during
    a mean.
    """

    def __init__(
        self,
        store: Store | Callable[[], Store],
        rank: int,
        workers: int,
        device: torch.device,
        *,
        host: str = "127.0.0.1",
        patience: float = 300.0,
        on_waiting: Callable[[], None] = lambda: None,
    ) -> None:
        self.workers = workers
        self._on_waiting = on_waiting  # called now and then, for as long as a mean takes
        self._blocks = device.type == "cpu"
        try:
            self._backend = _backend(
                store() if callable(store) else store, rank, workers, device, host, timedelta(seconds=patience)
            )
        except RuntimeError as error:  # of torch, which does not name the missing worker
            raise Stalled(
                f"worker {rank} at {host} could not connect to the other {workers - 1} through torch.distributed "
                f"within {patience:g} s: {str(error).splitlines()[0]}. All ports must be open between the machines; "
                'Attached(collectives="messages") and runs without --trusted-network do not need it.'
            ) from error
        self._backend._set_default_timeout(_NEVER)
        self._rooms: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._begun: tuple[Tensor, _Sum] | None = None
        self._broken = False
        self.early = 0  # buckets sent before their vector was complete

    def ahead(self, x: Tensor, weight: float, most: float) -> Callable[[slice], None] | None:
        """Begin a mean of x; return a function to call with final ranges, or None if x is a single bucket."""
        if x.dtype not in _EXACT:
            return None
        begun = self._sum(x, weight, self.workers * most)
        self._begun = x, begun
        return begun.ready if x.numel() * x.element_size() > _BUCKET else None

    def mean(self, x: Tensor, weight: float) -> tuple[Tensor, float]:
        """Return Σ wᵢ xᵢ / Σ wᵢ, in memory that the next mean of this length reuses, and Σ wᵢ; if 0, there is no mean.

        A vector of weight zero is not read.
        """
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] is not x:
            raise RuntimeError("one mean was begun and another requested: this is a bug in the strategy")
        self.early += begun[1].sent if begun is not None else 0
        try:
            return self._mean(x, weight, begun[1] if begun is not None else None)
        except RuntimeError as error:
            raise Stalled(f"an all-reduce of all workers failed: {error}") from error

    def mean_(self, x: Tensor, weight: float) -> float:
        """x ← its mean, in place; return Σ wᵢ. If that is 0, x stays as it is."""
        mean, total = self.mean(x, weight)
        if total:
            x.copy_(mean)
        return total

    def _mean(self, x: Tensor, weight: float, begun: _Sum | None) -> tuple[Tensor, float]:
        mean = self._room(x)[1]
        if x.dtype not in _EXACT:  # sum the weights first, so that no sum can overflow
            total = self._total(weight, x.device)
            if total:
                self._sum(x, weight, total).finish(weight)
            return mean, total
        adding = begun or self._sum(x, weight, 1.0)
        total, wrong = adding.finish(weight)
        if wrong:
            adding = self._sum(x, weight, adding.whole)
            total, _ = adding.finish(weight)
        if total not in (0.0, adding.whole):
            mean.mul_(adding.whole / total)
        return mean, total

    def _total(self, weight: float, device: torch.device) -> float:
        total = torch.tensor([weight], dtype=torch.float64, device=device)
        self._wait([self._backend.allreduce([total])])
        return float(total)

    def _sum(self, x: Tensor, weight: float, whole: float) -> _Sum:
        return _Sum(self._backend, x, self._room(x)[0], weight, whole, self._wait)

    def _wait(self, works: list[Work]) -> None:
        try:
            for work in works:
                _await(work, self._on_waiting) if self._blocks else work.wait()  # NCCL has the GPU wait
            if not self._blocks:
                _await_gpu(self._on_waiting)
        except BaseException:
            _never_end(self._backend)
            self._broken = True
            raise

    def _room(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return memory for a vector with its head, and the part for the vector alone."""
        key = x.numel(), x.dtype
        if key not in self._rooms:
            room = torch.zeros(_HEAD + x.numel(), dtype=x.dtype, device=x.device)
            self._rooms[key] = room, room[_HEAD:]
        return self._rooms[key]

    def close(self) -> None:
        """Close the connections."""
        if self._begun is not None:
            _never_end(self._backend)
        if (self._begun is not None or self._broken) and not self._blocks:
            self._backend.abort()  # shutdown waits for sums under way, which may never end
        else:
            self._backend.shutdown()
