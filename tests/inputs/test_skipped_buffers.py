# SPDX-License-Identifier: Apache-2.0
"""A gradient that is not finite is skipped, and what its forward pass did to the model's buffers is undone."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.prepare.loops import loop
from tests.processes import together, values
from tests.zoo import INPUTS, SEED, assert_same, make_data, sgd, train
from torch import Tensor, nn

import orchestra
from orchestra import Attached, Epochs, Local, Simulated
from orchestra.data.random_state import seed_everything
from orchestra.engine.cluster import Cluster

BAD = 37  # the sample that is not finite: its first input is a hundredth of that


class Sick(nn.Module):
    """One sample becomes infinite, and its batch with it: before BatchNorm sees it (`poisons`), or after."""

    def __init__(self, *, poisons: bool) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 5)
        self.norm = nn.BatchNorm1d(5, momentum=None)  # its counter weighs what comes later
        self.last = nn.Linear(5, 1)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.poisons = poisons

    def forward(self, x: Tensor) -> Tensor:
        bad = (x[:, :1] * 100).round() == BAD
        if self.training and bool(bad.any()):
            if not self.poisons:
                y: Tensor = self.last(self.first(x)) * math.inf
                return y
            x = torch.where(bad, math.inf, x)
        y = self.last(self.norm(self.first(x)))
        return y


def finite(module: nn.Module) -> bool:
    return bool(module.eval()(make_data()[0]).isfinite().all())


def both(cluster: Cluster, folder: Path, strategy: str, **given: Any) -> list[nn.Module]:
    """The models with and without a BatchNorm that sees the bad sample."""
    given |= {"cluster": cluster, "budget": Epochs(2)}
    found = [train(strategy, folder / str(p), model=partial(Sick, poisons=p), **given) for p in (True, False)]
    assert [result.summary.skipped for result in found] == [2, 2]  # once in every epoch
    return [result.model for result in found]


WORLDS = {
    "local": Local(workers=2, patience=20),
    "simulated": Simulated(workers=2),
    "real": Simulated(workers=2, numerics="real"),
}


@pytest.mark.parametrize("world", ["local", "simulated", "real"])
@pytest.mark.parametrize("strategy", ["allreduce", "ps", "localsgd(tau=3)"])
def test_a_skipped_gradient_leaves_no_trace_in_buffers(world: str, strategy: str, tmp_path: Path) -> None:
    poisoned, spared = both(WORLDS[world], tmp_path, strategy)
    assert finite(poisoned)
    assert_same(poisoned, spared)


def test_a_skipped_gradient_leaves_no_trace_in_buffers_with_micro_batches(tmp_path: Path) -> None:
    poisoned, spared = both(
        WORLDS["simulated"], tmp_path, "allreduce", accumulate=3, batch=12, data=partial(make_data, 96)
    )
    assert finite(poisoned)
    assert_same(poisoned, spared)


def test_a_skipped_gradient_leaves_no_trace_in_buffers_over_sockets(tmp_path: Path) -> None:
    def call() -> bool:
        poisoned, spared = both(Attached(patience=20), tmp_path, "allreduce")
        assert_same(poisoned, spared)
        return finite(poisoned)

    assert values(together(2, call)) == [True, True]


# A loop of one's own.


def own(strategy: str, *, poisons: bool = True) -> dict[str, Tensor]:
    _, state = loop(strategy, model=partial(Sick, poisons=poisons), optimizer=sgd, epochs=2)
    return state


@pytest.mark.parametrize("strategy", ["allreduce", "localsgd(tau=3)"])
def test_a_skipped_gradient_leaves_no_trace_in_buffers_under_prepare(strategy: str) -> None:
    poisoned = values(together(2, partial(own, strategy)))
    spared = values(together(2, partial(own, strategy, poisons=False)))
    for a, b in zip(poisoned, spared, strict=True):
        assert all(t[t != -math.inf].isfinite().all() for t in a.values())
        assert all(torch.equal(t, b[name]) for name, t in a.items())


def scaled(*, poisons: bool) -> tuple[float, dict[str, Tensor]]:
    """Three steps with a GradScaler, which passes over one that is not finite. Gives the scale and the model."""
    seed_everything(SEED)
    module: Any = Sick(poisons=poisons)
    module, optimizer = orchestra.prepare(module, sgd(module.parameters()), cluster=Attached(patience=20))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    x, y = make_data(48)
    for start in (0, 16, 32):
        optimizer.zero_grad()
        scaler.scale(((module(x[start : start + 16]) - y[start : start + 16]) ** 2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.finish()
    return scaler.get_scale(), {name: t.clone() for name, t in module.state_dict().items()}


def test_a_step_skipped_by_a_grad_scaler_leaves_no_trace_in_buffers() -> None:
    (scale, poisoned), (_, spared) = scaled(poisons=True), scaled(poisons=False)
    assert scale == 2.0  # it was passed over
    assert all(torch.equal(t, spared[name]) for name, t in poisoned.items())


def apart(victims: tuple[int, ...]) -> tuple[dict[str, Tensor], list[str]]:
    """A loop that calls the parts of its model, so that no forward pass is seen to begin; some see a bad sample."""
    seed_everything(SEED)
    module: Any = Sick(poisons=True)
    module, optimizer = orchestra.prepare(module, sgd(module.parameters()), cluster=Attached(patience=20))
    rank = int(os.environ["RANK"])
    x, y = make_data(64)
    x, y = x[16 * rank : 16 * rank + 16], y[16 * rank : 16 * rank + 16]
    for step in range(2):
        optimizer.zero_grad()
        seen = x * math.inf if rank in victims and step else x
        ((module.last(module.norm(module.first(seen))) - y) ** 2).mean().backward()
        optimizer.step()
    optimizer.finish()
    return dict(module.state_dict()), optimizer.orchestra.peers.warnings


@pytest.mark.parametrize("victims", [(0,), (1, 2)])
def test_buffers_that_cannot_be_undone_are_left_out_of_the_mean(victims: tuple[int, ...]) -> None:
    found = values(together(3, partial(apart, victims)))
    for state, _ in found:
        assert state["norm.running_var"].isfinite().all()
        assert torch.equal(state["mask"], torch.tensor([0.0, -math.inf]))
        assert all(torch.equal(t, found[0][0][name]) for name, t in state.items())
    (warning,) = found[0][1]
    assert f"worker{'s' if len(victims) > 1 else ''} {', '.join(map(str, victims))}" in warning
    assert not any(warnings for _, warnings in found[1:])
