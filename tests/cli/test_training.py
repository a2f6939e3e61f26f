# SPDX-License-Identifier: Apache-2.0
"""Commands that train, for real and briefly."""

from __future__ import annotations

import html
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.cli.conftest import Orchestra
from tests.waiting import wait_until

SOURCE = Path(__file__).parents[2] / "src"

WORKLOAD = """
import functools, torch
from torch import nn
import neighbour

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, neighbour.CLASSES)

    def forward(self, x):
        return self.layer(x)

def data():
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(1))
    return x, x[:, :3].argmax(1)

def score(model, data):
    with torch.no_grad():
        return {"accuracy": float((model(data[0]).argmax(1) == data[1]).float().mean())}

sgd = functools.partial(torch.optim.SGD, lr=0.5)
"""

RECIPE = """
from orchestra.recipes.recipe import Recipe

RECIPE = Recipe(
    name="mine", about="a line", model=Net, data=data, loss=nn.functional.cross_entropy, optimizer=sgd,
    batch=10, epochs=2, evaluate=score, evaluation_data=data, target="accuracy=0.8",
)
"""

SCRIPT = """
import sys
import orchestra

print("arguments", sys.argv[1:])
result = orchestra.train(
    model=Net, data=data, loss=nn.functional.cross_entropy, optimizer=sgd, strategy="allreduce", batch=10,
    cluster=orchestra.Local(workers=1), budget=orchestra.Epochs(50), note={"mine": 1},
)
print("steps", result.summary.steps)
"""


def write(folder: Path, rest: str) -> str:
    (folder / "neighbour.py").write_text("CLASSES = 3\n")
    path = folder / "mine.py"
    path.write_text(WORKLOAD + rest)
    return str(path)


def test_run_a_recipe(orchestra: Orchestra) -> None:
    said = orchestra(
        "run", "digits", "--strategy", "ps(consistency=asp())", "--epochs", "0.5", "--json", "--lr", "0.01"
    )
    assert said.code == 0
    found = said.json
    assert (found["strategy"], found["workers"], found["servers"]) == ("ps(consistency=asp)", 2, 1)
    assert found["recipe"] == "digits"
    assert found["staleness_max"] is not None
    assert Path(found["model"]).is_file()
    assert "\x1b" not in said.out + said.err


def test_summary_for_people(orchestra: Orchestra) -> None:
    said = orchestra(
        "run", "digits", "--epochs", "0.5", "--out", "here", "--partition", "dirichlet:1", "--workers", "3"
    )
    assert said.code == 0
    assert all(text in said.out for text in ("allreduce · 3 workers", "worker 2", "here/model.safetensors", "accuracy"))
    assert "next: orchestra compare digits" in said.err
    assert "\x1b" not in said.out + said.err
    rows = [line for line in said.out.splitlines() if line.startswith("  worker ")]
    assert [sum(map(int, re.findall(r"(\d+)%", row))) for row in rows] == [100, 100, 100]


def test_quiet_says_nothing(orchestra: Orchestra) -> None:
    said = orchestra("run", "digits", "--strategy", "solo", "--epochs", "0.2", "--quiet")
    assert said.code == 0
    assert said.err == ""
    assert "1 worker" in said.out


def test_a_file_with_a_recipe(orchestra: Orchestra, tmp_path: Path) -> None:
    said = orchestra("run", write(tmp_path, RECIPE), "--strategy", "localsgd(tau=2)", "--json")
    assert said.code == 0
    assert said.json["strategy"] == "localsgd(tau=2)"
    assert said.json["recipe"] == str(tmp_path / "mine.py")
    assert "accuracy" in said.json["metrics"]


def test_a_script_that_trains_by_itself(orchestra: Orchestra, tmp_path: Path) -> None:
    options = ["--strategy", "slowmo(tau=4)", "--workers", "2", "--steps", "12", "--batch", "5", "--json"]
    said = orchestra("run", write(tmp_path, SCRIPT), *options, "--", "--flag")
    assert said.code == 0
    assert "arguments ['--flag']\nsteps 12\n" in said.out
    assert (said.json["strategy"], said.json["workers"], said.json["samples"]) == ("slowmo(tau=4)", 2, 120)
    note = json.loads((Path(said.json["run"]) / "config.json").read_text())["note"]
    assert note["mine"] == 1
    assert note["options"]["steps"] == 12


def test_a_script_that_fails_on_a_worker(orchestra: Orchestra, tmp_path: Path) -> None:
    broken = RECIPE + (
        "import dataclasses\ncalls = []\n"
        "def loss(*pair):\n    calls.extend([1] * pair[0].requires_grad)\n    assert len(calls) < 4, 'enough'\n"
        "    return nn.functional.cross_entropy(*pair)\n"
        "RECIPE = dataclasses.replace(RECIPE, loss=loss)\n"
    )
    said = orchestra("run", write(tmp_path, broken))
    assert said.code == 1
    assert said.err.startswith("Traceback")
    assert "AssertionError: enough" in said.err
    assert said.err.count("Traceback") == 1
    compared = orchestra(
        "compare",
        str(tmp_path / "mine.py"),
        "--strategies",
        "allreduce,solo",
        "--no-tune",
        "--seeds",
        "1",
        "--out",
        "c",
    )
    assert compared.code == 1
    assert "failed: AssertionError: enough" in compared.out


def test_compare(orchestra: Orchestra) -> None:
    said = orchestra(
        "compare", "digits", "--strategies", "allreduce, localsgd(tau=4)", "--epochs", "3", "--target", "accuracy=0.5",
        "--no-tune", "--seeds", "1", "--out", "race",
    )  # fmt: skip
    assert said.code == 0
    table = json.loads(Path("race/table.json").read_text())
    assert {row["strategy"] for row in table["rows"]} == {"allreduce", "localsgd(tau=4)"}
    assert all(row["reached"] == 1 and row["seconds_to_target"] > 0 for row in table["rows"])
    assert {row["strategy"]: row["speedup"] for row in table["rows"]}["allreduce"] == 1
    assert Path("race/localsgd-tau-4/seed0/model.safetensors").is_file()
    sentence = table["learned"][0]
    assert " reached accuracy ≥ 0.5 in " in sentence
    assert " ".join(sentence.split()) in " ".join(said.out.split())
    assert f"<p>{html.escape(sentence)}</p>" in Path("race/report.html").read_text()
    assert "| strategy |" in Path("race/table.md").read_text()
    assert "\x1b" not in said.out + said.err


def test_compare_shows_what_missed_the_target_and_who_ran_alone(orchestra: Orchestra) -> None:
    said = orchestra(
        "compare", "digits", "--strategies", "solo,allreduce", "--epochs", "0.3", "--target", "accuracy=1.0", "--json",
        "--quiet", "--workers", "2", "--seeds", "2", "--no-tune",
    )  # fmt: skip
    assert said.code == 0
    assert said.err == ""
    rows = {row["strategy"]: row for row in said.json["rows"]}
    assert (rows["solo"]["nodes"], rows["allreduce"]["nodes"]) == (1, 2)
    assert all(row["reached"] == 0 and row["best"] is not None for row in rows.values())
    assert "No strategy reached accuracy ≥ 1 in every run" in said.json["learned"][0]


def test_ctrl_c_leaves_a_checkpoint_and_resume_completes(orchestra: Orchestra, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "orchestra", "run", "digits", "--epochs", "100000", "--out", "broken", "--quiet"]
    environment = dict(os.environ) | {"PYTHONPATH": str(SOURCE), "NO_COLOR": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    events = tmp_path / "broken" / "events-0.jsonl"
    wait_until(lambda: events.exists() and events.stat().st_size)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "orchestra resume" in err
    assert "Traceback" not in err
    saved = int((tmp_path / "broken" / "checkpoints" / "latest").read_text().removeprefix("step-"))
    assert saved > 0
    again = orchestra("run", "digits", "--out", "broken")
    assert again.err.endswith("choose a new folder, or go on from its checkpoint with `orchestra resume broken`\n")
    said = orchestra("resume", "broken", "--steps", str(saved + 50), "--json")
    assert said.code == 0
    assert said.err.startswith(f"continues from the checkpoint of step {saved:,}\n")
    assert said.json["steps"] == saved + 50
    before = {path: path.stat().st_mtime_ns for path in Path("broken").rglob("*")}
    complete = orchestra("resume", "broken", "--json")
    assert (complete.code, complete.json) == (0, said.json)
    assert f"is complete, nothing left to do: its budget was {saved + 50} steps" in complete.err
    assert f"--steps {saved + 51} or more would go on" in complete.err
    told = orchestra("resume", "broken", "--steps", str(saved + 50))
    assert told.code == 0
    assert f"broken is complete: {saved + 50} steps in " in told.err
    assert f"{saved + 50} steps of each worker" in told.out
    assert {path: path.stat().st_mtime_ns for path in Path("broken").rglob("*")} == before


def test_a_run_that_the_clock_ended_is_told_of_more_seconds(orchestra: Orchestra) -> None:
    limits = ("--epochs", "1000", "--seconds", "0.5")
    assert orchestra("run", "digits", "-n", "2", *limits, "--checkpoint-every", "5", "--out", "timed").code == 0
    told = orchestra("resume", "timed", "--json")
    more = math.floor(told.json["seconds"]) + 1
    assert f"its budget was 1000 epochs or 0.5 seconds; --seconds {more} or more would go on" in told.err
    same, less = (
        orchestra("resume", "timed", *limits),
        orchestra("resume", "timed", "--epochs", "900", "--seconds", "0.4"),
    )
    assert "Nothing is trained; --seconds " in same.err
    assert "budget = '900 epochs or 0.4 seconds'    nothing left to do" in less.err
    assert "; --seconds " in less.err


def test_a_demo_is_not_put_over_something_else(orchestra: Orchestra) -> None:
    Path("runs/demo").mkdir(parents=True)
    Path("runs/demo/precious").write_text("mine")
    said = orchestra("demo")
    assert said.code == 2
    assert Path("runs/demo/precious").read_text() == "mine"


def test_an_optimizer_and_a_schedule_from_the_command_line(orchestra: Orchestra, tmp_path: Path) -> None:
    given = ("-n", "2", "--optimizer", "lars(lr=0.1, eta=0.02)", "--schedule", "warmup(epochs=1, reference=16)")
    first = orchestra("run", "digits", "--epochs", "1", "--checkpoint-every", "20", *given, "--out", "run", "-q")
    assert first.code == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["schedule"] == "warmup(epochs=1, factor=2.0)"
    assert config["optimizer"].startswith("LARS ")
    resumed = orchestra("resume", "run", "--epochs", "2", "--json", "-q")
    assert (resumed.json["steps"], resumed.err) == (90, "")
    assert (
        orchestra(
            "compare", "digits", "--sim", "--epochs", "1", *given, "-s", "allreduce,localsgd", "-q", "--no-tune"
        ).code
        == 0
    )
