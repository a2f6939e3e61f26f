# SPDX-License-Identifier: Apache-2.0
"""Caller and processes have the same model and data, by name: sets of texts have another order in every program."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.cases import few
from tests.processes import together
from tests.zoo import INPUTS, assert_close, assert_same, flat, make_data, momentum, plain, train
from torch import Tensor, nn
from torch.utils.data import Dataset

import orchestra
from orchestra import Attached, Simulated, Steps
from orchestra.errors import ClusterError

NAMES = ("ada", "bob", "cleo", "dan")
STRATEGIES = ["allreduce", "localsgd(tau=2)", "ps", "hogwild", "slowmo(tau=2)"]


class Named(nn.Module):
    """Layers of one shape, used in the order of their names, in whatever order they were registered."""

    def __init__(self, names: Sequence[str], *, width: int = INPUTS, frozen: str = "", noise: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(width, width) for name in names})
        self.head = nn.Linear(INPUTS, 1)
        if frozen:
            self.layers[frozen].requires_grad_(False)
        if noise:
            for name in names:
                self.register_buffer(f"noise_{name}", torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        for name in NAMES:
            x = x + torch.tanh(self.layers[name](x)) + getattr(self, f"noise_{name}", 0.0)
        y: Tensor = self.head(x)
        return y


def differently(here: Callable[[], Any], elsewhere: Callable[[], Any]) -> Callable[[], Any]:
    """Makes one thing in this process, and another in all others."""
    caller = os.getpid()
    return lambda: (here if os.getpid() == caller else elsewhere)()


def shuffled(**given: Any) -> Callable[[], nn.Module]:
    return differently(partial(Named, NAMES, **given), partial(Named, NAMES[::-1], **given))


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
@pytest.mark.parametrize("given", [{}, {"frozen": "bob"}, {"noise": True}], ids=["all", "frozen", "buffers"])
def test_local_is_plain_training_whatever_the_order_of_the_layers(
    tmp_path: Path, strategy: str, given: dict[str, Any]
) -> None:
    asked = {"model": shuffled(**given), "budget": Steps(6)}
    result = train(strategy, tmp_path / "run", workers=2, **asked)
    assert_close(result.model, plain(model=partial(Named, NAMES, **given), steps=6, size=2))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_local_gives_the_same_in_either_order(tmp_path: Path, strategy: str) -> None:
    # One worker: what Hogwild does with several depends on the moment.
    asked: dict[str, Any] = {"budget": Steps(6), "workers": 1 if strategy == "hogwild" else 2}
    if strategy == "ps":
        strategy = "ps(servers=2)"  # synchronous: x is cut between two layers
    found = train(strategy, tmp_path / "a", model=shuffled(), **asked).model
    assert_same(found, train(strategy, tmp_path / "b", model=partial(Named, NAMES), **asked).model)


class InTurn(Named):
    """Calls its layers in the order in which they were registered."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(2 * layer(x))
        y: Tensor = self.head(x)
        return y


class AsListed(Named):
    """Calls its layers in the order of a list of its own."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.listed = list(names)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.listed:
            x = torch.tanh(2 * self.layers[name](x))
        y: Tensor = self.head(x)
        return y


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_layers_are_called_in_the_callers_order(tmp_path: Path, strategy: str) -> None:
    model = differently(partial(InTurn, NAMES), partial(InTurn, NAMES[::-1]))
    result = train(strategy, tmp_path / "run", workers=2, model=model, budget=Steps(6))
    assert_close(result.model, plain(model=partial(InTurn, NAMES), steps=6, size=2))


def test_a_model_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    model = differently(partial(AsListed, NAMES), partial(AsListed, NAMES[::-1]))
    with pytest.raises(ClusterError, match=r"the model computes something else for the same samples.*PYTHONHASHSEED"):
        train("allreduce", tmp_path, workers=2, model=model)


def test_tied_layers_have_one_name_or_the_other(tmp_path: Path) -> None:
    def tied(first: str, second: str) -> nn.Module:
        model = Named([first, *NAMES[2:], second])
        model.layers["ada"].weight = model.layers["bob"].weight
        return model

    model = differently(lambda: tied("ada", "bob"), lambda: tied("bob", "ada"))
    result = train("allreduce", tmp_path, workers=2, model=model)
    assert_close(result.model, plain(model=lambda: tied("ada", "bob"), size=2))


def test_layers_with_another_name_or_shape_are_named(tmp_path: Path) -> None:
    renamed = differently(partial(Named, NAMES), partial(Named, (*NAMES[:3], "eve")))
    with pytest.raises(ClusterError, match=r"parameter layers\.dan\.weight .*is in the caller only"):
        train("allreduce", tmp_path / "a", model=renamed)
    wider = differently(lambda: Named(NAMES), lambda: nn.Sequential(Named(NAMES)))
    with pytest.raises(ClusterError, match=r"parameter layers\.ada\.weight .*is in the caller only"):
        train("allreduce", tmp_path / "b", model=wider)
    frozen = differently(partial(Named, NAMES, frozen="ada"), partial(Named, NAMES))
    with pytest.raises(ClusterError, match=r"parameter layers\.ada\.weight is '7×7 float32, frozen' in the caller"):
        train("allreduce", tmp_path / "c", model=frozen)
    more = differently(partial(Named, NAMES), lambda: Named((*NAMES, "eve")))
    with pytest.raises(ClusterError, match=r"parameter layers\.eve\.weight is in the processes only"):
        train("allreduce", tmp_path / "d", model=more)


def dropping(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 5), *between, nn.Linear(5, 1))


def test_modules_without_parameters_are_compared(tmp_path: Path) -> None:
    """In evaluation a model computes the same whatever its dropout, so its outputs do not tell."""
    rates = differently(lambda: dropping(nn.Dropout(0.1)), lambda: dropping(nn.Dropout(0.5)))
    with pytest.raises(ClusterError, match=r"module 1 is 'Dropout\(p=0.1, .* in the caller and 'Dropout\(p=0.5, "):
        train("allreduce", tmp_path / "a", model=rates)
    order = differently(lambda: dropping(nn.ReLU(), nn.Dropout(0.1)), lambda: dropping(nn.Dropout(0.1), nn.ReLU()))
    with pytest.raises(ClusterError, match=r"module 1 is 'ReLU' in the caller and 'Dropout\("):
        train("allreduce", tmp_path / "b", model=order)


def relabelled() -> tuple[Tensor, Tensor]:
    x, y = make_data()
    return x, -y


def test_data_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"sample 0 is .* in the caller and .* in the processes.*PYTHONHASHSEED"):
        train("allreduce", tmp_path / "a", data=differently(make_data, relabelled))
    with pytest.raises(ClusterError, match=r"number of samples is 101 in the caller and 102 in the processes"):
        train("allreduce", tmp_path / "b", data=differently(make_data, partial(make_data, 102)))


def drawn_apart() -> tuple[Tensor, Tensor]:
    return torch.randn(20, INPUTS), torch.randn(20, 1)


def test_validation_data_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"validation sample 0 is .* in the caller and .* in the processes"):
        train("allreduce", tmp_path / "a", validation_data=differently(make_data, relabelled))
    with pytest.raises(ClusterError, match=r"number of validation samples is 101 in the caller and 102 in"):
        train("allreduce", tmp_path / "b", validation_data=differently(make_data, partial(make_data, 102)))
    assert train("allreduce", tmp_path / "c", validation_data=drawn_apart).summary.steps == 5


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples that cannot be compared: a generator that no seed reaches."""

    def __init__(self) -> None:
        self.x, self.y = make_data()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + float.fromhex(f"0x{os.urandom(2).hex()}p-30"), self.y[index]


class Flipped(Noisy):
    """Likewise, and each sample is one of two: several are read the same twice by chance."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] * (1 - 2 * (os.urandom(1)[0] % 2)), self.y[index]


@pytest.mark.parametrize("data", [Noisy, Flipped])
def test_samples_that_are_drawn_are_not_compared(tmp_path: Path, data: Callable[[], Any]) -> None:
    assert train("allreduce", tmp_path / "run", data=data).summary.steps == 5


def ordered(order: Sequence[str]) -> nn.Module:
    """Begins with the same values whatever the order, so that only the order differs."""
    model = Named(order)
    for name in NAMES:
        nn.init.constant_(model.layers[name].weight, 0.01 * len(name))  # type: ignore[arg-type]
        nn.init.zeros_(model.layers[name].bias)  # type: ignore[arg-type]
    nn.init.ones_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    return model


def by_rank() -> nn.Module:
    return ordered(NAMES if os.environ["RANK"] == "0" else NAMES[::-1])


def own_loop() -> Tensor:
    model = by_rank()
    model, optimizer = orchestra.prepare(model, momentum(model.parameters()), cluster=Attached(patience=20))
    x, y = make_data()
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(F.mse_loss(model(x), y))
        optimizer.step()
    optimizer.finish()
    return flat(model)


@pytest.mark.parametrize("kind", ["train", "prepare"])
def test_attached_processes_with_another_order_are_refused(tmp_path: Path, kind: str) -> None:
    call = own_loop if kind == "prepare" else partial(
        train, "allreduce", tmp_path / "run", model=by_rank, cluster=Attached(patience=20)
    )  # fmt: skip
    for outcome in together(2, call):
        assert outcome.kind == "ClusterError"
        assert "parameter layers.ada.weight" in outcome.error
        assert "order" in outcome.error
        assert "PYTHONHASHSEED" in outcome.error


def test_simulated_has_the_callers_order(tmp_path: Path) -> None:
    cluster = Simulated(workers=2)
    found = train("allreduce", tmp_path / "run", model=partial(Named, NAMES[::-1]), cluster=cluster)
    assert_close(found.model, plain(model=partial(Named, NAMES[::-1]), size=2))


_SCRIPT = """
import os, sys
from functools import partial
from pathlib import Path
import torch, torch.nn.functional as F
import orchestra

FOLDER = Path(sys.argv[1])
NAMES = {f"layer {i}" for i in range(9)}

def make_model():
    names = list(NAMES)
    Path(FOLDER, f"{os.getpid()}.txt").write_text(",".join(names))
    return torch.nn.Sequential(torch.nn.Linear(3, 1))

def make_data():
    return torch.ones(8, 3), torch.ones(8, 1)

if __name__ == "__main__":
    os.environ.update(dict(given.split("=") for given in sys.argv[2:]))
    orchestra.train(model=make_model, data=make_data, loss=F.mse_loss, optimizer=partial(torch.optim.SGD, lr=0.1),
                    batch=2, out=FOLDER / "run", cluster=orchestra.Local(workers=2), progress=False)
"""


@pytest.mark.parametrize(
    "later", few([[], ["PYTHONHASHSEED=8"]], [["PYTHONHASHSEED=8"]]), ids=["as started", "changed since"]
)
def test_the_callers_hash_seed_reaches_the_processes(tmp_path: Path, later: list[str]) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT)
    environ = os.environ | {"PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, tmp_path / "script.py", tmp_path, *later], env=environ, check=True, timeout=100)
    orders = {path.read_text() for path in tmp_path.glob("*.txt")}
    assert len([*tmp_path.glob("*.txt")]) == 3
    assert len(orders) == 1
