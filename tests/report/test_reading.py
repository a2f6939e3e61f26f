# SPDX-License-Identifier: Apache-2.0
"""Folders as they are found: cut short, damaged, hostile."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.report.folders import make_race, make_run, moved

from orchestra.errors import ConfigError
from orchestra.report import model, page, perfetto
from orchestra.runs import reading
from orchestra.runs.budget import Target
from orchestra.runs.events import Stepped
from orchestra.runs.reading import RunRecord


def test_runs_are_found_below_and_each_once(tmp_path: Path) -> None:
    make_race(tmp_path / "race", {"allreduce": [0.1], "ps": [0.2]})
    found = reading.find([tmp_path / "race", tmp_path / "race" / "allreduce" / ".." / "ps" / "seed0"])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["race/allreduce/seed0", "race/ps/seed0"]


def test_a_run_cut_short_tells_what_it_has(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", over=False, steps=20)
    path = run / "events-1.jsonl"
    path.write_bytes(path.read_bytes()[:1000])
    loaded = reading.load(run)
    assert not loaded.over
    steps = [e for e in loaded.events if isinstance(e, Stepped) and e.node == 1]
    assert 2 <= len(steps) < 20
    told = model.build([run])["runs"][0]
    assert [node["steps"] for node in told["nodes"]] == [20, len(steps)]
    assert told["formula"] is None, "the number of steps that it would have taken is not known"


def test_a_replaced_connection_is_reported_once_for_both_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", workers=3)
    with (run / "events-0.jsonl").open("a", encoding="utf-8") as file:
        for node, peer, seconds in ((0, 2, 1.0), (2, 0, 1.5), (0, 2, 4.04), (2, 1, 0.5)):
            what = {"event": "reconnected", "t": 1.0, "node": node, "peer": peer, "seconds": seconds, "why": "reset"}
            file.write(json.dumps(what) + "\n")
    assert reading.load(run).warnings == (
        "the connection between worker 0 and worker 2 broke 2 times and was replaced within 4.0 s; no message lost.",
        "the connection between worker 2 and worker 1 broke 1 time and was replaced within 0.5 s; no message lost.",
    )


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (None, "no config.json"),
        ("", "damaged"),
        ("[1, 2]", "damaged"),
        ("[" * 100_000, "damaged"),
        ('{"workers": 2}', "no strategy"),
        ('{"strategy": "ps", "workers": "many"}', "workers"),
        ('{"strategy": "ps", "workers": 0, "servers": 1, "seed": 0, "parameters": 1}', "workers"),
        ('{"strategy": "ps", "workers": 2, "servers": -1, "seed": 0, "parameters": 1}', "servers"),
        (f'{{"strategy": "ps", "workers": 2, "servers": 1, "seed": 0, "parameters": 1{"0" * 400}}}', "parameters"),
    ],
)
def test_what_is_no_run_is_named_with_the_reason(config: str | None, why: str, tmp_path: Path) -> None:
    run, good = make_run(tmp_path / "bad"), make_run(tmp_path / "good")
    (run / "config.json").unlink()
    if config is not None:
        (run / "config.json").write_text(config, encoding="utf-8")
    told = model.build([tmp_path])
    assert [r["name"] for r in told["runs"]] == [str(good)]
    (refused,) = told["refused"]
    assert refused["name"] == str(run)
    assert why in refused["why"]


def test_a_run_whose_figures_make_no_sense_takes_no_other_with_it(tmp_path: Path) -> None:
    good, bad = make_run(tmp_path / "a"), make_run(tmp_path / "b")

    def describe(run: RunRecord, target: Target | None, blocks: int | None) -> dict[str, Any]:
        return model.describe_run(run, target, blocks) if run.path == good else {"half": 1 // 0}

    told = model.build([tmp_path], describe=describe)
    assert [run["name"] for run in told["runs"]] == [str(good)]
    assert [(r["name"], r["why"][:27]) for r in told["refused"]] == [(str(bad), "its figures make no sense: ")]


def test_nothing_to_read_is_an_error_that_says_so(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError):
            model.build([where])
    (make_run(tmp_path / "bad") / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json is damaged"):
        model.build([tmp_path])


GARBAGE = [
    '{"event": "stepped", "t": "soon", "node": 0}',
    '{"event": "stepped"}',
    '{"event": "stepped", "t": NaN, "node": 0, "step": 1, "epoch": 0, "samples": 1, "loss": 1, "lr": 1, "compute": 1, '
    '"communicate": 1, "wait": 1, "sent": 1, "received": 1}',
    '{"event": "stepped", "t": 1, "node": 0, "step": 1, "epoch": 0, "samples": 1, "loss": Infinity, "lr": 1, '
    '"compute": 1, "communicate": 1, "wait": 1, "sent": 1, "received": 1}',
    '{"event": "node_ended", "t": 1e400, "node": 0, "step": 1, "samples": 1, "compute": 1, "communicate": 1, '
    '"wait": 1, "sent": 1, "received": 1}',
    '{"event": "node_ended", "t": 1e304, "node": 0, "step": 1, "samples": 1, "compute": 1, "communicate": 1, '
    '"wait": 1, "sent": 1, "received": 1}',
    '{"event": "node_ended", "t": 1, "node": 0, "step": 1, "samples": 1, "compute": 1e304, "communicate": 1, '
    '"wait": 1, "sent": 1, "received": 1}',
    '{"event": "stepped", "t": -1, "node": 0, "step": 1, "epoch": 0, "samples": 1, "loss": 1, "lr": 1, "compute": 1, '
    '"communicate": 1, "wait": 1, "sent": 1, "received": 1}',
    '{"event": "logged", "t": 1, "node": 999999999, "step": 1, "name": "staleness", "value": 3}',
    '{"event": "logged", "t": 1, "node": -1, "step": 1, "name": "staleness", "value": 3}',
    '{"event": ["stepped"]}',
    "null",
    '"',
    "\x00\x00\x00",
    "[" * 5000,
]


def test_garbage_among_events_changes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = model.build([run])
    for node in (0, 1):
        path = run / f"events-{node}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines()
        for i, line in enumerate(GARBAGE):
            lines.insert(2 * i + 1, line)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    scores = run / "scores.jsonl"
    bad = '{"event": "scored", "t": 0.1, "step": 1, "samples": 1, "number": "x", "metrics": {}}\n'
    worse = '{"event": "scored", "t": 0.1, "step": 1, "samples": 1, "number": 1, "metrics": [1]}\n'
    early = '{"event": "scored", "t": -0.1, "step": 1, "samples": 1, "number": 0, "metrics": {"accuracy": 1}}\n'
    assert model.build([run]) == before
    goal = Target("accuracy", 0.5)
    assert (when := model.build([run], target=goal)["runs"][0]["reached"]) > 0
    scores.write_text(scores.read_text(encoding="utf-8") + worse, encoding="utf-8")
    assert model.build([run])["runs"][0]["metrics"] == before["runs"][0]["metrics"]
    text = scores.read_text(encoding="utf-8")
    for line in (bad, early):
        scores.write_text(line + text, encoding="utf-8")
        assert model.build([run], target=goal)["runs"][0]["reached"] == when


HOSTILE = [0, -1, 1.5, 1e304, -1e304, 1e-320, 10**400, float("nan"), float("inf"), "x", "", None, True, [], [1], {}]


def twisted(value: Any, dice: random.Random) -> Any:
    """The same with something else somewhere in it."""
    if not isinstance(value, dict) or not value or dice.random() < 0.1:
        return dice.choice(HOSTILE)
    name = dice.choice([key for key in value if key != "event"])
    return {**value, name: twisted(value[name], dice)}


@pytest.mark.parametrize("seed", range(20))
def test_values_of_any_kind_anywhere_do_no_harm(seed: int, tmp_path: Path) -> None:
    race, dice = make_race(tmp_path / "race", {"allreduce": [0.1, 0.2], "ps": [0.1, 0.1]}), random.Random(seed)
    (race / "ps" / "seed0" / "trace-0.jsonl").write_text(moved(0, "send", 0.1, 0.1, 1, 9) * 3, encoding="utf-8")
    for path in sorted(path for path in race.rglob("*.json*") if dice.random() < 0.5):
        lines = path.read_text(encoding="utf-8").splitlines()
        for i in dice.sample(range(len(lines)), min(3, len(lines))):
            lines[i] = json.dumps(twisted(json.loads(lines[i]), dice))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with contextlib.suppress(ConfigError):  # if it hit what nothing can be told without
        page.write(model.build([race]))
    for run in reading.find([race]):
        with contextlib.suppress(reading.Unreadable):
            perfetto.write(run, tmp_path / "trace.json")


@pytest.mark.parametrize("seed", range(20))
def test_bytes_turned_over_at_random_do_no_harm(seed: int, tmp_path: Path) -> None:
    run, dice = make_run(tmp_path / "run", steps=8, servers=1, strategy="ps"), random.Random(seed)
    for path in sorted(run.iterdir()):
        data = bytearray(path.read_bytes())
        for _ in range(3):
            data[dice.randrange(len(data))] = dice.randrange(256)
        path.write_bytes(data)
    with contextlib.suppress(ConfigError):  # if it hit what nothing can be told without
        json.dumps(model.build([run]), allow_nan=False)


def test_names_cannot_deceive(tmp_path: Path) -> None:
    name = "x\u202egnp.<script>alert(1)</script>\x07"
    told = model.build([make_run(tmp_path / name.replace("/", "|"), strategy="mine\u2066\ud800(a=1)")], title=name)
    text = json.dumps(told, ensure_ascii=False)
    assert "\u202e" not in text
    assert "\u2066" not in text
    assert "\\\\u202e" in text
    text.encode("utf-8")  # no halves of characters
