# SPDX-License-Identifier: Apache-2.0
"""Run folders made to do harm: pipes, devices, endless and absurd files. Every reader comes back."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.report.folders import make_run
from tests.zoo import adam, make_large, train

from orchestra import ASP, AllReduce, DelayCompensated, ParameterServer, Steps
from orchestra.cli.resume import resume as resume_command
from orchestra.engine import checkpoint, resume, snapshot
from orchestra.errors import CheckpointError, ConfigError, OrchestraError
from orchestra.live.follower import Follower
from orchestra.live.moment import moment
from orchestra.report import exporters, model, tables, traces
from orchestra.runs import events, files, reading, run_lock
from orchestra.runs.facts import facts_of
from orchestra.runs.progress import latest_score
from orchestra.worlds.sockets import auth

MANY = 10**12


def within(call: Callable[[], Any], seconds: float = 120) -> Any:
    """What a call gives or raises; fails if it does not come back."""
    found: list[Any] = []

    def go() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it waits, or reads without end"
    return found[0]


# What may lie in the place of a file.


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


def listening(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(path.name)
    finally:
        os.chdir(here)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def holding(text: str | bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)

    return write


EVIL: dict[str, Callable[[Path], None]] = {
    "pipe": fifo,
    "zeros without end": link("/dev/zero"),
    "random bytes without end": link("/dev/urandom"),
    "terminal": link("/dev/tty"),
    "itself": lambda path: path.symlink_to(path.name),
    "folder": lambda path: path.mkdir(),
    "socket": listening,
    "a tebibyte": sparse,
    "deep": holding("[" * 1_000_000),
    "deep object": holding('{"event":' * 200_000),
    "infinite": holding('{"workers": 1e999, "servers": 1e999, "step": 1e999, "t": 1e999, "event": "stepped"}'),
    "too many digits": holding('{"workers": ' + "9" * 10_000 + "}"),
    "a long line": holding(b"x" * (9 << 20)),
    "nothing": holding(b""),
    "no text": holding(bytes(range(256)) * 100),
}
NAMES = (
    "config.json", "ending.json", "summary.json", "topology.json", "scores.jsonl", "events-0.jsonl", "events-1.jsonl",
    "trace-0.jsonl", "running", "model.safetensors",
)  # fmt: skip


def replace(path: Path, how: str) -> None:
    path.unlink(missing_ok=True)
    EVIL[how](path)


READERS: dict[str, Callable[[Path], Any]] = {
    "load": reading.load,
    "facts": facts_of,
    "report": lambda run: tables.markdown(told := model.build([run])) + tables.runs_csv(told) + tables.curves_csv(told),
    "figures": lambda run: exporters.rows(reading.load(run)),
    "trace": lambda run: traces.read(run, 2),
    "top": lambda run: (follower := Follower(run)).look() and moment(follower, 0.0),
    "watch": lambda run: Follower(run, keep=True).look(),
    "alive": run_lock.ask,
    "start again": run_lock.never_began,
    "score": latest_score,
    "resume": resume.left_by,
}
EXPECTED = (OrchestraError, reading.Unreadable, OSError, ValueError, LookupError, TypeError, AttributeError)


@pytest.fixture(autouse=True)
def _less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is too large, less than usual is read."""
    monkeypatch.setattr(events, "_MOST", 1 << 26)
    monkeypatch.setattr("orchestra.live.tail._MOST", 1 << 26)


@pytest.mark.parametrize("how", EVIL)
def test_every_reader_comes_back_whatever_lies_there(how: str, tmp_path: Path) -> None:
    for name in NAMES:
        run = make_run(tmp_path / name)
        replace(run / name, how)
        for reader, read in READERS.items():
            found = within(lambda read=read, run=run: read(run))  # type: ignore[misc]
            if isinstance(found, Exception):
                assert isinstance(found, EXPECTED), (name, reader, found)


@pytest.mark.parametrize("seed", range(12))
def test_every_reader_comes_back_from_any_mixture(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    run = make_run(tmp_path / "run", strategy=draw.choice(["=cmd|'/C calc'!A0", "a|b\n# c", "`x`", "ps"]))
    for name in draw.sample(NAMES, 4):
        replace(run / name, draw.choice([*EVIL]))
    for read in READERS.values():
        found = within(lambda read=read: read(run))  # type: ignore[misc]
        assert not isinstance(found, Exception) or isinstance(found, EXPECTED), found


def test_what_is_sound_is_read_beside_what_is_not(tmp_path: Path) -> None:
    """A pipe in the place of one node's events costs that node's figures only."""
    run = make_run(tmp_path / "run")
    replace(run / "events-1.jsonl", "pipe")
    replace(run / "ending.json", "zeros without end")
    found = within(lambda: reading.load(run))
    assert {e.node for e in found.events if not isinstance(e, events.Scored)} == {0}
    assert found.facts.steps == 20


@pytest.mark.parametrize("workers", [MANY, -1, 1.5, True, "2", None])
def test_a_number_of_workers_that_cannot_be_is_refused(workers: object, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", workers=2)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"workers": workers}))
    assert isinstance(within(lambda: reading.load(run)), reading.Unreadable)


def test_events_after_a_line_without_end_are_read(tmp_path: Path) -> None:
    path = tmp_path / "events-0.jsonl"
    good = events.encode(events.Logged(1.0, 0, 1, "s", 2.0)).encode()
    path.write_bytes(good + b"x" * (9 << 20) + b"\n" + good + b"\n\r\n" + good[:-1])
    assert [event.t for event in events.read(path)] == [1.0] * 3


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that came to its end and kept its checkpoint."""
    out = tmp_path_factory.mktemp("complete") / "run"
    train(AllReduce(), out, workers=2, budget=Steps(2), checkpoint_every=Steps(2))
    return out


@pytest.mark.parametrize("how", EVIL)
def test_a_complete_run_with_a_model_that_is_none_is_damaged(how: str, complete: Path, tmp_path: Path) -> None:
    """A link to itself counts as no file: the run writes its model again."""
    run = Path(shutil.copytree(complete, tmp_path / "run"))
    replace(run / "model.safetensors", how)
    again = within(lambda: train(AllReduce(), run, workers=2, budget=Steps(2), resume=True))
    if how == "itself":
        assert again.summary.steps == 2
    else:
        assert isinstance(again, CheckpointError), again
        assert "what it left is damaged" in str(again)


LARGER = "a larger budget, e.g. --epochs 10, would go on"


@pytest.mark.parametrize(
    ("budget", "told"),
    [
        (["epochs=x"], f"its budget was epochs=x; {LARGER}"),
        (["seconds=nan", "steps=1e999", "epochs=3.5"],
         "its budget was nan seconds or inf steps or 3.5 epochs; --epochs 4 or more would go on"),
        (["steps=\x1b[2J"], f"its budget was steps=\\u001b[2J; {LARGER}"),
        ([None, 3], f"its budget was None or 3; {LARGER}"),
        ("steps=3", f"its budget is unknown; {LARGER}"),
        ({"steps": 3}, f"its budget is unknown; {LARGER}"),
        (7, f"its budget is unknown; {LARGER}"),
    ],
)  # fmt: skip
def test_a_complete_run_with_a_budget_that_is_none_is_told(
    budget: object, told: str, complete: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(complete, tmp_path / "run"))
    resume.remember(run, budget=budget)
    resume_command(run)
    assert f"is complete, nothing left to do: {told}\n" in capsys.readouterr().err


def test_a_complete_run_that_took_for_ever_is_damaged(complete: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(complete, tmp_path / "run"))
    path = run / "events-0.jsonl"
    *lines, last = path.read_text().splitlines()
    path.write_text("\n".join([*lines, json.dumps(json.loads(last) | {"t": float("inf")})]) + "\n")
    with pytest.raises(CheckpointError, match="what it left is damaged: it took inf s"):
        resume.left_by(run)


# Checkpoints.


def saved(folder: Path, step: int, **about: Any) -> Path:
    for node in range(2):
        part = {"x": torch.zeros(3), "cost": [0.5], "counts": [step, 0, 0, 1]}
        checkpoint.write_tree(checkpoint.open_draft(folder, step) / checkpoint.part_name(node), part)
    return checkpoint.commit(folder, step, {"workers": 2, "servers": 0, **about})


def changed(**changes: Any) -> Callable[[Path], None]:
    """Another manifest, whose hash is right."""

    def change(path: Path) -> None:
        manifest = json.loads((path / "manifest.json").read_text()) | changes
        (path / "manifest.json").write_text(json.dumps(checkpoint.sealed(manifest)))

    return change


def forged(path: Path) -> None:
    """A part that is a pipe, of which the manifest says the truth: it has no bytes."""
    (path / "node-0.safetensors").unlink()
    os.mkfifo(path / "node-0.safetensors")
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["node-0.safetensors"] = {"bytes": 0, "sha256": "0" * 64}
    (path / "manifest.json").write_text(json.dumps(checkpoint.sealed(manifest)))


def unsealed(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text()) | {"step": 999_999}
    (path / "manifest.json").write_text(json.dumps(manifest))


def replaced(name: str, how: str) -> Callable[[Path], None]:
    return lambda path: replace(path / name, how)


SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "10^12 workers": (changed(workers=MANY), "workers is 1000000000000"),
    "10^12 servers": (changed(servers=MANY), "servers is 1000000000000"),
    "infinitely many workers": (changed(workers=float("inf")), "workers is inf"),
    "step infinite": (changed(step=float("inf")), "step is inf"),
    "step of another": (changed(step=7), "its name should be step-00000007"),
    "step changed": (unsealed, "manifest.json was changed"),
    "files not told": (changed(files=[1]), "is not whole"),
    "a part that is a pipe": (forged, "is not a regular file"),
    **{f"manifest: {how}": (replaced("manifest.json", how), "") for how in EVIL},
    **{f"part: {how}": (replaced("node-1.safetensors", how), "") for how in EVIL},
}  # fmt: skip


@pytest.mark.parametrize("how", SPOILT)
def test_a_hostile_checkpoint_falls_back_to_the_one_before(how: str, tmp_path: Path) -> None:
    spoil, told = SPOILT[how]
    saved(tmp_path, 4)
    spoil(saved(tmp_path, 6))
    found, complaints = within(lambda: checkpoint.newest(tmp_path))
    assert found.step == 4
    assert len(complaints) == 1
    assert "step-00000006 is not whole" in complaints[0]
    assert told in complaints[0]


def test_a_part_that_is_too_large_for_the_model_falls_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would take hours to see that it is not what the manifest says, or all memory, if it is."""
    run = tmp_path / "run"
    train(AllReduce(), run, workers=2, budget=Steps(4), checkpoint_every=Steps(2))
    newest = run / "checkpoints" / "step-00000004"
    sparse(newest / "node-1.safetensors")
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["files"]["node-1.safetensors"]["bytes"] = 1 << 40
    (newest / "manifest.json").write_text(json.dumps(checkpoint.sealed(manifest)))
    (run / "ending.json").unlink()
    result = within(lambda: train(AllReduce(), run, workers=2, budget=Steps(5), resume=True))
    assert result.summary.steps == 5
    assert "has 1,099,511,627,776 bytes, more than" in capsys.readouterr().err


def test_no_part_of_a_real_run_is_nearly_as_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a server keeps what each worker read, beside x and Adam's state."""
    strategy = ParameterServer(consistency=ASP(), correction=DelayCompensated(adaptive=True))
    train(strategy, tmp_path, workers=3, model=make_large, optimizer=adam, budget=Steps(2), checkpoint_every=Steps(1))
    parts = [part.stat().st_size for part in tmp_path.glob("checkpoints/step-*/node-*")]
    monkeypatch.setattr(files, "SMALL", 0)  # that much is for words
    assert 10 * max(parts) < resume.largest_part(make_large(), 4) < 200 * max(parts)


@pytest.mark.parametrize("how", EVIL)
def test_a_part_that_is_none_is_named(how: str, tmp_path: Path) -> None:
    """Also where nothing was verified before."""
    replace(tmp_path / "node-0.safetensors", how)
    assert isinstance(within(lambda: checkpoint.read_tree(tmp_path / "node-0.safetensors")), CheckpointError)
    assert isinstance(within(lambda: snapshot.parts(tmp_path)), CheckpointError)


def test_checkpoints_and_snapshots_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """From a hundred million steps on, names are longer; the order of names is another."""
    for step in (99_999_998, 99_999_999, 100_000_000):
        saved(tmp_path, step)
    assert [path.name for path in checkpoint.found_in(tmp_path)] == [
        "step-99999999",
        "step-100000000",
    ]  # the newest two
    assert checkpoint.newest(tmp_path)[0].step == 100_000_000
    for name in ("step-", "step-x", "step-1.tmp", "step-٣", "step-" + "9" * 40, "latest"):
        (tmp_path / name).mkdir(exist_ok=True) if name != "latest" else None
    assert len(checkpoint.found_in(tmp_path)) == 2
    for name in ("99999", "100000", "00002", "x", "5x"):
        (tmp_path / "snapshots" / name).mkdir(parents=True)
    assert [number for number, _ in snapshot.numbered(tmp_path / "snapshots")] == [2, 99_999, 100_000]
    for node in (2, 10, 1):
        snapshot.write(tmp_path / "one", node, snapshot.SnapshotPart(float(node), 1, 1, 0, None, {}))
    (tmp_path / "one" / "node-x.safetensors").touch()
    assert [part.t for part in snapshot.parts(tmp_path / "one")] == [1.0, 2.0, 10.0]
    assert snapshot.parts_present(tmp_path / "one") == {1, 2, 10}


def test_a_part_that_tells_no_time_is_named_when_resuming(tmp_path: Path) -> None:
    path = saved(tmp_path, 4)
    found = checkpoint.verify(path)
    assert resume.clock(found) == 0.5
    for part in ({}, {"cost": [float("inf")], "counts": [0, 0, 0, 1]}, {"cost": [], "counts": 3}, [1]):
        checkpoint.write_tree(path / "node-0.safetensors", part)
        with pytest.raises(CheckpointError, match="holds neither the time"):
            resume.clock(found)


# Writing beside them.


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """A folder to be resumed may hold links where temporary files and the lock go."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    run = make_run(tmp_path / "run")
    for name in ("config.json.tmp", "running"):
        (run / name).symlink_to(victim)
    resume.remember(run, budget=["steps=1"])
    hold = run_lock.RunLock(run)
    hold.leave("Error", "why")
    assert victim.read_text() == "mine"
    assert json.loads((run / "config.json").read_text())["budget"] == ["steps=1"]


def test_a_lock_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    os.mkfifo(run / "running")
    within(lambda: run_lock.RunLock(run).leave("Error", "why"))
    assert within(lambda: run_lock.ask(run)) is not None


@pytest.mark.parametrize("how", ["pipe", "zeros without end", "a tebibyte", "folder"])
def test_a_token_is_read_from_a_file_only(how: str, tmp_path: Path) -> None:
    replace(tmp_path / "token", how)
    assert isinstance(within(lambda: auth.read(tmp_path / "token")), ConfigError)


def test_a_file_that_grows_while_it_is_read_has_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_text("x" * 100)
    assert files.read_bytes(path, most=100) == b"x" * 100
    with pytest.raises(OSError, match="more than the 99"):
        files.read_bytes(path, most=99)
    monkeypatch.setattr(files, "_require_regular", lambda *_: None)  # as if it were smaller then
    with pytest.raises(OSError, match="more than the 99"):
        files.read_bytes(path, most=99)


def test_a_part_of_a_snapshot_that_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    fifo(tmp_path / "node-0.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        checkpoint.has_tensor(tmp_path / "node-0.safetensors", "x")


def test_a_part_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("as it was")
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / ".0.tmp").symlink_to(tmp_path / "mine")
    snapshot.write(tmp_path / "final", 0, snapshot.SnapshotPart(0.0, 1, 1, 0, torch.ones(2), {}))
    assert (tmp_path / "mine").read_text() == "as it was"
    assert snapshot.parts(tmp_path / "final")[0].step == 1


def test_a_folder_of_another_user_is_no_place_for_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "theirs").mkdir(mode=0o700)
    snapshot.elsewhere("abc").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="not a private folder"):
        snapshot.make_elsewhere("abc")
    open_to_all = snapshot.elsewhere("def")
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(OSError, match="not a private folder"):
        snapshot.make_elsewhere("def")
    assert snapshot.is_ours(snapshot.make_elsewhere("ghi"))
