# SPDX-License-Identifier: Apache-2.0
"""Loops that cannot be are refused at once, with the reason; what a loop saves can be read elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed
from tests.cases import few
from tests.prepare.loops import equal, loop, make_loader
from tests.processes import together
from tests.zoo import make_model, momentum, sgd
from torch import nn

import orchestra
from orchestra import Attached
from orchestra.core.vectors import LARGE
from orchestra.errors import ConfigError
from orchestra.user_loop.earlier_calls import EARLIER


def prepared(strategy: str) -> tuple[nn.Module, Any]:
    model = make_model()
    return orchestra.prepare(model, sgd(model.parameters()), strategy=strategy, cluster=Attached(patience=20))


def one_step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()


# A second call of prepare.


def twice(first: str, second: str, *, finish: bool) -> str | None:
    """Why the second call is refused; None on a server, whose script has ended."""
    EARLIER.servers_return = False  # as in a script
    try:
        model, optimizer = prepared(first)
        one_step(model, optimizer)
        if finish:
            optimizer.finish()
        with pytest.raises(ConfigError) as told:
            prepared(second)
        if not finish:
            optimizer.finish()
        return str(told.value)
    except SystemExit:
        return None


@pytest.mark.parametrize("finish", [True, False])
@pytest.mark.parametrize("second", ["ps", "allreduce"])
def test_servers_come_to_no_second_call(second: str, finish: bool) -> None:
    *workers, server = together(3, partial(twice, "ps", second, finish=finish))
    for outcome in (*workers, server):
        assert not outcome.kind, outcome.error
    assert server.value is None
    for worker in workers:
        assert "was called before with ParameterServer, whose servers (1 process) end their script" in worker.value
        assert "Put both models into one nn.Module" in worker.value


def test_workers_of_one_run_do_not_become_servers_of_another() -> None:
    for outcome in together(2, partial(twice, "allreduce", "ps", finish=False)):
        assert not outcome.kind, outcome.error
        assert "all processes are workers of an earlier orchestra.prepare that is not finished" in outcome.value


def test_a_run_with_servers_may_follow_one_without() -> None:
    def call() -> Any:
        EARLIER.servers_return = False
        try:
            return [loop(strategy, epochs=1)[1] for strategy in ("allreduce", "localsgd", "ps")]
        except SystemExit:
            return None

    first, second, server = together(3, call)
    assert not first.kind + second.kind + server.kind, first.error
    assert server.value is None
    assert all(equal(a, b) for a, b in zip(first.value, second.value, strict=True))


# A process group that was opened before.


def after_a_group(strategy: str) -> dict[str, torch.Tensor]:
    torch.distributed.init_process_group("gloo")  # as Accelerator() does; its store has MASTER_PORT
    try:
        return loop(strategy, epochs=1)[1]
    finally:
        torch.distributed.destroy_process_group()


def test_a_process_group_may_be_open_without_servers() -> None:
    found = together(2, partial(after_a_group, "allreduce"))
    expected = together(2, partial(loop, "allreduce", epochs=1))
    for mine, theirs in zip(found, expected, strict=True):
        assert not mine.kind, mine.error
        assert equal(mine.value, theirs.value[1])


def test_a_process_group_that_waits_for_servers_is_refused() -> None:
    for outcome in together(3, partial(after_a_group, "ps")):
        assert outcome.kind == "ConfigError", outcome.error
        assert "was opened before orchestra.prepare, by init_process_group, Accelerator() or the like" in outcome.error
        assert "Call orchestra.prepare first" in outcome.error


# Leaving early.


def unequal_epochs(given: bool) -> None:
    """Worker 0 stops after one epoch, worker 1 goes on."""
    if given:
        loop("allreduce", epochs=1 + int(os.environ["RANK"]))
        return
    model, optimizer = prepared("allreduce")
    for _ in range(9 + int(os.environ["RANK"])):
        one_step(model, optimizer)
    optimizer.finish()


@pytest.mark.parametrize("given", [True, False])
def test_who_stops_early_is_told_what_to_do(given: bool) -> None:
    for outcome in together(2, partial(unequal_epochs, given)):
        assert outcome.kind in ("ClusterError", "Stopped"), outcome.error
        assert "worker 0 finished after 9 steps, but worker 1 has begun step 10" in outcome.error
        assert ("Leave the loop at the same step everywhere" in outcome.error) is given
        assert ("Give the loader to orchestra.prepare" in outcome.error) is not given


# All that is wrong, at once.


def test_a_switch_says_all_that_it_needs() -> None:
    (outcome,) = together(1, partial(prepared, "switch"))
    assert outcome.kind == "ConfigError"
    assert "4 problems" in outcome.error
    assert "start more than 1 process" in outcome.error
    assert "use momenta=reset" in outcome.error
    assert "loader = None    must be given" in outcome.error
    assert "optimizer.step(loss=loss)" in outcome.error


def test_what_a_switch_needs_is_enough() -> None:
    strategy = "switch(first=allreduce, then=ps(consistency=asp), when=plateau(window=2), momenta=reset)"
    *workers, server = together(3, partial(loop, strategy, told=True))
    for worker in workers:
        assert not worker.kind, worker.error
    assert "SystemExit: 0" in server.error


# What a loop saves.

READ = """
import sys
import torch

class Nowhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "orchestra":
            raise ModuleNotFoundError("No module named 'orchestra'")

sys.meta_path.insert(0, Nowhere())
model = torch.load(sys.argv[1], weights_only=False)
print(model(torch.ones(2, 7)).sum().item())
"""


@pytest.mark.parametrize("strategy", few(["allreduce", "synceasgd", "localsgd"], ["allreduce"]))
def test_a_whole_model_is_read_without_orchestra(strategy: str, tmp_path: Path) -> None:
    wide = LARGE // 7 + 1  # gradients of large layers are taken by hooks
    model = nn.Sequential(nn.Linear(7, wide), nn.Linear(wide, 1))
    model, optimizer = orchestra.prepare(model, momentum(model.parameters()), strategy=strategy)
    one_step(model, optimizer)
    torch.save(model, tmp_path / "model.pt")
    with torch.no_grad():
        expected = model(torch.ones(2, 7)).sum().item()
    optimizer.finish()
    read = subprocess.run(
        [sys.executable, "-c", READ, tmp_path / "model.pt"], capture_output=True, text=True, check=False
    )
    assert read.returncode == 0, read.stderr
    assert float(read.stdout) == expected


def test_every_parameter_is_a_tensor_of_its_own(tmp_path: Path) -> None:
    """Safetensors, and libraries that use it, take tensors with a common storage for one tensor."""
    model = make_model()
    model, optimizer, loader = orchestra.prepare(
        model, momentum(model.parameters()), make_loader(), strategy="localsgd"
    )
    for x, _ in loader:
        model(x).sum().backward()
        optimizer.step()
    safetensors.torch.save_model(model, str(tmp_path / "model.safetensors"))
    again = make_model()
    safetensors.torch.load_model(again, tmp_path / "model.safetensors")
    assert equal(model.state_dict(), again.state_dict())
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert len(storages) == len([*model.parameters()])
    optimizer.finish()
