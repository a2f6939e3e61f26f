# SPDX-License-Identifier: Apache-2.0
"""The peers: plain torch, DistributedDataParallel on Gloo, and the RPC parameter server of PyTorch's tutorials.

A process of a group sets up once, then reads commands from its standard input and answers each with a line of JSON:

    ready         → true
    steps N       → seconds of each of N steps
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.rpc as distributed_rpc
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads import WORKLOADS, Workload, loss, sgd

Step = Callable[[], None]


def batches(workload: Workload, rank: int) -> Iterator[list[Tensor]]:
    """Random mini-batches, gathered by index as our feed does."""
    data = workload.data()
    generator = torch.Generator().manual_seed(rank)
    while True:
        order = torch.randperm(len(data[0]), generator=generator)
        for chosen in order.split(workload.batch):  # type: ignore[no-untyped-call]
            yield [part.index_select(0, chosen) for part in data]


def gradient(module: nn.Module, batch: list[Tensor]) -> float:
    """Forward and backward."""
    inputs, target = batch
    value = loss(module(inputs), target)
    value.backward()  # type: ignore[no-untyped-call]
    return value.item()


def plain(module: nn.Module, feed: Iterator[list[Tensor]]) -> Step:
    """The loop everyone writes."""
    optimizer = sgd(module.parameters())

    def step() -> None:
        optimizer.zero_grad()
        gradient(module, next(feed))
        optimizer.step()

    return step


def solo(workload: Workload, rank: int, **_: Any) -> Step:
    """One process alone."""
    return plain(workload.module(), batches(workload, rank))


def ddp(workload: Workload, rank: int, processes: int, port: str, options: list[str]) -> Step:
    """DistributedDataParallel on Gloo."""
    first = os.environ.get("ORCHESTRA_LAB_FIRST", "127.0.0.1")
    dist.init_process_group("gloo", init_method=f"tcp://{first}:{port}", rank=rank, world_size=processes)
    module = DistributedDataParallel(workload.module(), gradient_as_bucket_view="--gradient-as-bucket-view" in options)
    return plain(module, batches(workload, rank))


# The RPC parameter server, after "Implementing Batch RPC Processing Using Asynchronous Executions": gradients travel as
# the arguments of one call a step, parameters as its result.


class _Server:
    def __init__(self, module: nn.Module, workers: int, momentum: float) -> None:
        self.module = module
        self.workers = workers
        self.parameters = list(module.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.001, momentum=momentum)
        self.lock = threading.Lock()
        self.waiting = 0
        self.future: torch.futures.Future[nn.Module] = torch.futures.Future()

    def apply(self, grads: list[Tensor]) -> list[Tensor]:
        """Asynchronous: every gradient is applied when it comes."""
        with self.lock:
            for parameter, grad in zip(self.parameters, grads, strict=True):
                parameter.grad = grad
            self.optimizer.step()
        return [parameter.detach() for parameter in self.parameters]

    def gather(self, grads: list[Tensor]) -> torch.futures.Future[nn.Module]:
        """The tutorial's `update_and_fetch_model`: no worker is answered before all have pushed."""
        for parameter, grad in zip(self.parameters, grads, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad += grad
        with self.lock:
            self.waiting += 1
            future = self.future
            if self.waiting == self.workers:
                for parameter in self.parameters:
                    assert parameter.grad is not None
                    parameter.grad /= self.workers
                self.waiting = 0
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=False)
                future.set_result(self.module)
                self.future = torch.futures.Future()
        return future


_serving: _Server | None = None


def push_and_pull(grads: list[Tensor]) -> list[Tensor]:
    """Runs on the server: apply gradients, give the parameters."""
    assert _serving is not None
    return _serving.apply(grads)


@distributed_rpc.functions.async_execution  # type: ignore[untyped-decorator]
def update_and_fetch_model(grads: list[Tensor]) -> torch.futures.Future[nn.Module]:
    """Runs on the server: give the model once everyone's gradients are in."""
    assert _serving is not None
    return _serving.gather(grads)


def rpc(workload: Workload, rank: int, processes: int, port: str, options: list[str]) -> Step | None:
    """The last process is the server."""
    global _serving
    last = processes - 1
    agent = distributed_rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", num_worker_threads=4)
    module = workload.module()
    if rank == last:
        _serving = _Server(module, last, 0.0 if "--plain-sgd" in options else 0.9)
    name = f"node{rank}"
    distributed_rpc.init_rpc(name, rank=rank, world_size=processes, rpc_backend_options=agent)  # type: ignore[no-untyped-call]
    if rank == last:
        return None
    feed = batches(workload, rank)
    server = f"node{last}"

    def tensors() -> None:
        parameters = list(module.parameters())
        if "--without-gradient" not in options:
            module.zero_grad()
            gradient(module, next(feed))
        pulled = distributed_rpc.rpc_sync(server, push_and_pull, args=([p.grad for p in parameters],))
        for parameter, value in zip(parameters, pulled, strict=True):
            parameter.data = value  # taken over, not copied

    def tutorial() -> None:
        nonlocal module
        module.zero_grad()
        gradient(module, next(feed))
        grads = [p.grad for p in module.parameters()]
        module = distributed_rpc.rpc_sync(server, update_and_fetch_model, args=(grads,))

    gradient(module, next(feed))
    return tutorial if "--as-in-the-tutorial" in options else tensors


def copier() -> Step:
    """A plain copy of 40 MB between two buffers."""
    source, target = torch.ones(10_000_000), torch.zeros(10_000_000)

    def step() -> None:
        target.copy_(source)

    return step


KINDS: dict[str, Callable[..., Step | None]] = {
    "solo": solo,
    "ddp": ddp,
    "rpc": rpc,
    "memcpy": lambda *_, **__: copier(),
}


def timed(step: Step, count: int) -> list[float]:
    """Seconds of each step."""
    seconds, last = [], time.perf_counter()
    for _ in range(count):
        step()
        now = time.perf_counter()
        seconds.append(now - last)
        last = now
    return seconds


def serve() -> None:
    """Set up what the command line asks for."""
    kind, workload, processes, port, rank, *options = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    answer(KINDS[kind](WORKLOADS[workload], int(rank), processes=int(processes), port=port, options=options))


def answer(step: Step | None) -> None:
    """Read commands until there are no more; does not return."""
    for line in sys.stdin:
        match line.split():
            case ["ready"]:
                found: Any = True
            case ["steps", count]:
                found = [] if step is None else timed(step, int(count))
            case words:
                raise ValueError(f"unknown command {words}")
        print(json.dumps(found), flush=True)
    os._exit(0)  # process groups and RPC agents end together with the others, which is not needed here


if __name__ == "__main__":
    # Functions called by RPC are looked up by module name, which must be the same in every process.
    from benchmarks import peer

    peer.serve()
