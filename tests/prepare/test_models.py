# SPDX-License-Identifier: Apache-2.0
"""Models as people have them: frozen, tied, in half precision, compiled, moved about."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.prepare.loops import equal
from tests.processes import together, values
from tests.zoo import INPUTS, SEED, make_data, make_model, momentum, sgd
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, ReduceLROnPlateau, SequentialLR

import orchestra
from orchestra.data.random_state import seed_everything
from orchestra.errors import OrchestraError

STEPS = 5


class Tied(nn.Module):
    """One matrix in two places, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS, bias=False)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.none = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(x))).mean(1, keepdim=True) * self.scale
        return y


def frozen() -> nn.Module:
    model = make_model()
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    model[2].bias.requires_grad_(False)  # type: ignore[index]
    return model


def strided() -> nn.Module:
    """Parameters whose numbers do not lie in rows."""
    model = nn.Linear(INPUTS, 1)
    model.weight = nn.Parameter(torch.randn(INPUTS, 1).t())
    return model


def whole(model: nn.Module) -> torch.optim.Optimizer:
    return momentum(model.parameters())


def script(
    strategy: str | None,
    *,
    model: Callable[[], nn.Module] = make_model,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = whole,
    before: Callable[[Any], Any] | None = None,
    after: Callable[[Any], Any] | None = None,
    afterwards: Callable[[nn.Module], Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor] | None:
    """The model in the end. Schedulers are made before `prepare` or after; something may happen to the model then."""
    seed_everything(SEED)
    module = model()
    o: Any = optimizer(module)
    schedulers = [] if before is None else [before(o)]
    if strategy is not None:
        try:
            module, o = orchestra.prepare(module, o, strategy=strategy, cluster=orchestra.Attached(patience=20))
        except SystemExit:
            return None
    schedulers += [] if after is None else [after(o)]
    module = module if afterwards is None else afterwards(module) or module
    x, y = (t.to(dtype) for t in make_data(8))
    for _ in range(STEPS):
        o.zero_grad()
        loss = F.mse_loss(module(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        o.step()
        for scheduler in schedulers:
            scheduler.step(*([loss.item()] if isinstance(scheduler, ReduceLROnPlateau) else []))
    if strategy is not None:
        o.finish()
    return {name.removeprefix("_orig_mod."): tensor.clone() for name, tensor in module.state_dict().items()}


def in_turn(o: Any) -> Any:
    return SequentialLR(o, [LinearLR(o, 0.1, total_iters=2), CosineAnnealingLR(o, 5)], [2])


def with_ones(model: nn.Module) -> None:
    for p in model.parameters():
        nn.init.ones_(p)


compiled = partial(torch.compile, backend="eager")
CASES: dict[str, dict[str, Any]] = {
    "tied": {"model": Tied},
    "frozen": {"model": frozen},
    "strided": {"model": strided},
    "double": {"model": lambda: make_model().double(), "dtype": torch.float64},
    "named": {"optimizer": lambda model: torch.optim.Adam(model.named_parameters())},
    "whole layers": {"optimizer": lambda model: torch.optim.Adafactor(model.parameters())},
    "begins with zero": {"before": lambda o: LambdaLR(o, lambda t: min(1, t / 3))},
    "schedulers in turn": {"after": in_turn},
    "plateau": {"after": lambda o: ReduceLROnPlateau(o, patience=0, threshold=1.0)},
    "compiled before": {"model": lambda: compiled(make_model())},
    "compiled after": {"afterwards": compiled},
    "begun again": {"afterwards": with_ones},
}
HALF: dict[str, dict[str, Any]] = {
    str(dtype): {"model": lambda dtype=dtype: make_model().to(dtype), "dtype": dtype}
    for dtype in (torch.bfloat16, torch.float16)
}


@pytest.mark.parametrize("case", CASES | HALF)
def test_prepare_with_one_worker_equals_plain_torch_for_every_model(case: str) -> None:
    given = (CASES | HALF)[case]
    expected, found = script(None, **given), script("allreduce", **given)
    assert expected is not None
    assert found is not None
    assert equal(found, expected)


@pytest.mark.nightly
def test_one_worker_and_one_server_are_the_script_as_well() -> None:
    among = ("tied", "frozen", "named", "whole layers", "begins with zero", "plateau", "compiled before")
    cases = {name: CASES[name] for name in among}

    def call() -> list[Any]:
        return [script("ps", **given) for given in cases.values()]

    found, _ = values(together(2, call))
    for (name, given), state in zip(cases.items(), found, strict=True):
        expected = script(None, **given)
        assert expected is not None
        assert equal(state, expected), name


def test_in_half_precision_workers_end_with_one_model() -> None:
    def call() -> list[Any]:
        return [script("allreduce", **given) for given in HALF.values()]

    mine, theirs = values(together(2, call))
    for one, other in zip(mine, theirs, strict=True):
        assert equal(one, other)


def test_what_is_frozen_is_that_of_worker_0_as_well() -> None:
    """In rows or not, of any type, and longer than what is trained."""

    def call() -> Any:
        model = nn.Sequential(nn.Linear(3, 1), nn.Embedding(300, 1000), nn.Linear(2, 3))
        model[1].weight.requires_grad_(False)
        model[2].weight = nn.Parameter(torch.randn(2, 3).bfloat16().t(), requires_grad=False)
        model[2].bias = nn.Parameter(torch.randint(0, 100, (3,), dtype=torch.int8), requires_grad=False)
        torch.manual_seed(int(os.environ["RANK"]))
        with torch.no_grad():
            for p in model.parameters():
                p.random_(0, 100)
        model.one = nn.Parameter(torch.ones(3, 1).expand(3, 2), requires_grad=False)  # its elements share memory
        model, optimizer = orchestra.prepare(model, sgd(model[0].parameters()))
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model[0](torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.finish()
        return state

    mine, theirs = values(together(2, call))
    assert equal(mine, theirs)
    assert len(mine["1.weight"].unique()) > 50


def test_who_does_not_use_a_layer_has_gradient_zero_there() -> None:
    def call() -> Any:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with_ones(model)
        model, optimizer = orchestra.prepare(model, sgd(model.parameters()))
        (model if int(os.environ["RANK"]) == 0 else model[0])(torch.ones(1, 2)).sum().backward()
        found = [p.grad for p in model[1].parameters()]
        optimizer.step()
        optimizer.finish()
        return found, {name: tensor.clone() for name, tensor in model.state_dict().items()}

    (grads, mine), (nothing, theirs) = values(together(2, call))
    assert nothing == [None, None]
    assert equal(mine, theirs)
    assert torch.allclose(mine["1.weight"], 1 - 0.05 * grads[0] / 2)


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)


def with_data(model: nn.Module) -> None:
    model[2].bias.data = torch.zeros(3)  # type: ignore[index]


@pytest.mark.parametrize(
    ("afterwards", "dtype", "told"),
    [
        (nn.Module.double, torch.float64, "parameter 0.weight of the model was replaced"),
        (assigned, torch.float32, "parameter 0.weight of the model was replaced"),
        (with_data, torch.float32, "parameter 2.bias of the model was replaced"),
    ],
    ids=["double", "assigned", "data"],
)
def test_parameters_that_are_put_elsewhere_are_refused(afterwards: Any, dtype: torch.dtype, told: str) -> None:
    """They would not be trained, without any error."""
    (outcome,) = together(1, partial(script, "allreduce", afterwards=afterwards, dtype=dtype))
    assert outcome.kind == "OrchestraError"
    assert told in outcome.error


def test_a_model_in_evaluation_begins_no_step() -> None:
    model = make_model().eval()
    model, optimizer = orchestra.prepare(model, sgd(model.parameters()), strategy="synceasgd")
    model(torch.ones(2, INPUTS)).sum().backward()
    with pytest.raises(OrchestraError, match=r"not called in training: .* after model\.train"):
        optimizer.step()
    optimizer.finish()
