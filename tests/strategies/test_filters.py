# SPDX-License-Identifier: Apache-2.0
"""What filters keep back: how much, how wrong that makes anybody, and how many bytes it saves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.cases import in_both_worlds
from tests.strategies.filtered import Every, make_even
from tests.zoo import adam, assert_same, ended, events, make_large, plain, simulate, train
from torch import Tensor, nn

from orchestra import (
    BSP,
    KKT,
    AllReduce,
    BoundedDelay,
    Local,
    ParameterServer,
    ProximalSGD,
    RandomSkip,
    Significant,
    Simulated,
    Steps,
)
from orchestra.core.node import Node
from orchestra.runs.events import Logged
from orchestra.strategies.parameter_server.consistency import Consistency, ServerState
from orchestra.strategies.parameter_server.filters import sparse

WORKERS, STEPS = 3, 8
in_worlds = partial(in_both_worlds, local=Local(workers=WORKERS), simulated=Simulated(workers=WORKERS))
GIVEN: dict[str, Any] = {"budget": Steps(STEPS), "optimizer": adam}


def passed(run: Path, node: int) -> list[float]:
    return [e.value for e in events(run, node) if isinstance(e, Logged) and e.name == "passed"]


# Bytes.


@given(
    st.integers(1, 40).flatmap(lambda n: st.lists(st.booleans(), min_size=n, max_size=n)),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.booleans(),
)
def test_what_is_packed_is_unpacked(sent: list[bool], dtype: torch.dtype, known: bool) -> None:
    keep, base = torch.tensor(sent), torch.arange(len(sent)).to(dtype)
    v = torch.where(keep, -1 - base, base)
    keys = keep.nonzero().view(-1).int()
    packed, told = sparse.pack(v, keep, keys if known else None)
    heard = sparse.unpack(packed, base, keys if known else None)
    assert torch.equal(base, v)
    assert (told is None) == (heard is None)
    shortest = min(len(v) * v.element_size(), len(keys) * (4 + v.element_size()))
    assert packed.nbytes == 16 + (len(keys) * v.element_size() if known else shortest)


def test_other_keys_of_the_same_number_are_noticed() -> None:
    """Of 3,000, the last one differs: a hash of the first few would not tell."""
    keep = torch.zeros(10_000, dtype=torch.bool)
    keep[:3000] = True
    keys = keep.nonzero().view(-1).int()
    packed, _ = sparse.pack(torch.ones(10_000), keep, keys)
    keys[-1] += 1
    with pytest.raises(RuntimeError, match="other keys"):
        sparse.unpack(packed, torch.zeros(10_000), keys)


@in_worlds("model, pieces", [make_even, make_large], [1, 2], real=lambda model, pieces: model is make_even)
def test_keys_that_stay_the_same_are_sent_once(model: Any, pieces: int, cluster: Any, tmp_path: Path) -> None:
    """Keys as long as values: half of the bytes, but for the pushes in which the keys are new."""
    given = GIVEN | {"model": model, "cluster": cluster}
    for repeat in (1, 4, STEPS):
        runs = [tmp_path / f"{repeat}-{cached}" for cached in (False, True)]
        all_keys, new_keys = (
            train(ParameterServer(filter=Every(repeat=repeat), cache_keys=cached, pieces=pieces), run, **given)
            for cached, run in zip((False, True), runs, strict=True)
        )
        assert_same(all_keys.model, new_keys.model)
        sent, less = (ended(run, 0).sent - 16 * STEPS * pieces for run in runs)
        assert less / sent == pytest.approx(0.5 + 0.5 / repeat, rel=1e-4)


# Significant.


@in_worlds("consistency", [BSP(), BoundedDelay(tau=0)], real=lambda consistency: consistency == BSP())
def test_a_threshold_of_nothing_is_no_filter(consistency: Consistency, cluster: Any, tmp_path: Path) -> None:
    given = GIVEN | {"cluster": cluster}
    for i, more in enumerate([("pieces", 1), ("pieces", 3), ("cache_keys", True)]):
        which: dict[str, Any] = {"consistency": consistency, "servers": 2, **dict([more])}
        sieved = train(ParameterServer(**which, filter=Significant()), tmp_path / f"{i}", **given)
        assert_same(sieved.model, train(ParameterServer(**which), tmp_path / f"{i}-plain", **given).model)


@dataclass(frozen=True, kw_only=True)
class Watched(ParameterServer):
    """Compares what a worker has with what the servers have, after every step."""

    nodes: ClassVar[list[tuple[Node, ServerState]]] = []
    apart: ClassVar[list[float]] = []

    def init(self, node: Node) -> ServerState:
        s = ParameterServer.init(self, node)
        self.nodes.append((node, s))
        return s

    def step(self, node: Node, s: ServerState) -> None:
        ParameterServer.step(self, node, s)
        x = torch.cat([other.x for other, _ in self.nodes if other.serves])
        self.apart.append(float((node.x - x).abs().max()))


@pytest.mark.parametrize("threshold", [0.02, 0.2])
def test_what_a_worker_sees_is_wrong_by_the_threshold_at_most(threshold: float, tmp_path: Path) -> None:
    Watched.nodes.clear()
    Watched.apart.clear()
    strategy = Watched(filter=Significant(threshold=threshold), servers=2)
    train(strategy, tmp_path, cluster=Simulated(workers=WORKERS), **GIVEN)
    assert len(Watched.apart) == WORKERS * STEPS
    assert 0 < max(Watched.apart) <= threshold * (1 + 1e-6)
    kept_back = [float(rest.abs().max()) for _, s in Watched.nodes for rest in s.rest]
    assert 0 < max(kept_back) <= threshold


# Random skip.


@pytest.mark.parametrize("unbiased", [True, False])
def test_what_is_sent_is_the_gradient_on_average(unbiased: bool) -> None:
    p, draws = 0.75, 4000
    g, node = torch.linspace(-2, 3, 10), SimpleNamespace(rng=torch.Generator().manual_seed(1))
    filtered = RandomSkip(probability=p, unbiased=unbiased)
    sent = torch.stack([filtered.push(node, None, 0, g)[0] for _ in range(draws)])  # type: ignore[arg-type]
    expected, scale = (g, 1 / (1 - p)) if unbiased else ((1 - p) * g, 1.0)
    deviation = g.abs() * scale * math.sqrt(p * (1 - p) / draws)
    assert bool(((sent.mean(0) - expected).abs() <= 4 * deviation + 1e-6).all())
    assert float((sent != 0).float().mean()) == pytest.approx(1 - p, abs=0.01)


def test_skipping_nothing_is_no_filter(tmp_path: Path) -> None:
    for unbiased in (True, False):
        strategy = ParameterServer(filter=RandomSkip(probability=0.0, unbiased=unbiased))
        sieved = simulate(strategy, tmp_path / str(unbiased), workers=2, **GIVEN)
        assert_same(sieved.model, simulate(ParameterServer(), tmp_path / f"{unbiased}-plain", workers=2, **GIVEN).model)


# l1.

FEATURES, SAMPLES, L1 = 1500, 1500, 0.014


class Linear(nn.Module):
    """Weights that are zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w


def rare_features() -> tuple[Tensor, Tensor]:
    """Every feature is there in a tenth of the samples; ten of them matter."""
    generator = torch.Generator().manual_seed(5)
    shape = SAMPLES, FEATURES
    x = torch.randn(shape, generator=generator) * (torch.rand(shape, generator=generator) < 0.1)
    w = torch.zeros(FEATURES)
    w[:: FEATURES // 10] = 5.0
    return x, (torch.sigmoid(x @ w) > torch.rand(SAMPLES, generator=generator)).float()


def test_entries_held_at_zero_are_not_pushed(tmp_path: Path) -> None:
    x, y = rare_features()

    def objective(model: nn.Module) -> float:
        w = next(model.parameters()).detach()
        return float(F.binary_cross_entropy_with_logits(x @ w, y) + L1 * w.abs().sum())

    world, optimizer = Simulated(workers=2), partial(ProximalSGD, lr=4.0, l1=L1)
    given: dict[str, Any] = {
        "model": Linear, "data": rare_features, "loss": F.binary_cross_entropy_with_logits, "batch": SAMPLES // 2,
        "budget": Steps(100), "cluster": world, "optimizer": optimizer,
    }  # fmt: skip
    strategy = ParameterServer(filter=KKT(l1=L1, margin=0.2 * L1), cache_keys=True)
    sieved, whole = train(strategy, tmp_path / "kkt", **given), train(AllReduce(), tmp_path / "whole", **given)
    first = objective(Linear())
    assert objective(whole.model) < 0.95 * first
    assert objective(sieved.model) == pytest.approx(objective(whole.model), rel=1e-3)
    pushed = [*passed(tmp_path / "kkt", 0), *passed(tmp_path / "kkt", 1)]
    assert sum(pushed) / len(pushed) < 0.1 * FEATURES
    nonzero = int((next(whole.model.parameters()) != 0).sum())
    assert 5 < nonzero < 0.1 * FEATURES


def test_without_a_penalty_it_is_sgd(tmp_path: Path) -> None:
    given: dict[str, Any] = {"workers": 1, "budget": Steps(10)}
    found = simulate(AllReduce(), tmp_path, optimizer=partial(ProximalSGD, lr=0.05), **given)
    assert_same(found.model, plain(optimizer=partial(torch.optim.SGD, lr=0.05), steps=10))


def test_the_proximal_step() -> None:
    x = nn.Parameter(torch.tensor([1.0, -1.0, 0.1, -0.1, 0.0]))
    x.grad = torch.tensor([1.0, -1.0, 0.5, 0.0, 3.0])
    ProximalSGD([x], lr=0.1, l1=2.0).step()
    torch.testing.assert_close(x.detach(), torch.tensor([0.7, -0.7, 0.0, 0.0, -0.1]))
