# SPDX-License-Identifier: Apache-2.0
"""The figures of a report: sound SVG, and lines, marks and intervals where they belong."""

from __future__ import annotations

import re
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tests.report.folders import HOSTILE, make_race, make_run

from orchestra.cli import invoke
from orchestra.errors import EnvironmentProblem
from orchestra.report import figures, model, plots
from orchestra.report.plots import FIGURES
from orchestra.runs.budget import Target
from orchestra.runs.events import Logged, Stepped, encode


def test_every_figure_is_sound_svg(race: Path, tmp_path: Path) -> None:
    for i, batch in enumerate((8, 16)):
        make_run(race / "more" / f"seed{i}", HOSTILE[:20], batch=batch)
    make_run(race / "more" / "seed2", HOSTILE[:20], batch=16, workers=4)
    with (race / "allreduce" / "seed0" / "events-0.jsonl").open("a", encoding="utf-8") as file:
        for k in range(10):
            file.write(encode(Logged(0.1 * k, 0, k, "consensus", 1.0 / (k + 1))))
            file.write(encode(Logged(0.1 * k, 0, k, "gap", k % 4)))
    drawn = figures.draw(model.build([race]))
    assert {name.split("-workers")[0].split("-batch")[0] for name in drawn} == {*FIGURES, "scaling", "conditions"}
    for text in drawn.values():
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert not [e for e in root.iter() if "script" in e.tag or "nan" in str(e.attrib).lower()]


def words_under(told: dict[str, Any], condition: str) -> list[str]:
    """What is written below the seconds of each strategy, in order of names."""
    texts = [e.text or "" for e in ElementTree.fromstring(figures.draw(told)["conditions"]).findall(".//{*}text")]
    return texts[texts.index(condition) + 1 :][1 : 2 * len(told["strategies"]) : 2]


def test_all_that_may_have_been_first_are_boxed(tmp_path: Path) -> None:
    """Snapshots are 2 steps apart: of 0.1 s and of 0.11 s they cannot be told apart, those of 0.2 s can."""
    for batch, seconds in ((8, (0.1, 0.11, 0.2)), (9, (0.1, 0.3, 0.2))):
        for name, second in zip(("allreduce", "localsgd", "slowmo"), seconds, strict=True):
            make_run(tmp_path / name / str(batch), name, second=second, batch=batch)
    told = model.build([tmp_path], target=Target("accuracy", 0.5))
    assert told["firsts"] == {"batch 8": ["allreduce", "localsgd"], "batch 9": ["allreduce"]}
    assert "several at once under 1" in told["verdict"]["sentence"]
    assert words_under(told, "batch 8") == ["tie", "tie", "2.00×"]
    assert words_under(told, "batch 9") == ["first", "3.00×", "2.00×"]
    to_the_end = model.build([tmp_path])
    assert to_the_end["firsts"] == {"batch 8": ["allreduce"], "batch 9": ["allreduce"]}, "ends are known exactly"


def lines_in(text: str, width: str) -> list[list[tuple[float, ...]]]:
    """The lines of a drawing that are so wide, as points."""
    found = [e for e in ElementTree.fromstring(text).findall(".//{*}polyline") if e.get("stroke-width") == width]
    return [[tuple(map(float, p.split(","))) for p in e.attrib["points"].split()] for e in found]


def test_the_thick_line_is_the_median_over_seeds(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.1, 0.8, 0.9)):
        make_run(tmp_path / f"seed{seed}", seed=seed, accuracy=accuracy)
    text = figures.draw(model.build([tmp_path]))["score"]
    (thick,), thin = lines_in(text, "2"), lines_in(text, "0.8")
    assert len(thin) == 3
    assert thick[-1] == thin[1][-1], "neither the first nor the last"


def test_marks_are_where_something_was_measured(tmp_path: Path) -> None:
    """At all of 11 scores, also of the median of seeds that were scored at the same times; at some of 120 losses."""
    for seed in range(3):
        make_run(tmp_path / f"seed{seed}", seed=seed, accuracy=0.5 + seed / 10, steps=120)
    drawn = figures.draw(model.build([tmp_path]))
    for name, count in (("score", 11), ("training-loss", 6)):
        (thick,) = lines_in(drawn[name], "2")
        marks = re.findall(r'<circle r="4" transform="translate\(([\d.]+),([\d.]+)\)', drawn[name])
        assert len(marks) == count + 1, "one beside the name"
        assert {tuple(map(float, mark)) for mark in marks[:-1]} <= {*thick}
    assert plots.median([[(0.0, 1.0), (3.0, 4.0)], [(0.0, 3.0), (1.0, 3.0), (3.0, 3.0)]]) == [
        (0.0, 2.0), (1.0, 2.5), (3.0, 3.5),
    ]  # fmt: skip


def test_between_two_steps_there_is_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", workers=1)
    times = (0.1, 0.2, 0.3, 0.8)
    events = [Stepped(t, 0, k, 1.0, 8 * k, 1.0, 0.1, t, 0.0, 0.0, 0, 0) for k, t in enumerate(times, 1)]
    (run / "events-0.jsonl").write_text("".join(map(encode, events)), encoding="utf-8")
    told = model.build([run])
    assert set(told["runs"][0]["step_times"][0]["seconds"]) == {0.1, 0.5}, "nothing took 0.3 s"
    (line,) = lines_in(figures.draw(told)["step-times"], "2")
    assert all(a[0] == b[0] or a[1] == b[1] for a, b in pairwise(line)), "up only where a step ended"


def test_a_median_has_its_interval_from_six_runs_on(tmp_path: Path) -> None:
    times = [0.1 * k for k in range(1, 13)]
    few = model.build([make_race(tmp_path / "few", {"allreduce": times[:5]})])
    many = model.build([make_race(tmp_path / "many", {"allreduce": times})])
    drawn = {
        "least to most": figures.draw(few)["time-to-target"],
        "95 % interval": figures.draw(many)["time-to-target"],
    }
    for words, text in drawn.items():
        assert words in text.partition("</title>")[0]
    ((a, _), (b, _)), _ = lines_in(drawn["95 % interval"], "2.5")
    marks = sorted(
        float(x) for x in re.findall(r'<circle r="5" transform="translate\(([\d.]+)', drawn["95 % interval"])
    )
    assert (a, b) == (marks[2], marks[-3]), "of 12 the third and the tenth"


def test_long_conditions_have_figures_of_their_own_and_too_many_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for k in range(14):
        note = {"recipe": "digits", "options": {"network": f"{'x' * 80}{k:02}"}}
        make_run(tmp_path / f"run{k}", note=note)
    told = model.build([tmp_path])
    assert len([name for name in figures.draw(told) if name.startswith("waiting")]) == 12
    assert invoke(["report", str(tmp_path), "--format", "svg", "-o", str(tmp_path / "out")]) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert "no figures of 2 conditions" in err
    assert all(condition in err for condition in told["conditions"][12:])


def test_png_without_a_browser_says_what_to_do(race: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"apt-get install chromium.*--format svg"):
        figures.pictures(model.build([race]))


def test_every_step_counts_the_same_on_every_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the figure of a paper: 10 of 1,000 steps took a second, and are one in a hundred, not one in two."""
    run = make_run(tmp_path / "run", workers=2, steps=990, second=0.01)
    slow = [Stepped(1.0 * k, 1, k, 1.0, 8 * k, 1.0, 0.1, 1.0 * k, 0.0, 0.0, 0, 0) for k in range(1, 11)]
    (run / "events-1.jsonl").write_text("".join(map(encode, slow)), encoding="utf-8")
    drawn: list[dict[str, list[tuple[float, float]]]] = []
    monkeypatch.setattr(plots, "lines", lambda *given, **_: drawn.append(given[-1]))
    told = model.build([run])
    FIGURES["step-times"](told, told["runs"])
    ((curve,),) = (found.values() for found in drawn)
    assert max(share for seconds, share in curve if seconds < 0.5) == pytest.approx(99, abs=0.3)
