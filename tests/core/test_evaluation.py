# SPDX-License-Identifier: Apache-2.0
"""Evaluating is looking: it happens in evaluation mode, on a copy, and leaves no trace in the result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zoo import make_data, train
from torch import nn

from orchestra import AllReduce, ConfigError, Epochs


def make_normed() -> nn.Module:
    width = make_data()[0].shape[1]
    return nn.Sequential(nn.Linear(width, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, make_data()[1].shape[1]))


def test_evaluation_leaves_no_trace_in_the_result(tmp_path: Path) -> None:
    modes: list[tuple[bool, bool]] = []

    def careless(model: nn.Module, data: Any) -> float:
        modes.append((model.training, torch.is_grad_enabled()))
        model.train()
        return float(model(data[0] + 3).sum())

    given: dict[str, Any] = {"model": make_normed, "workers": 2, "budget": Epochs(2)}
    plain = train(AllReduce(), tmp_path / "plain", **given)
    scored = train(AllReduce(), tmp_path / "scored", evaluate=careless, evaluation_data=make_data, **given)
    assert set(modes) == {(False, False)}
    assert not scored.model.training
    for name, value in plain.model.state_dict().items():
        assert torch.equal(scored.model.state_dict()[name], value), name


def test_a_figure_of_a_function_without_a_name_is_called_score(tmp_path: Path) -> None:
    result = train(AllReduce(), tmp_path, workers=2, evaluate=lambda model, data: 1.0, evaluation_data=make_data)
    assert result.metrics == {"score": 1.0}


def test_an_evaluation_that_fails_does_so_before_anything_is_trained(tmp_path: Path) -> None:
    def broken(model: nn.Module, data: Any) -> float:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(AllReduce(), tmp_path / "run", workers=2, evaluate=broken, evaluation_data=make_data)
    assert not (tmp_path / "run").exists()


def test_a_loss_given_as_a_class_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a class: give an instance, loss=MSELoss\(\)"):
        train(AllReduce(), tmp_path, workers=2, loss=nn.MSELoss)
