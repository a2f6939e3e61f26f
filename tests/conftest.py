# SPDX-License-Identifier: Apache-2.0
"""One thread for the reference computations, as in the workers."""

from __future__ import annotations

import pytest
import torch

from orchestra.launch import forkserver


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In several processes (`-n 2`) the tests of a file stay together, and so do laboratories: they are one network."""
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            group = "lab" if "lab" in item.path.parts else str(item.path)
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a run comes as far as asking for processes."""

    def refuse() -> forkserver.ForkServer:
        raise AssertionError("a process was asked for")

    monkeypatch.setattr(forkserver, "warm", refuse)
