# SPDX-License-Identifier: Apache-2.0
"""Traces: every op is there, every message has two ends, and tracing a run changes nothing in it."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.report.folders import make_run, moved
from tests.zoo import flat, train

from orchestra import Local, Simulated, Steps
from orchestra.cli import invoke
from orchestra.engine.cluster import Cluster
from orchestra.report import perfetto, traces
from orchestra.runs.events import Logged, NodeEnded, Stepped, encode, read

WORLDS = {"processes": Local(workers=2, threads=1), "simulation": Simulated(workers=2)}


def run(strategy: str, out: Path, cluster: Cluster, **more: Any) -> Any:
    return train(strategy, out, cluster=cluster, budget=Steps(4), progress=False, **more)


@pytest.mark.parametrize("world", WORLDS)
def test_what_is_traced_is_what_happened(world: str, tmp_path: Path) -> None:
    """Four pushes and four answers of each worker, as many bytes as were counted, sent before they came."""
    run("ps()", tmp_path / "run", WORLDS[world], trace=True)
    moved = sorted(traces.moves(tmp_path / "run"), key=lambda e: e.t)
    counts = Counter((e.node, e.kind) for e in moved)
    assert [counts[worker, kind] for worker in (0, 1) for kind in ("compute", "send", "receive")] == [4] * 6
    assert (counts[2, "send"], counts[2, "receive"]) == (8, 8)
    pairs = list(traces.messages(moved))
    assert len(pairs) == 16
    assert all(sent.began <= got.t and sent.bytes == got.bytes for sent, got in pairs)
    ended = [e for node in range(3) for e in read(tmp_path / f"run/events-{node}.jsonl") if isinstance(e, NodeEnded)]
    for e in ended:
        mine = Counter[str]()
        for sent, _ in pairs:
            if sent.node == e.node:
                mine[str(sent.peer)] += sent.bytes
        assert e.sent_to == mine
        assert sum(mine.values()) == e.sent


def test_looking_changes_nothing(tmp_path: Path) -> None:
    models = [
        flat(run("slowmo(tau=2)", tmp_path / str(trace), Simulated(workers=3), trace=trace).model)
        for trace in (False, True)
    ]
    assert torch.equal(*models)
    assert not list((tmp_path / "False").glob("trace-*"))
    for node in range(3):
        one, other = (list(read(tmp_path / f"{trace}/events-{node}.jsonl")) for trace in (False, True))
        assert one == [e for e in other if not (isinstance(e, Logged) and e.name == "consensus")]


def test_before_a_mean_it_is_told_how_far_the_models_are_apart(tmp_path: Path) -> None:
    """Of two, each is as far from the mean as the other; and where all are always equal there is nothing to tell."""
    run("localsgd(tau=2)", tmp_path / "run", Simulated(workers=2), trace=True)
    first, second = (
        [e.value for e in read(tmp_path / f"run/events-{w}.jsonl") if isinstance(e, Logged)] for w in (0, 1)
    )
    assert len(first) == 2
    assert first == pytest.approx(second)
    assert min(first) > 0
    run("allreduce", tmp_path / "equal", Simulated(workers=2), trace=True)
    assert not [e for e in read(tmp_path / "equal/events-0.jsonl") if isinstance(e, Logged)]


@pytest.mark.parametrize("traced", [True, False])
def test_the_file_is_what_viewers_read(traced: bool, tmp_path: Path) -> None:
    run("ps()", tmp_path / "run", Simulated(workers=2), trace=traced)
    count = perfetto.write(tmp_path / "run", tmp_path / "trace.json.gz")
    with gzip.open(tmp_path / "trace.json.gz") as file:
        records = json.load(file)["traceEvents"]
    assert len(records) == count
    names = {r["tid"]: r["args"]["name"] for r in records if r["name"] == "thread_name"}
    assert names == {0: "worker 0", 1: "worker 1", 2: "server 0"}
    slices = [r for r in records if r["ph"] == "X"]
    assert {r["tid"] for r in slices} == ({0, 1, 2} if traced else {0, 1})
    assert all(r["dur"] > 0 for r in slices)
    arrows = Counter(r["ph"] for r in records if r["name"] == "message")
    assert arrows == ({"s": 16, "f": 16} if traced else {})


@pytest.mark.parametrize("config", ['{"strategy": "ps", "wor', '{"strategy": "ps"}', None])
def test_what_is_no_run_is_said_and_nothing_is_left_behind(
    config: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = make_run(tmp_path / "bad")
    before = {*bad.iterdir()}
    (bad / "config.json").unlink()
    if config is not None:
        (bad / "config.json").write_text(config, encoding="utf-8")
    assert invoke(["trace", str(bad)]) == 2
    assert "config.json" in capsys.readouterr().err
    assert {*bad.iterdir()} <= before


def test_events_that_make_no_sense_are_left_out(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run", workers=2)
    count = perfetto.write(made, tmp_path / "before.json")
    with (made / "events-0.jsonl").open("a", encoding="utf-8") as file:
        file.write(encode(Stepped("soon", 0, 21, 1.0, 8, 1.0, 0.1, 9.0, None, [], 1, 1)))  # type: ignore[arg-type]
        file.write(encode(Stepped(1e305, 0, 21, 1.0, 8, 1.0, 0.1, 9.0, 1.0, 1.0, 1, 1)))
    assert perfetto.write(made, tmp_path / "after.json") == count


def test_before_a_message_was_sent_its_receiver_waited(tmp_path: Path) -> None:
    made = make_run(tmp_path / "run")
    (made / "trace-0.jsonl").write_text(moved(0, "send", 2.0, 0.5, 1, 8) + moved(0, "send", 5.0, 0.5, 1, 8))
    received = moved(1, "receive", 1.0, 2.0, 0, 8) + moved(1, "receive", 5.5, 0.5, 0, 8) + moved(1, "receive", 7.0, 1.0)
    (made / "trace-1.jsonl").write_text(received)
    found = [(r["name"], r["ts"], r["dur"]) for r in perfetto.records(made) if r["ph"] == "X" and r["tid"] == 1]
    assert found == [
        ("wait", 1e6, 1e6),
        ("receive", 2e6, 1e6),
        ("receive", 5.5e6, 0.5e6),
        ("receive", 7e6, 1e6),
    ]


def test_lines_cut_short_do_no_harm(tmp_path: Path) -> None:
    run("ps()", tmp_path / "run", Simulated(workers=2), trace=True)
    path = tmp_path / "run/trace-1.jsonl"
    path.write_bytes(path.read_bytes()[:-25] + b'\xff{"event":"op_traced"}\n')
    assert perfetto.write(tmp_path / "run", tmp_path / "trace.json") > 20
