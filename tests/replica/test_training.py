# SPDX-License-Identifier: Apache-2.0
"""Strange models and optimizers through whole runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.zoo import BATCH, INPUTS, SEED, assert_close, make_data, make_model, momentum, plain, train
from torch import Tensor, nn

from orchestra import AllReduce, ConfigError, Epochs, LocalSGD, ParameterServer, SlowMo, Steps, Strategy
from orchestra.data.feed import IndexedFeed
from orchestra.data.random_state import seed_everything
from orchestra.model.flat_optimizer import Factory

STRATEGIES: list[Strategy[Any]] = [AllReduce(), ParameterServer(servers=2), LocalSGD(tau=2), SlowMo(tau=2)]


class Odd(nn.Module):
    """Tied, frozen, without dimensions, of another dtype, with statistics, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, INPUTS)
        self.second = nn.Linear(INPUTS, INPUTS)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(INPUTS, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.narrow = nn.Linear(5, 1).double()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.frozen(self.second(torch.tanh(self.first(x)))))
        z: Tensor = self.scale * self.narrow(y.double()).float()
        return z


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
def test_an_odd_model_is_trained_whole(strategy: Strategy[Any], tmp_path: Path) -> None:
    result = train(strategy, tmp_path, model=Odd, workers=2, budget=Epochs(1))
    seed_everything(SEED)
    start = Odd().state_dict()
    end = result.model.state_dict()
    assert list(end) == list(start)
    for name, value in end.items():
        assert value.dtype == start[name].dtype
        assert bool(torch.isfinite(value.double()).all())
        moves = not name.startswith(("frozen", "unused"))
        assert moves != torch.equal(value, start[name]), name
    assert torch.equal(end["first.weight"], end["second.weight"])
    assert isinstance(result.model, Odd)
    assert result.model.first.weight is result.model.second.weight


def test_weights_are_exported_for_plain_torch(tmp_path: Path) -> None:
    result = train(AllReduce(), tmp_path, model=Odd, workers=2)
    fresh = Odd()
    fresh.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, result.model.state_dict()[name])


def test_an_odd_model_in_a_world_of_one_is_plain_training(tmp_path: Path) -> None:
    # float64 throughout, so that the master copy of the narrow layers does not round otherwise than torch's own.
    def odd() -> nn.Module:
        return Odd().double()

    def data() -> tuple[Tensor, Tensor]:
        x, y = make_data()
        return x.double(), y.double()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output.double(), target)

    def no_unused(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.02, momentum=0.9)

    given: dict[str, Any] = {"model": odd, "data": data, "loss": loss, "optimizer": no_unused}
    result = train(AllReduce(), tmp_path, workers=1, budget=Steps(8), **given)
    assert_close(result.model, plain(steps=8, **given), tolerance=1e-9)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer()], ids=lambda s: type(s).__name__)
def test_statistics_are_the_mean_over_the_workers(strategy: Strategy[Any], tmp_path: Path) -> None:
    """With a learning rate that changes nothing, each worker's running statistics can be computed by hand."""
    workers, steps = 3, 4
    still = partial(torch.optim.SGD, lr=1e-30)
    result = train(strategy, tmp_path, model=normed, optimizer=still, workers=workers, budget=Steps(steps))
    ends = []
    for rank in range(workers):
        seed_everything(SEED)
        module, data = normed(), make_data()
        feed = IndexedFeed(data, batch=BATCH, seed=SEED, rank=rank, size=workers)
        for _ in range(steps):
            module(feed.next()[0][0])
        ends.append(module.state_dict())
    got = result.model.state_dict()
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(got[name], torch.stack([e[name] for e in ends]).mean(0))
        assert not torch.allclose(ends[0][name], ends[1][name])
    assert int(got["1.num_batches_tracked"]) == steps


def test_accumulation_is_the_whole_batch(tmp_path: Path) -> None:
    whole = train(AllReduce(), tmp_path / "whole", budget=Steps(8))
    cut = train(AllReduce(), tmp_path / "cut", budget=Steps(8), accumulate=4)
    assert_close(cut.model, whole.model)


def test_bf16_trains(tmp_path: Path) -> None:
    x, y = make_data()
    result = train(AllReduce(), tmp_path, precision="bf16", budget=Epochs(10), workers=2)
    exact = plain(size=2, steps=90)
    assert next(result.model.parameters()).dtype == torch.float32
    reached = float(F.mse_loss(result.model(x), y).detach())
    assert reached < 1.5 * float(F.mse_loss(exact(x), y).detach()) + 0.05
    assert not torch.equal(next(result.model.parameters()), next(exact.parameters()))


def test_a_schedule_in_steps_of_an_epoch(tmp_path: Path) -> None:
    def halved(epochs: float) -> float:
        return 0.5 ** int(epochs)

    result = train(AllReduce(), tmp_path, workers=2, schedule=halved, budget=Epochs(3))
    assert_close(result.model, plain(size=2, schedule=halved, steps=27))


# Optimizers.


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.AdamW, lr=0.01),
        partial(torch.optim.RMSprop, lr=0.003, momentum=0.5),
        partial(torch.optim.Adagrad, lr=0.05),
        partial(torch.optim.Adadelta, lr=1.0),
        partial(torch.optim.Adamax, lr=0.01),
        partial(torch.optim.NAdam, lr=0.01),
        partial(torch.optim.RAdam, lr=0.01),
        partial(torch.optim.Rprop, lr=0.003),
        partial(torch.optim.ASGD, lr=0.02),
        partial(torch.optim.Adafactor, lr=0.01),
        partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True, foreach=False),
        partial(torch.optim.Adam, lr=0.01, amsgrad=True, maximize=True),
    ],
    ids=lambda p: p.func.__name__,
)
def test_any_torch_optimizer(optimizer: Factory, tmp_path: Path) -> None:
    result = train(AllReduce(), tmp_path, workers=2, optimizer=optimizer, budget=Steps(6))
    assert_close(result.model, plain(optimizer=optimizer, size=2, steps=6), tolerance=2e-5)


def muon(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.02)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(tau=2), SlowMo(tau=2)], ids=lambda s: type(s).__name__)
def test_muon_sees_whole_layers(strategy: Strategy[Any], tmp_path: Path) -> None:
    def matrices() -> nn.Module:
        return nn.Sequential(nn.Linear(INPUTS, 6, bias=False), nn.Tanh(), nn.Linear(6, 1, bias=False))

    result = train(strategy, tmp_path, model=matrices, optimizer=muon, workers=2, budget=Steps(6))
    if isinstance(strategy, AllReduce):
        assert_close(result.model, plain(model=matrices, optimizer=muon, size=2, steps=6), tolerance=1e-4)


def two_groups(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() <= 1], "lr": 0.001},
        ],
        lr=0.05,
        momentum=0.9,
    )


@pytest.mark.parametrize("schedule", [None, lambda epochs: 1 / (1 + epochs)], ids=["constant", "falling"])
def test_several_groups(schedule: Callable[[float], float] | None, tmp_path: Path) -> None:
    result = train(AllReduce(), tmp_path, workers=3, optimizer=two_groups, budget=Steps(8), schedule=schedule)
    assert_close(result.model, plain(optimizer=two_groups, size=3, steps=8, schedule=schedule))


def test_several_groups_with_clipping(tmp_path: Path) -> None:
    result = train(AllReduce(), tmp_path, workers=3, optimizer=two_groups, budget=Steps(8), clip=0.1)
    assert_close(result.model, plain(optimizer=two_groups, size=3, steps=8, clip=0.1))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(INPUTS, 5)
        self.narrow = nn.Linear(5, 1).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(self.wide(x).to(torch.bfloat16))
        return y.float()


@pytest.mark.usefixtures("no_process")
def test_several_groups_with_several_dtypes(tmp_path: Path) -> None:
    """Layers of another dtype than x are copies of it, so what an optimizer of layers does to them would be lost."""
    with pytest.raises(ConfigError, match=r"one dtype, not with torch\.bfloat16, torch\.float32"):
        train(AllReduce(), tmp_path, workers=2, model=Mixed, optimizer=two_groups, budget=Steps(8))


@pytest.mark.usefixtures("no_process")
def test_optimizers_that_need_a_closure_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LBFGS"):
        train(AllReduce(), tmp_path, optimizer=partial(torch.optim.LBFGS, lr=0.1))
    with pytest.raises(ConfigError, match="SparseAdam"):
        train(AllReduce(), tmp_path, optimizer=partial(torch.optim.SparseAdam, lr=0.1))


def test_groups_of_layers_go_with_servers(tmp_path: Path) -> None:
    result = train(ParameterServer(), tmp_path, workers=2, optimizer=two_groups, budget=Steps(4))
    assert_close(result.model, plain(optimizer=two_groups, size=2, steps=4))


@pytest.mark.usefixtures("no_process")
def test_momenta_of_groups_are_not_handed_over(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="several groups, and its state for them cannot be transferred: use"):
        train("switch(when=atshare(share=0.5))", tmp_path, optimizer=two_groups)


def only_matrices(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return momentum([p for p in params if p.dim() > 1])


def test_an_optimizer_of_some_parameters_leaves_the_others(tmp_path: Path) -> None:
    result = train(AllReduce(), tmp_path, workers=2, optimizer=only_matrices, budget=Steps(4))
    assert_close(result.model, plain(optimizer=only_matrices, size=2, steps=4))


# Refusals, before any process starts.


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 3, sparse=True)
        self.out = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.words((x[:, 0] * 100).round().long()))
        return y


class Lookup(Embedded):
    """Sparse gradients that no attribute tells of."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 3)

    def forward(self, x: Tensor) -> Tensor:
        picked = F.embedding((x[:, 0] * 100).round().long(), self.words.weight, sparse=True)
        y: Tensor = self.out(picked)
        return y


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(INPUTS, 1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.phase).real


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("model", "name"),
    [
        (Embedded, "model.words.sparse"),
        (Lookup, "model.words.weight"),
        (lambda: nn.Sequential(nn.LazyLinear(1)), "model.0.weight"),
        (lambda: nn.Identity(), "has no trainable parameter"),
        (lambda: make_model().requires_grad_(False), "has no trainable parameter"),
        (Complex, "model.phase"),
        (lambda: torch.zeros(3), "must be a function that returns an nn.Module"),
        (make_model(), "give the function that makes it"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(model: Any, name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's own, on lazy modules
        with pytest.raises(ConfigError, match=name):
            train(AllReduce(), tmp_path / "run", model=model)
    assert not (tmp_path / "run").exists()
