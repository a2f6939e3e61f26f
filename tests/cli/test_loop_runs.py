# SPDX-License-Identifier: Apache-2.0
"""`compare` and `recommend` of a script with a training loop of its own, under `orchestra.prepare`."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Orchestra, story
from tests.waiting import wait_until

from orchestra.cli import goals, loop_runs, repeat, sources
from orchestra.cli.candidates import Setting
from orchestra.cli.compare import prepare
from orchestra.cli.options import Options
from orchestra.cli.race import Race
from orchestra.cli.table import Outcome
from orchestra.cli.tuning import Tuning
from orchestra.cli.tuning_results import TuningResult
from orchestra.errors import ConfigError, Problem
from orchestra.report import model
from orchestra.runs.events import Scored, encode
from orchestra.runs.facts import scores_of

SCRIPT = """
import sys, torch, orchestra
import torch.nn.functional as F
torch.manual_seed(0)
x = torch.randn(192, 4)
y = x[:, :3].argmax(1)
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
model, optimizer, loader = orchestra.prepare(model, optimizer, loader, strategy="localsgd(tau=2)")
print("a line that is of no use to a comparison")
for _ in range(3):
    SCORE
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step(LOSS)
optimizer.finish()
SCORE
"""

SCORE = "optimizer.orchestra.score(accuracy=(model(x).argmax(1) == y).float().mean(), epoch=_)"

ONCE = ("--seeds", "1", "--no-tune")
NINTHS = [1 / 9, 1 / 3, 1, 3, 9]


def write(folder: Path, *, score: str = SCORE, loss: str = "") -> str:
    text = SCRIPT.replace("SCORE\n    for", "SCORE_IN\n    for").replace(
        "SCORE_IN", f"model.eval(); {score}; model.train()"
    )
    path = folder / "loop.py"
    path.write_text(text.replace("SCORE", score).replace("LOSS", loss))
    return str(path)


@pytest.mark.timeout(240)
@pytest.mark.nightly
def test_compare(orchestra: Orchestra, tmp_path: Path) -> None:
    """Every strategy takes the place of the script's own, in processes of its own; the scores are the loop's."""
    said = orchestra("compare", write(tmp_path), "-s", "allreduce,ps", *ONCE, "--out", "c")
    assert said.code == 0, said.err
    assert "a line that is of no use" not in said.out + said.err
    assert "[first run] allreduce · seed 1: " in said.err
    assert "as none was given" in said.err
    assert "loop · target test accuracy ≥ " in said.out
    assert "same initial parameters" in " ".join(said.out.split())
    record = json.loads((tmp_path / "c" / "table.json").read_text())
    assert {row["strategy"]: (row["nodes"], row["runs"]) for row in record["rows"]} == {
        "allreduce": (2, 1),
        "ps": (3, 1),
    }
    for slug in ("allreduce", "ps"):
        run = tmp_path / "c" / slug / "seed0"
        assert json.loads((run / "config.json").read_text())["strategy"] == slug
        assert [scored.metrics["epoch"] for scored in scores_of(run)] == [0, 1, 2, 2]
    assert (tmp_path / "c" / "report.html").exists()


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_recommend_by_the_loss_that_the_loop_tells(orchestra: Orchestra, tmp_path: Path) -> None:
    path = write(tmp_path, score="pass", loss="loss=loss")
    said = orchestra("recommend", path, "-s", "allreduce,localsgd", *ONCE, "--out", "r", "--json")
    assert said.code == 0, said.err
    assert said.json["target"]["metric"] == "training_loss"
    assert said.json["recommended"] in ("allreduce", "localsgd")
    words = " ".join(said.json["advice"])
    assert "Measured on this machine" in words
    assert "virtual" not in words
    losses = [scored.metrics["training_loss"] for scored in scores_of(tmp_path / "r" / "localsgd" / "seed0")]
    assert 30 <= len(losses) <= 40  # of 36 steps
    assert losses[-1] < losses[0] / 2


@pytest.mark.timeout(120)
def test_without_a_score_the_line_to_add_is_told(orchestra: Orchestra, tmp_path: Path) -> None:
    said = orchestra("compare", write(tmp_path, score="pass"), "-s", "allreduce", *ONCE)
    assert said.code == 2
    assert "call optimizer.orchestra.score(accuracy=accuracy) where it evaluates" in said.err
    assert not [*(tmp_path / "runs").iterdir()]


def test_of_a_command_that_is_refused_only_what_others_left_stays(tmp_path: Path) -> None:
    def refused(out: Path, more: str) -> None:
        with repeat.kept(["compare", "digits"], out):
            (out / "ps").mkdir()
            if more:
                (out / more).write_text("{}")
            raise ConfigError([Problem("script", "loop.py", "has no score")])

    (tmp_path / "old").mkdir()
    for name, more, stays in (("new", "", False), ("old", "", True), ("begun", "tuning.json", True)):
        with pytest.raises(ConfigError):
            refused(tmp_path / name, more)
        assert (tmp_path / name).exists() is stays
        assert not repeat.is_taken(tmp_path / name)


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_a_score_that_the_loop_does_not_have_is_refused(orchestra: Orchestra, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()  # an empty folder is as good as none
    words = ("compare", write(tmp_path), "-s", "allreduce", *ONCE, "--out", "c")
    said = orchestra(*words, "--target", "recall=0.5")
    assert said.code == 2
    assert "is no score of this loop" in said.err


def test_a_loop_is_not_simulated(orchestra: Orchestra, tmp_path: Path) -> None:
    path = write(tmp_path)
    for words in (
        ("compare", path, "--sim"), ("recommend", path, "--network", "1gbit"), ("sim", path),
        ("sweep", path, "--sim", "--grid", "bandwidth=1mbit,1gbit"),
    ):  # fmt: skip
        said = orchestra(*words)
        assert said.code == 2, words
        assert "real time" in said.err
    said = orchestra("compare", path, "--epochs", "3", "--lab", "10mbit,1ms")
    assert "  epochs = 3.0    is decided by the script" in said.err
    assert "  lab = '10mbit,1ms'" in said.err
    assert orchestra("compare", path, "-s", "hogwild").code == 2
    said = orchestra("compare", path, "--lrs", "0.1,0.2")
    assert said.code == 2
    assert "sets its learning rate itself: tuning tries factors on it" in said.err


@pytest.mark.timeout(120)
@pytest.mark.nightly
def test_a_factor_reaches_the_steps_of_a_contestant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = sources.find(write(tmp_path))
    race = prepare(source, ["allreduce"], Options(workers=2, lr_factor=0.25), 1, "accuracy=0.5", tmp_path / "c")
    outcome = race.run_one("allreduce", 0, "", quiet=True, first=True)
    config = json.loads((outcome.run / "config.json").read_text())
    assert (config["lr_factor"], config["seed"]) == (0.25, 0)
    events = (outcome.run / "events-0.jsonl").read_text().splitlines()
    assert {json.loads(line)["lr"] for line in events if '"stepped"' in line} == {0.125}
    assert outcome.seconds is not None


@pytest.mark.parametrize(
    ("seeds", "factors"), [(1, []), (2, [1 / 3, 1]), (3, [1 / 3, 1, 3]), (4, [1 / 3, 1, 3]), (9, NINTHS)]
)
def test_a_loop_is_tuned_by_whole_runs(seeds: int, factors: list[float], tmp_path: Path) -> None:
    source = sources.find(write(tmp_path))
    race = prepare(source, ["allreduce"], Options(workers=2), seeds, "accuracy=0.5", tmp_path / "c")
    tuned, tried = Tuning(race, seeds, quiet=True), list[float]()

    def one(setting: Setting, epochs: float, seed: int, *, whole: bool = False) -> TuningResult:
        assert not whole
        assert seed == seeds  # one that is not raced with
        assert (tuned._race_of(setting, epochs).options_of("allreduce", seed).lr_factor or 1) == setting.factor
        tried.append(setting.factor)
        return TuningResult(seconds=setting.factor, curve=((1.0, 0.6),))

    tuned._one = one  # type: ignore[method-assign]
    found = tuned.run()
    assert tried == pytest.approx(factors)
    assert len(tried) <= seeds
    assert {str(setting) for setting in found.settings.values()} == ({f"lr x {min(factors):.3g}"} if factors else set())


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_a_loop_is_tuned_and_compared(orchestra: Orchestra, tmp_path: Path) -> None:
    """The script's own rate is far too small: the largest factor is the best, and there may be better ones."""
    path = Path(write(tmp_path))
    path.write_text(path.read_text().replace("lr=0.5", "lr=0.02"))
    words = ("compare", str(path), "-s", "allreduce", "--seeds", "3", "--target", "accuracy=0.99", "--out", "c")
    said = orchestra(*words)
    assert said.code == 0, said.err
    before = (
        "tuning 1 strategy, 3 tries each, on real processes, seed 3: 3 whole runs of the script, and 3 in the race."
    )
    lines = said.err.splitlines()
    assert any(line.startswith(before) for line in lines)
    (took,) = (line for line in lines if line.startswith("a run took "))
    about = r"about \d+ (s|min)"
    assert re.match(rf"a run took {about}: tuning takes {about}, the race {about}\.", took)
    assert "tuned allreduce: lr x 3, at the edge of the rates tried" in lines
    rates = story("c/report.html")["fairness"][-1]
    assert rates.startswith("tuned on real processes, each the best of 3 tries")
    assert rates.endswith("allreduce lr x 3 (at the edge of the rates tried)")
    configs = [json.loads(path.read_text()) for path in Path("c").rglob("config.json")]
    assert [config["lr_factor"] for config in configs] == [3.0] * 3
    assert sorted(config["seed"] for config in configs) == [0, 1, 2]


def test_how_long_it_takes_is_said_before_where_a_first_run_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    race = prepare(sources.find(write(tmp_path)), ["allreduce", "ps"], Options(workers=2), 3, None, tmp_path / "c")

    def first(race: Race, strategy: str, seed: int, *rest: Any, **more: Any) -> Outcome:
        run = race.out / "run"
        run.mkdir(parents=True)
        scores = (Scored(float(i), i, i, i, {"accuracy": i / 4}) for i in range(4))
        (run / "scores.jsonl").write_text("".join(map(encode, scores)))
        clock[0] += 20
        return Outcome(seed, run)

    clock = [100.0]
    monkeypatch.setattr(Race, "run_one", first)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    race = goals.settle(race, quiet=True)
    tuned = Tuning(race, 3)
    tuned._one = lambda setting, *_, **of: TuningResult(curve=((1.0, setting.factor),))  # type: ignore
    assert {setting.factor for setting in tuned.run().settings.values()} == {3.0}
    said = capfd.readouterr().err
    assert "6 whole runs of the script, and 6 in the race; tuning takes about 2 min, the race about 2 min." in said


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_a_contestant_that_fails_is_told(orchestra: Orchestra, tmp_path: Path) -> None:
    path = Path(write(tmp_path))
    path.write_text(path.read_text().replace("optimizer.finish()", "assert not repr(optimizer).count('slowmo'), 'no'"))
    said = orchestra("compare", str(path), "-s", "slowmo", *ONCE, "--target", "accuracy=0.5", "--out", "c")
    assert said.code == 1
    assert "failed: AssertionError: no" in said.out


@pytest.mark.timeout(240)
@pytest.mark.nightly
def test_a_signal_ends_the_whole_comparison(tmp_path: Path) -> None:
    path = Path(write(tmp_path))
    path.write_text(path.read_text().replace("range(3)", "range(10**6)"))
    command = [sys.executable, "-m", "orchestra", "compare", str(path), "-s", "allreduce,localsgd", "--out", "c"]
    command += ["--target", "accuracy=0.5", *ONCE]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    scores = tmp_path / "c" / "allreduce" / "seed0" / "scores.jsonl"
    try:
        wait_until(scores.exists, 120)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "stopped by a signal while a strategy ran" in err
    assert scores.exists()
    assert not (tmp_path / "c" / "localsgd").exists()


def test_what_a_loop_can_never_have() -> None:
    assert [problem.where for problem in loop_runs.misfits(["hogwild", "allreduce", "nothing"])] == ["strategy"]


def test_how_a_target_was_found_and_how_long_the_race_takes_is_told(tmp_path: Path, orchestra: Orchestra) -> None:
    script = """
import torch, orchestra
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = orchestra.prepare(model, optimizer)
for step in range(6):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.orchestra.score(accuracy=0.1 + 0.1 * step)
optimizer.finish()
"""
    (tmp_path / "scored.py").write_text(script)
    said = orchestra("compare", str(tmp_path / "scored.py"), "-s", "allreduce", "--seeds", "1", "--out", "found")
    assert said.code == 0, said.err
    how = (
        "target accuracy ≥ 0.55, as none was given: 90 % of the way from the first score, 0.1, to the best, 0.6, of a "
        "first run of allreduce with seed 1"
    )
    assert how in said.err
    first = r"\[first run\] allreduce · seed 1: about \d+ s, of which it trained 0\.\d+ s: the rest starts "
    assert re.search(first, said.err)
    assert how in json.loads(Path("found/table.json").read_text())["fairness"]
    assert how in model.build([Path("found")])["fairness"]  # of the page
    assert "--seeds 2 or more allow for it. The race takes about " in said.err
