# SPDX-License-Identifier: Apache-2.0
"""What two processes do not have in common is told by part: which parameter, which setting, which sample."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.processes import environ_of
from tests.zoo import adam, make_data, make_model, momentum
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, TensorDataset

import orchestra
from orchestra import Attached, Steps, _train
from orchestra.clusters.runners import runner_of
from orchestra.data.random_state import seed_everything
from orchestra.engine import expression, fingerprint
from orchestra.engine.fingerprint import parts_of_beginning
from orchestra.engine.training import Training
from orchestra.errors import ClusterError
from orchestra.launchers import agent, preflight
from orchestra.user_loop.arguments import LoopArguments
from orchestra.worlds.sockets.rendezvous import first_difference


@pytest.fixture(autouse=True)
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ_of(0, 2, 29_500).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fingerprint, "_scripts", lambda given: {})  # what differs here is defined here


def of_train(**given: Any) -> dict[str, Any]:
    """What `train` says of itself to the others."""
    asked: dict[str, Any] = {"model": make_model, "data": make_data, "loss": F.mse_loss, "optimizer": momentum}
    bound = inspect.signature(orchestra.train).bind(**asked | {"cluster": Attached(), "batch": 6} | given)
    bound.apply_defaults()
    made = Training(_train._arguments(bound.arguments), runner_of)
    return made._fingerprint(made.spec())


def of_prepare(**given: Any) -> dict[str, Any]:
    """What `prepare` says of itself to the others."""
    seed_everything(0)
    model = given.pop("model", make_model)()
    data = given.pop("data", make_data)()
    asked: dict[str, Any] = {
        "optimizer": given.pop("optimizer", momentum)([p for p in model.parameters() if p.requires_grad]),
        "loader": DataLoader(data if isinstance(data, Dataset) else TensorDataset(*data), batch_size=6),
        "strategy": expression.parse(given.pop("strategy", "allreduce")),
        "cluster": Attached(), "steps": None, "seed": 0, "out": None, "tolerate": 10, "note": {},
    }  # fmt: skip
    whole = LoopArguments(model=model, **asked | given)
    return whole.in_common(whole.spec())


def normed(**given: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(7, 1), nn.BatchNorm1d(1, **given))


class Calling(nn.Module):
    """Prints an object among its settings, which is elsewhere in every process."""

    made: ClassVar[list[object]] = []

    def extra_repr(self) -> str:
        self.made.append(object())
        return f"how={self.made[-1]}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def dropping(p: float = 0.1, first: Callable[[], nn.Module] | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(7, 1), nn.Dropout(p) if first is None else first(), Calling())


def in_double() -> nn.Module:
    return make_model().double()


def frozen() -> nn.Module:
    model = make_model()
    model[2].bias.requires_grad_(False)  # type: ignore[index]
    return model


def other_begin() -> nn.Module:
    model = normed()
    model[1].running_mean.fill_(1.0)  # type: ignore[index]
    return model


def grouped(params: Any, *, first: int = 1, decay: float = 0.1) -> optim.Optimizer:
    given = [*params]
    groups: list[dict[str, Any]] = [{"params": given[:first]}, {"params": given[first:], "weight_decay": decay}]
    return optim.SGD(groups, lr=0.1)


def wrong_at(sample: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = make_data()
    x[sample] += 1
    return x, y


def wider() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = make_data()
    return x, y.long()


def in_doubles() -> tuple[torch.Tensor, ...]:
    return tuple(t.double() for t in make_data())


BOTH = [of_train, of_prepare]
CASES: list[tuple[list[Callable[..., dict[str, Any]]], dict[str, Any], dict[str, Any], str]] = [
    # The model.
    (BOTH, {}, {"model": in_double, "data": in_doubles},
     "parameter 0.weight is '7×7 float32' here and '7×7 float64' there"),
    (BOTH, {"model": normed}, {"model": lambda: nn.Sequential(nn.Linear(7, 1))}, "parameter 1.weight is here only"),
    (BOTH, {}, {"model": frozen}, "parameter 2.bias is '3 float32' here and '3 float32, frozen' there"),
    (BOTH, {"model": normed}, {"model": partial(normed, track_running_stats=False)},
     "buffer 1.running_mean is here only"),
    ([of_train], {"model": normed}, {"model": other_begin}, "sum of the initial 1.running_mean is '"),
    ([of_train], {}, {"seed": 1}, "seed is 0 here and 1 there"),
    (BOTH, {"model": dropping}, {"model": partial(dropping, p=0.2)},
     "module 1 is 'Dropout(p=0.1, inplace=False)' here and 'Dropout(p=0.2, inplace=False)' there"),
    (BOTH, {"model": dropping}, {"model": partial(dropping, first=nn.Tanh)},
     "module 1 is 'Dropout(p=0.1, inplace=False)' here and 'Tanh' there"),
    # The optimizer.
    (BOTH, {}, {"optimizer": adam}, "optimizer is 'SGD' here and 'Adam' there"),
    (BOTH, {}, {"optimizer": partial(momentum, momentum=0.5)}, "momentum of the optimizer is 0.9 here and 0.5 there"),
    (BOTH, {"optimizer": adam}, {"optimizer": partial(adam, betas=(0.9, 0.9))},
     "betas of the optimizer is '(0.9, 0.999)' here and '(0.9, 0.9)' there"),
    (BOTH, {"optimizer": grouped}, {"optimizer": partial(grouped, decay=0.2)},
     "weight_decay of group 1 of the optimizer is 0.1 here and 0.2 there"),
    (BOTH, {"optimizer": grouped}, {"optimizer": partial(grouped, first=2)}, "group of 0.bias is 1 here and 0 there"),
    # The strategy, the budget and the rest.
    (BOTH, {}, {"strategy": "localsgd"}, "strategy is 'allreduce' here and 'localsgd' there"),
    (BOTH, {"strategy": "localsgd(tau=3)"}, {"strategy": "localsgd(tau=4)"},
     "tau of the strategy is 3 here and 4 there"),
    (BOTH, {"strategy": "ps(consistency=ssp(staleness=2))"}, {"strategy": "ps(consistency=ssp(staleness=1))"},
     "consistency of the strategy is 'ssp(staleness=2)' here and 'ssp(staleness=1)' there"),
    ([of_train], {}, {"budget": Steps(4)},
     "budget is ['epochs=1'] here and ['steps=4'] there"),
    ([of_train], {}, {"clip": 1.0}, "clip is None here and 1.0 there"),
    ([of_train], {}, {"cluster": Attached(trusted=True, collectives="messages")},
     "cluster: encrypted is True here and False there"),
    ([of_prepare], {}, {"steps": 7}, "steps is None here and 7 there"),
    ([of_prepare], {}, {"tolerate": 3}, "tolerate is 10 here and 3 there"),
    # The data.
    (BOTH, {}, {"data": partial(make_data, 96)}, "data is '101 samples' here and '96 samples' there"),
    (BOTH, {}, {"data": partial(wrong_at, 12)}, "sample 12 is '7 float32, 1 float32, in sum "),
    (BOTH, {}, {"data": wider}, "sample 0 is '7 float32, 1 float32, in sum "),
    ([of_train], {}, {"validation_data": make_data}, "number of validation samples is there only"),
    ([of_train], {"validation_data": make_data}, {"validation_data": partial(make_data, 96)},
     "number of validation samples is 101 here and 96 there"),
    ([of_train], {"validation_data": make_data}, {"validation_data": partial(wrong_at, 12)},
     "validation sample 12 is '7 float32, 1 float32, in sum "),
]  # fmt: skip


EACH = [(of, usual, other, told) for ofs, usual, other, told in CASES for of in ofs]


@pytest.mark.parametrize(
    ("of", "usual", "other", "told"), EACH, ids=[f"{of.__name__}-{told}" for of, _, _, told in EACH]
)
def test_the_part_that_differs_is_named(
    of: Callable[..., dict[str, Any]], usual: dict[str, Any], other: dict[str, Any], told: str
) -> None:
    here, there = of(**usual), of(**usual | other)
    assert first_difference(here, of(**usual)) is None
    assert str(first_difference(here, there)).startswith(told)


def test_what_is_not_set_is_there_nevertheless() -> None:
    assert first_difference({"clip": None}, {"clip": 0.5}) == "clip is None here and 0.5 there"
    assert first_difference({"clip": None}, {}) == "clip is here only"


def test_of_a_model_with_thousands_of_layers_there_is_as_much_as_an_introduction_holds() -> None:
    def many(bias: bool = True) -> nn.Module:
        return nn.Sequential(nn.Linear(7, 1), *(nn.BatchNorm1d(1) for _ in range(1000)), nn.Linear(1, 1, bias=bias))

    def each(params: Any) -> optim.Optimizer:
        return optim.SGD([{"params": [p], "lr": 0.1 + i / 1e6} for i, p in enumerate(params)], lr=0.1)

    found = of_prepare(model=many, optimizer=each) | parts_of_beginning(many())
    assert len(json.dumps(found)) < (1 << 16) - 2000
    assert first_difference(found, of_prepare(model=partial(many, bias=False), optimizer=each)) is not None
    assert first_difference(parts_of_beginning(many()), parts_of_beginning(many())) is not None  # drawn again


def test_differing_sources_are_reported_with_a_file(tmp_path: Path) -> None:
    answers: list[tuple[str, dict[str, Any]]] = []
    for name in ("one", "two", "three"):
        folder = tmp_path / name
        (folder / "loop").mkdir(parents=True)
        (folder / "a.py").write_text("")
        (folder / "loop" / "b.py").write_text("x = 1" if name == "two" else "")
        if name == "three":
            (folder / "loop" / "c.py").write_text("")
        same = {"orchestra": "1", "torch": "2", "port": 1, "problems": []}
        answers.append((name, {**same, "code": agent._fingerprint(folder)}))
    assert len(preflight.agree(answers[:1] * 2)) == 2
    with pytest.raises(ClusterError) as caught:
        preflight.agree([*answers, ("four", {**answers[0][1], "code": "a sum"})])
    assert "two has other sources of orchestra than one, such as loop/b.py: install the same commit" in str(
        caught.value
    )
    assert "four has other sources of orchestra than one: install the same commit" in str(caught.value)
    assert "three has other sources of orchestra than one, such as loop/c.py: install the same commit" in str(
        caught.value
    )
