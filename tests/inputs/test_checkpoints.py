# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are damaged, foreign or hostile; disks that fail; deaths while one is written."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.waiting import wait_until
from tests.zoo import INPUTS, Watched, adam, assert_same, make_data, make_model, sgd, train
from torch import nn

from orchestra import AllReduce, Local, LocalSGD, ParameterServer, Steps
from orchestra.cli import invoke
from orchestra.engine import checkpoint
from orchestra.errors import CheckpointError
from orchestra.worlds.shared_memory.coordinator import LocalCoordinator

SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 4 and 6, to be copied and spoilt, and the model of step 7."""
    out = tmp_path_factory.mktemp("finished") / "run"
    train(AllReduce(), out, workers=2, budget=Steps(6), checkpoint_every=Steps(2))
    train(AllReduce(), out.parent / "whole", workers=2, budget=Steps(7))
    shutil.copy(out.parent / "whole" / "model.safetensors", out)
    assert sorted(p.name for p in (out / "checkpoints").iterdir()) == ["latest", "step-00000004", "step-00000006"]
    assert (out / "checkpoints" / "latest").read_text() == "step-00000006"
    return out


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def resume(run: Path, **given: Any) -> Any:
    return train(**{"strategy": AllReduce(), "out": run, "workers": 2, "budget": Steps(7), "resume": True, **given})


def truncate(share: float) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        path = folder / "node-1.safetensors"
        os.truncate(path, int(path.stat().st_size * share))

    return spoil


def flip(folder: Path) -> None:
    path = folder / "node-0.safetensors"
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 1
    path.write_bytes(content)


def reseal(folder: Path) -> None:
    """Make the manifest fit whatever lies there: damage that no checksum tells of."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {
        p.name: {"bytes": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()}
        for p in folder.glob("node-*.safetensors")
    }
    (folder / "manifest.json").write_text(json.dumps(checkpoint.sealed(manifest)))


def drop_a_part(folder: Path) -> None:
    (folder / "node-1.safetensors").unlink()
    reseal(folder)


def change_manifest(**changes: Any) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def replace_by_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("x")


def link_outside(folder: Path) -> None:
    path = folder / "node-0.safetensors"
    elsewhere = folder.parents[1] / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


SPOILT: dict[str, Callable[[Path], object]] = {
    **{f"truncated to {share:.0%}": truncate(share) for share in (0.0, 0.01, 0.5, 0.99)},
    "bit flipped": flip,
    "part missing": lambda folder: (folder / "node-0.safetensors").unlink(),
    "part missing, resealed": drop_a_part,
    "manifest missing": lambda folder: (folder / "manifest.json").unlink(),
    "manifest cut": lambda folder: os.truncate(folder / "manifest.json", 50),
    "manifest of another kind": lambda folder: (folder / "manifest.json").write_text("[1, 2]"),
    "manifest nested deeply": lambda folder: (folder / "manifest.json").write_text("[" * 1_000_000),
    "manifest not utf-8": lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe\xfa{}"),
    "manifest huge": lambda folder: os.truncate(folder / "manifest.json", 1 << 30),
    "manifest pointing outside": change_manifest(files={"../../config.json": {"bytes": 1, "sha256": "0"}}),
    "newer format": change_manifest(format=99),
    "symlink outside": link_outside,
    "a file in its place": replace_by_a_file,
}


@pytest.mark.parametrize("how", SPOILT)
def test_a_damaged_one_falls_back_to_the_one_before(
    how: str, run: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SPOILT[how](run / "checkpoints" / "step-00000006")
    result = resume(run)
    said = capsys.readouterr()
    assert "step-00000006" in said.out + said.err  # loudly
    assert result.summary.steps == 7
    again = make_model()
    from safetensors.torch import load_file

    again.load_state_dict(load_file(finished / "model.safetensors"))
    assert_same(result.model, again)


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("how", ["bit flipped", "manifest missing", "newer format", "part missing, resealed"])
def test_without_a_whole_one_there_is_a_verdict(how: str, run: Path) -> None:
    for step in ("step-00000004", "step-00000006"):
        SPOILT[how](run / "checkpoints" / step)
    with pytest.raises(CheckpointError, match="no usable checkpoint") as caught:
        resume(run)
    assert caught.value.exit_code == 7
    assert "step-00000004" in str(caught.value)
    assert "step-00000006" in str(caught.value)


@pytest.mark.usefixtures("no_process")
def test_a_run_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="The run stopped before it wrote one"):
        resume(tmp_path)


class Touch:
    """Unpickling this leaves a trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize("resealed", [False, True])
@pytest.mark.parametrize("node", [0, 1])
def test_a_pickle_is_never_opened(resealed: bool, node: int, run: Path, tmp_path: Path) -> None:
    for step in ("step-00000004", "step-00000006"):
        folder = run / "checkpoints" / step
        (folder / f"node-{node}.safetensors").write_bytes(pickle.dumps(Touch(tmp_path / "executed")))
        if resealed:
            reseal(folder)
    with pytest.raises(CheckpointError):
        resume(run)
    assert not (tmp_path / "executed").exists()


@pytest.mark.usefixtures("no_process")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": lambda: nn.Linear(INPUTS, 1)}, "model"),
        ({"model": lambda: nn.Sequential(*list(make_model().children())[:3], nn.Linear(3, 1))}, "model"),
        ({"model": lambda: make_model().double(), "data": lambda: tuple(t.double() for t in make_data())}, "model"),
        ({"model": lambda: Watched(make_model())}, "model"),
        ({"strategy": LocalSGD()}, "strategy"),
        ({"strategy": ParameterServer()}, "strategy"),
        ({"cluster": Local(workers=3)}, "workers"),
        ({"batch": 5}, "batch"),
        ({"seed": 4}, "seed"),
        ({"optimizer": adam}, "optimizer"),
        ({"data": lambda: make_data(90)}, "data"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused(changes: dict[str, Any], said: str, run: Path) -> None:
    with pytest.raises(CheckpointError, match=f"was written with {said}"):
        resume(run, **changes)


def test_a_longer_budget_may_be_given_when_resuming(run: Path) -> None:
    assert resume(run, budget=Steps(11)).summary.steps == 11


# Trees.


def test_trees_come_back_as_they_were(tmp_path: Path) -> None:
    tree = {
        "a": [1, 2.5, None, True, "text", (1, (2, 3)), {3: "int key", "k": torch.arange(3)}],
        "b": torch.tensor(2.0),
        "c": torch.zeros(0),
        "d": torch.ones(2, 2, dtype=torch.bfloat16).t(),
        "$": "tensor",
        "inf": float("inf"),
    }
    checkpoint.write_tree(tmp_path / "t.safetensors", tree)
    back = checkpoint.read_tree(tmp_path / "t.safetensors")
    assert str(back) == str(tree)
    assert back["d"].dtype == torch.bfloat16
    with pytest.raises(CheckpointError, match="cannot be saved"):
        checkpoint.write_tree(tmp_path / "u.safetensors", {"x": object()})


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 8, b"\x10\0\0\0\0\0\0\0{}", b"PK\3\4zip", b"x" * 1000])
def test_a_file_that_is_no_tree_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "t.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.read_tree(tmp_path / "t.safetensors")


def test_a_tree_nested_without_end_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({}, tmp_path / "t.safetensors", metadata={"tree": "[" * 100_000 + "]" * 100_000})
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.read_tree(tmp_path / "t.safetensors")


# Disks that fail.


def test_a_part_that_cannot_be_written_does_not_end_the_training(tmp_path: Path) -> None:
    """A folder stands where a worker's file of step 4 should go."""
    out = tmp_path / "run"
    done: list[bool] = []

    def obstruct(watch: Any) -> None:
        if not done:
            done.append(True)
            (out / "checkpoints" / "step-00000004.tmp" / "node-1.safetensors").mkdir(parents=True)

    result = train(AllReduce(), out, workers=2, budget=Steps(7), checkpoint_every=Steps(2), progress=obstruct)
    assert result.summary.steps == 7
    assert "could not save at step 4" in json.loads((out / "ending.json").read_text())["warnings"][0]
    saved, complaints = checkpoint.newest(out / "checkpoints")
    assert saved.step == 7
    assert complaints == []


def test_a_full_disk_when_sealing_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    out = tmp_path / "run"
    monkeypatch.setattr(checkpoint, "commit", full)
    result = train(AllReduce(), out, workers=2, budget=Steps(5), checkpoint_every=Steps(2))
    assert result.summary.steps == 5
    assert "No space left on device" in json.loads((out / "ending.json").read_text())["warnings"][0]
    assert LocalCoordinator is not None


# Deaths.

WRITER = """
import sys, torch
from pathlib import Path
from orchestra.engine import checkpoint

folder = Path(sys.argv[1])
print("ready", flush=True)
step = 0
while True:
    step += 1
    for node in range(2):
        part = checkpoint.open_draft(folder, step) / checkpoint.part_name(node)
        checkpoint.write_tree(part, {"x": torch.full((20_000,), float(step)), "step": step})
    checkpoint.commit(folder, step, {"workers": 2, "servers": 0})
    print(step, flush=True)
"""


def state_of(pid: int) -> str:
    """The letter of a process's state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_kill_at_any_moment_leaves_the_newest_whole(tmp_path: Path) -> None:
    draw = random.Random(5)
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    for attempt in range(3):
        folder = tmp_path / f"{attempt}"
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)], env=environment, stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        assert writer.stdout.readline() == "1\n"
        for _ in range(12):  # stopped and looked at many times, killed once
            time.sleep(draw.random() * 0.03)
            writer.send_signal(signal.SIGSTOP)
            wait_until(lambda writer=writer: state_of(writer.pid) == "T")  # type: ignore[misc]
            copy = tmp_path / "copy"
            shutil.copytree(folder, copy)
            _look(copy)
            shutil.rmtree(copy)
            writer.send_signal(signal.SIGCONT)
        writer.kill()
        told = [line for line in writer.stdout.read().split("\n") if line]
        writer.wait()
        writer.stdout.close()
        saved = _look(folder)
        if told:
            assert saved.step >= int(told[-1])


def _look(folder: Path) -> checkpoint.Checkpoint:
    saved, complaints = checkpoint.newest(folder)
    assert complaints == []
    for node in range(2):
        tree = saved.node(node)
        assert tree["step"] == saved.step
        assert bool((tree["x"] == saved.step).all())
    return saved


def test_a_run_resumed_twice(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(AllReduce(), out, workers=2, optimizer=sgd, budget=Steps(3), checkpoint_every=Steps(2))
    resume(out, budget=Steps(6), optimizer=sgd, checkpoint_every=Steps(2))
    last = resume(out, budget=Steps(9), optimizer=sgd)
    never = train(AllReduce(), tmp_path / "never", workers=2, optimizer=sgd, budget=Steps(9))
    assert_same(last.model, never.model)
    assert last.summary.samples == never.summary.samples
    assert last.summary.sent_per_worker == never.summary.sent_per_worker


ENDS: dict[str, tuple[str, bytes]] = {
    "an ending": ("ending.json", b'{"steps": 6, '),
    "a config": ("config.json", b"[]"),
    "a model": ("model.safetensors", b"\xff" * 40),
}


@pytest.mark.parametrize("what", ENDS)
def test_a_complete_run_that_is_damaged_is_told_as_that(
    what: str, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, data = ENDS[what]
    (run / name).write_bytes(data)
    with pytest.raises(CheckpointError, match="what it left is damaged"):
        resume(run, budget=Steps(6))
    if what != "a model":  # of which the command line only says where it is
        assert invoke(["resume", str(run)]) == CheckpointError.exit_code
        assert "what it left is damaged" in capfd.readouterr().err


def test_a_complete_run_whose_model_is_gone_writes_it_again(run: Path) -> None:
    before = (run.parent / "again").with_suffix(".safetensors")
    train(AllReduce(), run.parent / "six", workers=2, budget=Steps(6))
    shutil.copy(run.parent / "six" / "model.safetensors", before)
    (run / "model.safetensors").unlink()
    resume(run, budget=Steps(6))
    assert (run / "model.safetensors").read_bytes() == before.read_bytes()


def test_a_complete_run_without_a_model_or_a_checkpoint_is_no_success(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "model.safetensors").unlink()
    assert invoke(["resume", str(run)]) == CheckpointError.exit_code
    assert "model.safetensors is gone" in capfd.readouterr().err
