# SPDX-License-Identifier: Apache-2.0
"""A process knows its rank before `prepare`, and stays what it was told."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.processes import Processes, together, values
from tests.zoo import make_data, make_model, sgd, train
from torch.nn.utils import parameters_to_vector

import orchestra
from orchestra.clusters.attached import ProcessRank
from orchestra.data.random_state import seed_everything
from orchestra.engine import overrides
from orchestra.worlds.sockets import rank_order


def test_rank_is_0_and_world_size_1_in_a_single_process() -> None:
    assert (orchestra.rank(), orchestra.world_size(), orchestra.world_size("allreduce")) == (0, 1, 1)
    with pytest.raises(orchestra.ConfigError, match="start more than 1 process"):
        orchestra.world_size("ps")


def test_half_of_an_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for ask in (orchestra.rank, orchestra.world_size):
        with pytest.raises(orchestra.ConfigError, match="MASTER_ADDR, MASTER_PORT"):
            ask()


def cut(strategy: str, asked: str | None) -> Any:
    """A loop that cuts its data before `prepare`; what it was told, and the model."""
    size = orchestra.world_size(asked)
    place = orchestra.rank(), size
    x, y = (t[place[0] :: size] for t in make_data(24))
    seed_everything(0)
    model = make_model()
    with contextlib.suppress(SystemExit):
        model, optimizer = orchestra.prepare(
            model, sgd(model.parameters()), strategy=strategy, cluster=orchestra.Attached(patience=20)
        )
        assert (optimizer.orchestra.rank, optimizer.orchestra.workers) == place
        for start in range(0, 24 // size, 4):
            optimizer.zero_grad()
            F.mse_loss(model(x[start : start + 4]), y[start : start + 4]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        optimizer.finish()
        return place, parameters_to_vector(model.parameters()).detach()
    return place


@pytest.mark.parametrize(("strategy", "asked"), [("allreduce", None), ("ps", "ps"), ("ps(servers=2)", "ps(servers=2)")])
def test_data_can_be_cut_first(strategy: str, asked: str | None) -> None:
    """All samples are used, each once: as one process on all of them would."""
    servers = {"allreduce": 0, "ps": 1, "ps(servers=2)": 2}[strategy]
    found = values(together(2 + servers, partial(cut, strategy, asked)))
    workers = found[:2]
    assert [place for place, _ in workers] == [(0, 2), (1, 2)]
    assert found[2:] == [(2 + i, 2) for i in range(servers)]
    seed_everything(0)
    model = make_model()
    optimizer = sgd(model.parameters())
    x, y = make_data(24)
    for start in range(0, 24, 8):
        optimizer.zero_grad()
        F.mse_loss(model(x[start : start + 8]), y[start : start + 8]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for _, vector in workers:
        torch.testing.assert_close(vector, parameters_to_vector(model.parameters()).detach(), rtol=1e-5, atol=1e-6)


def test_data_that_was_cut_for_servers_as_well_is_refused() -> None:
    """A part of it would be read by no worker."""
    for outcome in together(3, partial(cut, "ps", None)):
        assert outcome.kind == "ConfigError", outcome.error
        assert "orchestra.world_size() = 3" in outcome.error
        assert "has 2 workers beside 1 server" in outcome.error
        assert 'orchestra.world_size("ps")' in outcome.error


def test_what_the_command_line_says_counts() -> None:
    def by_strategy() -> Any:
        with overrides.using({"strategy": lambda old: "ps"}):
            return orchestra.rank(), orchestra.world_size(), orchestra.world_size("allreduce")

    def by_number() -> Any:
        return orchestra.rank(), orchestra.world_size()

    assert values(together(3, by_strategy)) == [(i, 2, 2) for i in range(3)]
    assert values(together(3, by_number, more={"ORCHESTRA_WORKERS": "2"})) == [(i, 2) for i in range(3)]


# Where `train` would choose another order.


def chosen(asks: Sequence[int], out: Path, **given: Any) -> Any:
    """A run on a network where process 2 would become worker 1."""
    if int(os.environ["RANK"]) in asks:
        orchestra.rank()
    with (
        mock.patch.object(ProcessRank, "loopback", return_value=False),
        mock.patch.object(rank_order, "arrange", return_value=[0, 2, 1]),
    ):
        train("allreduce", out, cluster=orchestra.Attached(patience=20, **given))


def run(asks: Sequence[int], out: Path, **given: Any) -> list[Any]:
    token = {"ORCHESTRA_TOKEN": secrets.token_hex(32)}
    with Processes([partial(chosen, asks, out, **given)] * 3, token) as processes:
        return processes.outcomes()


def test_asking_keeps_the_order(tmp_path: Path) -> None:
    orders = []
    for asks in ((), (0, 1, 2)):
        out = tmp_path / str(len(asks))
        values(run(asks, out))
        chose = out / "topology.json"
        orders.append(json.loads(chose.read_text())["order"] if chose.exists() else [0, 1, 2])
    assert orders == [[0, 2, 1], [0, 1, 2]]


def test_a_process_that_asked_alone_says_so(tmp_path: Path) -> None:
    outcomes = run((1,), tmp_path / "run")
    assert "orchestra.rank() returned 1 here, but process 0 did not call it" in outcomes[1].error
    assert all(outcome.kind for outcome in outcomes)


def test_an_order_of_ones_own_is_refused(tmp_path: Path) -> None:
    for outcome in run((0, 1, 2), tmp_path / "run", order=(0, 2, 1)):
        assert outcome.kind == "ConfigError", outcome.error
        assert "orchestra.rank() was called" in outcome.error
