# SPDX-License-Identifier: Apache-2.0
"""What the command writes: one page, tables, figures; whole or not at all."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html.parser
import json
import re
import shlex
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.report.folders import HOSTILE, make_run

from orchestra.cli import invoke, summary
from orchestra.cli import report as cli_report
from orchestra.cli.patience import patiently
from orchestra.report import formulas, model, page, tables
from orchestra.report.styles import COLOURS, MARKERS, looks


class Scripts(html.parser.HTMLParser):
    """The scripts of a page, as a browser cuts it up."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[dict[str, str | None], str]] = []
        self.tags: list[str] = []
        self.policy = ""
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "script":
            self.found.append((dict(attrs), ""))
        if tag == "meta" and dict(attrs).get("http-equiv") == "Content-Security-Policy":
            self.policy = dict(attrs)["content"] or ""
        self._inside = tag == "script"

    def handle_data(self, data: str) -> None:
        if self._inside:
            attributes, text = self.found[-1]
            self.found[-1] = (attributes, text + data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = False


def packed_in(text: str) -> dict[str, Any]:
    (data,) = [body for attributes, body in Scripts(text).found if attributes.get("id") == "report"]
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(data)))
    return found


# The page.


def test_a_page_holds_its_story(race: Path) -> None:
    told = model.build([race])
    assert packed_in(page.write(told)) == told | {"legend": tables.legend(told)}


def test_only_the_scripts_in_the_page_may_run_and_nothing_may_be_fetched(race: Path) -> None:
    scripts = Scripts(page.write(model.build([race])))
    code = [body for attributes, body in scripts.found if attributes.get("type") != "application/octet-stream"]
    assert len(code) == 3
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" for body in code}
    policy = dict(part.strip().split(" ", 1) for part in scripts.policy.split(";"))
    assert policy["default-src"] == "'none'"
    assert set(policy["script-src"].split()) == hashes
    assert not [a for a, _ in scripts.found if "src" in a]
    assert not {"link", "iframe", "img", "object"} & set(scripts.tags)


def test_the_pages_own_code_makes_no_html_of_data_and_runs_none() -> None:
    code = page.bundle()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function|fetch\(", code)
    assert "import " not in re.sub(r"//.*", "", code)


ASSETS = sorted((Path(page.__file__).parent / "assets").glob("*.js"))


@pytest.mark.parametrize("path", ASSETS, ids=lambda p: p.name)
def test_a_module_takes_one_sitting_and_what_it_imports_is_there_and_used(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("// SPDX-License-Identifier: Apache-2.0\n// ")
    assert len(text.splitlines()) <= 400
    for names, module in re.findall(r"^import \{([^}]*)\} from \"\./(\w+)\.js\";$", text, re.MULTILINE):
        there = (path.parent / f"{module}.js").read_text(encoding="utf-8")
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^export (async )?(function|const) {name}\b", there, re.MULTILINE), (module, name)
            assert len(re.findall(rf"\b{name}\b", text)) > 1, f"{name} is not used"


def test_hostile_names_stay_data(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", strategy=HOSTILE[:30] + "(x)", note={"recipe": HOSTILE, "options": {"delay": HOSTILE}}
    )
    told = model.build([run], title=HOSTILE)
    text = page.write(told)
    assert HOSTILE not in text
    assert len(Scripts(text).found) == 4
    assert packed_in(text)["title"] == HOSTILE


def test_the_same_runs_give_the_same_page_to_the_byte(race: Path) -> None:
    text = page.write(model.build([race]))
    assert text == page.write(model.build([race]))
    (data,) = [body for attributes, body in Scripts(text).found if attributes.get("id") == "report"]
    assert base64.b64decode(data)[4:8] == b"\0\0\0\0", "no time of day"


def test_a_report_of_twenty_runs_is_small(tmp_path: Path) -> None:
    for i in range(20):
        make_run(tmp_path / f"run{i}", ("allreduce", "ps")[i % 2], workers=4, servers=i % 2, seed=i // 2, steps=600)
    assert len(page.write(model.build([tmp_path]))) < 1.5e6


def test_a_long_run_makes_no_larger_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "BLOCKS", 8000)
    sizes = []
    for steps in (2000, 20_000):
        told = model.build([make_run(tmp_path / f"run{steps}", workers=4, steps=steps)])
        assert sum(len(lane["t"]) for lane in told["runs"][0]["lanes"]) <= model.BLOCKS
        sizes.append(len(json.dumps(told)))
    assert sizes[1] < 1.2 * sizes[0]


def test_a_comparison_in_numbers(race: Path) -> None:
    told = model.build([race])
    by = {run["name"].removeprefix(f"{race}/"): run for run in told["runs"]}
    run = by["localsgd/seed1"]
    # 0.9 · i/10 is at least 0.5 from the sixth snapshot on, which is at 6/10 of 20 steps of 0.06 s.
    assert run["reached"] == pytest.approx(0.6 * 20 * 0.06)
    assert run["since"] == pytest.approx(0.5 * 20 * 0.06)
    assert run["nodes"][0]["spent"] == pytest.approx({"compute": 0.6, "communicate": 0.4, "wait": 0.2})
    assert by["ps-consistency-asp-/seed0"]["counts"]["staleness"] == [[0, 14], [1, 13], [2, 13]]
    assert told["table"]["lines"][0][:2] == ["localsgd", "0.6 s [0.6, 0.72]"]
    assert [bool(run["lanes"]) for run in told["runs"]] == [True, False, False] * 3, "one timeline for each strategy"


# Looks.


def test_a_strategy_looks_the_same_beside_any_others() -> None:
    catalogue = formulas.catalogue()
    for name in catalogue[:8]:
        alone = looks([name], catalogue)[name]
        together = looks([*catalogue[:8], "ps(consistency=asp)", "localsgd(tau=2)"], catalogue)[name]
        assert alone == together


def test_no_two_look_alike() -> None:
    names = [f"localsgd(tau={i})" for i in range(60)] + ["localsgd", "mine", "allreduce"]
    found = looks(names, formulas.catalogue())
    assert len(set(found.values())) == len(names)
    eight = looks(names[:8], formulas.catalogue())
    assert len({look.colour for look in eight.values()}) == 8
    many = looks([f"x(n={i})" for i in range(100)], formulas.catalogue())
    assert len(set(many.values())) == len(COLOURS) * len(MARKERS)


# The command.


def test_the_command_writes_beside_the_runs_and_says_where(race: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["report", str(race), "--title", "A race"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(
        "localsgd and ps(consistency=asp) are tied: they reached accuracy ≥ 0.5 in 0.6 and 0.72 virtual"
    )
    assert (race / "report.html").as_uri() in err
    assert packed_in((race / "report.html").read_text(encoding="utf-8"))["title"] == "A race"
    assert not [*race.glob("*.tmp")]


def test_every_format_but_pixels(race: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert invoke(["report", str(race), "-o", str(out), "--format", "html,md,csv,svg", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {Path(name).name for name in told["files"]} == {path.name for path in out.iterdir()}
    assert {"report.html", "report.md", "runs.csv", "curves.csv", "score.svg"} <= {path.name for path in out.iterdir()}


def test_report_writes_one_file_of_a_given_name(race: Path, tmp_path: Path) -> None:
    assert invoke(["report", str(race), "-o", str(tmp_path / "x.html"), "--target", "acc=0.8", "-q"]) == 0
    assert packed_in((tmp_path / "x.html").read_text(encoding="utf-8"))["target"]["value"] == 0.8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{race}", "--format", "pdf"], "is none; known: csv, html, md, png, svg"),
        (["{race}", "--format", "html,csv", "-o", "x.html"], "name a folder"),
        (["{race}", "--target", "accuracy"], "must be a score and a number"),
        (["{race}", "-o", "/dev/null/x"], "cannot be written"),
        (["{empty}"], "holds no run"),
        (["{race}", "nowhere"], "does not exist"),
    ],
)
def test_mistakes_end_with_2(
    words: list[str], message: str, race: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert invoke(["report", *(word.format(race=race, empty=tmp_path / "empty") for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_a_comparison_simulated_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "race"
    words = ["--sim", "-n", "3", "--epochs", "2", "--seeds", "2", "--target", "accuracy=0.2", "--quiet"]
    typed = ["compare", "digits", "--no-tune", "-s", "allreduce, ps(consistency=ssp)", *words]
    assert invoke([*typed, "--out", str(out)]) == 0
    assert invoke(["report", str(out)]) == 0
    told = packed_in((out / "report.html").read_text(encoding="utf-8"))
    for run in told["runs"]:
        assert run["sent_per_worker"] == pytest.approx(run["formula"]["bytes"])
        assert sum(size for _, _, size in run["traffic"]["flow"]) == run["sent_total"] if run["traffic"] else True
    ssp = next(run for run in told["runs"] if "ssp" in run["strategy"])
    assert ssp["bound"] == ["gap", 3]
    assert max(value for value, _ in ssp["counts"]["gap"]) <= 3
    assert told["commands"] == [shlex.join(["orchestra", *typed])]
    (out / "table.json").unlink()  # as it is while the comparison still runs
    assert model.build([out])["target"]["value"] == 0.2


def test_who_waits_is_told_what_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: here until the word has come."""
    said, heard = list[str](), threading.Event()

    def say(text: str) -> None:
        said.append(text)
        heard.set()

    monkeypatch.setattr(summary, "say", say)
    monkeypatch.setattr(model, "build", lambda *_, build=model.build, **more: heard.wait(60) and build(*_, **more))
    monkeypatch.setattr(cli_report, "patiently", partial(patiently, after=0.0))
    run = make_run(tmp_path / "run")
    assert invoke(["report", str(run)]) == 0
    assert said[0] == f"looking through {run} for runs ..."


def test_what_is_done_at_once_is_not_announced() -> None:
    with patiently("this takes a while", after=1000.0):
        running = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    assert running
    assert not any(thread.is_alive() for thread in running)


def test_a_folder_without_a_run_of_ours_says_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    assert invoke(["report", str(tmp_path)]) == 2
    assert "holds no run: give a folder with a config.json" in capsys.readouterr().err
    (tmp_path / "other" / "config.json").write_text("{}", encoding="utf-8")
    assert invoke(["report", str(tmp_path)]) == 2
    assert f"holds no run that can be read ({tmp_path}/other: its config.json is damaged)" in capsys.readouterr().err
