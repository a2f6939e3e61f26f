# SPDX-License-Identifier: Apache-2.0
"""`orchestra run` of a script with a training loop of its own, under `orchestra.prepare`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Orchestra, Said
from tests.processes import environ_of, free_port

from orchestra.cli import local_processes, sources
from orchestra.cli.options import Options
from orchestra.launchers import process_group
from orchestra.launchers.process_group import ProcessGroup

SCRIPT = """
import sys, torch, orchestra
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(24, 3)), batch_size=2)
model, optimizer, loader = orchestra.prepare(model, optimizer, loader, strategy="localsgd(tau=2)")
for (x,) in loader:
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    MORE
optimizer.finish()
if optimizer.orchestra.is_coordinator:
    print(optimizer, sys.argv[1:])
    print(optimizer.orchestra.workers, "workers,", optimizer.orchestra.steps, "steps")
"""


def orchestra_here(*words: str) -> Said:
    """In an interpreter of its own, as a terminal would start it."""
    command = [sys.executable, "-m", "orchestra", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=55, check=False)
    return Said(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "loop.py"
    path.write_text(SCRIPT.replace("MORE", "pass"))
    return path


@pytest.mark.parametrize(("text", "holds"), [
    ("import orchestra\norchestra.prepare(1, 2)", True),
    ("import orchestra as o\ndef f():\n    return o.prepare(1, 2)", True),
    ("from orchestra import prepare as p\np(1, 2)", True),
    ("import orchestra\norchestra.train()", False),
    ("import orchestra\norchestra.prepare(1, 2); orchestra.train()", False),
    ("import accelerate\naccelerate.prepare(1, 2)", False),
    ("def prepare(): ...\nprepare()", False),
    ("import orchestra\nRECIPE = orchestra.prepare(1, 2)", False),
])  # fmt: skip
def test_what_holds_a_loop(tmp_path: Path, text: str, holds: bool) -> None:
    (tmp_path / "it.py").write_text(text)
    assert sources.find(str(tmp_path / "it.py")).holds_loop == holds


def test_strategy_and_workers_reach_prepare(path: Path) -> None:
    said = orchestra_here(
        "run", str(path), "-s", "ps(servers=1)", "-n", "2", "--seed", "4", "--out", "kept", "--", "--mine"
    )
    assert said.code == 0, said.err
    first, *_, last = said.out.splitlines()
    assert first.startswith("Prepared(ps, SGD")
    assert said.out.count("['--mine']") == 1
    assert last == "2 workers, 6 steps"
    assert "strategy ps, as the command line says, in place of the script's localsgd(tau=2)" in said.err
    assert {f"events-{node}.jsonl" for node in range(3)} < {path.name for path in Path("kept").iterdir()}


@pytest.mark.nightly
def test_what_is_not_said_stays_as_the_script_has_it(path: Path) -> None:
    said = orchestra_here("run", str(path))
    assert said.code == 0, said.err
    assert said.out.startswith("Prepared(localsgd(tau=2), SGD")
    assert "in place of" not in said.err
    assert "warning" not in said.err
    assert orchestra_here("run", str(path), "-n", "1").out.endswith("1 workers, 12 steps\n")


def test_a_loop_ends_with_a_summary(path: Path) -> None:
    said = orchestra_here("run", str(path))
    lines = said.err.splitlines()
    first = lines.index("localsgd(tau=2) · 2 workers · 4 parameters")
    assert lines[first + 1].startswith("  worker 0 made 6 steps in ")
    assert "unknown: optimizer.step(loss=loss) reports it" in lines[first + 2]
    quiet = orchestra_here("run", str(path), "--quiet").err.splitlines()
    assert not [line for line in quiet if "waits for" not in line]  # which it says when a process is slow to start


def test_with_a_run_folder_the_summary_covers_all_nodes(path: Path) -> None:
    path.write_text(path.read_text().replace("optimizer.finish()", ""))  # its end is called after the script's
    said = orchestra_here("run", str(path), "--out", "kept")
    summary = said.err.partition("localsgd(tau=2) · 2 workers")[2]
    assert "6 steps of each worker in" in summary
    assert "worker 1  " in summary
    assert "run    kept" in summary


@pytest.mark.nightly
def test_servers_that_only_the_script_knows_of_are_asked_for(path: Path) -> None:
    path.write_text(path.read_text().replace("localsgd(tau=2)", "ps"))
    said = orchestra_here("run", str(path), "-n", "2")
    assert said.code == 2
    assert "workers = 2    ParameterServer has 1 server beside them: say --servers 1 as well" in said.err
    assert orchestra_here("run", str(path), "-n", "2", "--servers", "1").out.endswith("2 workers, 6 steps\n")


def test_what_is_the_loops_own_is_refused_before_anything_runs(orchestra: Orchestra, path: Path) -> None:
    path.write_text("raise SystemExit('it ran')\n" + path.read_text())
    said = orchestra("run", str(path), "--epochs", "2", "--lr", "0.1", "--json")
    assert said.code == 2
    assert "it ran" not in said.err
    for name in ("epochs", "lr", "json"):
        assert f"  {name} = " in said.err
    assert "is decided by the script" in said.err
    said = orchestra("sim", str(path))
    assert (said.code, "runs in real time" in said.err) == (2, True)


def test_a_loop_is_asked_to_stop_not_to_save(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Silent(ProcessGroup):
        def run(self, links: Any) -> int:
            asked.append(self.asking)
            return 0

    monkeypatch.setattr(process_group, "ProcessGroup", Silent)
    monkeypatch.setattr(process_group, "AgentProcess", lambda *given: None)
    assert local_processes.start(sources.find(str(path)), Options(workers=2), []) == 0
    assert asked == ["stop"]


def test_an_error_is_told_by_the_scripts_own_line(path: Path) -> None:
    path.write_text(SCRIPT.replace("MORE", "if optimizer.orchestra.rank == 1: 1 / 0"))
    said = orchestra_here("run", str(path), "-n", "2")
    assert said.code == 1
    assert "Stopped: worker 1 failed: ZeroDivisionError: division by zero\n" in said.err
    assert "cli/" not in said.err
    assert f'localhost[1] |   File "{path}", line 11, in <module>' in said.err


def test_a_loop_that_could_not_be_seen_is_told_how_to_start(orchestra: Orchestra, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.py").write_text(SCRIPT.replace("MORE", "pass"))
    (tmp_path / "script.py").write_text("import elsewhere\n")
    said = orchestra("run", str(tmp_path / "script.py"), "-n", "2")
    assert said.code == 2
    assert "start it with torchrun --nproc-per-node 2" in said.err


@pytest.mark.parametrize(
    "verb", [["compare", "digits"], ["compare", "digits", "--sim"], ["sweep", "digits", "--grid", "lr=0.1"], ["demo"]]
)
def test_a_race_under_torchrun_is_refused(
    orchestra: Orchestra, monkeypatch: pytest.MonkeyPatch, verb: list[str]
) -> None:
    for name, value in environ_of(0, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    said = orchestra(*verb)
    assert said.code == 2
    assert f"orchestra {verb[0]} starts its runs itself" in said.err
    assert "--lab" in said.err
    assert "--sim" in said.err
    assert "workers" not in said.err
