# SPDX-License-Identifier: Apache-2.0
"""A parameter that one of two workers uses in some steps, on asynchronous servers: against a program in NumPy.

Every push is one step of the optimizer, in the order in which pushes come: of w, and of v where the push has a gradient
for it. The program knows the order from the virtual times that each worker takes, and the model from its formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.zoo import BATCH, SEED, make_data, train
from torch import Tensor, nn

from orchestra import Simulated, Steps
from orchestra.data.feed import IndexedFeed
from orchestra.runs.events import Logged
from orchestra.runs.facts import events_of

Vector = npt.NDArray[np.float64]
STEPS = 8  # of each worker, within the first epoch
SECONDS = (1.0, 1.7)  # of a step of each worker
PICKED = (2, 3, 6)  # steps in which worker 1 uses v
W, V = np.linspace(-1.0, 1.0, 5), np.array([0.5, -0.25, 2.0])
RATE, DECAY = 0.05, 0.1


def doubles() -> tuple[Tensor, Tensor]:
    x, y = make_data()
    return x.double(), y.double()


def feed_of(worker: int) -> IndexedFeed:
    return IndexedFeed(doubles(), batch=BATCH, seed=SEED, rank=worker, size=2)


class Picky(nn.Module):
    """Linear in five inputs; for some mini-batches, known by their first sample, in three more."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.from_numpy(W.copy())), nn.Parameter(torch.from_numpy(V.copy()))
        self.first = {feed_of(1).indices(0, step)[0] for step in PICKED}

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, 1:6] @ self.w
        if round(100 * float(x[0, 0])) in self.first:
            y = y + x[:, 4:7] @ self.v
        return y[:, None]


class SGD:
    """With momentum 0.9 and weight decay, of one parameter."""

    def __init__(self) -> None:
        self.u: Vector | None = None

    def step(self, x: Vector, g: Vector) -> Vector:
        g = g + DECAY * x
        self.u = g if self.u is None else 0.9 * self.u + g
        return x - RATE * self.u


class AdamW:
    """Of one parameter, which counts its own steps."""

    def __init__(self) -> None:
        self.t, self.m, self.s = 0, np.zeros(1), np.zeros(1)

    def step(self, x: Vector, g: Vector) -> Vector:
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * g
        self.s = 0.999 * self.s + 0.001 * g * g
        m, s = self.m / (1 - 0.9**self.t), self.s / (1 - 0.999**self.t)
        moved: Vector = x * (1 - RATE * DECAY) - RATE * m / (np.sqrt(s) + 1e-8)
        return moved


def order() -> list[tuple[int, int]]:
    """Worker and step of each push, in the order of the moments at which they come."""
    moments = sorted((SECONDS[worker] * (step + 1), worker, step) for worker in (0, 1) for step in range(STEPS))
    assert all(later - earlier > 0.05 for (earlier, *_), (later, *_) in pairwise(moments))
    return [(worker, step) for _, worker, step in moments]


def moments_and_staleness() -> list[tuple[float, float]]:
    """When each push comes, and how many have come since its worker's last."""
    come = [worker for worker, _ in order()]
    last = [max((j for j in range(i) if come[j] == come[i]), default=-1) for i in range(len(come))]
    return [(round(SECONDS[worker] * (step + 1), 3), i - last[i] - 1) for i, (worker, step) in enumerate(order())]


def by_hand(make: Callable[[], Any], share: float, *, zeros: bool = False) -> list[Vector]:
    """w and v in the end. `zeros`: as if a push without a gradient for v had one of zeros."""
    samples = [column.numpy() for column in doubles()]
    x, inner = [W, V], [make(), make()]
    read = [x, x]  # by each worker
    for worker, step in order():
        chosen = feed_of(worker).indices(0, step)
        a, b, y = samples[0][chosen, 1:6], samples[0][chosen, 4:7], samples[1][chosen, 0]
        w, v = read[worker]
        uses_v = worker == 1 and step in PICKED
        error = a @ w + (b @ v if uses_v else 0.0) - y
        gradients = [2 / len(y) * (error @ a), 2 / len(y) * (error @ b) if uses_v else zeros * np.zeros(3)]
        used = [True, uses_v or zeros]
        x = [one.step(p, share * g) if has else p for one, p, g, has in zip(inner, x, gradients, used, strict=True)]
        read[worker] = x
    return x


@pytest.mark.parametrize(
    ("strategy", "share"),
    [
        ("ps(consistency=asp)", 1.0),
        ("ps(consistency=asp, servers=2)", 1.0),  # w is cut
        ("ps(consistency=asp, servers=2, placement=layers)", 1.0),
        ("ps(consistency=ssp(staleness=8))", 0.5),  # of a gradient: the learning rate is that of the mean
    ],
)
@pytest.mark.parametrize(
    ("optimizer", "make"),
    [
        (partial(torch.optim.SGD, lr=RATE, momentum=0.9, weight_decay=DECAY), SGD),
        (partial(torch.optim.AdamW, lr=RATE, weight_decay=DECAY), AdamW),
    ],
    ids=["sgd", "adamw"],
)
def test_two_workers_are_as_by_hand(
    strategy: str, share: float, optimizer: Any, make: Callable[[], Any], tmp_path: Path
) -> None:
    delay = "constant:" + ",".join(map(str, SECONDS))
    cluster = Simulated(workers=2, network="1000gbit,0s", compute_time=delay, numerics="real")
    model = train(
        strategy, tmp_path, cluster=cluster, model=Picky, data=doubles, optimizer=optimizer, budget=Steps(STEPS)
    ).model  # fmt: skip
    pushed = [e for e in events_of(tmp_path) if isinstance(e, Logged) and (e.node, e.name) == (2, "staleness")]
    assert [(round(e.t, 3), e.value) for e in pushed] == moments_and_staleness()
    expected, naive = by_hand(make, share), by_hand(make, share, zeros=True)
    for name, value in zip("wv", expected, strict=True):
        np.testing.assert_allclose(model.get_parameter(name).detach().numpy(), value, rtol=1e-12, atol=1e-13)
    assert np.abs(expected[1] - naive[1]).max() > 0.01
