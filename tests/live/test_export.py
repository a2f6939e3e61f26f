# SPDX-License-Identifier: Apache-2.0
"""Runs given to other tools, here small ones that write down what they are given."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import pytest
from tests.live.made import append, make, whole

from orchestra.cli import invoke
from orchestra.report import exporters
from orchestra.runs import reading
from orchestra.runs.events import Stepped


def test_figures_by_step(tmp_path: Path) -> None:
    rows = exporters.rows(reading.load(whole(tmp_path)))
    by_step = {row.step: row for row in rows}
    assert [row.step for row in rows] == [*range(41)]
    assert by_step[0].figures == {"test/accuracy": 0.0}
    assert by_step[8].t == pytest.approx(0.8)
    assert by_step[8].figures["train/loss"] == 0.25
    assert by_step[8].figures["traffic/sent"] == 3200
    assert by_step[8].figures["train/staleness"] == 0.5
    shares = [by_step[40].figures[f"time/{kind}"] for kind in ("compute", "communicate", "wait")]
    assert shares == pytest.approx([0.6, 0.1, 0.3])
    assert by_step[40].figures["test/accuracy"] == 0.8


def test_shares_are_those_of_the_last_steps(tmp_path: Path) -> None:
    """A hundred steps of computing, then a hundred of waiting."""
    run = make(tmp_path, workers=1, servers=0)
    busy = [(k, min(k, 100) * 0.1, max(0, k - 100) * 0.1) for k in range(1, 201)]
    append(run, 0, [Stepped(k * 0.1, 0, k, 0.0, k, 1.0, 0.1, c, 0.0, w, 0, 0) for k, c, w in busy])
    figures = {row.step: row.figures for row in exporters.rows(reading.load(run))}
    assert figures[100]["time/compute"] == pytest.approx(1.0)
    assert figures[116]["time/wait"] == pytest.approx(0.5)
    assert figures[132]["time/wait"] == pytest.approx(1.0)


class Wandb(ModuleType):
    """As much of it as is used."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []

    def init(self, **asked: Any) -> Self:
        self.begun.append(asked)
        return self

    def log(self, figures: dict[str, float], step: int) -> None:
        self.logged.append((step, figures))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *how: object) -> None:
        self.finished = True


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for name in ("a", "b/c"):
        whole(tmp_path / "runs" / name)
    assert invoke(["export", str(tmp_path / "runs"), "--wandb", "mine"]) == 0
    assert [(run["project"], run["name"]) for run in wandb.begun] == [("mine", "a"), ("mine", "b/c")]
    assert wandb.begun[0]["config"]["strategy"] == "ps(consistency=asp)"
    assert [step for step, _ in wandb.logged] == [*range(41)] * 2
    assert wandb.logged[8][1]["train/loss"] == 0.25
    assert wandb.logged[8][1]["seconds"] == pytest.approx(0.8)
    assert wandb.finished


def test_runs_of_two_comparisons_keep_their_names_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for name in ("one", "two"):
        whole(tmp_path / name / "runs" / "ps" / "seed0")
    words = [f"{tmp_path}/one/../one/runs", f"{tmp_path}/two/runs", f"{tmp_path}/two/runs/ps"]
    assert invoke(["export", *words, "--wandb", "mine"]) == 0
    assert [run["name"] for run in wandb.begun] == ["one/runs/ps/seed0", "two/runs/ps/seed0"]


def mlflow_with(**calls: Any) -> ModuleType:
    module = ModuleType("mlflow")
    vars(module).update({"set_tracking_uri": lambda uri: None} | calls)
    return module


def entities_of_mlflow() -> ModuleType:
    entities = ModuleType("mlflow.entities")
    vars(entities)["Metric"] = lambda *of: of
    return entities


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []

    class Client:
        def log_batch(self, run: str, metrics: list[tuple[str, float, int, int]]) -> None:
            assert len(metrics) <= 1000
            said.extend((run, *metric) for metric in metrics)

    class Started:
        info = SimpleNamespace(run_id="7")

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *how: object) -> None: ...

    module = mlflow_with(
        set_tracking_uri=lambda uri: said.append(uri), set_experiment=lambda name: said.append(name),
        start_run=lambda run_name: Started(), MlflowClient=Client, log_params=lambda given: said.append(len(given)),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities_of_mlflow())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "to be undone")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    run = whole(tmp_path / "run")
    assert invoke(["export", str(run), "--mlflow", "sqlite:///x.db"]) == 0
    assert said[:3] == ["sqlite:///x.db", "orchestra", 9]
    kept = [os.environ[name] for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_HTTP_REQUEST_MAX_RETRIES")]
    assert kept == ["false", "3"], "what its user said, and what he did not"
    began = (run / "config.json").stat().st_mtime
    assert ("7", "train/loss", 0.25, round((began + 0.8) * 1e3), 8) in said


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    whole(tmp_path / "runs" / "a")
    assert invoke(["export", str(tmp_path / "runs"), "--tensorboard", str(tmp_path / "tb")]) == 0
    (path,) = (tmp_path / "tb" / "a").iterdir()
    found = {
        (value.tag, event.step): value.simple_value
        for event in LegacyEventFileLoader(str(path)).Load()
        for value in event.summary.value
    }
    assert found["train/loss", 8] == 0.25


@pytest.mark.parametrize("tool", ["wandb", "mlflow", "tensorboard"])
def test_without_the_tool_it_says_how_to_get_it(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, tool, None)
    assert invoke(["export", str(whole(tmp_path / "run")), f"--{tool}", "x"]) == 3
    assert f"pip install 'neural-orchestra[{tool}]'" in capsys.readouterr().err


def refusing(*lines: str) -> Any:
    def refuse(*asked: Any, **more: Any) -> None:
        raise RuntimeError("\n".join(lines))

    return refuse


@pytest.mark.parametrize(
    ("tool", "call", "said"),
    [
        ("wandb", "init", "Weights & Biases refused the run: No key. With WANDB_MODE=offline it is kept here"),
        ("mlflow", "set_experiment", "MLflow at x refused the run: No key.\n"),
        ("mlflow", "start_run", "MLflow at x refused the run: No key.\n"),
    ],
)
def test_what_a_tool_refuses_is_told_in_a_line(
    tool: str, call: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = Wandb() if tool == "wandb" else mlflow_with(set_experiment=lambda name: None)
    vars(module)[call] = refusing("No key.", "Consider this:", "  and that")
    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "0")  # and as it was afterwards
    monkeypatch.setitem(sys.modules, tool, module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities_of_mlflow())
    assert invoke(["export", str(whole(tmp_path / "run")), f"--{tool}", "x"]) == 3
    assert said in (err := capsys.readouterr().err)
    assert len(err.splitlines()) == 1


def test_a_folder_is_no_place_for_event_files_where_a_file_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    (tmp_path / "file").touch()
    assert invoke(["export", str(whole(tmp_path / "run")), "--tensorboard", str(tmp_path / "file")]) == 3
    assert f"TensorBoard cannot write to {tmp_path / 'file'}: [Errno 20] Not a directory" in capsys.readouterr().err


def test_what_cannot_be_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Wandb())
    assert invoke(["export", str(tmp_path)]) == 2
    assert "give --tensorboard DIR" in capsys.readouterr().err
    assert invoke(["export", str(tmp_path / "no"), "--wandb", "x"]) == 2
    (tmp_path / "config.json").write_text("{")
    assert invoke(["export", str(tmp_path), "--wandb", "x"]) == 2
    assert "its config.json is damaged" in capsys.readouterr().err
