# SPDX-License-Identifier: Apache-2.0
"""Means by torch.distributed: Gloo between processors, NCCL between GPUs; while backward goes on, if it is told.

    every worker, from the end of x to its beginning, a bucket at a time, as soon as it is final
        s ← wᵢ xᵢ / W                    W: what the weights add up to if nobody lacks anything; s: memory of our own
        s ← Σᵢ s                         under way beside what this worker computes
    with the last bucket
        Σᵢ wᵢ and Σᵢ bᵢ                  bᵢ: whether xᵢ turned out to be other than what was sent of it
    Σ bᵢ > 0:  all of it again, now that everybody knows its weight
    x̄ ← s W / Σ wᵢ                       nothing to be done if W is right

The buckets and their order are the same on every worker, whoever has or lacks a gradient. A worker whose gradient is
not finite finds that out when parts of it have gone: its weight is then 0 and bᵢ is 1, and since x is as it was, what
was sent is forgotten.

2 (N−1)/N S is sent by each worker for a vector of S bytes, and some bytes for the weights.

Neither Gloo nor NCCL nor the store through which they meet has a password or encrypts anything: whoever reaches the
run's network can read gradients and change them. They listen at the address they are given only, but that is all: for
networks that are trusted, and nothing else.
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
_THREADS = 2  # of Gloo: as many buckets are under way at once
_HEAD = 16  # elements before a vector, which leave it at a cache line; the last two are added up with it
_SLICE = 0.2  # seconds between two looks at whatever else there may be to hear
_NEVER = timedelta(days=365)  # until torch ends a mean: whoever waits for it finds out itself who is missing
_EXACT = (torch.float32, torch.float64)  # in which numbers of samples can be added up


class _Backend(Protocol):
    """What Gloo and NCCL have in common."""

    def allreduce(self, tensors: list[Tensor]) -> Work:
        """Begin to add up."""
        ...

    def shutdown(self) -> None:
        """Hang up, when every sum is there."""

    def abort(self) -> None:
        """Hang up now."""

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Let sums take so long from now on."""


# Where the workers meet.


def file_store(path: Path, workers: int) -> Store:
    """A store for the processes of one machine. A file in the run folder, not a port: nobody else can join."""
    return FileStore(str(path), workers)


def tcp_store(messenger: Messenger, rank: int, workers: int, host: str, patience: float) -> Callable[[], Store]:
    """A store on the first worker, which listens at `host` only; the others learn where through the run's messages.

    To connect to it may take as long as anything between machines, so that is left to whoever can wait.
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


# Adding up.


def _await(work: Work, meanwhile: Callable[[], None]) -> None:
    """Wait in Python: Gloo hears neither signals nor what others say, and cannot be asked again once it gave up."""
    if not work.is_completed():
        over = threading.Lock()
        over.acquire()
        work.get_future().add_done_callback(lambda _: over.release())
        while not over.acquire(timeout=_SLICE):
            meanwhile()
    work.wait()  # says what went wrong


def _await_gpu(meanwhile: Callable[[], None]) -> None:
    """Wait in Python until the GPU has done everything so far: NCCL hears no more than Gloo."""
    stream, looked = torch.cuda.current_stream(), time.monotonic()
    while not stream.query():
        time.sleep(0.0)  # other threads of this process may go on
        if time.monotonic() - looked > _SLICE:
            meanwhile()
            looked = time.monotonic()


def _never_end(backend: _Backend) -> None:
    """Gloo waits for all that is under way before it lets go of its memory; who should take part in it may be gone."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(backend))


class _Sum:
    """Σ wᵢ xᵢ / W, under way."""

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
        self._missing = {k: self._length for k in range(self._count - 1)}  # elements; the last one waits for the end
        self._told: set[int] = set()
        self._again = False
        self._works: list[Work] = []

    def ready(self, part: slice) -> None:
        """A range of x is final."""
        if part.start in self._told:
            self._again = True  # it was not: what went of it is wrong
            return
        self._told.add(part.start)
        n, length = self._x.numel(), self._length
        for k in range((n - part.stop) // length, min(-(-(n - part.start) // length), self._count - 1)):
            stop = n - k * length
            self._missing[k] -= min(part.stop, stop) - max(part.start, stop - length)
        while self._missing.get(len(self._works)) == 0:
            self._send()

    @property
    def sent(self) -> int:
        """Buckets under way."""
        return len(self._works)

    def _send(self) -> None:
        """The next bucket, from the end; the last one with what stands before the vector."""
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
        """The sum of the weights, and whether it all was in vain."""
        again = self._again or weight != self._weight
        self._room[_HEAD - 2 : _HEAD] = torch.tensor([weight, float(again)])
        while len(self._works) < self._count:
            self._send()
        self._wait(self._works)
        total, wrong = self._room[_HEAD - 2 : _HEAD].tolist()
        return total, wrong > 0


class TorchCollectives:
    """The means of all workers.

    `host` is this machine's address in the run's network, where Gloo listens. `on_waiting` is called again and again
    for as long as a mean takes.
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
        except RuntimeError as error:  # of torch, which does not say whom it waited for
            raise Stalled(
                f"worker {rank} at {host} did not come together with the other {workers - 1} through torch.distributed "
                f"within {patience:g} s: {str(error).splitlines()[0]}. All ports must be open between the machines; "
                'Attached(collectives="messages") and runs without --trusted-network do without it.'
            ) from error
        self._backend._set_default_timeout(_NEVER)
        self._rooms: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._begun: tuple[Tensor, _Sum] | None = None
        self._broken = False
        self.early = 0  # buckets that went before their vector was whole

    def ahead(self, x: Tensor, weight: float, most: float) -> Callable[[slice], None] | None:
        """Begin a mean of x, of which nothing is final yet. Gives whom to tell what is; None if x is but one bucket."""
        if x.dtype not in _EXACT:
            return None
        begun = self._sum(x, weight, self.workers * most)
        self._begun = x, begun
        return begun.ready if x.numel() * x.element_size() > _BUCKET else None

    def mean(self, x: Tensor, weight: float) -> tuple[Tensor, float]:
        """Σ wᵢ xᵢ / Σ wᵢ, in memory that the next mean of such a vector uses again, and Σ wᵢ; if 0, there is no mean.

        A vector of weight zero is not read, so it may hold anything.
        """
        begun, self._begun = self._begun, None
        if begun is not None and begun[0] is not x:
            raise RuntimeError("one mean was begun and another asked for: this is a bug of the strategy")
        self.early += begun[1].sent if begun is not None else 0
        try:
            return self._mean(x, weight, begun[1] if begun is not None else None)
        except RuntimeError as error:
            raise Stalled(f"a mean of all workers broke off: {error}") from error

    def mean_(self, x: Tensor, weight: float) -> float:
        """x ← its mean, in place; gives Σ wᵢ. If that is 0, x stays as it is."""
        mean, total = self.mean(x, weight)
        if total:
            x.copy_(mean)
        return total

    def _mean(self, x: Tensor, weight: float, begun: _Sum | None) -> tuple[Tensor, float]:
        mean = self._room(x)[1]
        if x.dtype not in _EXACT:  # the weights first, by themselves; then no sum can overflow
            total = self._total(weight, x.device)
            if total:
                self._sum(x, weight, total).finish(weight)
            return mean, total
        adding = begun or self._sum(x, weight, 1.0)
        total, in_vain = adding.finish(weight)
        if in_vain:
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
        """Memory for such a vector with what goes before it, and for the vector alone."""
        key = x.numel(), x.dtype
        if key not in self._rooms:
            room = torch.zeros(_HEAD + x.numel(), dtype=x.dtype, device=x.device)
            self._rooms[key] = room, room[_HEAD:]
        return self._rooms[key]

    def close(self) -> None:
        """Hang up."""
        if self._begun is not None:
            _never_end(self._backend)
        if (self._begun is not None or self._broken) and not self._blocks:
            self._backend.abort()  # shutdown waits for sums under way, which may never end
        else:
            self._backend.shutdown()
