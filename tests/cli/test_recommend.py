# SPDX-License-Identifier: Apache-2.0
"""Advice: the whole catalogue takes part, the slow ones leave early, and what is said follows from the figures."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Orchestra, story
from tests.cli.test_table import row
from typer.testing import CliRunner

from orchestra.cli import assumed, compare, halving, recommend, sources
from orchestra.cli.app import app
from orchestra.cli.candidates import Setting
from orchestra.cli.halving import SuccessiveHalving
from orchestra.cli.options import Options
from orchestra.cli.race import options_for
from orchestra.cli.recommend import Advice, _scaled
from orchestra.cli.table import StrategyRow
from orchestra.cli.tuning import Tuning
from orchestra.clusters.simulated import Simulated
from orchestra.engine import expression
from orchestra.engine.compute_times import ConstantTime
from orchestra.errors import ConfigError, Problem
from orchestra.report import escaping, model
from orchestra.strategies.catalogue import ROWS, Hogwild


def test_every_strategy_but_those_of_one_memory_is_tried() -> None:
    for entry in ROWS:
        tried = [expression.parse(text) for text in entry.search_space]
        assert all(type(strategy) is entry.strategy for strategy in tried)
        assert tried or entry.strategy is Hogwild, entry.name


def ask(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["recommend", "digits", *words])
    return found.exit_code, found.output


@pytest.mark.parametrize(
    ("named", "tried"),
    [
        (("-s", "localsgd,localsgd(tau=4)"), {"localsgd": {4, 16, 64}, "localsgd(tau=4)": {4}}),
        ((), {"localsgd(tau=4)": {4}, "localsgd(tau=16)": {16}}),  # the catalogue itself has several values
    ],
)
def test_an_option_that_is_not_given_is_tuned(
    named: tuple[str, ...], tried: dict[str, set[int]], orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, set[Any]] = {}

    def run(tuning: Tuning) -> None:
        for name in tuning.race.strategies:
            found[name] = {getattr(expression.parse(s.strategy), "tau", None) for s in tuning._settings(name)}
        raise ConfigError([Problem("tuning", None, "is looked at only")])

    monkeypatch.setattr(Tuning, "run", run)
    assert orchestra("recommend", "digits", "--network", "10mbit", *named).code == 2
    assert [folder.name[17:] for folder in Path("runs").iterdir()] == ["-recommend-digits"]
    assert {name: found.get(expression.show(expression.parse(name))) for name in tried} == tried


@pytest.mark.parametrize(("candidates", "seeds"), [(1, 4), (3, 4), (4, 1), (7, 2), (30, 4)])
def test_successive_halving_makes_the_predicted_number_of_runs(candidates: int, seeds: int, tmp_path: Path) -> None:
    """The time that tuning may take follows from that number."""
    names = sorted({text for entry in ROWS for text in entry.search_space})[:candidates]
    race = compare.prepare(sources.find("digits"), names, Options(workers=4, sim=True), seeds, None, tmp_path)
    ladder, runs = SuccessiveHalving(race, seeds, quiet=True), Counter[tuple[str, int]]()

    def counted(strategy: str, seed: int, place: str) -> None:
        runs[strategy, seed] += 1
        ladder.outcomes[strategy].append(row(strategy, 1.0).outcomes[0])

    ladder._run = counted  # type: ignore[method-assign]
    ladder.climb()
    assert {*runs.values()} == {1}
    assert sum(runs.values()) + (4 * seeds if candidates > 1 else 0) == halving.runs(len(names), seeds, race)
    assert len(ladder.left) == min(3, candidates)
    assert {seed for name, seed in runs if name in ladder.left} == {*range(seeds)}


@pytest.mark.timeout(120)
def test_with_a_slow_network_and_a_straggler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 2 Mbit/s a message costs more than a hundred steps: no strategy that sends every step can win."""
    runs = Counter[str]()
    real = SuccessiveHalving._run

    def counted(ladder: SuccessiveHalving, strategy: str, seed: int, place: str) -> None:
        runs[strategy] += 1
        real(ladder, strategy, seed, place)

    monkeypatch.setattr(SuccessiveHalving, "_run", counted)
    names = "allreduce, ps, localsgd(tau=4), localsgd(tau=16), localsgd(tau=64)"
    code, output = ask(
        "--network", "2mbit", "-n", "2", "--straggler", "1x2", "-s", names, "--seeds", "2", "--epochs", "2",
        "--target", "accuracy=0.6", "--out", str(tmp_path / "out"), "--json", "-q", "--no-tune",
    )  # fmt: skip
    record = json.loads(output.splitlines()[-1])
    assert code == 0
    assert record["recommended"].startswith("localsgd(tau=")
    assert max(runs.values()) == 2
    assert min(runs.values()) == 1  # not all are worth another seed
    advice = " ".join(record["advice"])
    assert f"Take {record['recommended']}" in advice
    assert "times fewer bytes than " in advice
    assert "With half the bandwidth, localsgd(tau=64)" in advice
    saved = json.loads((tmp_path / "out/table.json").read_text())
    assert saved == record
    assert saved["rows"][0]["strategy"] == record["recommended"]
    assert [entry["runs"] for entry in saved["rows"]] == [2, 2, 2, 1, 1]


@pytest.mark.timeout(120)
def test_all_have_the_same_ends_and_who_is_slow_is_given_up(orchestra: Orchestra) -> None:
    """Who comes after the first success may take three times as long, and no more epochs than those before."""
    said = orchestra(
        "recommend", "digits", "--network", "2mbit", "-n", "2", "-s", "localsgd(tau=64),localsgd(tau=16),allreduce",
        "--seeds", "1", "--target", "accuracy=0.6", "--out", "out", "--no-tune",
    )  # fmt: skip
    assert said.code == 0
    budgets = {path.parts[1]: json.loads(path.read_text())["budget"] for path in Path("out").rglob("config.json")}
    assert {name: budget[0] for name, budget in budgets.items()} == dict.fromkeys(budgets, "epochs=20")
    assert "· 1 seed · until the target, at most 20 epochs ·" in said.out
    assert "total time: until the target, or until it was given up." in " ".join(said.out.split())
    assert "seconds=" not in str(budgets["localsgd-tau-64"])
    assert "allreduce · seed 0: given up after 3 x the best; accuracy 0.6 not reached" in said.err
    assert "allreduce was given up after 3 x the best, accuracy 0." in said.out
    assert json.loads(Path("out/table.json").read_text())["given_up"] == {"allreduce": [0]}
    assert "it is tied with localsgd(tau=16), and it sends the fewest bytes" in " ".join(said.out.split())
    assert "virtual s (one seed)." in " ".join(said.out.split())
    # How long others were waited for is no condition, and what was run on another network is not there.
    told = model.build([Path("out")])
    assert told["conditions"] == [""]
    assert {run["strategy"] for run in told["runs"]} == {"localsgd(tau=64)", "localsgd(tau=16)", "allreduce"}
    assert "next: open out/report.html" in said.err
    assert said.err.endswith("\n  or  orchestra run digits -s 'localsgd(tau=64)' -n 2\n")
    # The verdict stands alone; how long a step takes on this machine is printed, and not saved.
    assert re.search(r"\n\nTake localsgd\(tau=64\): .*\n\nIn these runs", said.out)
    assumption = "The simulation assumes 50 ms for a step of each worker, since no --compute-time was given."
    assert f"{assumption} With other times another strategy may be first. Measure yours" in said.out
    here = re.search(r"on this machine a step takes about (\S+) ms: --compute-time constant:(\S+) ", said.err)
    assert here is not None
    assert float(here[1]) == pytest.approx(1e3 * float(here[2]))
    assert assumption in Path("out/table.md").read_text().replace("\\", "")
    assert "on this machine a step" not in "".join(Path("out", name).read_text() for name in ("table.md", "table.json"))
    page, record = story("out/report.html"), json.loads(Path("out/table.json").read_text())
    assert [page["verdict"]["sentence"], *page["why"]] == record["advice"]
    assert page["fairness"] == record["fairness"]
    assert page["fairness"][-1].startswith("untuned (--no-tune): the learning rate is the recipe's own for all")
    assert "fairness: same initial parameters" in said.out
    assert "untuned (--no-tune)" in Path("out/table.md").read_text()


@pytest.mark.timeout(120)
@pytest.mark.nightly
def test_the_page_has_the_last_rung_with_the_rates_that_were_tuned(orchestra: Orchestra) -> None:
    said = orchestra(
        "recommend", "digits", "--network", "2mbit", "-n", "2", "-s", "localsgd(tau=64),localsgd(tau=16),ps,allreduce",
        "--seeds", "1", "--target", "accuracy=0.6", "--epochs", "4", "--out", "out", "--json",
    )  # fmt: skip
    assert said.code == 0, said.err
    page, first = story("out/report.html"), said.json["recommended"]
    assert page["verdict"]["sentence"] == said.json["advice"][0]
    last = {strategy["name"] for strategy in page["strategies"]}
    assert len(last) == 3
    assert page["why"][-1].startswith("Left out earlier: ")
    rates = page["fairness"][-1]
    chosen = json.loads(Path("out/tuning.json").read_text())["chosen"]
    assert re.match(r"tuned in simulation( \(.*\))?, each the best of ", rates)  # with a note: these tries are short
    assert f"{first} lr {chosen[first]['lr']:.3g}" in rates
    assert {name for name in chosen if f"{name} lr " in rates} == last


def advised(out: Path, monkeypatch: pytest.MonkeyPatch, left: list[str], *rows: StrategyRow) -> Advice:
    """What would be said after such runs, with so many left in the end."""
    monkeypatch.setattr(recommend, "_elsewhere", lambda ladder, rows: [])
    names = [entry.strategy for entry in rows]
    race = compare.prepare(sources.find("digits"), names, Options(workers=2, sim=True), 4, "accuracy=0.9", out)
    ladder = SuccessiveHalving(race, 4, quiet=True)
    ladder.outcomes = {entry.strategy: [*entry.outcomes] for entry in rows}
    ladder.left = left
    return Advice(ladder, {})


def test_who_left_with_one_good_seed_is_not_ranked_before_those_who_stayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (
        row("allreduce", 2.5),
        row("slowmo", 4.0, None, 4.2, 4.3),
        row("ps", None),
        row("localsgd", 2.0, 3.0, 3.1, 3.2),
    )
    advice = advised(tmp_path, monkeypatch, ["slowmo", "localsgd"], *rows)
    advice.save()
    record = json.loads((tmp_path / "table.json").read_text())
    assert record["recommended"] == "localsgd"
    assert [entry["strategy"] for entry in record["rows"]] == ["localsgd", "slowmo", "allreduce", "ps"]
    table = (tmp_path / "table.md").read_text()
    assert [line.split()[1] for line in table.splitlines() if line.startswith("| ")][2:] == ["localsgd", "slowmo"]
    assert escaping.markdown(" ".join(record["advice"])) in table
    assert "allreduce reached" not in table
    assert "- allreduce: 2.5 s (1 seed)\n- ps: did not reach the target, accuracy 0.8 (1 seed)" in table
    assert "allreduce took 1.25 times as long (one pair of runs: too little for an interval)" in table


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (
            (4.0, 4.2, 4.0, 4.04),
            "slowmo is next: it took 2.00 times as long (95 % interval 1.90 to 2.10, 4 pairs of runs",
        ),
        ((2.6, 1.8, 2.5, 2.2), "4 pairs of runs with equal seeds, which may be chance)."),
        (
            (2.6, 1.8, 2.1, 2.1),
            "it is tied with slowmo, and it sends the fewest bytes between all nodes, 1.0 MB. They reached accuracy "
            "≥ 0.9 after 2.01 and 2.1 s, medians of 4 seeds.",
        ),
        ((2.6, 1.8, None, 2.1), "slowmo did not reach the target in 1 of 4 runs, accuracy 0.8."),
    ],
)
def test_the_advice_says_how_sure_it_is(
    second: tuple[float | None, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (row("localsgd", 2.0, 2.1, 2.0, 2.02, sent=5e5), row("slowmo", *second))
    words = " ".join(advised(tmp_path, monkeypatch, ["localsgd", "slowmo"], *rows).words())
    assert words.startswith("Take localsgd:")
    assert said in words
    assert ("tied" in words) == ("tied" in said)
    assert "next" not in words or "tied" not in words


def test_of_a_tie_the_cheaper_is_recommended_and_the_rule_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (
        row("localsgd", 2.0, 2.1, 2.0, 2.02),
        row("slowmo", 2.6, 1.8, 2.1, 2.1, sent=1e5),
        row("ps", 4.0, 4.0, 4.0, 4.0),
    )
    advice = advised(tmp_path, monkeypatch, ["localsgd", "slowmo", "ps"], *rows)
    words = " ".join(advice.words())
    assert words.startswith("Take slowmo: it is tied with localsgd, and it sends the fewest bytes between all nodes")
    assert advice.record()["recommended"] == "slowmo"
    assert advice.record()["tied"] == ["slowmo", "localsgd"]
    assert "ps is next: it took 1." in words


def test_who_is_given_up_in_the_last_rung_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = row("slowmo", 2.6, None)
    cut = slow.outcomes[1]
    assert cut.facts is not None
    cut = replace(cut, facts=replace(cut.facts, stopped_by="seconds"))
    slow = replace(slow, outcomes=(slow.outcomes[0], cut))
    advice = advised(tmp_path, monkeypatch, ["localsgd", "slowmo"], row("localsgd", 2.0, 2.1), slow)
    assert "slowmo was given up after 3 x the best in 1 of 2 runs, accuracy 0.8." in advice.words()
    assert advice.record()["given_up"] == {"slowmo": [1]}


def test_where_nothing_is_reached_the_nearest_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (row("localsgd", None, None), row("slowmo", 2.0, None))
    advice = advised(tmp_path, monkeypatch, ["localsgd", "slowmo"], *rows)
    assert not advice.reached
    assert "Nothing reached accuracy ≥ 0.9 in every run; slowmo did in 1 of 2." in advice.words()[0]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (Setting("ps", own=0.05, factor=1.5), "-s ps -n 2 --batch 8 --lr 0.075 --epochs 3"),
        (Setting("ps", own=0.05, factor=2.0, momentum=0.0), "-s ps -n 2 --batch 8 --lr 0.1 --momentum 0 --epochs 3"),
        (Setting("ps", factor=3.0), "-s ps -n 2 --batch 8 --lr-factor 3 --epochs 3"),
        (None, "-s ps -n 2 --batch 8 --epochs 3"),
    ],
)
def test_the_command_trains_as_recommended(
    setting: Setting | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    advice = advised(tmp_path, monkeypatch, ["ps"], row("ps", 2.0))
    race = advice.ladder.race
    shared = replace(race.shared, batch=8, epochs=3.0, straggler="1x5", network="1gbit,1ms", target="accuracy=0.9")
    advice.ladder.race = replace(race, shared=shared, settings={"ps": setting} if setting else {})
    assert advice.command() == f"orchestra run digits {said}"


def test_what_is_assumed_is_said_unless_it_is_given(tmp_path: Path) -> None:
    race = compare.prepare(sources.find("digits"), ["ps"], Options(workers=2, sim=True), 1, "accuracy=0.9", tmp_path)
    assert "assumes 50 ms for a step" in race.table({}).assumes
    assert "orchestra probe digits" in assumed.of(race)
    for shared in (replace(race.shared, compute_time="constant:0.05"), replace(race.shared, sim=None)):
        assert assumed.of(replace(race, shared=shared)) == ""
    refused = replace(race.shared, precision="float12")
    assumed.tell_measured(replace(race, shared=refused))  # the comparison has ended: this raises nothing
    own = replace(race.recipe, more={"cluster": Simulated(compute_time=ConstantTime(0.1))})
    assert assumed.of(replace(race, recipe=own)) == ""


def test_the_stated_error_of_simulations_is_the_measured_one() -> None:
    results = (Path(__file__).parents[2] / "benchmarks" / "results" / "lab_prediction-2-cores.md").read_text()
    (line,) = [line for line in results.splitlines() if line.startswith("| besides, links of the nominal rate")]
    assert [cell.strip() for cell in line.split("|")[2:4]] == [
        f"{recommend._ERROR:.1%}",
        f"{recommend._ERROR_OF_A_TENTH:.1%}",
    ]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("1gbit", "-s", "localsgd(tau=0)"), "tau"),
        (("1parsec",), "parsec"),
        (("1gbit racks:4xz",), "'racks:4xz' is not racks:HOSTS"),  # the latency that is added belongs to the rate
        (("1gbit", "--seeds", "0"), "seeds"),
        (("1gbit", "--straggler", "5"), "such as 1x5"),
        (("1gbit", "--straggler", "9x5"), "there are 4 workers"),
        (("1gbit", "--target", "accuracy=95"), "an accuracy between 0 and 1"),
    ],
)
def test_what_cannot_be_run_is_said(words: tuple[str, ...], complaint: str) -> None:
    found = CliRunner().invoke(app, ["recommend", "digits", "--network", *words])
    assert isinstance(found.exception, ConfigError)
    assert complaint in str(found.exception)


@pytest.mark.parametrize(("rate", "half"), [("50mbit", "25mbit"), ("1.5gbit", "0.75gbit")])
def test_rates_are_scaled(rate: str, half: str) -> None:
    assert _scaled(rate, 0.5) == half


def test_solo_runs_on_a_machine_that_is_slow_only_if_all_are() -> None:
    shared = Options(workers=4, straggler="1x5")
    assert options_for("solo", shared).straggler == "1x1"
    assert options_for("allreduce", shared).straggler == "1x5"
    assert options_for("solo", Options(workers=4, straggler="4x5")).straggler == "1x5"
    assert options_for("solo", Options(workers=4, compute_time="1 slow:3x5")).compute_time == "1 slow:1x1"
    assert options_for("solo", Options(workers=4, compute_time="1 slow:4x5")).compute_time == "1 slow:1x5"
