# SPDX-License-Identifier: Apache-2.0
"""A run goes on as it began: whatever would change its course is refused, by name."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zoo import assert_same, classifier, make_classes, train

from orchestra import AllReduce, Dirichlet, LabelSorted, Steps
from orchestra.errors import CheckpointError

SGD = torch.optim.SGD
GIVEN: dict[str, Any] = {
    "workers": 2,
    "model": classifier,
    "data": make_classes,
    "loss": torch.nn.functional.cross_entropy,
    "optimizer": partial(SGD, lr=0.02, momentum=0.9),
    "checkpoint_every": Steps(2),
}

# What is changed, and a word that the refusal must hold.
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "learning rate": ({"optimizer": partial(SGD, lr=0.03, momentum=0.9)}, "lr|learning rate"),
    "momentum": ({"optimizer": partial(SGD, lr=0.02, momentum=0.8)}, "momentum"),
    "weight decay": ({"optimizer": partial(SGD, lr=0.02, momentum=0.9, weight_decay=0.1)}, "weight_decay"),
    "nesterov": ({"optimizer": partial(SGD, lr=0.02, momentum=0.9, nesterov=True)}, "nesterov"),
    "optimizer": ({"optimizer": partial(torch.optim.Adam, lr=0.02)}, "Adam"),
    "clip": ({"clip": 1.0}, "clip"),
    "accumulate": ({"accumulate": 2}, "accumulate"),
    "precision": ({"precision": "bf16"}, "precision"),
    "partition": ({"partition": LabelSorted()}, "partition"),
    "another partition": ({"partition": Dirichlet(alpha=0.5)}, "partition"),
    "batch": ({"batch": 5}, "batch"),
    "seed": ({"seed": 9}, "seed"),
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("begun") / "run"
    train(AllReduce(), out, budget=Steps(3), **GIVEN)
    return out


@pytest.fixture
def run(begun: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(begun, tmp_path / "run"))


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("what", CHANGES)
def test_another_course_is_refused_by_name(what: str, run: Path) -> None:
    change, word = CHANGES[what]
    with pytest.raises(CheckpointError) as caught:
        train(AllReduce(), run, budget=Steps(6), resume=True, **{**GIVEN, **change})
    assert re.search(word, str(caught.value))


def test_resuming_with_the_same_settings_equals_an_uninterrupted_run(run: Path, tmp_path: Path) -> None:
    resumed = train(AllReduce(), run, budget=Steps(6), resume=True, **GIVEN)
    assert_same(resumed.model, train(AllReduce(), tmp_path / "never", budget=Steps(6), **GIVEN).model)
