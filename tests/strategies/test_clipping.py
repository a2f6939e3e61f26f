# SPDX-License-Identifier: Apache-2.0
"""What clipping applies to, strategy by strategy: the mean that makes an update, or every worker's own gradient."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.laws.examples import EXAMPLES
from tests.zoo import assert_same, sgd, simulate, train
from torch import Tensor, nn

from orchestra import (
    ASP,
    EASGD,
    SSP,
    AllReduce,
    AtShare,
    BackupWorkers,
    BoundedDelay,
    ConfigError,
    DelayCompensated,
    Downpour,
    Hogwild,
    KAsync,
    KBatchAsync,
    KBatchSync,
    KSync,
    Local,
    LocalSGD,
    ParameterServer,
    Simulated,
    SlowMo,
    SoftSync,
    Solo,
    StalenessAware,
    Steps,
    Strategy,
    StrategySwitch,
    SyncEASGD,
)
from orchestra.engine.expression import show

CLIP, RATE = 0.25, 0.5


def ps(consistency: Any, **more: Any) -> ParameterServer:
    return ParameterServer(consistency=consistency, **more)


# What one step of two workers moves x by, in units of γ·CLIP: each clipped gradient is a unit vector.
# Worker 0 has (8, 0), worker 1 has (0, 3). Their mean (4, 1.5) is clipped to (0.936, 0.351).
MEAN = (4 / 18.25**0.5, 1.5 / 18.25**0.5)
EACH = {
    "the mean": MEAN,
    "each, averaged": (0.5, 0.5),
    "each, added": (1.0, 1.0),
}
CASES: list[tuple[Strategy[Any], str]] = [
    (AllReduce(), "the mean"),
    (AllReduce(algorithm="ring"), "the mean"),
    (SlowMo(base=AllReduce(), tau=1, beta=0.0), "the mean"),
    (ps(BoundedDelay(tau=0)), "the mean"),
    (ps(BackupWorkers(b=0)), "the mean"),
    (ps(KSync(k=2)), "the mean"),
    (ps(KBatchSync(k=2)), "the mean"),
    (ps(KAsync(k=2)), "the mean"),
    (ps(KBatchAsync(k=2)), "the mean"),
    (ps(SoftSync(n=1)), "the mean"),
    (ParameterServer(), "the mean"),
    (StrategySwitch(first=AllReduce(), then=LocalSGD(), when=AtShare(share=1.0)), "the mean"),
    (LocalSGD(tau=1), "each, averaged"),
    (SlowMo(tau=1, beta=0.0), "each, averaged"),
    (SyncEASGD(tau=1, alpha=0.0, beta=1.0), "each, averaged"),
    (ps(SSP(staleness=0)), "each, averaged"),
    (ps(SSP(staleness=0), servers=2), "each, averaged"),
    (StrategySwitch(first=LocalSGD(tau=1), then=AllReduce(), when=AtShare(share=1.0)), "each, averaged"),
    (EASGD(tau=1, alpha=1.0), "each, added"),
    (ps(ASP()), "each, added"),
    (ps(ASP(), servers=2), "each, added"),
    (ps(KAsync(k=1), correction=StalenessAware()), "each, added"),
    (ps(ASP(), correction=DelayCompensated(lam=0.0)), "each, added"),
    (Downpour(), "each, added"),
    (Downpour(servers=2), "each, added"),
    (Downpour(n_push=2, n_fetch=2), "each, added"),
    (Hogwild(), "each, added"),
]


class Point(nn.Module):
    """x itself: the gradient of a sample is the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(2))

    def forward(self, sample: Tensor) -> Tensor:
        return sample @ self.x


def two_samples() -> tuple[Tensor, Tensor]:
    """One for each of two workers in a step."""
    return torch.tensor([[8.0, 0.0], [0.0, 3.0]]), torch.zeros(2)


def mean_output(output: Tensor, target: Tensor) -> Tensor:
    return output.mean()


def moved(strategy: Strategy[Any], out: Path, cluster: Any, **given: Any) -> list[float]:
    """Where one step of two workers leads from zero, in units of γ·CLIP."""
    result = train(
        strategy, out, cluster=cluster, model=Point, data=two_samples, loss=mean_output, batch=1, clip=CLIP,
        optimizer=partial(torch.optim.SGD, lr=RATE), **{"budget": Steps(1)} | given,
    )  # fmt: skip
    return sorted((-next(result.model.parameters()).detach() / (RATE * CLIP)).tolist(), reverse=True)


@pytest.mark.parametrize(("strategy", "what"), CASES, ids=[show(s) for s, _ in CASES])
def test_what_is_clipped(strategy: Strategy[Any], what: str, tmp_path: Path) -> None:
    shared = isinstance(strategy, Hogwild)
    found = moved(strategy, tmp_path, Local(workers=2, patience=20) if shared else Simulated(workers=2))
    if shared:  # without locks, one step may undo the other
        assert found[0] == pytest.approx(1.0, abs=1e-4)
    elif isinstance(strategy, EASGD):  # the centre is where the last worker was
        assert found == pytest.approx([1.0, 0.0], abs=1e-4)
    else:
        assert found == pytest.approx(EACH[what], abs=1e-4)
    assert strategy.layout.updates.clip == ("mean" if what == "the mean" else "own")


@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer(), ps(SSP(staleness=0)), Downpour()], ids=show)
def test_what_is_clipped_in_processes(strategy: Strategy[Any], tmp_path: Path) -> None:
    (what,) = [what for other, what in CASES if other == strategy]
    assert moved(strategy, tmp_path, Local(workers=2, patience=20)) == pytest.approx(EACH[what], abs=1e-4)


def test_the_table_covers_the_catalogue() -> None:
    """Every strategy, consistency and correction has a row, but one process alone, of which own and mean are one."""
    rows = [*(strategy for strategy, _ in CASES), Solo()]
    assert {type(s) for s in EXAMPLES} <= {type(s) for s in rows}
    servers = [s for s in rows if isinstance(s, ParameterServer)]
    for part in ("consistency", "correction"):
        named = {type(getattr(s, part)) for s in EXAMPLES if isinstance(s, ParameterServer)}
        assert named <= {type(getattr(s, part)) for s in servers}


def test_a_local_step_of_downpour_is_clipped(tmp_path: Path) -> None:
    """One worker that pushes at the end: its second gradient is taken where the first, clipped, has led."""
    given: dict[str, Any] = {"clip": 0.05, "budget": Steps(6), "optimizer": sgd, "cluster": Simulated(workers=1)}
    alone = train(Solo(), tmp_path / "solo", **given)
    seldom = train(Downpour(n_push=6, n_fetch=6), tmp_path / "downpour", **given)
    torch.testing.assert_close([*seldom.model.parameters()], [*alone.model.parameters()], rtol=1e-5, atol=1e-6)


def test_downpour_that_exchanges_at_every_step_is_asp(tmp_path: Path) -> None:
    given: dict[str, Any] = {"clip": 0.05, "budget": Steps(6), "cluster": Simulated(workers=3)}
    every = train(Downpour(), tmp_path / "downpour", **given)
    assert_same(every.model, train(ps(ASP()), tmp_path / "asp", **given).model)


@pytest.mark.parametrize(
    "strategy",
    [
        ParameterServer(servers=2),
        ps(KAsync(k=3), servers=2),
        StrategySwitch(then=ParameterServer(servers=2), when=AtShare(share=0.5)),
    ],
    ids=show,
)
@pytest.mark.usefixtures("no_process")
def test_a_mean_in_parts_cannot_be_clipped(strategy: Strategy[Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="each server sees only its range: use servers=1"):
        simulate(strategy, tmp_path, workers=3, clip=1.0)


def test_a_switch_changes_what_is_clipped(tmp_path: Path) -> None:
    """Two local steps with clipped gradients, then two of all-reduce with a clipped mean."""
    switch = StrategySwitch(first=LocalSGD(tau=1), then=AllReduce(), when=AtShare(share=0.5), scale=1.0)
    found = moved(switch, tmp_path, Simulated(workers=2), budget=Steps(4))
    assert found == pytest.approx([2 * 0.5 + 2 * m for m in MEAN], abs=1e-4)
