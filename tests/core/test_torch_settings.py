# SPDX-License-Identifier: Apache-2.0
"""What the caller told torch holds in the processes of `Local` as well, and in no later run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.core.test_scoring_meanwhile import await_scores
from tests.zoo import BATCH, INPUTS, SEED, Trap, assert_same, make_data, make_model, my_rank, train, trapped
from torch import Tensor, nn

from orchestra import ConfigError, Local, Simulated, Steps
from orchestra.engine.cluster import Cluster
from orchestra.engine.torch_settings import TorchSettings


@pytest.fixture(autouse=True)
def back_again() -> Iterator[None]:
    before = TorchSettings.current()
    yield
    before.apply()


PLACES = [
    "backends",
    *("backends.mkldnn", "backends.mkldnn.matmul", "backends.mkldnn.conv", "backends.mkldnn.rnn"),
    *("backends.cuda.matmul", "backends.cudnn", "backends.cudnn.conv", "backends.cudnn.rnn"),
]


UNREADABLE = "newer settings have no such value"


def set_fp32(place: str, precision: str) -> None:
    attrgetter(place)(torch).fp32_precision = precision


def legacy(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return UNREADABLE


def readable(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if value != UNREADABLE}


def in_force() -> dict[str, Any]:
    """Asked of torch itself, and computed where it does not tell."""
    return {
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul": legacy(torch.get_float32_matmul_precision),
        **{f"fp32 {name}": attrgetter(f"{name}.fp32_precision")(torch) for name in PLACES},
        "mkldnn deterministic": torch.backends.mkldnn.deterministic,
        "flushes": float(torch.tensor([1e-310], dtype=torch.float64) * 0.5) == 0.0,
        "fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "benchmark": torch.backends.cudnn.benchmark,
        "tf32": legacy(lambda: torch.backends.cudnn.allow_tf32),
        "mkldnn": torch.backends.mkldnn.enabled,
        "flash": torch.backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]
        "anomaly": torch.is_anomaly_enabled(),
    }


def asking(folder: Path, when: str) -> Callable[[], nn.Module]:
    """A model factory that writes down what is in force, when it makes a model and in a step."""

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if when == "made":
                self.write()
            self.inner = nn.Linear(INPUTS, 1)

        def forward(self, x: Tensor) -> Tensor:
            if when == "step" and self.training:
                self.write()
            y: Tensor = self.inner(x)
            return y

        def write(self) -> None:
            if (rank := my_rank()) >= 0:
                (folder / f"{rank}.json").write_text(json.dumps(in_force()))

    return Asking


CHANGES: dict[str, Callable[[], object]] = {
    "dtype": lambda: torch.set_default_dtype(torch.float64),
    "device": lambda: torch.set_default_device("cpu:0"),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "warn_only": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "matmul": lambda: torch.set_float32_matmul_precision("medium"),
    "flushes": lambda: torch.set_flush_denormal(True),
    "mkldnn deterministic": lambda: setattr(torch.backends.mkldnn, "deterministic", True),
    "fill": lambda: setattr(torch.utils.deterministic, "fill_uninitialized_memory", False),
    "benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "tf32": lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
    "mkldnn": lambda: setattr(torch.backends.mkldnn, "enabled", False),
    "flash": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "fp32 backends": lambda: set_fp32("backends", "tf32"),
    "fp32 backends.mkldnn.matmul": lambda: set_fp32("backends.mkldnn.matmul", "bf16"),
    "fp32 backends.cudnn.conv": lambda: set_fp32("backends.cudnn.conv", "ieee"),
}


def doubles() -> tuple[Tensor, Tensor]:
    x, y = make_data()
    return x.to(torch.get_default_dtype()), y.to(torch.get_default_dtype())


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("when", [pytest.param("made", marks=pytest.mark.nightly), "step"])
def test_the_callers_settings_reach_every_process(tmp_path: Path, when: str) -> None:
    before = in_force()
    for name, change in CHANGES.items():
        change()
        here = in_force()
        assert here[name] != before[name], name
        folder = tmp_path / name
        folder.mkdir()
        train("allreduce", folder / "run", workers=2, model=asking(folder, when), data=doubles, budget=Steps(2))
        for rank in range(2):
            there = json.loads((folder / f"{rank}.json").read_text())
            assert {n: v for n, v in there.items() if here[n] != UNREADABLE} == readable(here), name


@pytest.mark.parametrize("name", ["dtype", "device", "deterministic", "flushes", "anomaly"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_the_callers_settings_hold_where_snapshots_are_scored(tmp_path: Path, name: str) -> None:
    found: dict[str, dict[str, Any]] = {}

    def evaluate(model: nn.Module, data: Any) -> float:
        found[threading.current_thread().name] = in_force()
        return 0.0

    CHANGES[name]()
    given: dict[str, Any] = {"evaluate": evaluate, "evaluation_data": doubles, "evaluate_every": Steps(2)}
    wait = Trap.at(0, 6, partial(await_scores, tmp_path, 2), size=2)
    cluster = Local(workers=2, patience=300)
    train("allreduce", tmp_path, cluster=cluster, model=trapped(wait), data=doubles, budget=Steps(8), **given)
    assert found["scorer"] == found[threading.current_thread().name] == in_force()


def test_settings_do_not_outlive_a_run(tmp_path: Path) -> None:
    before = TorchSettings.current()
    for name in ("dtype", "flushes", "deterministic"):
        CHANGES[name]()
    for name in ("changed", "as before"):
        folder = tmp_path / name
        folder.mkdir()
        train("allreduce", folder / "run", workers=2, model=asking(folder, "made"), data=doubles, budget=Steps(2))
        assert json.loads((folder / "1.json").read_text()) == in_force()
        before.apply()


@pytest.mark.parametrize("strategy", ["allreduce", "ps", "localsgd(tau=2)", "easgd(tau=2)", "slowmo(tau=2)"])
def test_double_precision_is_the_same_in_both_worlds(tmp_path: Path, strategy: str) -> None:
    torch.set_default_dtype(torch.float64)
    given: dict[str, Any] = {"data": doubles, "model": make_model, "batch": BATCH, "seed": SEED}
    workers = 1 if strategy.startswith("easgd") else 2  # of several, the order of arrival decides
    local = train(strategy, tmp_path / "local", cluster=Local(workers=workers, patience=20), **given)
    simulated = train(strategy, tmp_path / "simulated", cluster=Simulated(workers=workers), **given)
    assert next(local.model.parameters()).dtype is torch.float64
    assert_same(local.model, simulated.model)


@pytest.mark.parametrize("cluster", [Local(workers=2), Simulated(workers=2)], ids=["local", "simulated"])
def test_an_autocast_around_the_call_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ConfigError, match=r'(?s)torch.autocast.*precision="bf16"'),
    ):
        train("allreduce", tmp_path / "cast", cluster=cluster, budget=Steps(1))
    with torch.autocast("cpu", enabled=False):
        train("allreduce", tmp_path / "plain", cluster=cluster, budget=Steps(1))
