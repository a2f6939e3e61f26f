# SPDX-License-Identifier: Apache-2.0
"""One thread for the reference computations, as in the workers."""

from __future__ import annotations

import pytest
import torch

from orchestra.launch import forkserver


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a run comes as far as asking for processes."""

    def refuse() -> forkserver.ForkServer:
        raise AssertionError("a process was asked for")

    monkeypatch.setattr(forkserver, "warm", refuse)
