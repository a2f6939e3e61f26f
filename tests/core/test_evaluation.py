# SPDX-License-Identifier: Apache-2.0
"""Evaluating is looking: it happens in evaluation mode, on a copy, and leaves no trace in the result."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.processes import together
from tests.zoo import make_data, train
from torch import nn

from orchestra import AllReduce, Attached, ConfigError, Epochs, Local, Simulated, Steps
from orchestra.engine.cluster import Cluster


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


WRONG: dict[str, tuple[Any, str]] = {
    "text": ("good", "evaluate(...) = 'good'    must be a number, or a dict of numbers"),
    "text of a number": ("0.5", "evaluate(...) = '0.5'    must be a number"),
    "nothing": (None, "evaluate(...) = None    must be a number, or a dict of numbers such as {'accuracy': 0.9}: does"),
    "tensor": (torch.zeros(2, 3), "evaluate(...) = 'tensor of shape (2, 3)'    must be a number"),
    "array": (np.zeros(4), "evaluate(...) = 'ndarray of shape (4,)'    must be a number"),
    "tuple": ((0.5, 0.7), "evaluate(...) = (0.5, 0.7)    must be a number"),
    "complex": (1j, "evaluate(...) = 1j    must be a number"),
    "dict of text": ({"accuracy": 0.5, "verdict": "good"}, "evaluate(...)['verdict'] = 'good'    must be a number"),
    "dict of lists": ({"accuracy": [0.5]}, "evaluate(...)['accuracy'] = [0.5]    must be a number"),
    "dict of dicts": ({"test": {"accuracy": 0.5}}, "evaluate(...)['test'] = {'accuracy': 0.5}    must be a number"),
}


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("cluster", [Local(workers=2), Simulated(workers=2)], ids=["local", "simulated"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_number_is_refused_before_anything_is_trained(wrong: str, cluster: Cluster, tmp_path: Path) -> None:
    value, said = WRONG[wrong]
    given: dict[str, Any] = {"evaluate": lambda model, data: value, "evaluation_data": make_data}
    with pytest.raises(ConfigError) as caught:
        train(AllReduce(), tmp_path / "run", cluster=cluster, **given)
    assert said in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
def test_every_process_of_several_ends_where_a_score_is_no_number(tmp_path: Path) -> None:
    def call() -> Any:
        given: dict[str, Any] = {"evaluate": lambda model, data: "good", "evaluation_data": make_data}
        train(AllReduce(), tmp_path / "run", cluster=Attached(patience=20), **given)

    first, second = together(2, call)
    assert first.kind == "ConfigError"
    assert "evaluate(...) = 'good'" in first.error
    assert second.kind
    assert not (tmp_path / "run").exists()


def test_all_wrong_figures_are_named_together(tmp_path: Path) -> None:
    given: dict[str, Any] = {"evaluate": lambda model, data: {"a": "x", "b": None}, "evaluation_data": make_data}
    with pytest.raises(ConfigError) as caught:
        train(AllReduce(), tmp_path / "run", cluster=Simulated(workers=2), **given)
    assert [problem.where for problem in caught.value.problems] == ["evaluate(...)['a']", "evaluate(...)['b']"]


@pytest.mark.parametrize(
    "value", [1, 1.0, True, torch.tensor(1), torch.ones(1, 1), np.float32(1), np.array([1.0]), np.int64(1), Decimal(1)]
)
def test_every_kind_of_number_is_a_figure(value: Any, tmp_path: Path) -> None:
    given: dict[str, Any] = {"evaluate": lambda model, data: {"one": value}, "evaluation_data": make_data}
    result = train(AllReduce(), tmp_path / "run", cluster=Simulated(workers=2), budget=Steps(1), **given)
    assert result.metrics == {"one": 1.0}


def test_a_score_that_stops_being_a_number_is_named_and_the_model_is_kept(tmp_path: Path) -> None:
    x0 = train(AllReduce(), tmp_path / "before", cluster=Simulated(workers=2), budget=Steps(1)).model

    def fickle(model: nn.Module, data: Any) -> Any:
        trained = all(torch.equal(a, b) for a, b in zip(model.parameters(), x0.parameters(), strict=True))
        return "trained" if trained else 0.5

    given: dict[str, Any] = {"evaluate": fickle, "evaluation_data": make_data, "budget": Steps(1)}
    with pytest.raises(ConfigError, match="'trained'    must be a number"):
        train(AllReduce(), tmp_path / "run", cluster=Simulated(workers=2), **given)
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_loss_given_as_a_class_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a class: give an instance, loss=MSELoss\(\)"):
        train(AllReduce(), tmp_path, workers=2, loss=nn.MSELoss)
