# SPDX-License-Identifier: Apache-2.0
"""A loss that is a sum over the samples is found by a probe, which changes nothing and never fails a run."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.processes import together
from tests.zoo import Dicey, assert_same, classifier, make_classes, make_data, make_model, train
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from orchestra import Attached, Local, Simulated, Steps
from orchestra.engine.cluster import Cluster
from orchestra.engine.warnings import about_loss

SAID = "the loss is a sum over the samples, not their mean"
total = partial(F.mse_loss, reduction="sum")


@pytest.mark.parametrize("cluster", [Local(workers=2), Simulated(workers=2)], ids=["local", "simulated"])
def test_a_sum_is_named_with_its_remedy(cluster: Cluster, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    given: dict[str, Any] = {"cluster": cluster, "budget": Steps(1)}
    train("allreduce", tmp_path / "sum", loss=total, **given)
    said = capfd.readouterr().err
    assert said.count(SAID) == 1
    assert 'reduction="mean", or divide by the number of samples' in said
    (warning,) = json.loads((tmp_path / "sum" / "ending.json").read_text())["warnings"]
    assert SAID in warning
    train("allreduce", tmp_path / "mean", **given)
    assert SAID not in capfd.readouterr().err


def test_one_process_of_several_says_so(tmp_path: Path) -> None:
    def call() -> Any:
        run = train("allreduce", tmp_path / "run", cluster=Attached(patience=20), loss=total, budget=Steps(1)).run
        return json.loads((run / "ending.json").read_text())["warnings"]

    for outcome in together(2, call):
        assert not outcome.kind, outcome.error
        assert [SAID in warning for warning in outcome.value] == [True]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Counts how often it was begun."""

    begun = 0

    def __iter__(self) -> Any:
        Stream.begun += 1
        return iter(TensorDataset(*make_data()))


def test_a_stream_is_judged_by_the_samples_that_were_read_anyway(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    begun: list[int] = []
    for loss in (F.mse_loss, total):
        Stream.begun = 0
        train("allreduce", tmp_path / str(len(begun)), cluster=Simulated(workers=2), data=Stream, loss=loss)
        begun.append(Stream.begun)
    assert begun[0] == begun[1]
    assert capfd.readouterr().err.count(SAID) == 1


def judged(loss: Any, model: nn.Module | None = None, data: Any = make_data, count: int = 8) -> bool:
    torch.manual_seed(0)
    return about_loss(model or make_model(), [t[:count] for t in data()], loss) is not None


def infonce(output: Tensor, target: Tensor) -> Tensor:
    """Every sample is compared with all others: neither a sum nor a mean of losses of its own."""
    z = F.normalize(output, dim=1)
    return F.cross_entropy(0 * z @ z.T, torch.arange(len(z)))


def masked(output: Tensor, target: Tensor) -> Tensor:
    """Only the first sample counts."""
    weight = (target == make_data()[1][0]).float()
    return ((output - target) ** 2 * weight).sum() / weight.sum().clamp(min=1)


@pytest.mark.parametrize("count", [2, 3, 4, 6, 8])
def test_what_is_a_sum_and_what_is_not(count: int) -> None:
    judge = partial(judged, count=count)
    assert judge(total)
    assert judge(lambda output, target: total(output, target) / 1000)
    assert judge(nn.CrossEntropyLoss(reduction="sum"), classifier(), make_classes)
    assert judge(total, Dicey())  # BatchNorm and dropout do not hide it
    assert judge(lambda output, target: total(output, target) + 0.5) is (count > 3)  # from two cuts on
    assert not judge(lambda output, target: F.mse_loss(output, target) + 0.5)
    assert not judge(F.mse_loss)
    assert not judge(nn.CrossEntropyLoss(), classifier(), make_classes)
    assert not judge(nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2])), classifier(), make_classes)
    assert not judge(F.mse_loss, Dicey())
    assert not judge(infonce)
    assert not judge(masked)
    assert not judge(lambda output, target: 0 * total(output, target))
    assert not judge(lambda output, target: total(output, target) / 0)
    assert not judge(total, count=1)  # of one sample, both are the same


class Once:
    """A loss that fails where it is asked more often than training itself would."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls -= 1
        if self.calls < 0:
            raise RuntimeError("asked too often")
        return F.mse_loss(output, target)


def test_a_probe_that_fails_is_forgotten_and_leaves_no_trace(tmp_path: Path) -> None:
    loss = Once(1)
    assert not judged(loss)
    assert loss.calls == 1  # the probe has a copy


@pytest.mark.parametrize("cluster", [Local(workers=2), Simulated(workers=2)], ids=["local", "simulated"])
def test_the_result_is_that_without_a_probe(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"cluster": cluster, "model": Dicey, "loss": total, "budget": Steps(4)}
    probed = train("allreduce", tmp_path / "probed", **given)
    monkeypatch.setattr("orchestra.engine.warnings.about_loss", lambda *asked: None)
    assert_same(probed.model, train("allreduce", tmp_path / "plain", **given).model)
