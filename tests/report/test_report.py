# SPDX-License-Identifier: Apache-2.0
"""What the command writes: one page, tables, figures; whole or not at all."""

from __future__ import annotations

import base64
import csv
import gzip
import hashlib
import html.parser
import io
import json
import re
import shlex
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from tests.report.folders import make_race, make_run

from orchestra.cli import invoke, summary
from orchestra.cli import report as cli_report
from orchestra.cli.patience import patiently
from orchestra.errors import EnvironmentProblem
from orchestra.report import escaping, figures, formulas, model, page, plots, tables
from orchestra.report.plots import FIGURES
from orchestra.report.styles import COLOURS, MARKERS, looks
from orchestra.runs.budget import Target
from orchestra.runs.events import Logged, Stepped, encode

RACE = {"allreduce": [0.1, 0.11, 0.12], "ps(consistency=asp)": [0.06, 0.05, 0.07], "localsgd": [0.05, 0.06, 0.05]}
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


@pytest.fixture
def race(tmp_path: Path) -> Path:
    return make_race(tmp_path / "race", RACE)


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


# Tables and figures.


def test_markdown_cannot_be_broken_out_of(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", strategy="a|b<i>*x*`(y)")
    text = tables.markdown(model.build([run], title="<b>|"))
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))  # code is taken as it is
    assert "<" not in prose.replace("\\<", "")
    (line,) = [line for line in text.splitlines() if line.startswith("| a")]
    assert len(re.findall(r"(?<!\\)\|", line)) == len(model.build([run])["table"]["head"]) + 1


def test_spreadsheets_are_given_no_formulas(tmp_path: Path) -> None:
    told = model.build([make_run(tmp_path / "run", strategy="=HYPERLINK(1)")])
    (row,) = csv.DictReader(io.StringIO(tables.runs_csv(told)))
    assert row["strategy"] == "'=HYPERLINK(1)"
    assert float(row["final accuracy"]) == 0.9


@pytest.mark.parametrize(
    "name",
    ["=cmd|' /C calc'!A0", "+1", "-1", "@SUM(1)", " =1", "\t=1", "\n=1", "\uff1d1", '"=1', "a,b\n=c"],
)
def test_no_cell_begins_a_formula_whatever_a_run_is_called(name: str, tmp_path: Path) -> None:
    """In either table, in the names of figures as well; what was asked for is still there."""
    told = model.build([make_run(tmp_path / "run", strategy=name)])
    for run in told["runs"]:
        run["metrics"], run["strategy"] = {name: 1.0}, name
        run["scores"]["metrics"] = {name: run["scores"]["metrics"]["accuracy"]}
    for text in (tables.runs_csv(told), tables.curves_csv(told)):
        rows = [*csv.reader(io.StringIO(text))]
        assert len({len(row) for row in rows}) == 1
        strange = [
            c for row in rows for c in row if c.lstrip().startswith(("=", "+", "@", "\uff1d")) or c[:1].isspace()
        ]
        assert not strange
        assert any(c in (name, f"'{name}") for row in rows for c in row)
        assert not any(c.startswith("-") and not c[1:2].isdigit() for row in rows for c in row)


@pytest.mark.parametrize(
    "name",
    ["a|b", "`x`", "<img src=x onerror=alert(1)>", "[x](http://evil)", "http://evil.org", "www.evil.org", "~~x~~",
     "a\n# b", "# x", "- x", "1. x", "===", "x\n===", "$x$", "&lt;b&gt;", "a@b.org", "\\|", "![x](y)"],
)  # fmt: skip
def test_a_name_is_shown_as_it_is_by_markdown(name: str, tmp_path: Path) -> None:
    """Judged by a parser of Markdown: plain text, in a paragraph, in a list, in a table and below it."""
    visible = re.sub("\n", " ", name)
    assert inline(escaping.markdown(name)) == {visible}
    told = model.build(
        [make_run(tmp_path / "a", strategy=name), make_run(tmp_path / "b")], target=Target("accuracy", 0.5)
    )
    told["verdict"] |= {"baseline": name, "sentence": name, "doubts": [name]}
    text = tables.markdown(told | {"title": name, "why": [name], "commands": []})
    assert "http://" not in text
    assert "www.evil" not in text
    tokens = MarkdownIt().enable(["table", "strikethrough"]).parse(text)
    assert {t.type for t in tokens if t.type.endswith("_open")} <= {
        f"{kind}_open" for kind in ("heading", "paragraph", "table", "thead", "tbody", "tr", "th", "td", "bullet_list",
                                    "list_item")
    }  # fmt: skip
    kinds = {child.type for token in tokens for child in token.children or ()}
    assert kinds <= {"text", "strong_open", "strong_close", "text_special", "softbreak"}
    cells = [sum(t.type in ("td_open", "th_open") for t in row) for row in rows_of(tokens)]
    assert sorted({*cells}) == sorted({len(told["table"]["head"]), 2})  # the figures, and the settings


def inline(text: str) -> set[str]:
    """What a reader of Markdown sees, paragraph by paragraph."""
    tokens = MarkdownIt().enable(["table", "strikethrough"]).parse(text)
    assert {token.type for token in tokens} == {"paragraph_open", "inline", "paragraph_close"}
    children = [token.children or [] for token in tokens if token.type == "inline"]
    assert {child.type for some in children for child in some} <= {"text", "text_special"}
    return {"".join(child.content for child in some) for some in children}


def rows_of(tokens: list[Token]) -> Iterator[list[Token]]:
    starts = [i for i, token in enumerate(tokens) if token.type == "tr_open"]
    stops = [i for i, token in enumerate(tokens) if token.type == "tr_close"]
    return (tokens[start:stop] for start, stop in zip(starts, stops, strict=True))


def test_curves_for_a_spreadsheet(race: Path) -> None:
    rows = [*csv.DictReader(io.StringIO(tables.curves_csv(model.build([race]))))]
    scores = [row for row in rows if row["figure"] == "test accuracy" and row["run"].endswith("allreduce/seed0")]
    assert [float(row["value"]) for row in scores] == pytest.approx([0.09 * i for i in range(11)])
    assert float(scores[-1]["bytes"]) == 2 * 20 * 400


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
