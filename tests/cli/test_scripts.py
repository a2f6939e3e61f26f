# SPDX-License-Identifier: Apache-2.0
"""`compare`, `sweep`, `sim` and `recommend` of a script that calls `train`, as its user wrote it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import Orchestra
from torch.utils.data import IterableDataset

from orchestra import Local, Simulated
from orchestra.cli import goals, in_lab, scripts, sources
from orchestra.cli.compare import prepare
from orchestra.cli.loop_runs import TRAINING_LOSS
from orchestra.cli.options import Options
from orchestra.engine import overrides
from orchestra.engine.spec import TrainArguments
from orchestra.errors import ClusterError, ConfigError
from orchestra.model.adjusted_optimizer import Adjusted
from orchestra.recipes.recipe import Recipe
from orchestra.runs.budget import Epochs, Samples, Seconds, Steps, Target

SCRIPT = """
import sys
import torch
import torch.nn.functional as F
import orchestra

BEFORE

x = torch.randn(256, 4, generator=torch.Generator().manual_seed(1))
y = x[:, :3].argmax(1)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x)

def accuracy(model, data):
    return (model(data[0]).argmax(1) == data[1]).float().mean().item()

if __name__ == "__main__":
    print("arguments", sys.argv[1:])
    try:
        result = orchestra.train(
            model=Net, data=lambda: (x, y), loss=F.cross_entropy, batch=16, clip=5.0,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5), SCORE
            cluster=orchestra.Local(workers=3), budget=orchestra.Epochs(2), strategy="slowmo", seed=7, out="mine",
        )
    except Exception:
        raise SystemExit("it was handled")
    raise SystemExit("it went on")
"""

SCORE = "evaluate=accuracy, evaluation_data=lambda: (x, y),"


def write(folder: Path, *, score: str = SCORE, before: str = "", name: str = "mine.py") -> str:
    path = folder / name
    path.write_text(SCRIPT.replace("SCORE", score).replace("BEFORE", before))
    return str(path)


def asked(**changes: Any) -> TrainArguments:
    """The arguments of a call of `train`, as it would begin with them."""
    from orchestra import train

    plain: dict[str, Any] = {
        "model": lambda: torch.nn.Linear(4, 3), "data": lambda: (torch.zeros(100, 4), torch.zeros(100).long()),
        "loss": torch.nn.functional.cross_entropy, "optimizer": torch.optim.SGD, "batch": 5,
        "cluster": Local(workers=4),
    }  # fmt: skip
    with overrides.using({}, captures=True), pytest.raises(overrides.Reached) as reached:
        train(**plain | changes)
    request = reached.value.arguments
    assert isinstance(request, TrainArguments)
    return request


ONCE = ("--seeds", "1", "--no-tune")


def recipe(**changes: Any) -> Recipe:
    return scripts.as_recipe("mine", asked(**changes))


@pytest.mark.timeout(120)
def test_compare_on_real_processes(orchestra: Orchestra, tmp_path: Path) -> None:
    """The script runs once and no further than its call; each strategy then trains what it was called with."""
    path = write(tmp_path, before="with open('ran', 'a') as file: file.write('once ')")
    said = orchestra("compare", path, "-s", "allreduce,localsgd(tau=2)", *ONCE, "--out", "c", "--json", "--", "--flag")
    assert said.code == 0, said.err
    assert (tmp_path / "ran").read_text() == "once "
    assert "arguments ['--flag']" in said.out
    assert "it went on" not in said.err
    assert not (tmp_path / "mine").exists()
    assert said.json["workers"] == 3
    assert said.json["target"]["metric"] == "accuracy"
    assert [row["runs"] for row in said.json["rows"]] == [1, 1]
    for slug in ("allreduce", "localsgd-tau-2"):
        config = json.loads((tmp_path / "c" / slug / "seed0" / "config.json").read_text())
        assert (config["seed"], config["clip"], config["budget"], config["workers"]) == (0, 5.0, ["epochs=2.0"], 3)
        assert config["note"]["args"] == ["--flag"]
    assert not (tmp_path / "c" / "first-run").exists()


def test_compare_in_virtual_time_by_the_training_loss(orchestra: Orchestra, tmp_path: Path) -> None:
    """A script without `evaluate` is compared by the loss of the samples it trains on."""
    path = write(tmp_path, score="")
    said = orchestra("compare", path, "--sim", "-s", "allreduce,localsgd(tau=2)", *ONCE, "--out", "c")
    assert said.code == 0, said.err
    assert "mine · target training_loss ≤ " in said.out
    assert "[first run] allreduce · seed 1: " in said.err
    assert "target training_loss ≤ " in said.err
    record = json.loads((tmp_path / "c" / "table.json").read_text())
    assert all(row["reached"] == 1 for row in record["rows"])
    assert all(0 < row["final"] <= record["target"]["value"] for row in record["rows"])


def test_sweep_runs_the_script_once_and_has_one_target(orchestra: Orchestra, tmp_path: Path) -> None:
    path = write(tmp_path, before="with open('ran', 'a') as file: file.write('once ')")
    said = orchestra(
        "sweep", path, "--sim", "-s", "allreduce,localsgd(tau=2)", "--grid", "bandwidth=1mbit,1gbit", "--json"
    )
    assert said.code == 0, said.err
    assert (tmp_path / "ran").read_text() == "once "
    targets = [condition["table"]["target"]["value"] for condition in said.json["conditions"]]
    assert len(targets) == 2
    assert targets[0] == targets[1]
    assert said.err.count("[first run]") == 1


def test_sim_of_a_script(orchestra: Orchestra, tmp_path: Path) -> None:
    """`sim` runs all of the script, as `run` does."""
    path = write(tmp_path)
    said = orchestra("sim", path, "--network", "10mbit,1ms", "--lr-factor", "0.5")
    assert said.code == 1
    assert "it went on" in said.err
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert config["cluster"]["kind"] == "simulated"
    assert "'lr': 0.25" in config["optimizer"]


@pytest.mark.timeout(120)
def test_recommend_of_a_script(orchestra: Orchestra, tmp_path: Path) -> None:
    path = write(tmp_path)
    names = "allreduce,localsgd(tau=4)"
    said = orchestra("recommend", path, "--network", "1mbit", "-s", names, "--seeds", "2", "--out", "r", "--json")
    assert said.code == 0, said.err
    assert said.json["recommended"] == "localsgd(tau=4)"


def test_a_target_that_is_said_needs_no_first_run(orchestra: Orchestra, tmp_path: Path) -> None:
    path = write(tmp_path)
    said = orchestra("compare", path, "--sim", "-s", "allreduce", *ONCE, "--target", "accuracy=0.5", "--out", "c")
    assert said.code == 0, said.err
    assert "first run" not in said.err
    assert orchestra("compare", path, "--sim", "--target", "recall=0.5").code == 2


def test_several_calls_are_told(orchestra: Orchestra, tmp_path: Path) -> None:
    path = Path(write(tmp_path))
    path.write_text(path.read_text().replace('raise SystemExit("it went on")', "orchestra.train()"))
    said = orchestra("compare", str(path), "--sim", "-s", "allreduce", *ONCE, "--target", "accuracy=0.1", "--out", "c")
    assert said.code == 0, said.err
    assert "note: mine.py calls train() in 2 places: the first one reached counts." in said.err


@pytest.mark.parametrize(("text", "code", "why"), [
    ("import orchestra", 2, "neither called orchestra.train(...)"),
    ("import helper", 2, "calls orchestra.prepare in a module that it imports"),
    ("import orchestra\nraise SystemExit(3)\norchestra.train()", 3, ""),
    ("import orchestra\norchestra.train(model=1, data=1, loss=1, optimizer=1)", 2, "must be a function"),
])  # fmt: skip
def test_what_cannot_be_compared(orchestra: Orchestra, tmp_path: Path, text: str, code: int, why: str) -> None:
    (tmp_path / "helper.py").write_text(
        "import torch, orchestra\nmodel = torch.nn.Linear(1, 1)\n"
        "orchestra.prepare(model, torch.optim.SGD(model.parameters()))"
    )
    (tmp_path / "it.py").write_text(text)
    said = orchestra("compare", "it.py", "--sim", "--out", "c")
    assert said.code == code
    assert why in said.err


@pytest.mark.parametrize("command", ["compare", "run"])
def test_an_error_is_told_by_the_scripts_own_lines(orchestra: Orchestra, tmp_path: Path, command: str) -> None:
    (tmp_path / "it.py").write_text("import orchestra\norchestra.train(workers=2)")
    said = orchestra(command, "it.py", "--out", "c")
    assert said.code == 1
    lines = said.err[said.err.index("Traceback") :].splitlines()
    assert "it.py" in lines[1]
    assert "unexpected keyword argument 'workers'" in lines[-1]
    assert "runpy" not in said.err


FAILING = """
import orchestra
from orchestra import Recipe, Simulated, Steps
from orchestra.recipes.images import DIGITS as d
def data():
    raise ValueError("of the user's function")
"""


@pytest.mark.parametrize(
    "text",
    [
        "RECIPE = __import__('dataclasses').replace(d, data=data)",
        "orchestra.train(model=d.model, data=data, loss=d.loss, optimizer=d.optimizer, evaluate=d.evaluate,\n"
        "    evaluation_data=d.evaluation_data, cluster=Simulated(workers=2), budget=Steps(2))",
    ],
    ids=["recipe", "train"],
)
def test_an_error_of_a_users_function_is_told_by_its_own_lines(orchestra: Orchestra, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "runpython"  # a name that holds that of a module which runs scripts
    folder.mkdir()
    (folder / "it.py").write_text(FAILING + text)
    said = orchestra("compare", "runpython/it.py", "--sim", "--out", "c")
    assert said.code == 1
    lines = said.err[said.err.index("Traceback") :].splitlines()
    assert "it.py" in lines[1]
    assert lines[-1] == "ValueError: of the user's function"


MISFIT = """
import torch, orchestra
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(3, 1))
    def forward(self, x):
        return self.layers(x)
orchestra.train(model=Net, data=lambda: (torch.ones(8, 2), torch.ones(8, 1)), loss=torch.nn.functional.mse_loss,
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch=2)
"""


def test_a_model_that_does_not_fit_is_told_without_the_calls_of_orchestra(orchestra: Orchestra, tmp_path: Path) -> None:
    (tmp_path / "it.py").write_text(MISFIT)
    said = orchestra("run", "it.py")
    assert said.code == 1
    files = [Path(line.split('"')[1]).name for line in said.err.splitlines() if line.startswith("  File ")]
    assert files == ["it.py", "it.py", "container.py", "linear.py"]
    assert "shapes cannot be multiplied (2x2 and 3x1)" in said.err


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.zeros(4), torch.tensor(1)), (torch.ones(4), torch.tensor(2))])


@pytest.mark.parametrize(("budget", "epochs"), [
    (None, 1.0),
    (Epochs(3), 3.0),
    (Steps(10), 2.0),  # 10 steps of 4 workers with 5 of 100 samples
    (Samples(50), 0.6),  # in whole steps
    (Epochs(1) | Steps(10), 1.0),
    (Epochs(4) | Seconds(10) | Target("x", 1), 4.0),
    (Seconds(10), math.nan),
])  # fmt: skip
def test_the_samples_of_a_budget_are_for_all(budget: Any, epochs: float) -> None:
    assert recipe(budget=budget, **_scored(budget)).epochs == pytest.approx(epochs, nan_ok=True)


def _scored(budget: Any) -> dict[str, Any]:
    with_target = "Target" in repr(budget)
    return {"evaluate": lambda model, data: {"x": 0.0}, "evaluation_data": lambda: 0} if with_target else {}


def test_an_end_that_is_not_told_in_samples_is_asked_for(orchestra: Orchestra, tmp_path: Path) -> None:
    assert math.isnan(recipe(data=Stream, budget=Steps(10)).epochs)
    path = Path(write(tmp_path))
    path.write_text(path.read_text().replace("Epochs(2)", "Seconds(2)"))
    said = orchestra("compare", str(path), "--sim", "-s", "allreduce", *ONCE, "--out", "c")
    assert (said.code, "  epochs = None" in said.err) == (2, True)
    assert orchestra("compare", str(path), "--sim", "-s", "allreduce", *ONCE, "--out", "c", "--epochs", "1").code == 0


def test_the_target_of_a_script_is_that_of_its_budget() -> None:
    budget = Epochs(1) | Target("x", 0.9)
    assert recipe(budget=budget, **_scored(budget)).target == "x=0.9"
    assert recipe().target == ""


def test_the_loss_of_all_samples_or_of_the_first_of_a_stream() -> None:
    mine = recipe(data=lambda: (torch.eye(4).repeat(700, 1), torch.zeros(2800).long()))
    batches = mine.evaluation_data()
    assert sum(len(batch[-1]) for batch in batches) == math.ceil(2800 / 3)
    model = mine.model()
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(
            model(torch.cat([batch[0] for batch in batches])), torch.cat([batch[1] for batch in batches])
        )
        found = mine.evaluate(model, batches)[TRAINING_LOSS]
    assert found == pytest.approx(float(expected), rel=1e-5)
    (few,) = recipe(data=Stream).evaluation_data()
    assert few[1].tolist() == [1, 2]


def test_workers_and_network_are_the_scripts_unless_said() -> None:
    mine = recipe(cluster=Simulated(workers=5, network="10mbit,2ms", compute_time="constant:0.5"))
    found = scripts.placed(mine, Options())
    assert (found.sim, found.workers, found.network, found.compute_time) == (True, 5, "10mbit,2ms", "constant:0.5")
    assert scripts.placed(mine, Options(workers=2, network="1gbit,1ms")).given() == {
        "workers": 2, "network": "1gbit,1ms", "sim": True, "compute_time": "constant:0.5",
    }  # fmt: skip
    assert scripts.placed(recipe(), Options()).given() == {"workers": 4}
    assert scripts.placed(sources.load(sources.find("digits")), Options()).given() == {"workers": 2}


def test_in_a_laboratory_the_script_itself_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[Any] = []

    def run(what: str, chosen: Options, nodes: int, lab: str, args: Any) -> None:
        asked_for.append((what, chosen.epochs, chosen.evaluate_every, nodes, lab, args))
        raise ClusterError("no lab here")

    monkeypatch.setattr(in_lab, "run", run)
    source = sources.find(write(tmp_path), ["--flag"])
    race = prepare(source, ["ps"], Options(), 1, "accuracy=0.5", tmp_path / "c")
    outcome = replace(race, lab="10mbit,1ms").run_one("ps", 0, "", quiet=True, first=False)
    assert outcome.failed == "no lab here"
    assert asked_for == [(str(tmp_path / "mine.py"), 2.0, 0.05, 4, "10mbit,1ms", ("--flag",))]


def test_a_first_run_that_does_not_learn_finds_no_target(orchestra: Orchestra, tmp_path: Path) -> None:
    path = Path(write(tmp_path, score=""))
    path.write_text(path.read_text().replace("lr=0.5", "lr=1e5"))
    said = orchestra("compare", str(path), "--sim", "-s", "allreduce", *ONCE, "--out", "c")
    assert said.code == 2
    assert "a first run of allreduce found none" in said.err
    assert "Give one: --target" in said.err


def test_a_factor_on_every_rate() -> None:
    one, two = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def factory(parameters: Any) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": one.parameters(), "lr": 0.5}, {"params": two.parameters()}]
        return torch.optim.SGD(groups, lr=0.25)

    change = Options(lr_factor=4.0).changes()["optimizer"]
    made = change(factory)
    assert isinstance(made, Adjusted)
    assert [group["lr"] for group in made(None).param_groups] == [2.0, 1.0]
    both = Options(lr_factor=4.0, lr=0.1).changes()["optimizer"](torch.optim.SGD)
    assert both(one.parameters()).param_groups[0]["lr"] == pytest.approx(0.4)
    assert Options(lr=0.1).changes()["optimizer"](factory)(None).param_groups[0]["lr"] == 0.1
    with pytest.raises(ConfigError, match="lr-factor"):
        Options(lr_factor=0.0).changes()


def test_the_target_of_a_recipe_is_checked_with_any_evaluate() -> None:
    def number(model: torch.nn.Module, data: Any) -> float:
        assert not model.training
        return 0.5

    mine = recipe(evaluate=number, evaluation_data=lambda: 0)
    assert goals.is_open(goals.choose(mine, None))
    assert goals.choose(mine, None).metric == "number"
    assert goals.choose(mine, "number=0.9") == Target("number", 0.9)
