# SPDX-License-Identifier: Apache-2.0
"""What belongs to a loop of plain PyTorch goes on working: schedulers, clipping, accumulation, scaling, saving."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import os
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.prepare.loops import equal, loop, make_loader
from tests.processes import together, values
from tests.zoo import SEED, adam, make_data, make_model, momentum, sgd
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

import orchestra
from orchestra import ConfigError
from orchestra.data.random_state import get_states, seed_everything, set_states
from orchestra.errors import CheckpointError, Diverged, OrchestraError


def one_step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()


def script(strategy: str | None, way: Callable[[nn.Module, Any, Any], None]) -> dict[str, torch.Tensor]:
    """The model after a loop of one's own making."""
    seed_everything(SEED)
    model = make_model()
    optimizer: Any = momentum(model.parameters())
    loader: Any = make_loader(101)
    if strategy is not None:
        model, optimizer, loader = orchestra.prepare(model, optimizer, loader, strategy=strategy, seed=SEED)
    way(model, optimizer, loader)
    if strategy is not None:
        optimizer.finish()
    return model.state_dict()


def clipped(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        optimizer.zero_grad(set_to_none=False)
        F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def accumulated(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for i, (x, y) in enumerate(loader, 1):
        (F.mse_loss(model(x), y) / 3).backward()  # type: ignore[no-untyped-call]
        if i % 3 == 0 or i == len(loader):
            optimizer.step()
            optimizer.zero_grad()


def never_cleared(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def scheduled(model: nn.Module, optimizer: Any, loader: Any, *, make: Callable[[Any], Any]) -> None:
    scheduler = make(optimizer)
    for x, y in loader:
        model.zero_grad()
        F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()


def by_closure(model: nn.Module, optimizer: Any, loader: Any) -> None:
    for x, y in loader:

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        assert math.isfinite(optimizer.step(closure).item())


def scaled(model: nn.Module, optimizer: Any, loader: Any, *, unscale: bool) -> None:
    """Every third batch overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for i, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) * (math.inf if i % 3 == 1 else 1.0)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


WAYS: dict[str, Callable[[nn.Module, Any, Any], None]] = {
    "clipped": clipped,
    "accumulated": accumulated,
    "never cleared": never_cleared,
    "lambda": partial(scheduled, make=lambda o: LambdaLR(o, lambda t: 0.9**t)),
    "cosine": partial(scheduled, make=lambda o: CosineAnnealingLR(o, 20)),
    "one cycle": partial(scheduled, make=lambda o: OneCycleLR(o, 0.1, total_steps=40)),
    "closure": by_closure,
    "scaled": partial(scaled, unscale=False),
    "unscaled": partial(scaled, unscale=True),
}


@pytest.mark.parametrize("way", WAYS)
def test_prepare_with_one_worker_equals_plain_torch_for_every_way_of_stepping(way: str) -> None:
    assert equal(script("allreduce", WAYS[way]), script(None, WAYS[way]))


def test_a_scheduler_made_before_goes_on() -> None:
    def call(prepared: bool) -> Any:
        seed_everything(SEED)
        model = make_model()
        optimizer: Any = momentum(model.parameters())
        scheduler = LambdaLR(optimizer, lambda t: 0.5**t)
        if prepared:
            model, optimizer = orchestra.prepare(model, optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 7)).sum().backward()
            optimizer.step()
            scheduler.step()
        if prepared:
            optimizer.finish()
        return model.state_dict()

    assert equal(call(True), call(False))


def test_a_scheduler_made_before_finds_nothing_to_complain_of_with_servers() -> None:
    def call() -> None:
        warnings.simplefilter("error")
        model = make_model()
        given = momentum(model.parameters())
        scheduler = LambdaLR(given, lambda t: 0.5**t)
        with contextlib.suppress(SystemExit):
            model, optimizer = orchestra.prepare(model, given, strategy="ps")
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 7)).sum().backward()
                optimizer.step()
                scheduler.step()
            optimizer.finish()

    values(together(2, call))


def test_a_worker_that_overflows_does_not_stop_the_others() -> None:
    """It takes part with weight zero: all-reduce goes on with the others' gradient."""

    def call() -> Any:
        rank = int(os.environ["RANK"])
        seed_everything(SEED)
        model = make_model()
        model, optimizer = orchestra.prepare(model, sgd(model.parameters()))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        x, y = make_data(8)
        for i in range(4):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y) * (math.inf if i == rank + 1 else 1.0)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()
        optimizer.finish()
        return model.state_dict()

    mine, theirs = values(together(2, call))
    seed_everything(SEED)
    alone = make_model()
    optimizer = sgd(alone.parameters())
    x, y = make_data(8)
    for _ in range(4):
        optimizer.zero_grad()
        F.mse_loss(alone(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert equal(mine, theirs)
    assert all(torch.allclose(mine[name], tensor) for name, tensor in alone.state_dict().items())


def test_what_was_not_used_stays_where_it_is() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    both = nn.Sequential(first, second)
    model, optimizer = orchestra.prepare(both, sgd(both.parameters()))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = second.weight.clone()
    optimizer.zero_grad()
    first(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(second.weight, before)
    optimizer.finish()


# Saving.


def halves(strategy: str, at: int, total: int, **given: Any) -> tuple[Any, Any]:
    """The model of one run, and of two where the second goes on from what the first saved, in the midst of an epoch."""
    kept: dict[str, Any] = {}

    def save(optimizer: Any) -> None:
        if optimizer.orchestra.steps == at:
            buffer = io.BytesIO()
            torch.save({"model": optimizer._replica.module.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
            kept["file"], kept["rng"] = buffer.getvalue(), get_states()

    _, whole = loop(strategy, steps=total, epochs=9, each=save, **given)
    seed_everything(SEED + 1)
    model = make_model()
    optimizer: Any = given.get("optimizer", momentum)(model.parameters())
    loader: Any = make_loader()
    model, optimizer, loader = orchestra.prepare(model, optimizer, loader, strategy=strategy, seed=SEED, steps=total)
    saved = torch.load(io.BytesIO(kept["file"]), weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    set_states(kept["rng"])
    while optimizer.orchestra.steps < total:
        for x, y in loader:
            if optimizer.orchestra.steps == total:
                break
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    optimizer.finish()
    return whole, model.state_dict()


def test_a_run_goes_on_bit_for_bit() -> None:
    strategies = ["allreduce", "slowmo(tau=4)", "synceasgd(tau=3)",
                  "switch(first=allreduce, then=localsgd(tau=3), when=atshare(share=0.3), scale=0.5)"]  # fmt: skip

    def call() -> Any:
        return [halves(strategy, 7, 20) for strategy in strategies] + [halves("localsgd(tau=4)", 9, 20, optimizer=adam)]

    for outcome in values(together(2, call)):
        for whole, resumed in outcome:
            assert equal(whole, resumed)


def test_a_run_of_one_worker_can_be_continued() -> None:
    def unshuffled() -> Any:
        return make_loader(shuffle=False)

    kept: dict[str, Any] = {}

    def save(optimizer: Any) -> None:
        if optimizer.orchestra.steps == 5:
            kept.update(copy.deepcopy(optimizer.state_dict()), x=optimizer._replica.x.clone())

    _, whole = loop("slowmo(tau=3)", loader=unshuffled, epochs=1, each=save)
    model = make_model()
    model, optimizer, loader = orchestra.prepare(
        model, momentum(model.parameters()), unshuffled(), strategy="slowmo(tau=3)"
    )
    assert optimizer._replica is not None
    optimizer._replica.x.copy_(kept.pop("x"))
    optimizer.load_state_dict(kept)
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    optimizer.finish()
    assert equal(whole, model.state_dict())


def test_what_was_saved_elsewhere_is_refused() -> None:
    model = make_model()
    model, optimizer = orchestra.prepare(model, sgd(model.parameters()), strategy="localsgd")
    saved = optimizer.state_dict()
    one_step(model, optimizer)
    optimizer.finish()
    again = make_model()
    again, other = orchestra.prepare(again, sgd(again.parameters()), strategy="slowmo")
    with pytest.raises(CheckpointError, match="strategy is 'slowmo"):
        other.load_state_dict(saved)
    other.load_state_dict(sgd(make_model().parameters()).state_dict())  # a plain one's will do
    one_step(again, other)
    other.finish()


# What a step is.


def test_evaluation_sees_the_model_and_training_where_the_gradient_is_wanted() -> None:
    """Of synchronous EASGD the model is the centre, and gradients are taken where the worker is."""
    model = make_model()
    model, optimizer = orchestra.prepare(model, sgd(model.parameters()), strategy="synceasgd(tau=100, beta=0.5)")
    x, y = make_data(8)
    outputs = []
    for _ in range(3):
        optimizer.zero_grad()
        with torch.no_grad():
            centre = model(x)
        loss = F.mse_loss(model(x), y)
        outputs.append((centre, loss.item()))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert torch.equal(outputs[1][0], outputs[2][0])  # it does not move
    assert outputs[2][1] < outputs[1][1] < outputs[0][1]  # the worker does
    model(x)
    with pytest.raises(CheckpointError, match="in the middle of a step"):
        optimizer.state_dict()
    optimizer.finish()
    with pytest.raises(OrchestraError, match="was already called"):
        optimizer.step()
    model(x)  # it is an ordinary model again


def test_parts_of_a_model_must_not_be_called_where_that_matters() -> None:
    model = nn.Sequential(nn.Linear(7, 1))
    model, optimizer = orchestra.prepare(model, sgd(model.parameters()), strategy="synceasgd")
    model[0](torch.ones(2, 7)).sum().backward()
    with pytest.raises(OrchestraError, match="call model"):
        optimizer.step()
    optimizer.finish()


def test_a_copy_of_the_model_is_a_model(tmp_path: Path) -> None:
    model = make_model()
    model, optimizer = orchestra.prepare(model, sgd(model.parameters()), strategy="synceasgd")
    twin = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    twin(torch.ones(2, 7)).sum().backward()  # begins no step
    optimizer.state_dict()
    one_step(model, optimizer)
    optimizer.finish()


def test_gradients_that_are_not_finite_end_the_run() -> None:
    model = make_model()
    model, optimizer = orchestra.prepare(model, sgd(model.parameters()), tolerate=3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def step() -> None:
        optimizer.zero_grad()
        (model(torch.ones(2, 7)).sum() * math.nan).backward()
        optimizer.step()

    step()
    step()
    with pytest.raises(Diverged, match="3 times in a row"):
        step()
    assert equal(before, model.state_dict())
    optimizer.orchestra._exit.close()


def test_autocast_and_grad_mode_are_left_alone() -> None:
    model = make_model()
    model, optimizer = orchestra.prepare(model, sgd(model.parameters()), strategy="synceasgd")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(torch.ones(2, 7))
        assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    optimizer.step()
    assert torch.is_grad_enabled()
    optimizer.finish()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"optimizer": partial(torch.optim.LBFGS, lr=0.1)}, "evaluates the loss several times a step"),
        ({"strategy": "ps"}, "start more than 1 process"),
        ({"strategy": "hogwild"}, "share one x in one memory"),
        ({"strategy": "switch(then=localsgd)"}, "looks at the loss of every epoch"),
        ({"strategy": "switch(then=localsgd, when=atshare(share=0.5))"}, "switches after a share"),
        ({"strategy": "slowmo(tau=0)"}, "must be at least 1"),
        ({"model": lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())}, "one dtype in common"),
        ({"other": True}, "not of the model"),
        ({"loader": [1, 2, 3]}, "must be a torch DataLoader"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], told: str) -> None:
    model = given.get("model", make_model)()
    optimizer = given.get("optimizer", sgd)((make_model() if "other" in given else model).parameters())
    asked: dict[str, Any] = {"strategy": given["strategy"]} if "strategy" in given else {}
    with pytest.raises(ConfigError, match=told):
        orchestra.prepare(model, optimizer, given.get("loader"), **asked)


def test_what_comes_too_late_is_refused() -> None:
    model = nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    model, optimizer = orchestra.prepare(model, sgd(model.parameters()))
    with pytest.raises(ConfigError, match="cannot be added after"):
        optimizer.add_param_group({"params": []})
    model[0].requires_grad_(True)
    model(torch.ones(2, 7)).sum().backward()
    with pytest.raises(ConfigError, match="was frozen"):
        optimizer.step()
    model[0].requires_grad_(False)
    model[0].zero_grad()
    one_step(model, optimizer)
    optimizer.finish()


def test_a_plateau_needs_to_know_the_loss() -> None:
    (outcome,) = together(1, partial(loop, "switch(first=allreduce, then=localsgd, when=plateau(window=2))"))
    assert outcome.code == 2
    assert "needs the loss of every mini-batch: call optimizer.step(loss=loss)" in outcome.error
