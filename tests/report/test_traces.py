# SPDX-License-Identifier: Apache-2.0
"""The traffic between nodes: as traced, as counted, as derived from totals, or unknown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.report.folders import SIZE, make_run, moved

from orchestra.report import formulas, model, traces
from orchestra.runs import reading
from orchestra.runs.events import NodeEnded


def test_a_trace_is_read_and_its_garbage_passed_over(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", workers=2)
    lines = [
        moved(0, "compute", 0.0, 1.0),
        moved(0, "send", 1.0, 0.5, 1, 100),
        moved(0, "send", 2.0, 0.5, 1, 50),
        moved(0, "send", 3.0, 0.5, 77, 50),  # to no node
        moved(0, "dance", 3.0, 0.5),
        moved(5, "mean", 3.0, 0.5),
        moved(0, "mean", float("nan"), 0.5),
        moved(0, "mean", 1.0, -3.0),
        "null\n", "{}\n", "[" * 3000 + "\n", '{"event": "op_traced"}\n', moved(0, "send", 9.0, 0.5, 1, 9)[:-9],
    ]  # fmt: skip
    (run / "trace-0.jsonl").write_text("".join(lines), encoding="utf-8")
    (run / "trace-1.jsonl").write_text(moved(1, "receive", 1.0, 0.5, 0, 100), encoding="utf-8")
    trace = traces.read(run, 2)
    assert trace is not None
    assert trace.flow == {(0, 1): 150.0}
    assert trace.spent[0] == {"compute": 1.0, "send": 1.5, "receive": 0.0, "mean": 0.0}
    assert [op.began for op in trace.ops] == sorted(op.began for op in trace.ops)
    told = model.build([run])["runs"][0]
    assert told["traffic"] == {"flow": [[0, 1, 150]], "source": "measured"}
    assert told["nodes"][0]["spent"].keys() == {"compute", "send", "receive", "wait"}
    assert told["trace"]["peer"][1] in (0, 1)


def test_too_many_ops_are_cut_and_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    text = "".join(moved(0, "send", float(k), 0.5, 1, 2) for k in range(100))
    (run / "trace-0.jsonl").write_text(text, encoding="utf-8")
    trace = traces.read(run, 2, most=30)
    assert trace is not None
    assert (len(trace.ops), trace.left_out) == (30, 70)
    assert trace.flow == {(0, 1): 200.0}, "bytes are counted over all"


def test_of_what_cannot_be_read_whole_every_node_has_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as all of them go: the room of node 1, which is twice as fast, is full in half the time."""
    monkeypatch.setattr(traces, "_MOST_SEEN", 80)
    run = make_run(tmp_path / "run")
    for node, second in ((0, 1.0), (1, 0.5)):
        text = "".join(moved(node, "send", k * second, 0.1, 1 - node, 2) for k in range(100))
        (run / f"trace-{node}.jsonl").write_text(text, encoding="utf-8")
    trace = traces.read(run, 2)
    assert trace is not None
    assert [sum(op.node == node for op in trace.ops) for node in (0, 1)] == [20, 40]
    assert trace.left_out == 200 - 60
    assert (trace.spent, trace.flow) == ({}, {}), "of a part of the run, which totals tell the whole of"
    assert model.build([run])["runs"][0]["nodes"][0]["spent"].keys() == {"compute", "communicate", "wait"}


def test_a_run_without_a_trace_is_read_as_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert traces.read(run, 2) is None
    (run / "trace-0.jsonl").write_text("", encoding="utf-8")
    assert traces.read(run, 2) is None


def test_bytes_by_peer_are_taken_where_they_were_counted(tmp_path: Path) -> None:
    """And what is not in them went to all others alike."""
    run = reading.load(make_run(tmp_path / "run", workers=3))
    events = [NodeEnded(1.0, node, 1, 1, 0.0, 0.0, 0.0, 12, 0, {str((node + 1) % 3): 8}) for node in range(3)]
    found = traces.traffic(replace(run, events=events), formulas.parsed("allreduce"), None)
    assert found is not None
    assert found.flow == {(a, b): 10.0 if b == (a + 1) % 3 else 2.0 for a in range(3) for b in range(3) if a != b}
    assert found.source == "messages measured, all-reduces divided evenly"
    alone = [replace(e, sent=8) for e in events]
    found = traces.traffic(replace(run, events=alone), formulas.parsed("allreduce"), None)
    assert found is not None
    assert found.flow == {(a, (a + 1) % 3): 8.0 for a in range(3)}
    assert found.source == "measured"


@pytest.mark.parametrize(
    ("strategy", "servers", "flow"),
    [
        ("ps", 1, {(0, 3): 1, (1, 3): 1, (2, 3): 1, (3, 0): 1, (3, 1): 1, (3, 2): 1}),
        ("allreduce(algorithm=ring)", 0, {(0, 1): 1, (1, 2): 1, (2, 0): 1}),
        ("allreduce", 0, {(i, j): 0.5 for i in range(3) for j in range(3) if i != j}),
        ("localsgd", 0, {(i, j): 0.5 for i in range(3) for j in range(3) if i != j}),
        ("ps(servers=2)", 2, None),
        ("unknown", 0, None),
    ],
)
def test_what_follows_from_totals(
    strategy: str, servers: int, flow: dict[tuple[int, int], float] | None, tmp_path: Path
) -> None:
    run = reading.load(make_run(tmp_path / "run", strategy, workers=3, servers=servers, steps=20))
    found = traces.traffic(run, formulas.parsed(strategy), None)
    if flow is None:
        assert found is None
    else:
        assert found is not None
        assert found.flow == {pair: share * 20 * SIZE for pair, share in flow.items()}
        assert found.source.startswith("from totals")


def test_of_a_run_cut_short_nothing_follows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", workers=3)
    path = run / "events-1.jsonl"
    path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8")
    assert traces.traffic(reading.load(run), formulas.parsed("allreduce"), None) is None
