# SPDX-License-Identifier: Apache-2.0
"""Checks of what processes need to train together: shared memory, futexes, a whole run, and the back ends of torch."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestra.doctor.trial import Finding, broken, fine, limited, short
from orchestra.formatting import plural, size
from orchestra.worlds.shared_memory.futex import FutexWords

if TYPE_CHECKING:
    from torch import Tensor

_TOUCHED = 1 << 26  # bytes
_ROOM = 1 << 28  # bytes free in /dev/shm
_TURNS = 200
_NO_DRIVER = "Only for device='cuda': needs an NVIDIA GPU and its driver."


# Memory.


def shared_memory() -> Finding:
    """Map, write and give back anonymous shared memory, as runs do; also look at /dev/shm."""
    fd = os.memfd_create("orchestra-doctor")
    mapped = _largest(fd)
    if mapped < _TOUCHED:
        return broken(f"only {size(mapped)} could be mapped", "Raise the limit: `ulimit -v unlimited`.")
    with mmap.mmap(fd, _TOUCHED) as memory:
        memory[:: mmap.PAGESIZE] = b"." * (_TOUCHED // mmap.PAGESIZE)
        memory.madvise(mmap.MADV_REMOVE)
        if memory[0]:
            return broken(
                "memory that was given back keeps its contents",
                "Local runs need a real Linux kernel, no emulation of one.",
            )
    found = f"memfd: {size(mapped)} mapped, {size(_TOUCHED)} written"
    problem = _named_memory()
    if problem:
        return limited(
            f"{found}; {problem}",
            "Only for DataLoader workers and NCCL: remount it, or start the container with --shm-size=2g.",
        )
    return fine(f"{found}; /dev/shm has {size(shutil.disk_usage('/dev/shm').free)} free")


def _largest(fd: int) -> int:
    """Return the largest power of two, up to a terabyte, that can be mapped: pages take memory only once touched."""
    mapped = 0
    for power in range(20, 41):
        try:
            os.ftruncate(fd, 1 << power)
            mmap.mmap(fd, 1 << power).close()
        except OSError:
            break
        mapped = 1 << power
    return mapped


def _named_memory() -> str:
    """Return what is wrong with /dev/shm, which runs themselves do not use; empty if nothing is."""
    try:
        with tempfile.TemporaryFile(dir="/dev/shm") as file:
            file.write(bytes(1 << 20))
    except OSError as error:
        return f"/dev/shm cannot be written: {error.strerror}"
    free = shutil.disk_usage("/dev/shm").free
    return f"/dev/shm has {size(free)} free" if free < _ROOM else ""


def futex() -> Finding:
    """Let two processes wake each other in turns."""
    words = FutexWords(mmap.mmap(-1, mmap.PAGESIZE), 2)
    other = os.fork()
    if other == 0:
        for turn in range(1, _TURNS + 1):
            _await(words, 0, turn)
            words.announce(1, turn)
        os._exit(0)
    took = []
    for turn in range(1, _TURNS + 1):
        began = time.perf_counter()
        words.announce(0, turn)
        _await(words, 1, turn)
        took.append(time.perf_counter() - began)
    os.waitpid(other, 0)
    return fine(f"{statistics.median(took) / 2 * 1e6:.0f} µs to wake another process")


def _await(words: FutexWords, index: int, turn: int) -> None:
    """Sleep until a word has this value, for at most five seconds, so that the forked process ends with the check."""
    deadline = time.monotonic() + 5
    while words[index] != turn and time.monotonic() < deadline:
        words.wait(index, turn - 1, 1.0)


# Training.


def torch_itself() -> Finding:
    """Import torch, and take a gradient."""
    from orchestra.doctor.packages import NEEDED, older

    began = time.perf_counter()
    import torch

    took = time.perf_counter() - began
    x = torch.ones(64, 64, requires_grad=True)
    (x @ x).sum().backward()  # type: ignore[no-untyped-call]
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU"
    found = f"{torch.__version__} built {built}, {plural(torch.get_num_threads(), 'thread')}, imported in {took:.1f} s"
    if x.grad is None or not torch.equal(x.grad, torch.full_like(x, 128.0)):
        return broken(f"{found}; a gradient was wrong", "Reinstall it: pip install --force-reinstall torch")
    if older(torch.__version__, NEEDED["torch"]):
        needs = f"torch>={NEEDED['torch']}"
        return broken(f"{found}; the package needs {needs}", f"pip install '{needs}'")
    return fine(found)


def local() -> Finding:
    """Train with two real processes."""
    from orchestra.worlds.shared_memory import fork_server

    began = time.perf_counter()
    fork_server.warm()  # first, so that it imports torch while this process does
    import torch
    from torch import nn

    from orchestra._train import train
    from orchestra.clusters.local import Local
    from orchestra.runs.budget import Steps

    with tempfile.TemporaryDirectory(prefix="orchestra-doctor-") as folder:
        result = train(
            model=partial(nn.Linear, 4, 1),
            data=_samples,
            loss=nn.functional.mse_loss,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            cluster=Local(workers=2, threads=1, patience=5.0),
            batch=4,
            budget=Steps(20),
            out=Path(folder) / "run",
            progress=False,
        )
    summary = result.summary
    if summary.loss is None or not summary.loss < 1.0:
        return broken(f"the loss was {summary.loss} after {summary.steps} steps", "Please report this as a bug.")
    return fine(
        f"2 processes, {summary.steps} steps in {summary.seconds * 1e3:.0f} ms, "
        f"{time.perf_counter() - began:.1f} s with imports and start"
    )


def _samples() -> tuple[Tensor, Tensor]:
    import torch

    x = torch.linspace(-1, 1, 64).repeat(4, 1).T.contiguous()
    return x, x.mean(1, keepdim=True)


# Back ends of torch.distributed.


def gloo() -> Finding:
    """Let two processes on loopback take a mean with Gloo."""
    import torch.distributed as dist

    if not dist.is_gloo_available():
        return limited(
            "this torch was built without Gloo", "Only for machines without GPUs: install a build that has it."
        )
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return _in_two(lambda folder, rank: _mean("gloo", folder, rank, 2, "cpu"), "2 processes on loopback")


def cuda() -> Finding:
    """Compute a sum on every GPU."""
    if not _driver():
        return limited("no NVIDIA driver on this machine: workers compute on the CPU", _NO_DRIVER)
    import torch

    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU"
        return limited(
            f"the driver is installed, but torch {torch.__version__} (built {built}) finds no GPU",
            "Only for device='cuda': look at nvidia-smi, and install a build of torch for its CUDA version.",
        )
    found = []
    for device in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(device)
        x = torch.ones(1 << 20).pin_memory().to(f"cuda:{device}", non_blocking=True)
        if float((2 * x).sum()) != 2 << 20:
            return broken(f"GPU {device} computes wrong sums", "Leave it out: export CUDA_VISIBLE_DEVICES=...")
        found.append(f"{torch.cuda.get_device_name(device)}, {size(free)} of {size(total)} free")
    return fine("; ".join(found))


def nccl() -> Finding:
    """Let two processes with a GPU each take a mean with NCCL; one process alone if there is only one GPU."""
    if not _driver():
        return limited("no NVIDIA driver on this machine", _NO_DRIVER)
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available() or not torch.version.cuda:
        return limited("this torch was built without NCCL", "Only for several GPUs: install a build of torch for CUDA.")

    def act(folder: Path, rank: int) -> None:
        gpus = torch.cuda.device_count()
        if gpus > rank:
            _mean("nccl", folder, rank, min(gpus, 2), f"cuda:{rank}")

    return _in_two(act, "2 GPUs, or 1 if there is only one")


def _driver() -> bool:
    """Whether the driver's library can be loaded: a quicker test than importing torch."""
    try:
        return bool(ctypes.CDLL("libcuda.so.1"))
    except OSError:
        return False


def _in_two(act: Callable[[Path, int], None], where: str) -> Finding:
    """Run both ranks of an exchange, rank 1 in a forked process."""
    with tempfile.TemporaryDirectory(prefix="orchestra-doctor-") as folder:
        began = time.perf_counter()
        other = os.fork()
        if other == 0:
            code = 1
            try:
                act(Path(folder), 1)
                code = 0
            finally:
                os._exit(code)
        act(Path(folder), 0)
        _, status = os.waitpid(other, 0)
        took = time.perf_counter() - began
    if status:
        raise ChildProcessError(f"the second process ended with {os.waitstatus_to_exitcode(status)}")
    return fine(f"a mean over {where}, {took:.2f} s")


def _mean(backend: str, folder: Path, rank: int, size: int, device: str) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    where: dict[str, Any] = {"device_id": torch.device(device)} if device != "cpu" else {}
    store = FileStore(str(folder / "store"), size)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=5), **where
    )  # fmt: skip
    x = torch.full((1000,), float(rank), device=device)
    dist.all_reduce(x)
    x /= size
    dist.destroy_process_group()
    if not bool((x == (size - 1) / 2).all()):
        raise RuntimeError(short(f"the mean was {x[0]}, not {(size - 1) / 2}"))
