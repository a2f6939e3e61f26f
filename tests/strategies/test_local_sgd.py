# SPDX-License-Identifier: Apache-2.0
"""Local SGD: with τ=1 synchronous SGD, and in between what a hand-written loop gives."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.zoo import BATCH, SEED, assert_close, make_data, make_model, momentum, sgd, train
from torch import Tensor, nn

from orchestra import AllReduce, Epochs, LocalSGD, Steps
from orchestra.data.feed import IndexedFeed
from orchestra.data.random_state import seed_everything


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("count", [101, 25])
def test_tau_1_is_all_reduce_for_plain_sgd(workers: int, count: int, tmp_path: Path) -> None:
    given = {"workers": workers, "optimizer": sgd, "budget": Epochs(3), "data": partial(make_data, count)}
    apart = train(LocalSGD(tau=1), tmp_path / "local", **given)  # type: ignore[arg-type]
    together = train(AllReduce(), tmp_path / "allreduce", **given)  # type: ignore[arg-type]
    assert_close(apart.model, together.model, tolerance=1e-5)


def by_hand(tau: int, workers: int, steps: int) -> Tensor:
    seed_everything(SEED)
    start = make_model()
    data = make_data()
    replicas, inner, feeds = [], [], []
    for rank in range(workers):
        replica = make_model()
        replica.load_state_dict(start.state_dict())
        replicas.append(replica)
        inner.append(momentum(list(replica.parameters())))
        feeds.append(IndexedFeed(data, batch=BATCH, seed=SEED, rank=rank, size=workers))
    used = [0] * workers
    for step in range(1, steps + 1):
        for rank in range(workers):
            (x, y), count = feeds[rank].next()
            inner[rank].zero_grad()
            torch.autograd.backward(F.mse_loss(replicas[rank](x), y))
            inner[rank].step()
            used[rank] += count
        if step % tau == 0 or step == steps:
            for values in zip(*(r.parameters() for r in replicas), strict=True):
                mean = sum(n * v.detach() for n, v in zip(used, values, strict=True)) / sum(used)
                for v in values:
                    v.data.copy_(mean)
            used = [0] * workers
    return nn.utils.parameters_to_vector(replicas[0].parameters())


@pytest.mark.parametrize("tau", [2, 3, 100])
def test_local_sgd_equals_a_loop_by_hand(tau: int, tmp_path: Path) -> None:
    result = train(LocalSGD(tau=tau), tmp_path, workers=3, budget=Steps(14))
    got = nn.utils.parameters_to_vector(result.model.parameters())
    torch.testing.assert_close(got, by_hand(tau, 3, 14), rtol=1e-5, atol=1e-6)
