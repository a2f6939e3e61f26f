# SPDX-License-Identifier: Apache-2.0
"""`optimizer.clip_grad_norm_` clips what the optimizer sees: the mean, or each worker's own gradient."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from tests.processes import together
from tests.zoo import make_model, sgd
from torch import nn

import orchestra
from orchestra import ConfigError

CLIP, RATE, STEPS = 0.25, 0.5, 3
GRADIENTS = torch.tensor([[8.0, 0.0], [0.0, 3.0]])  # of worker 0 and worker 1
NODES = {"allreduce": 2, "ps": 3, "localsgd(tau=1)": 2, "ps(consistency=ssp(staleness=0))": 3}
MEAN = [4 / 18.25**0.5, 1.5 / 18.25**0.5]  # of a mean that is clipped
EACH = [0.5, 0.5]  # of gradients that are clipped before the mean


def moved(strategy: str, *, torchs: bool = False, until: int = STEPS) -> Any:
    """Where three steps lead from zero, in units of γ·CLIP, and the norms told; only the first steps are clipped."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    norms: list[float] = []
    with contextlib.suppress(SystemExit):  # of servers
        model, optimizer = orchestra.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE), strategy=strategy)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(GRADIENTS[optimizer.orchestra.rank]).sum().backward()
            if step < until:
                clip = nn.utils.clip_grad_norm_(model.parameters(), CLIP) if torchs else optimizer.clip_grad_norm_(CLIP)
                norms.append(float(clip))
            optimizer.step()
        optimizer.finish()
        return (-model.weight.detach() / (RATE * CLIP)).reshape(-1).tolist(), norms
    return None


def workers(strategy: str, **given: Any) -> list[Any]:
    outcomes = together(NODES[strategy], lambda: moved(strategy, **given))
    for outcome in outcomes:
        assert not outcome.kind, outcome.error
    return [outcome.value for outcome in outcomes if outcome.value is not None]


@pytest.mark.parametrize("strategy", NODES)
def test_what_is_clipped(strategy: str) -> None:
    expected = MEAN if strategy in ("allreduce", "ps") else EACH
    found = workers(strategy)
    assert len(found) == 2
    for (x, norms), own in zip(found, (8.0, 3.0), strict=True):
        assert x == pytest.approx([STEPS * v for v in expected], abs=1e-4)
        assert norms == pytest.approx([own] * STEPS)


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_it_bounds_the_next_step_only(strategy: str) -> None:
    unclipped = [4 / CLIP, 1.5 / CLIP]
    for x, _ in workers(strategy, until=1):
        assert x == pytest.approx([m + 2 * u for m, u in zip(MEAN, unclipped, strict=True)], abs=1e-3)


def test_that_of_torch_clips_before_the_mean() -> None:
    for x, _ in workers("allreduce", torchs=True):
        assert x == pytest.approx([STEPS * v for v in EACH], abs=1e-4)


@pytest.mark.parametrize(("most", "told"), [(0.0, "above zero"), (-1.0, "above zero"), (float("nan"), "above zero")])
def test_a_bound_that_cannot_be_is_refused(most: float, told: str) -> None:
    model = make_model()
    model, optimizer = orchestra.prepare(model, sgd(model.parameters()))
    with pytest.raises(ConfigError, match=told):
        optimizer.clip_grad_norm_(most)
    assert optimizer.clip_grad_norm_(1.0) == 0.0  # there is no gradient yet
    assert optimizer.clip_grad_norm_(float("inf")) == 0.0  # bounds nothing
    optimizer.step()
    optimizer.finish()


def test_several_servers_cannot_clip_the_mean() -> None:
    def call() -> Any:
        model = make_model()
        with contextlib.suppress(SystemExit):
            model, optimizer = orchestra.prepare(model, sgd(model.parameters()), strategy="ps(servers=2)")
            model(torch.ones(2, 7)).sum().backward()
            with pytest.raises(ConfigError, match="each server sees only its range"):
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.finish()

    for outcome in together(4, call):
        assert not outcome.kind, outcome.error


def test_clipping_with_one_worker_equals_that_of_torch() -> None:
    def script(ours: bool) -> Any:
        torch.manual_seed(0)
        model = make_model()
        optimizer: Any = sgd(model.parameters())
        if ours:
            model, optimizer = orchestra.prepare(model, optimizer, strategy="localsgd")
        for i in range(5):
            optimizer.zero_grad()
            model(torch.full((2, 7), float(i))).square().sum().backward()
            norm = optimizer.clip_grad_norm_(0.1) if ours else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert norm > 0.1
            optimizer.step()
        if ours:
            optimizer.finish()
        return [*model.parameters()]

    torch.testing.assert_close(script(True), script(False), rtol=1e-6, atol=1e-7)


def differs(strategy: str) -> None:
    with contextlib.suppress(SystemExit):  # of servers
        model: Any = make_model()
        model, optimizer = orchestra.prepare(model, sgd(model.parameters()), strategy=strategy)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.ones(2, 7) * (1 + optimizer.orchestra.rank)).sum().backward()
            optimizer.clip_grad_norm_(0.5 if optimizer.orchestra.rank else 2.0)
            optimizer.step()
        optimizer.finish()


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_values_that_differ_between_workers_are_an_error(strategy: str) -> None:
    for outcome in together(NODES[strategy], lambda: differs(strategy))[:2]:
        assert outcome.kind in ("ClusterError", "Stopped"), outcome.error
        assert "2.0 on worker 0" in outcome.error
        assert "0.5 on worker 1" in outcome.error
