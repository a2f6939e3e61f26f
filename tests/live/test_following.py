# SPDX-License-Identifier: Apache-2.0
"""Following a run: only what is new is read, whatever happens to the files, and the state is what it is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.live.made import ENVIRON, append, began, ended, make, scored, stale, steps, whole

from orchestra.errors import Interrupted, WorkerFailed
from orchestra.live import text as words
from orchestra.live.follower import Follower, Latest
from orchestra.live.moment import RunNow, moment
from orchestra.live.page_feed import PageWriter
from orchestra.live.tail import TailedFile
from orchestra.report import model
from orchestra.runs import reading, run_lock
from orchestra.runs.events import Event, encode
from orchestra.runs.reading import RunRecord


def look(run: Follower, later: float = 0.0) -> RunNow:
    run.look()
    found = moment(run, time.time() + later)
    assert found is not None
    return found


# Files.


def lines(file: TailedFile) -> list[str]:
    return [line for batch in file.lines() for line in batch]


def test_only_new_whole_lines_are_given(tmp_path: Path) -> None:
    path = tmp_path / "a"
    file = TailedFile(path)
    assert not file.renewed()
    assert lines(file) == []
    path.write_bytes(b"one\ntwo\nthr")
    assert not file.renewed()
    assert lines(file) == ["one", "two"]
    with path.open("ab") as more:
        more.write(b"ee\xff\xe2\x80\xa8same line\nfour")
    assert not file.renewed()
    assert lines(file) == ["three�\u2028same line"]
    assert not file.renewed()
    assert lines(file) == []


@pytest.mark.parametrize("how", ["shorter", "another"])
def test_a_file_that_shrank_or_was_replaced_is_read_from_its_beginning(how: str, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("one\ntwo\n")
    file = TailedFile(path)
    file.renewed()
    assert lines(file) == ["one", "two"]
    if how == "shorter":
        path.write_text("new\n")
    else:
        (tmp_path / "b").write_text("new\nand longer than before\n")
        (tmp_path / "b").replace(path)
    assert file.renewed()
    assert lines(file)[0] == "new"
    assert not file.renewed()


def test_of_a_large_file_a_first_look_takes_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("".join(f"line {i:06}\n" for i in range(10_000)))
    file = TailedFile(path, tail=1000)
    file.renewed()
    found = lines(file)
    assert 50 < len(found) < 100
    assert found[-1] == "line 009999"


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    run = make(tmp_path)
    os.mkfifo(run / "events-0.jsonl")
    os.mkfifo(run / "running")
    (run / "events-1.jsonl").mkdir()
    follower = Follower(run)
    held = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert [node.step for node in look(follower).nodes] == [0, 0]
    assert len(os.listdir("/proc/self/fd")) == held


# Runs.


def test_a_run_is_followed_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    run = Follower(tmp_path / "run")
    assert not run.look()
    assert moment(run, 0.0) is None
    make(tmp_path / "run")
    with run_lock.holding(tmp_path / "run"):
        assert look(run).state == "setting up"
        for node in (0, 1):
            append(tmp_path / "run", node, [began(node), *steps(node, 1, 11 + node)])
        append(tmp_path / "run", 2, [began(2), *stale(1, 21)])
        scored(tmp_path / "run", 0, 0.9)
        assert look(run).latest is None  # of the model as it was at first
        scored(tmp_path / "run", 1, 0.5)
        now = look(run)
        assert (now.state, now.step, now.fraction) == ("running", 10, 0.25)
        assert now.t == pytest.approx(1.1)
        assert now.progress == "step 10 of 40"
        assert (now.metric, now.latest) == ("accuracy", 0.5)
        worker, _, server = now.nodes
        assert (worker.state, worker.step, worker.samples, worker.loss) == ("running", 10, 80, 0.2)
        assert (worker.compute, worker.communicate, worker.wait) == pytest.approx((0.6, 0.1, 0.3))
        assert (worker.rate, worker.traffic) == pytest.approx((80.0, 8000.0))
        assert worker.times == pytest.approx([0.1] * 9)
        assert (server.state, server.step, server.staleness) == ("serving", 20, 0.5)
        for node in (0, 1, 2):
            append(tmp_path / "run", node, [ended(node, 40)])
        assert look(run).state == "scoring"
        (tmp_path / "run" / "ending.json").write_text('{"stopped_by": "target"}')
    now = look(run)
    assert (now.state, now.why, now.over) == ("done", "the target was reached", True)
    assert {node.state for node in now.nodes} == {"done"}
    assert not run.look()


def test_what_happened_after_the_checkpoint_is_forgotten_with_the_run(tmp_path: Path) -> None:
    run = make(tmp_path)
    append(run, 0, [began(0), *steps(0, 1, 31)])
    follower = Follower(run, keep=True)
    assert look(follower).nodes[0].step == 30
    (run / "draft").write_text("".join(encode(e) for e in [began(0), *steps(0, 1, 11)]))
    (run / "draft").replace(run / "events-0.jsonl")
    now = look(follower)
    assert (now.nodes[0].step, len(now.nodes[0].losses), len(follower.events)) == (10, 10, 11)


GARBAGE = [
    b"[" * 100_000,
    b"\xff\xfe\x00 not text",
    b'{"event":"stepped"}',
    b'{"event":["stepped"]}',
    b"17",
    b"null",
    encode(steps(0, 7, 8)[0]).replace('"step":7', '"step":"seven"').encode(),
    encode(steps(0, 7, 8)[0]).replace('"t":0.7', '"t":1e999').encode(),
    encode(steps(0, 7, 8)[0]).replace('"node":0', '"node":99').encode(),
    encode(steps(0, 7, 8)[0]).replace('"samples":56', f'"samples":{"9" * 400}').encode(),
    b'{"event":"logged","t":1,"node":0,"step":1,"name":["staleness"],"value":1}',
    encode(ended(0, 9)).replace('"sent_to":{}', '"sent_to":[1]').encode(),
    encode(ended(0, 9)).replace('"sent_to":{}', '"sent_to":{"x":1}').encode(),
]


@pytest.mark.parametrize("keep", [False, True])
def test_what_makes_no_sense_is_passed_over(keep: bool, tmp_path: Path) -> None:
    run = make(tmp_path)
    for line in GARBAGE:
        append(run, 0, [began(0), *steps(0, 1, 7)])
        with (run / "events-0.jsonl").open("ab") as file:
            file.write(line + b"\n")
    (run / "scores.jsonl").write_text('{"event":"scored","t":0,"step":0,"samples":0,"number":0,"metrics":[1]}\n{"ev')
    (run / "ending.json").write_text("[" * 100_000)
    (run / "running").write_text('{"kind": 7}')
    follower = Follower(run, keep=keep)
    now = look(follower)
    assert [(node.name, node.step) for node in now.nodes] == [("worker 0", 6)]
    assert len(follower.events) == keep * 7 * len(GARBAGE)
    assert now.state == "died"


@pytest.mark.parametrize(
    "changes", [{"workers": 99_999}, {"budget": "all of it"}, {"budget": ["steps=nan", 7, "seconds=0"]}]
)
def test_a_strange_configuration_does_no_harm(changes: dict[str, object], tmp_path: Path) -> None:
    run = make(tmp_path, **changes)
    append(run, 0, [began(0), *steps(0, 1, 6)])
    now = look(Follower(run))
    assert now.fraction in (None, 0.125)
    assert words.plain(now)
    assert len(words.topology(now, 78)) == 3


@pytest.mark.parametrize("workers", [-3, 0, 10**9, 10**400])
def test_a_number_of_workers_that_cannot_be_is_no_run(workers: int, tmp_path: Path) -> None:
    follower = Follower(make(tmp_path, workers=workers))
    assert not follower.look()
    assert moment(follower, time.time()) is None


def test_names_cannot_reach_the_terminal(tmp_path: Path) -> None:
    run = make(tmp_path / "\x1b[2Jrun", strategy="\x1b]0;mine\x07[red]<script>\u202e")
    append(run, 0, [began(0), *steps(0, 1, 6)])
    with (run / "scores.jsonl").open("w") as file:
        file.write('{"event":"scored","t":0,"step":1,"samples":1,"number":1,"metrics":{"\\u001b[31m":1}}\n')
    now = look(Follower(run))
    text = words.plain(now) + "".join(f"{subject}{what}" for _, subject, what in now.news)
    assert not [c for c in text if c != "\n" and not c.isprintable()]
    assert "\\u001b" in text


def test_a_comparison_is_followed_from_run_to_run(tmp_path: Path) -> None:
    latest = Latest(tmp_path)
    assert latest.look(0.0) is None
    whole(tmp_path / "a")
    os.utime(tmp_path / "a" / "config.json", (1e9, 1e9))
    first = latest.look(10.0)
    assert first is not None
    make(tmp_path / "b")
    assert latest.look(10.5) is first  # searching a large folder takes time
    found = latest.look(20.0)
    assert found is not None
    assert found.folder == tmp_path / "b"


# How it ended.


def going_on(run: Path) -> Follower:
    make(run)
    for node in (0, 1):
        append(run, node, [began(node), *steps(node, 1, 6)])
    return Follower(run)


SCRIPT = """
import sys, time
from pathlib import Path
from orchestra.runs import run_lock
with run_lock.holding(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_run_that_is_killed_is_dead_at_once(tmp_path: Path) -> None:
    follower = going_on(tmp_path)
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, env=ENVIRON)
    assert process.stdout is not None
    with process:
        process.stdout.readline()
        assert look(follower, later=3600).state == "running"  # however long it says nothing
        assert look(follower, later=3600).nodes[0].state == "silent 1 h 0 min"
        process.send_signal(signal.SIGKILL)
        process.wait()
    now = look(follower)
    assert (now.state, now.nodes[0].state, now.over) == ("died", "died", True)
    assert "recorded no error" in now.why


def test_a_run_that_failed_leaves_its_last_words(tmp_path: Path) -> None:
    follower = going_on(tmp_path)
    with pytest.raises(WorkerFailed), run_lock.holding(tmp_path):
        raise WorkerFailed("worker 1", "Traceback ...\n  line\nValueError: no such thing")
    now = look(follower)
    assert now.state == "failed"
    assert now.why.startswith("ValueError: no such thing · worker 1 failed")


def test_a_run_that_was_stopped_did_not_fail(tmp_path: Path) -> None:
    follower = going_on(tmp_path)
    with pytest.raises(Interrupted), run_lock.holding(tmp_path):
        raise Interrupted("stopped by SIGINT")
    assert look(follower).state == "stopped"
    with run_lock.holding(tmp_path):  # resumed
        assert look(follower).state == "running"
    assert not (tmp_path / run_lock.NAME).exists()


def test_without_a_lock_only_silence_tells(tmp_path: Path) -> None:
    follower = going_on(tmp_path)
    assert look(follower).state == "running"
    assert look(follower, later=100).state == "silent"


# The story.


def test_a_story_told_in_pieces_is_that_of_the_report(tmp_path: Path) -> None:
    """Whatever a reader saw on the way, in the end it is the report, dict for dict."""
    source, run = whole(tmp_path / "source"), make(tmp_path / "runs" / "a")
    before = whole(tmp_path / "runs" / "before", strategy="allreduce", servers=0)
    writer = PageWriter([tmp_path / "runs"])
    assert [r["steps"] for r in writer.report["runs"]] == [0, 40]
    pieces = 7
    for i in range(pieces):
        for name in ("events-0.jsonl", "events-1.jsonl", "events-2.jsonl", "scores.jsonl"):
            data = (source / name).read_bytes()
            cuts = [len(data) * j // pieces for j in (i, i + 1)]  # anywhere, but not between a line and its end:
            first, last = (cut + (data[cut : cut + 1] == b"\n") for cut in cuts)  # the report reads such a line
            with (run / name).open("ab") as file:
                file.write(data[first:last])
        assert writer.look(time.time() + i)
        writer.update()
        assert writer.report == model.build([tmp_path / "runs"])
        assert 0 < writer.report["runs"][0]["samples"] <= 640
    (run / "ending.json").write_bytes((source / "ending.json").read_bytes())
    assert writer.look(time.time() + 10)
    for _ in range(2):  # the second time from memory
        writer.update()
        assert writer.report == model.build([tmp_path / "runs"])
    assert not writer.report["verdict"]["sentence"].startswith("So far")
    for node in (0, 1):  # one that was over is resumed
        append(before, node, [*steps(node, 41, 51), ended(node, 50)])
    (before / "ending.json").write_bytes((source / "ending.json").read_bytes())
    writer.look(time.time() + 20)
    writer.update()
    assert writer.report == model.build([tmp_path / "runs"])
    assert writer.report["runs"][1]["steps"] == 50


def count_readings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Which folders are read from the beginning to the end, from now on."""
    read: list[Path] = []
    load = reading.load

    def counted(path: Path, events: Sequence[Event] | None = None) -> RunRecord:
        read.extend([path] if events is None else [])
        return load(path, events)

    monkeypatch.setattr(reading, "load", counted)
    return read


def test_what_is_over_is_read_once_however_many_runs_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a run that died: it leaves no ending, and will never have one."""
    dead = going_on(tmp_path / "0")
    with pytest.raises(WorkerFailed), run_lock.holding(tmp_path / "0"):
        raise WorkerFailed("worker 1", "ValueError")
    monkeypatch.setattr(model, "BLOCKS", 1200)
    read = count_readings(monkeypatch)
    writer = PageWriter([tmp_path])
    assert writer.report["runs"][0]["fate"] == "failed"
    assert not writer.report["verdict"]["sentence"].startswith("So far")
    for i in range(1, 9):
        run = make(tmp_path / str(i), batch=100 + i)
        append(run, 0, [began(0), *steps(0, 1, 401), ended(0, 400)])
        (run / "ending.json").write_text('{"stopped_by": "budget"}')
        writer.look(100.0 * i)
        writer.update()
        blocks = [len(lane["t"]) for run in writer.report["runs"] for lane in run["lanes"]]
        assert sum(blocks) <= max(1200, 50 * len(blocks))
    assert sorted(read) == [tmp_path / str(i) for i in range(9)]
    assert len(writer._over) == 9
    lane = writer.report["runs"][1]["lanes"][0]
    assert sum(lane["t"]) == 40_000_000, "microseconds, however many steps are put together"
    assert lane["together"] * len(lane["t"]) >= 400
    with run_lock.holding(tmp_path / "0"):  # resumed
        append(dead.folder, 0, steps(0, 6, 9))
        for _ in range(2):
            writer.look(1e6)
            writer.update()
        assert [node["steps"] for node in writer.report["runs"][0]["nodes"]] == [8, 5]
        assert writer.report["verdict"]["sentence"].startswith("So far")
    assert len(read) == 9, "from then on it is followed again"


def test_a_new_run_of_a_comparison_appears(tmp_path: Path) -> None:
    whole(tmp_path / "a")
    writer = PageWriter([tmp_path])
    writer.look(0.0)
    assert not writer.look(50.0)
    whole(tmp_path / "b", seed=1)
    assert writer.look(100.0)
    assert len(writer.moments(time.time())) == 2
    writer.update()
    assert [r["seed"] for r in writer.report["runs"]] == [0, 1]
