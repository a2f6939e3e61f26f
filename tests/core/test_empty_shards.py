# SPDX-License-Identifier: Apache-2.0
"""Batch statistics count by samples seen: a worker without samples changes nothing, and is named before the run."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import together, values
from tests.zoo import make_data, sgd, train
from torch import Tensor, nn

import orchestra
from orchestra import Attached, Dirichlet, Epochs, Local, Simulated, Steps
from orchestra.engine import snapshot
from orchestra.engine.cluster import Cluster
from orchestra.engine.warnings import about_shards
from orchestra.runs.facts import scores_of

COUNT, BATCH = 96, 6
data = partial(make_data, COUNT)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))


class Tracking(nn.Module):
    """BatchNorm needs two samples; this buffer takes any number of them."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 1)
        self.register_buffer("seen", torch.zeros(7))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)
        y: Tensor = self.inner(x)
        return y


@dataclass(frozen=True, kw_only=True)
class Uneven:
    """Worker 1 has the last `few` samples, worker 0 all others."""

    few: int = 0

    def shards(self, labels: Tensor, size: int, seed: int) -> list[Tensor]:
        order = torch.arange(len(labels))
        return [order[: len(order) - self.few], order[len(order) - self.few :], *[order[:0]] * (size - 2)]


def statistics(model: nn.Module, _: Any) -> dict[str, float]:
    return {"mean": float(model[1].running_mean.sum()), "var": float(model[1].running_var.sum())}  # type: ignore[index]


GIVEN: dict[str, Any] = {
    "model": normed, "data": data, "optimizer": sgd, "batch": BATCH, "evaluate": statistics,
    "evaluation_data": data,
}  # fmt: skip


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """But for rounding: sums over a batch depend on the number of threads."""
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6)


def alone(out: Path) -> orchestra.Result:
    """What worker 0 does without the other: the same batches in the same order."""
    return train("allreduce", out, cluster=Simulated(workers=1), budget=Epochs(2), **GIVEN)


@pytest.mark.parametrize("strategy", ["allreduce", "localsgd(tau=3)", "ps(consistency=bsp())"])
@pytest.mark.parametrize("cluster", [Local(workers=3), Simulated(workers=3)], ids=["local", "simulated"])
def test_workers_without_samples_leave_the_model_of_the_one_that_has_them(
    cluster: Cluster, strategy: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the result, in the file, and in every snapshot on the way."""
    expected = alone(tmp_path / "alone")
    capfd.readouterr()
    found = train(
        strategy, tmp_path / "run", cluster=cluster, budget=Epochs(2), partition=Uneven(), keep_snapshots=True, **GIVEN
    )
    assert_close(found.model.state_dict(), expected.model.state_dict())
    scores = [[score.metrics for score in scores_of(tmp_path / name)] for name in ("run", "alone")]
    assert len(scores[0]) == len(scores[1]) == 4
    for mine, theirs in zip(*scores, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    said = capfd.readouterr().err
    assert said.count("warning: workers 1, 2 of 3 have no samples (partition Uneven(few=0))") == 1
    assert "another partition" in said
    (warning,) = json.loads((tmp_path / "run" / "ending.json").read_text())["warnings"]
    assert f"warning: {warning}" in said


def test_workers_without_samples_leave_the_model_alone_over_sockets(tmp_path: Path) -> None:
    def call() -> Any:
        cluster = Attached(patience=20)
        run = train("allreduce", tmp_path / "run", cluster=cluster, budget=Epochs(2), partition=Uneven(), **GIVEN)
        return run.model.state_dict()

    expected = alone(tmp_path / "alone").model.state_dict()
    for found in values(together(2, call)):
        assert_close(found, expected)
    (warning,) = json.loads((tmp_path / "run" / "ending.json").read_text())["warnings"]
    assert warning.startswith("worker 1 of 2 has no samples (partition Uneven(few=0))")


def test_workers_without_samples_leave_the_model_alone_under_prepare() -> None:
    """Of a mask, the mean is the mask, also where it is not finite."""

    def call(idle: int | None) -> Any:
        torch.manual_seed(0)
        module = normed()
        module.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        module, optimizer = orchestra.prepare(module, sgd(module.parameters()), cluster=Attached(patience=20))
        x, y = data()
        for step in range(5):
            optimizer.zero_grad()
            if int(os.environ.get("RANK", "0")) == idle:
                optimizer.step(samples=0)
                continue
            part = slice(BATCH * step, BATCH * (step + 1))
            nn.functional.mse_loss(module(x[part]), y[part]).backward()  # type: ignore[no-untyped-call]
            optimizer.step(samples=BATCH)
        optimizer.finish()
        return {name: tensor.clone() for name, tensor in module.state_dict().items()}

    (expected,) = values(together(1, partial(call, None)))
    for idle in (0, 1):
        for found in values(together(2, partial(call, idle))):
            assert same(found, expected), idle


def test_statistics_are_weighted_by_samples_seen() -> None:
    """With equal numbers it is the plain mean, bit for bit; of whole numbers the first with samples counts."""
    generator = torch.Generator().manual_seed(0)
    means = [torch.randn(5, generator=generator) for _ in range(4)]
    x = torch.zeros(sum(p.numel() for p in normed().parameters()))

    def put_together(seen: list[int]) -> dict[str, Tensor]:
        module = normed()
        parts = [
            snapshot.SnapshotPart(
                0.0, 1, 1, 0, x, {"1.running_mean": m, "1.num_batches_tracked": torch.tensor(7 + i)}, seen=n
            )
            for i, (m, n) in enumerate(zip(means, seen, strict=True))
        ]
        snapshot.load_into(module, parts)
        return module.state_dict()

    found = put_together([0, 30, 10, 0])
    torch.testing.assert_close(found["1.running_mean"], 0.75 * means[1] + 0.25 * means[2], rtol=1e-6, atol=1e-7)
    assert found["1.num_batches_tracked"] == 8
    plain = torch.stack([m.double() for m in means]).mean(0).float()
    for equal in ([5] * 4, [0] * 4):
        found = put_together(equal)
        assert torch.equal(found["1.running_mean"], plain)
        assert found["1.num_batches_tracked"] == 7


def test_samples_seen_survive_a_resume(tmp_path: Path) -> None:
    """Worker 1 has a sample before the run is broken off, and none afterwards."""
    given: dict[str, Any] = GIVEN | {
        "model": Tracking,
        "evaluate": None,
        "evaluation_data": None,
        "partition": Uneven(few=1),
    }
    per_epoch = -(-(COUNT - 1) // BATCH)
    given |= {"cluster": Local(workers=2), "checkpoint_every": Steps(per_epoch)}
    train("allreduce", tmp_path / "run", budget=Steps(per_epoch), **given)
    resumed = train("allreduce", tmp_path / "run", budget=Steps(per_epoch + 3), resume=True, **given)
    never = train("allreduce", tmp_path / "never", budget=Steps(per_epoch + 3), **given)
    assert same(resumed.model.state_dict(), never.model.state_dict())


def test_empty_shards_of_a_dirichlet_partition_are_named() -> None:
    assert about_shards(None, None) is None
    assert about_shards([3, 1], Dirichlet(alpha=0.1)) is None
    said = about_shards([0] * 10 + [4], Dirichlet(alpha=0.01))
    assert said is not None
    assert said.startswith("workers 0, 1, 2, 3, 4, 5, 6, 7, … of 11 have no samples (partition Dirichlet(alpha=0.01))")
    assert "larger alpha" in said
