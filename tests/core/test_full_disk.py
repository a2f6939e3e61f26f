# SPDX-License-Identifier: Apache-2.0
"""A disk that is full when the result is written, and a run folder that is deleted: what is lost, and what is said."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.attached.test_runs import far_off
from tests.cases import few
from tests.prepare.loops import loop
from tests.processes import Outcome, together
from tests.waiting import wait_until
from tests.zoo import INPUTS, Jittery, Trap, make_model, paced, train, trapped
from torch import nn

from orchestra import AllReduce, Attached, LocalSGD, ParameterServer, Simulated, Steps, Strategy
from orchestra.engine import snapshot
from orchestra.errors import EnvironmentProblem, RunFolderGone
from orchestra.runs import files

STRATEGIES: list[Strategy[Any]] = [AllReduce(), LocalSGD(tau=2), ParameterServer(servers=2)]
each = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: type(s).__name__)
mostly_nightly = pytest.mark.parametrize("strategy", few(STRATEGIES, STRATEGIES[-1:]), ids=lambda s: type(s).__name__)
tiny = partial(torch.optim.SGD, lr=1e-6, momentum=0.5)
BUDGET: dict[str, Any] = {"budget": Steps(20), "checkpoint_every": Steps(4), "optimizer": tiny}


def large() -> nn.Module:
    """More than what is left in the last pages of files."""
    return nn.Sequential(nn.Linear(INPUTS, 8192), nn.Linear(8192, 1))


def hurried() -> nn.Module:
    """The same, in a process that tries again ten times as soon."""
    files.PAUSES = (0.05, 0.1, 0.2)
    return large()


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small disk of its own."""
    monkeypatch.setattr(files, "PAUSES", files.PAUSES)  # restores it after `hurried`
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder]).returncode:
        pytest.skip("needs root, to mount a small disk")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> None:
    """Leave no room."""
    with (disk / "filler").open("ab", buffering=0) as file:
        for piece in (1 << 20, 1 << 12):
            with suppress(OSError):
                while file.write(bytes(piece)) == piece:
                    pass


def fill_later(disk: Path) -> Callable[[Any], None]:
    """For `progress`: fill the disk from the middle of the run on."""

    def watch(now: Any) -> None:
        if now.step >= 4:
            fill(disk)

    return watch


def fill_once_saved(disk: Path) -> None:
    """In a worker, between two checkpoints: none of them is then half written, to be removed and make room."""
    wait_until(lambda: any((disk / "run" / "checkpoints").glob("step-*[0-9]")))
    fill(disk)


def rescued(message: str) -> dict[str, torch.Tensor]:
    """The model in the file that an error names."""
    found = re.search(r"was written to (\S+model\.safetensors) instead", message)
    assert found is not None, message
    state = load_file(found[1])
    shutil.rmtree(Path(found[1]).parent)
    return state


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@mostly_nightly
def test_the_model_is_written_elsewhere_and_the_run_can_be_concluded(
    strategy: Strategy[Any], disk: Path, tmp_path: Path
) -> None:
    model = trapped(Trap.at(0, 6, partial(fill_once_saved, disk), size=2), model=hurried)
    with pytest.raises(EnvironmentProblem, match=r"No space left on device") as error:
        train(strategy, disk / "run", model=model, workers=2, **BUDGET)
    whole = train(strategy, tmp_path / "whole", model=trapped(model=large), workers=2, **BUDGET)
    assert "conclude the run with the same train(" in str(error.value)
    assert "\n" not in str(error.value)
    assert same(rescued(str(error.value)), whole.model.state_dict())
    (disk / "filler").unlink()
    again = train(strategy, disk / "run", model=trapped(model=large), workers=2, resume=True, **BUDGET)
    assert same(again.model.state_dict(), whole.model.state_dict())


def test_room_that_is_made_in_time_is_enough(disk: Path, tmp_path: Path) -> None:
    """The model cannot be written at first; at the second attempt it can."""
    failed, written, caller = tmp_path / "failed", tmp_path / "written", os.getpid()

    def noting() -> nn.Module:
        """In a worker: note that an attempt to write the model failed, and make room."""
        if os.getpid() == caller:
            return large()
        trying_again = snapshot.trying_again

        def noted(write: Callable[[], Any]) -> Any:
            def attempt() -> Any:
                again = failed.exists()
                try:
                    write()
                except OSError:
                    failed.touch()
                    (disk / "filler").write_bytes(b"")
                    raise
                if again:
                    written.touch()

            return trying_again(attempt)

        snapshot.trying_again = noted
        return hurried()

    model = trapped(Trap.at(0, 6, partial(fill_once_saved, disk), size=2), model=noting)
    result = train(AllReduce(), disk / "run", model=model, workers=2, **BUDGET)
    assert failed.exists()
    assert written.exists()
    assert result.summary.steps == 20
    assert (disk / "run" / "model.safetensors").exists()


def test_a_full_disk_is_tried_again_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PAUSES", (0.0, 0.0, 0.0))
    tries: list[int] = []

    def failing(times: int, number: int) -> Callable[[], str]:
        tries.clear()

        def write() -> str:
            tries.append(1)
            if len(tries) <= times:
                raise OSError(number, os.strerror(number))
            return "written"

        return write

    assert snapshot.trying_again(failing(3, errno.ENOSPC)) == "written"
    with pytest.raises(OSError, match="No space left"):
        snapshot.trying_again(failing(4, errno.ENOSPC))
    with pytest.raises(PermissionError):
        snapshot.trying_again(failing(1, errno.EACCES))
    assert len(tries) == 1


def test_simulated_runs_write_the_model_elsewhere(disk: Path) -> None:
    cluster, model = Simulated(workers=2), lambda: Jittery(hurried)
    with pytest.raises(EnvironmentProblem, match="kept no checkpoint") as error:
        train(AllReduce(), disk / "run", cluster=cluster, model=model, budget=Steps(60), optimizer=tiny,
              progress=fill_later(disk))  # fmt: skip
    whole = train(
        AllReduce(),
        disk.parent / "whole",
        cluster=cluster,
        model=lambda: Jittery(hurried),
        budget=Steps(60),
        optimizer=tiny,
    )
    assert same(rescued(str(error.value)), whole.model.state_dict())


@pytest.mark.parametrize(("strategy", "size"), [("allreduce", 2), ("ps", 3)])
def test_attached_runs_write_the_model_elsewhere(strategy: str, size: int, disk: Path, tmp_path: Path) -> None:
    """Where a server does not see the folder, what it sends has no room there."""

    trap = Trap.at(0, 6, partial(fill_once_saved, disk), size=2)

    def call() -> Any:
        return far_off(strategy, disk / "run", model=trapped(trap, model=paced(0.05, 0.05, model=hurried)), **BUDGET)

    outcomes = together(size, call)
    assert outcomes[0].kind == "EnvironmentProblem", outcomes
    whole = train(strategy, tmp_path / "whole", workers=2, model=trapped(model=paced(model=large)), **BUDGET)
    assert same(rescued(outcomes[0].error), whole.model.state_dict())


def test_a_loop_under_prepare_writes_the_model_elsewhere(disk: Path) -> None:
    def call() -> Any:
        def step(optimizer: Any) -> None:
            if optimizer.orchestra.steps == 5:
                fill(disk)

        return loop("allreduce", model=hurried, optimizer=tiny, steps=9, each=step, out=disk / "run")

    (outcome,) = together(1, call)
    assert outcome.kind == "EnvironmentProblem", outcome
    (whole,) = together(1, lambda: loop("allreduce", model=large, optimizer=tiny, steps=9)[1])
    assert same(rescued(outcome.error), whole.value)


# A folder that is deleted.


def deleting(run: Path) -> Callable[[Any], None]:
    def watch(now: Any) -> None:
        if now.begun and now.step >= 3:
            shutil.rmtree(run, ignore_errors=True)

    return watch


def told(error: str, run: Path) -> bool:
    return error == f"the run folder {run} was deleted while the run went on; training was stopped."


@each
def test_a_deleted_folder_ends_the_run_in_a_line(strategy: Strategy[Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    given: dict[str, Any] = {"model": paced(0.02, 0.02), "checkpoint_every": Steps(3)}
    with pytest.raises(RunFolderGone) as error:
        train(strategy, run, workers=2, budget=Steps(100_000), progress=deleting(run), **given)
    assert told(str(error.value), run)
    assert not run.exists()


@pytest.mark.parametrize("steps", [200, 100_000])
def test_a_deleted_folder_of_a_virtual_run(steps: int, tmp_path: Path) -> None:
    """It is noticed at the next look, long before there are so many events that they are written to the folder."""
    run, looks = tmp_path / "run", []

    def watch(now: Any) -> None:
        looks.append(run.exists())
        deleting(run)(now)

    with pytest.raises(RunFolderGone) as error:
        train(AllReduce(), run, cluster=Simulated(workers=2), model=Jittery, budget=Steps(steps), progress=watch)
    assert told(str(error.value), run)
    assert all(looks)


def test_a_deleted_folder_of_processes_of_their_own(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def call() -> Any:
        given: dict[str, Any] = {"model": paced(0.02, 0.02), "budget": Steps(100_000)}
        return train("allreduce", run, cluster=Attached(patience=60), progress=deleting(run), **given)

    home, other = together(2, call)
    assert (home.kind, home.code) == ("RunFolderGone", 3)
    assert told(home.error, run)
    assert "was deleted while the run went on" in other.error
    assert "\n" not in other.error


def test_a_deleted_folder_of_a_loop(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def call() -> Any:
        def step(optimizer: Any) -> None:
            if optimizer.orchestra.steps == 5:
                shutil.rmtree(run)

        return loop("allreduce", model=make_model, steps=9, each=step, out=run)

    found: list[Outcome] = together(1, call)
    assert found[0].kind == "RunFolderGone", found
    assert told(found[0].error, run)
