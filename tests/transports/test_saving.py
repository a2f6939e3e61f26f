# SPDX-License-Identifier: Apache-2.0
"""What lies in a mailbox when a checkpoint is due is part of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.transports.world import World

from orchestra.engine import checkpoint_protocol
from orchestra.engine.checkpoint_protocol import NodeCheckpointer
from orchestra.strategies.catalogue import Downpour


def test_a_server_reads_what_was_pushed_before_it_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker pushes, asks for no answer and saves, just after the server has looked for messages and found none."""
    world = World(1, servers=1)
    worker, server = world.comms
    saved: list[int] = []
    monkeypatch.setattr(checkpoint_protocol, "report", lambda runtime: None)
    monkeypatch.setattr(NodeCheckpointer, "_save", lambda self, label: saved.append(label))
    runtime: Any = SimpleNamespace(
        rank=1,
        is_server=True,
        spec=SimpleNamespace(strategy=Downpour(), workers=1),
        node=SimpleNamespace(now=lambda: 0.0),
    )
    checkpointer = NodeCheckpointer(runtime, world.transports[1].control, world.transports[1], SimpleNamespace())  # type: ignore[arg-type]
    worker.send(1, torch.ones(3))
    world.transports[0].control.write("saved", 7, 0)
    checkpointer._while_idle()
    assert saved == []
    assert server.recv(0).x.sum() == 3
    checkpointer._while_idle()
    assert saved == [7]
