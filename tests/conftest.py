# SPDX-License-Identifier: Apache-2.0
"""What all tests share: one thread for the reference computations, as in the workers; Ctrl-C is heard.

Tests run in two lanes. What asserts how many seconds something took is marked `timed`: of these two run at a time, one
for each core. All other tests run three at a time. A test that waits for something until a deadline may be in either
lane, if the deadline is many times what it takes. `nightly` are those that take too long for every change, or need
what few machines have; those that are `timed` as well run one at a time.
"""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from orchestra.engine.environment import NEEDED
from orchestra.worlds.shared_memory import fork_server

# Folders and files of which every test is marked; single tests are marked where they stand.
LANES = {
    "timed": (
        "browser", "core/test_hangs.py", "core/test_orphans.py", "core/test_scoring_meanwhile.py",
        "core/test_stopping.py", "lab", "prepare/test_libraries.py", "transports/test_processes.py",
        "transports/test_reconnect.py",
    ),
    "nightly": ("browser", "docs/test_blocks.py", "lab", "launch/test_ray.py", "prepare/test_libraries.py"),
}  # fmt: skip
_TESTS = Path(__file__).parent


def lanes_of(path: Path) -> list[str]:
    """The marks that a file gives to its tests."""
    if not path.is_relative_to(_TESTS):
        return []
    file = path.relative_to(_TESTS)
    return [mark for mark, places in LANES.items() if any(file.is_relative_to(place) for place in places)]


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in lanes_of(item.path):
            item.add_marker(mark)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_is_heard() -> None:
    """Shells start what runs in the background deaf to Ctrl-C, and so would be all that the tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _no_environment_of_a_launcher() -> Iterator[None]:
    """A test process is no process of a run, whatever the shell's environment says."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (*NEEDED, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "ORCHESTRA_TOKEN", "ORCHESTRA_TOKEN_FILE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture
def promised(request: pytest.FixtureRequest) -> Callable[[float], float]:
    """How many seconds something may take: what the documentation says where a test runs alone, 20 beside others."""
    alone = request.node.get_closest_marker("nightly") is not None
    return lambda seconds: seconds if alone else 20.0


@pytest.fixture(params=["beside others", pytest.param("alone", marks=pytest.mark.nightly)])
def also_alone() -> None:
    """For tests that run for every change, and in `make nightly` alone."""


@pytest.fixture
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a run comes as far as asking for processes."""

    def refuse() -> fork_server.ForkServer:
        raise AssertionError("a process was asked for")

    monkeypatch.setattr(fork_server, "warm", refuse)


@pytest.fixture
def full_disk(tmp_path: Path) -> Path:
    """A file on which there is never room: a device as /dev/full, but of the test's own where it can make one."""
    path = tmp_path / "full"
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        path.open("wb").close()
    except OSError:  # not as root, or devices do not work in this folder
        path = Path("/dev/full")
    if not stat.S_ISCHR(path.stat().st_mode):
        pytest.skip("/dev/full of this machine is not the device")
    return path
