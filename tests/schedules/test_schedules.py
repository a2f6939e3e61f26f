# SPDX-License-Identifier: Apache-2.0
"""Warm-up, linear scaling and decays: their values, and that every strategy follows them alike."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zoo import BATCH, COUNT, assert_same, events, momentum, plain, train
from torch import nn

from orchestra import (
    AllReduce,
    Epochs,
    LocalSGD,
    ParameterServer,
    Polynomial,
    Simulated,
    StepDecay,
    Steps,
    Strategy,
    Warmup,
)
from orchestra.engine.expression import parse_schedule, show
from orchestra.errors import ConfigError
from orchestra.model.schedules import CURVES, Constant, for_global_batch
from orchestra.runs.events import Stepped


@pytest.mark.parametrize(
    ("schedule", "values"),
    [
        (Warmup(factor=8), {0: 1, 0.5: 1.7, 2.5: 4.5, 4.999: 7.9986, 5: 8, 5.001: 8, 90: 8}),
        (Warmup(factor=8, how="constant"), {0: 1, 2.5: 1, 4.999: 1, 5: 8, 90: 8}),
        (Warmup(factor=8, epochs=0), {0: 8, 90: 8}),
        (Warmup(factor=8, epochs=0, how="constant"), {0: 8}),
        (Warmup(epochs=0.1, start=0.0), {0: 0, 0.05: 0.5, 0.1: 1, 3: 1}),
        (Warmup(factor=0.5, epochs=2), {0: 1, 1: 0.75, 2: 0.5}),
        (StepDecay(at=(30, 60, 80)), {0: 1, 29.99: 1, 30: 0.1, 60: 0.01, 79.9: 0.01, 80: 0.001}),
        (Polynomial(epochs=4, power=2), {0: 1, 1: 0.5625, 2: 0.25, 4: 0, 5: 0}),
        (Polynomial(epochs=4, power=1), {1: 0.75}),
        (Warmup(factor=8, then=StepDecay(at=(3, 30))), {2.5: 4.5, 3: 0.52, 10: 0.8, 30: 0.08}),
        (Warmup(factor=2, epochs=1, then=lambda epochs: 10.0), {0: 10, 1: 20}),
        (Warmup(epochs=1, factor=2, then=Warmup(epochs=2, factor=3)), {0: 1, 0.5: 2.25, 1: 4, 2: 6}),
    ],
    ids=lambda value: str(value).partition(" at 0x")[0],  # functions lie elsewhere in every process
)
def test_schedules_have_the_factors_of_their_formulas(schedule: Any, values: dict[float, float]) -> None:
    assert {epochs: schedule(epochs) for epochs in values} == pytest.approx(values)


def test_linear_scaling_is_by_the_samples_of_a_step() -> None:
    scaled = Warmup(reference=256, epochs=5)
    assert scaled.for_global_batch(8192)(5) == 32
    assert scaled.for_global_batch(256) == Warmup(factor=1.0)
    assert Warmup(reference=256, factor=0.5).for_global_batch(512).factor == 1.0
    assert Warmup(then=Warmup(reference=4, epochs=0)).for_global_batch(8)(9) == 2  # also within another
    with pytest.raises(ValueError, match="for_global_batch"):
        scaled(0.0)
    other = lambda epochs: 1.0  # noqa: E731
    assert for_global_batch(other, 8) is other
    assert for_global_batch(None, 8) is None


@pytest.mark.parametrize("cls", CURVES)
def test_as_text_and_back(cls: type) -> None:
    for made in (cls(), Warmup(factor=3.5, reference=7, how="constant", then=cls())):
        assert parse_schedule(show(made)) == made
        assert eval(repr(made), {c.__name__: c for c in CURVES}) == made
    assert parse_schedule("warmup(how=constant, then=constant)") == Warmup(how="constant", then=Constant())


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        (Warmup(epochs=-1), r"schedule\.epochs = -1    must be at least 0"),
        (Warmup(reference=0), r"schedule\.reference = 0    must be at least 1"),
        (Warmup(reference=2.5), r"schedule\.reference = 2.5    must be a whole number, or None"),  # type: ignore[arg-type]
        (Warmup(factor=None), r"schedule\.factor = None    must be a number"),  # type: ignore[arg-type]
        (Warmup(how="fast"), r"schedule\.how = 'fast'    must be one of gradual, constant"),  # type: ignore[arg-type]
        (Warmup(then=Polynomial(epochs=0)), r"schedule\.then\.epochs = 0    must be at least"),
        (StepDecay(at=(1, "2")), r"schedule\.at = \(1, '2'\)    has '2', which must be a number"),  # type: ignore[arg-type]
    ],
    ids=str,
)
@pytest.mark.usefixtures("no_process")
def test_what_cannot_be_is_refused(schedule: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        train(AllReduce(), tmp_path, schedule=schedule)


@pytest.mark.parametrize(
    "strategy", [AllReduce(), LocalSGD(tau=2), ParameterServer(), ParameterServer(servers=2)], ids=show
)
def test_the_rate_goes_by_samples_seen(strategy: Strategy[Any], tmp_path: Path) -> None:
    workers = 2
    train(strategy, tmp_path, workers=workers, schedule=Warmup(reference=4, epochs=1), budget=Epochs(2))
    rates = {e.step: e.lr for e in events(tmp_path, 0) if isinstance(e, Stepped)}
    k = BATCH * workers / 4
    expected = {s: 0.02 * min(k, 1 + (k - 1) * (s - 1) * BATCH * workers / COUNT) for s in range(1, 10)}  # of an epoch
    assert {step: rates[step] for step in expected} == pytest.approx(expected)
    assert rates[10] == pytest.approx(0.02 * k)
    assert json.loads((tmp_path / "config.json").read_text())["schedule"] == f"warmup(epochs=1, factor={k})"


def test_servers_follow_it_bit_for_bit(tmp_path: Path) -> None:
    given: dict[str, Any] = {"schedule": Warmup(reference=4, epochs=1), "budget": Epochs(2), "optimizer": momentum}
    central = train(ParameterServer(servers=2), tmp_path / "ps", workers=2, **given)
    ours = train(AllReduce(), tmp_path / "real", workers=2, **given)
    virtual = train(AllReduce(), tmp_path / "virtual", cluster=Simulated(workers=2), **given)
    assert_same(central.model, ours.model)
    assert_same(virtual.model, ours.model)


# Remark 1 of Goyal et al.


def test_momentum_of_torch_needs_no_correction(tmp_path: Path) -> None:
    """Its path is that of v ← m v γ/γ_before + γ g, x ← x − v, and not that without the correction."""
    schedule, rate, m = Warmup(epochs=0.5, factor=8.0), 0.02, 0.9
    result = train(AllReduce(), tmp_path, workers=1, budget=Steps(12), schedule=schedule)
    corrected, uncorrected = (
        plain(optimizer=partial(Inside, lr=rate, momentum=m, correct=correct), steps=12, schedule=schedule)
        for correct in (True, False)
    )
    torch.testing.assert_close([*result.model.parameters()], [*corrected.parameters()], rtol=1e-4, atol=1e-5)
    with pytest.raises(AssertionError):
        torch.testing.assert_close([*result.model.parameters()], [*uncorrected.parameters()], rtol=1e-2, atol=1e-2)


class Inside(torch.optim.Optimizer):
    """SGD that keeps the rate inside of its momentum, as many papers write it, with the correction or without."""

    def __init__(self, params: list[nn.Parameter], *, lr: float, momentum: float, correct: bool) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.correct = correct
        self.before: float | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        gamma = group["lr"]
        change = gamma / self.before if self.correct and self.before is not None else 1.0
        for p in group["params"]:
            v = self.state[p].get("v", torch.zeros_like(p)) * group["momentum"] * change + gamma * p.grad
            self.state[p]["v"] = v
            p -= v
        self.before = gamma
