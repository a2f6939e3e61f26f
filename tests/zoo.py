# SPDX-License-Identifier: Apache-2.0
"""Small problems that all tests share, plain torch training to compare with, and traps that spring at a given step."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tests.waiting import wait_until
from torch import Tensor, nn

import orchestra
from orchestra.data.feed import IndexedFeed
from orchestra.data.partitions import Partition
from orchestra.data.random_state import seed_everything
from orchestra.model.flat_optimizer import Factory, Schedule
from orchestra.runs.events import Event, NodeEnded, read

INPUTS, CLASSES, COUNT, BATCH, SEED = 7, 3, 101, 6, 3

sgd: Factory = partial(torch.optim.SGD, lr=0.05)
momentum: Factory = partial(torch.optim.SGD, lr=0.02, momentum=0.9)
adam: Factory = partial(torch.optim.Adam, lr=0.01)


def make_model() -> nn.Module:
    """83 parameters: no group size divides that."""
    return nn.Sequential(nn.Linear(INPUTS, 7), nn.Tanh(), nn.Linear(7, CLASSES), nn.Linear(CLASSES, 1, bias=False))


def make_large() -> nn.Module:
    """269,681 parameters: large for any number of workers, and divisible neither by 2, by 3 nor by a cache line."""
    return nn.Sequential(nn.Linear(INPUTS, 600), nn.Tanh(), nn.Linear(600, 440), nn.Tanh(), nn.Linear(440, 1))


def make_data(count: int = COUNT) -> tuple[Tensor, Tensor]:
    """The first input of a sample is a hundredth of its index, so that a trap can know it."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(count, INPUTS, generator=generator)
    x[:, 0] = torch.arange(count) / 100
    return x, torch.sin(x.sum(1, keepdim=True)) + x[:, 1:2]


def make_classes(count: int = COUNT) -> tuple[Tensor, Tensor]:
    x, _ = make_data(count)
    return x, (x[:, 1] > 0).long() + (x[:, 2] > 0).long()


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 7), nn.Tanh(), nn.Linear(7, CLASSES))


class Dicey(nn.Module):
    """Draws from every generator there is, so that forgetting one of them shows."""

    def __init__(self, model: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        small = nn.Sequential(nn.Linear(INPUTS, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 1))
        self.inner = small if model is None else nn.Sequential(nn.BatchNorm1d(INPUTS), nn.Dropout(0.1), model())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand())) if self.training else y


def tell(kind: str) -> None:
    raise RuntimeError(f"sprung: {kind}")


@dataclass
class Trap:
    """Does something in the worker, and only there, that meets a given sample."""

    sample: int
    action: Callable[[], object]
    first: int | None = None  # what the worker it is set for meets in its first step; None: set for all workers
    parent: int = field(default_factory=os.getpid)
    armed: bool | None = None  # in this process; not known before the first step

    @classmethod
    def at(cls, rank: int, step: int, action: Callable[[], object], *, size: int, batch: int = BATCH) -> Trap:
        """Sprung by worker `rank` in its step `step` of the first epoch, once, not by others who meet it later."""
        feed = IndexedFeed(make_data(), batch=batch, seed=SEED, rank=rank, size=size)
        return cls(feed.indices(0, step)[0], action, feed.indices(0, 0)[0])

    def meet(self, x: Tensor) -> bool:
        if os.getpid() == self.parent:
            return False
        met = {round(index * 100) for index in x[:, 0].tolist()}
        if self.armed is None:
            self.armed = self.first is None or self.first in met
        sprung = self.armed and self.sample in met
        self.armed = self.armed and (self.first is None or not sprung)
        return sprung


class Watched(nn.Module):
    """A module with traps; without any it is the same model."""

    def __init__(self, inner: nn.Module, *traps: Trap) -> None:
        super().__init__()
        self.inner = inner
        self.traps = traps

    def forward(self, x: Tensor) -> Tensor:
        for trap in self.traps:
            if trap.meet(x):
                trap.action()
        y: Tensor = self.inner(x)
        return y


class Jittery(nn.Module):
    """Takes a different time at every call in every process, without touching any seeded generator."""

    def __init__(self, model: Callable[[], nn.Module] = make_model) -> None:
        super().__init__()
        self.inner = model()

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(os.urandom(1)[0] / 255 * 0.01)
        y: Tensor = self.inner(x)
        return y


class Paced(nn.Module):
    """Takes so many seconds a step, by worker; the same model whatever they are."""

    def __init__(self, seconds: dict[int, float], model: Callable[[], nn.Module] = make_model) -> None:
        super().__init__()
        self.inner = model()
        self.seconds = seconds
        self.rank: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.seconds:
            if self.rank is None:
                self.rank = my_rank()
            time.sleep(self.seconds.get(self.rank, 0.0))
        y: Tensor = self.inner(x)
        return y


def paced(*seconds: float, model: Callable[[], nn.Module] = make_model) -> Callable[[], nn.Module]:
    """A model that takes worker 0 the first time, worker 1 the second, ..."""
    return lambda: Paced(dict(enumerate(seconds)), model)


def my_rank() -> int:
    """Which node this process is, by the file it writes its events to; -1 outside of a run."""
    names = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            names.append(fd.readlink().name)
        except OSError:  # the one that lists them
            continue
    found = [n.removeprefix("events-").removesuffix(".jsonl") for n in names if n.startswith("events-")]
    return int(found[0]) if len(found) == 1 else -1


def trapped(*traps: Trap, model: Callable[[], nn.Module] = make_model) -> Callable[[], nn.Module]:
    return lambda: Watched(model(), *traps)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def note_and_die(path: Path) -> None:
    path.write_text(repr(time.time()))
    die()


def die_after(path: Path) -> None:
    """Die once a file is there: others may be behind."""
    wait_until(path.exists)
    die()


def press_ctrl_c(whom: int) -> None:
    """As a person at the keyboard would: only the program itself gets it. Then take a long step."""
    os.kill(whom, signal.SIGINT)
    time.sleep(0.3)


def train(strategy: orchestra.Strategy[Any] | str, out: Path, *, workers: int = 3, **given: Any) -> orchestra.Result:
    """A short run on the regression problem; anything may be replaced."""
    asked: dict[str, Any] = {
        "model": make_model,
        "data": make_data,
        "loss": F.mse_loss,
        "optimizer": momentum,
        "batch": BATCH,
        "budget": orchestra.Steps(5),
        "seed": SEED,
        "cluster": orchestra.Local(workers=workers, patience=20),
        **given,
    }
    return orchestra.train(strategy=strategy, out=out, **asked)


def simulate(strategy: orchestra.Strategy[Any] | str, out: Path, *, workers: int = 3, **given: Any) -> orchestra.Result:
    """The same run in virtual time: what the processes of `train` would give, bit for bit, and sooner."""
    return train(strategy, out, cluster=orchestra.Simulated(workers=workers, numerics="real"), **given)


def plain(
    *,
    model: Callable[[], nn.Module] = make_model,
    data: Callable[[], Any] = make_data,
    loss: Callable[[Any, Any], Tensor] = F.mse_loss,
    optimizer: Factory = momentum,
    batch: int = BATCH,
    steps: int = 5,
    seed: int = SEED,
    size: int = 1,
    schedule: Schedule | None = None,
    clip: float | None = None,
    partition: Partition | None = None,
) -> nn.Module:
    """Ordinary torch training in this process, on the batches of all `size` workers put together."""
    seed_everything(seed)
    module, samples = model(), data()
    feeds = [IndexedFeed(samples, batch=batch, seed=seed, rank=r, size=size, partition=partition) for r in range(size)]
    inner = optimizer(list(module.parameters()))
    rates = [group["lr"] for group in inner.param_groups]
    for _ in range(steps):
        for group, rate in zip(inner.param_groups, rates, strict=True):
            group["lr"] = rate * (schedule(epochs(feeds[0], batch * size)) if schedule else 1)
        taken = [pieces for pieces, count in (feed.next() for feed in feeds) if count]
        *inputs, target = (torch.cat(column) for column in zip(*taken, strict=True))
        inner.zero_grad()
        torch.autograd.backward(loss(module(*inputs), target))
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        inner.step()
    return module


def epochs(feed: IndexedFeed, together: int, count: int = COUNT) -> float:
    """Passes over the data before the feed's next step, in which all workers take `together` samples."""
    return (feed.epoch * count + min(feed.step * together, count)) / count


def flat(module: nn.Module) -> Tensor:
    """Parameters and buffers as one vector."""
    return torch.cat([t.detach().reshape(-1).double() for t in module.state_dict().values()])


def assert_same(a: nn.Module, b: nn.Module) -> None:
    """Bit for bit."""
    assert [*a.state_dict()] == [*b.state_dict()]
    assert torch.equal(flat(a), flat(b)), f"largest difference {float((flat(a) - flat(b)).abs().max()):g}"


def assert_close(a: nn.Module, b: nn.Module, *, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(flat(a), flat(b), rtol=tolerance, atol=tolerance)


def events(run: Path, node: int) -> list[Event]:
    return list(read(run / f"events-{node}.jsonl"))


def ended(run: Path, node: int) -> NodeEnded:
    (event,) = [e for e in events(run, node) if isinstance(e, NodeEnded)]
    return event
