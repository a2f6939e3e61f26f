# SPDX-License-Identifier: Apache-2.0
"""Servers on the machines of the workers: what stays on a machine is not traffic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.zoo import assert_same, ended, make_large, make_model, momentum, simulate, train

from orchestra import AllReduce, KSync, Local, ParameterServer, Simulated, Steps
from orchestra.core.vectors import share_of_mean

STEPS = 5


@pytest.mark.parametrize("world", [Local, Simulated])
@pytest.mark.parametrize("model", [make_model, make_large])
@pytest.mark.parametrize("n", [2, 3])  # alone, a worker would have more threads without a server beside it
def test_one_range_per_worker_is_reduce_scatter_and_all_gather(n: int, model: Any, world: Any, tmp_path: Path) -> None:
    """The model bit for bit, and the bytes of each machine: those of a worker and of its server."""
    given: dict[str, Any] = {"model": model, "optimizer": momentum, "budget": Steps(STEPS), "cluster": world(workers=n)}
    centred = train(ParameterServer(servers=n, colocated=True), tmp_path / "ps", **given)
    assert_same(centred.model, train(AllReduce(), tmp_path / "allreduce", **given).model)
    x = torch.empty(sum(p.numel() for p in centred.model.parameters()))
    for machine in range(n):
        both = [ended(tmp_path / "ps", node) for node in (machine, n + machine)]
        assert sum(node.sent for node in both) == STEPS * share_of_mean(x, n, machine)
        assert sum(node.received for node in both) == STEPS * share_of_mean(x, n, machine)
        assert ended(tmp_path / "allreduce", machine).sent == STEPS * share_of_mean(x, n, machine)


def test_where_servers_live_changes_no_step(tmp_path: Path) -> None:
    given: dict[str, Any] = {"workers": 3, "budget": Steps(8)}
    apart, together = (
        simulate(
            ParameterServer(consistency=KSync(k=3), servers=2, colocated=colocated), tmp_path / str(colocated), **given
        )
        for colocated in (False, True)
    )
    assert_same(apart.model, together.model)
    assert ended(tmp_path / "True", 0).sent == ended(tmp_path / "False", 0).sent  # worker 0 has no server at home
    assert ended(tmp_path / "True", 2).sent < ended(tmp_path / "False", 2).sent
