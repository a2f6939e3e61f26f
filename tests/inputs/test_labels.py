# SPDX-License-Identifier: Apache-2.0
"""Labels that the model has no output for are named with their range, and nothing else is taken for them."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.processes import together
from tests.zoo import CLASSES, COUNT, INPUTS, classifier, make_classes, train
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from orchestra import Attached, ConfigError, Local, Simulated, Steps
from orchestra.engine.cluster import Cluster
from orchestra.errors import WorkerFailed
from orchestra.model.error_hints import add_note

FIRST, LATE = 2, COUNT - 1  # samples: one that the trial before the start looks at, and one that it does not


def wrong(label: int, at: int) -> tuple[Tensor, Tensor]:
    x, y = make_classes()
    y[at] = label
    return x, y


class Plain(Dataset[tuple[Tensor, int]]):
    """Does not say which labels there are."""

    def __init__(self, label: int, at: int) -> None:
        self.x, self.y = wrong(label, at)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], int(self.y[index])


class WithTargets(Plain):
    """Says it, as the data sets of torchvision do."""

    @property
    def targets(self) -> list[int]:
        return self.y.tolist()


FORMS: dict[str, Callable[[int, int], Any]] = {
    "tensors": wrong,
    "arrays": lambda label, at: tuple(t.numpy() for t in wrong(label, at)),
    "dict": lambda label, at: dict(zip(("input", "labels"), wrong(label, at), strict=True)),
    "TensorDataset": lambda label, at: TensorDataset(*wrong(label, at)),
    "targets": WithTargets,
}


def wrapped(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


LOSSES: dict[str, Any] = {
    "function": F.cross_entropy,
    "module": nn.CrossEntropyLoss(),
    "wrapped": wrapped,
    "one hot": lambda output, target: F.mse_loss(output, F.one_hot(target, CLASSES).float()),
    "gather": lambda output, target: -output.log_softmax(1).gather(1, target[:, None]).mean(),
    "margin": lambda output, target: F.multi_margin_loss(output, target),
}


def said_of(data: Any, loss: Any, out: Path, **given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        train("allreduce", out, data=lambda: data, loss=loss, **{"model": classifier, **given})
    (problem,) = caught.value.problems
    assert problem.where.startswith("data[")
    return str(problem)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("at", [FIRST, LATE], ids=["first", "late"])
def test_a_label_without_an_output_is_named_before_training(at: int, form: str, loss: str, tmp_path: Path) -> None:
    for label in (CLASSES, -1):
        said = said_of(FORMS[form](label, at), LOSSES[loss], tmp_path / "run")
        assert str(label) in said
        assert f"0 to {CLASSES - 1}" in said
        assert f"{CLASSES} outputs" in said
    assert not (tmp_path / "run").exists()


def test_the_remedy_depends_on_the_label(tmp_path: Path) -> None:
    said = said_of(TensorDataset(*wrong(CLASSES, LATE)), wrapped, tmp_path / "run")
    assert said == (
        "data[-1] = '0 to 3'    labels must be 0 to 2, because the model has 3 outputs: count the classes from 0, or "
        "give the model 4 outputs"
    )
    said = said_of(FORMS["dict"](-1, LATE), wrapped, tmp_path / "run")
    assert said.startswith("data['labels'] = '-1 to ")
    assert said.endswith("count the classes from 0; to leave a sample out, label it -100")


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = classifier()

    def forward(self, input: Tensor, labels: Tensor) -> Any:
        return SimpleNamespace(loss=F.cross_entropy(self.inner(input), labels))


@pytest.mark.parametrize("at", [FIRST, LATE], ids=["first", "late"])
def test_a_model_with_a_loss_of_its_own(at: int, tmp_path: Path) -> None:
    said = said_of(FORMS["dict"](CLASSES, at), None, tmp_path / "run", model=Own)
    assert "data['labels'] = '0 to 3'" in said
    assert "Target 3 is out of bounds" in said


# Where only the processes come across the label: the smallest is that of a mini-batch.

NAMED = r"data\[-1\] = '[01] to 3'    the loss has no such class \(Target 3 is out of bounds\): labels must be 0 to"


@pytest.mark.parametrize(
    "cluster",
    [Local(workers=2), Simulated(workers=2), Simulated(workers=2, numerics="batched")],
    ids=["local", "simulated", "batched"],
)
def test_a_label_that_shows_in_training_is_named_there(cluster: Cluster, tmp_path: Path) -> None:
    given: dict[str, Any] = {"model": classifier, "loss": F.cross_entropy, "budget": Steps(20), "cluster": cluster}
    with pytest.raises(WorkerFailed) as caught:
        train("allreduce", tmp_path / "run", data=partial(Plain, CLASSES, LATE), **given)
    assert re.search(NAMED, str(caught.value))


def test_a_label_that_shows_in_training_over_sockets_is_named_there(tmp_path: Path) -> None:
    def call() -> Any:
        given: dict[str, Any] = {"model": classifier, "loss": F.cross_entropy, "budget": Steps(20)}
        train("allreduce", tmp_path / "run", data=partial(Plain, CLASSES, LATE), cluster=Attached(patience=60), **given)

    outcomes = together(2, call)
    assert all(outcome.kind for outcome in outcomes)
    assert any(re.search(NAMED, outcome.error) for outcome in outcomes)


def test_a_failed_assertion_of_a_gpu_comes_with_the_labels() -> None:
    error = RuntimeError("CUDA error: device-side assert triggered")
    add_note(error, [torch.zeros(3, 2), torch.tensor([0, 7, 1])])
    assert "The labels of this mini-batch are 0 to 7" in error.__notes__[0]
    other = RuntimeError("CUDA error: device-side assert triggered")
    add_note(other, [torch.zeros(3, 2), torch.zeros(3)])
    assert not hasattr(other, "__notes__")


# No false alarm.


def marked(label: int) -> tuple[Tensor, Tensor]:
    return wrong(label, LATE)


class Tokens(nn.Module):
    """Scores for every place of a sequence, classes last."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.inner(x[..., None])
        return scores


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.transpose(1, 2), target)


FINE: dict[str, dict[str, Any]] = {
    "ignored": {"data": partial(marked, -100), "loss": F.cross_entropy},
    "ignored by a wrapped loss": {"data": partial(marked, -100), "loss": wrapped},
    "ignored by another number": {"data": partial(marked, -1), "loss": nn.CrossEntropyLoss(ignore_index=-1)},
    "ignored inside a loss": {
        "data": partial(marked, 9),
        "loss": lambda output, target: F.cross_entropy(output, target, ignore_index=9),
    },
    "counts": {
        "data": lambda: (make_classes()[0], torch.arange(COUNT) - 3),
        "loss": lambda output, target: F.mse_loss(output[:, 0], target.float()),
    },
    "ranks compared": {
        "data": lambda: (make_classes()[0], torch.arange(COUNT)),
        "loss": lambda output, target: (output[:, 0] * (target.float() - target.float().mean())).mean(),
    },
    "several labels": {
        "data": lambda: (make_classes()[0], (make_classes()[0][:, :CLASSES] > 0).long()),
        "loss": lambda output, target: F.binary_cross_entropy_with_logits(output, target.float()),
    },
    "sequences": {
        "data": lambda: (make_classes()[0], make_classes()[1][:, None].expand(-1, INPUTS).contiguous()),
        "loss": of_tokens,
        "model": Tokens,
    },
    "bytes": {
        "data": lambda: (make_classes()[0].numpy(), make_classes()[1].numpy().astype(np.uint8)),
        "loss": F.cross_entropy,
    },
}


@pytest.mark.parametrize("task", FINE)
def test_other_tasks_are_left_alone(task: str, tmp_path: Path) -> None:
    given = {"model": classifier, "cluster": Simulated(workers=2), "budget": Steps(10), **FINE[task]}
    assert train("allreduce", tmp_path / "run", **given).summary.steps == 10


def test_an_error_of_the_model_itself_comes_through(tmp_path: Path) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.table(x)
            return scores

    data = (torch.arange(COUNT) % 9, make_classes()[1])
    with pytest.raises(IndexError, match="index out of range in self"):
        train("allreduce", tmp_path / "run", model=Small, data=lambda: data, loss=F.cross_entropy)
