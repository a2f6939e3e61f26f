# SPDX-License-Identifier: Apache-2.0
"""Real processes that only their environment tells about each other: the bits of processes that share memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.processes import Outcome, Processes, together, values
from tests.waiting import wait_until
from tests.zoo import Trap, classifier, ended, flat, make_classes, make_large, my_rank, paced, train, trapped

from orchestra import Attached, Epochs, Seconds, Steps, Target

NODES = {
    "allreduce": 3,
    "ps(servers=2)": 4,
    "localsgd(tau=2)": 2,
    'switch(first=allreduce, then=ps, when=atshare(share=0.5))': 3,
}  # fmt: skip


@pytest.mark.parametrize("strategy", NODES)
def test_every_process_gets_the_model_of_one_machine(strategy: str, tmp_path: Path) -> None:
    size = NODES[strategy]
    workers = size - strategy.count("ps") * (2 if "servers=2" in strategy else 1)
    here = train(strategy, tmp_path / "here", workers=workers, budget=Steps(8))

    def call() -> Any:
        result = train(strategy, tmp_path / "there", cluster=Attached(patience=20), budget=Steps(8))
        return result.model.state_dict(), result.summary

    found = values(together(size, call))
    for state, summary in found:
        assert all(torch.equal(state[name], tensor) for name, tensor in here.model.state_dict().items())
        assert summary.steps == here.summary.steps
        assert summary.sent_total == here.summary.sent_total
    assert {path.name for path in (tmp_path / "there").iterdir()} == {p.name for p in (tmp_path / "here").iterdir()}


def await_training(run: Path) -> None:
    """Until it has gone on for a moment."""
    wait_until((run / "events-0.jsonl").exists)
    time.sleep(0.3)


def far_off(strategy: str, out: Path, **given: Any) -> Any:
    """As on a machine that does not see the run folder: only process 0 may write there."""
    from orchestra.worlds.sockets import participant

    if os.environ["RANK"] != "0":
        participant._reads = lambda path: None
    return train(strategy, out, cluster=Attached(patience=20), **given).model.state_dict()


def states(outcomes: list[Outcome]) -> list[dict[str, torch.Tensor]]:
    return values(outcomes)


@pytest.mark.parametrize("strategy", ["ps(servers=2)", "localsgd(tau=2)"])
def test_machines_without_a_folder_in_common_send_their_files(strategy: str, tmp_path: Path) -> None:
    size = 4 if strategy.startswith("ps") else 2
    given: dict[str, Any] = {
        "model": classifier, "data": make_classes, "loss": F.cross_entropy, "budget": Steps(9),
        "evaluate": lambda model, data: {"score": float(flat(model).sum())}, "evaluation_data": make_classes,
        "evaluate_every": Steps(3), "checkpoint_every": Steps(4),
    }  # fmt: skip
    here = train(strategy, tmp_path / "here", workers=2, **given)
    for state in states(together(size, lambda: far_off(strategy, tmp_path / "there", **given))):
        assert all(torch.equal(state[name], tensor) for name, tensor in here.model.state_dict().items())
    for node in range(size):
        assert ended(tmp_path / "there", node).sent == ended(tmp_path / "here", node).sent
    scores = [(tmp_path / run / "scores.jsonl").read_text().splitlines() for run in ("here", "there")]
    assert [json.loads(line)["metrics"] for line in scores[0]] == [json.loads(line)["metrics"] for line in scores[1]]
    checkpoints = [{p.name for p in (tmp_path / run / "checkpoints").rglob("*")} for run in ("here", "there")]
    assert checkpoints[0] == checkpoints[1]
    assert "node-1.safetensors" in checkpoints[1]


SSP = "ps(consistency=ssp(staleness=1))"


@pytest.mark.parametrize(
    ("strategy", "size", "visible"),
    [
        ("allreduce", 2, True),
        (SSP, 3, True),
        ("ps", 3, False),
        pytest.param("allreduce", 2, False, marks=pytest.mark.nightly),
        pytest.param(SSP, 3, False, marks=pytest.mark.nightly),
        pytest.param("ps", 3, True, marks=pytest.mark.nightly),
    ],
)
def test_ctrl_c_and_resume(strategy: str, size: int, visible: bool, tmp_path: Path) -> None:
    """Stopped by a signal to any one process, gone on with later, to the model of a run that was not stopped."""

    def call(**more: Any) -> Any:
        given: dict[str, Any] = {"model": paced(0.02, 0.02), "budget": Steps(60), "checkpoint_every": Steps(50)} | more
        if not visible:
            return far_off(strategy, tmp_path / "run", **given)
        return train(strategy, tmp_path / "run", cluster=Attached(patience=20), **given).model.state_dict()

    with Processes([call] * size) as processes:
        await_training(tmp_path / "run")
        os.kill(processes.pid(1), signal.SIGTERM)
        outcomes = processes.outcomes()
    assert [outcome.code for outcome in outcomes] == [143] * size, outcomes
    assert "stopped by SIGTERM. A checkpoint of step" in outcomes[0].error
    found = states(together(size, lambda: call(resume=True)))
    if strategy != SSP:
        whole = train(strategy, tmp_path / "whole", workers=2, budget=Steps(60))
        kept = [tensor for name, tensor in found[-1].items()]
        assert all(torch.equal(a, b) for a, b in zip(kept, whole.model.state_dict().values(), strict=True))
    assert ended(tmp_path / "run", 0).step == 60


def test_every_process_gets_the_outcome_of_a_complete_run(tmp_path: Path) -> None:
    def call(resume: bool) -> Any:
        cluster = Attached(patience=20)
        result = train("ps", tmp_path / "run", cluster=cluster, budget=Steps(3), resume=resume)
        return result.model.state_dict(), result.summary

    before = values(together(3, lambda: call(False)))
    for (state, summary), (model, facts) in zip(values(together(3, lambda: call(True))), before, strict=True):
        assert summary == facts
        assert all(torch.equal(state[name], tensor) for name, tensor in model.items())
    assert (tmp_path / "run" / "events-0.jsonl").read_text().count('"stepped"') == 3


@pytest.mark.timed
def test_budgets_that_only_process_0_can_measure(tmp_path: Path) -> None:
    def call(out: str, **given: Any) -> Any:
        return train("allreduce", tmp_path / out, cluster=Attached(patience=20), **given).summary

    slow = {"model": paced(0.01, 0.01, model=classifier), "data": make_classes, "loss": F.cross_entropy}
    first, second = values(together(2, lambda: call("seconds", **slow, budget=Seconds(0.5) | Epochs(1000))))
    assert first.stopped_by == second.stopped_by == "seconds"
    assert 0.5 <= first.seconds < 3
    scored = {"evaluate": lambda model, data: {"score": 1.0}, "evaluation_data": make_classes}
    budget = Target("score", 0.5) | Epochs(1000)
    summary, _ = values(together(2, lambda: call("t", **slow | scored, budget=budget, evaluate_every=Steps(5))))
    assert summary.stopped_by == "target"


def test_a_worker_that_fails_is_named_with_its_traceback(tmp_path: Path) -> None:
    def fail() -> None:
        if my_rank() == 1:  # not before the run, when the model is tried
            raise ValueError("no such luck")

    model = trapped(Trap.at(1, 3, fail, size=3))
    call = lambda: train("allreduce", tmp_path / "run", cluster=Attached(patience=20), model=model)  # noqa: E731
    home, failed, other = together(3, call)
    assert (home.kind, home.code) == ("WorkerFailed", 10)
    assert "no such luck" in home.error
    assert "worker 1 failed" in home.error
    assert (failed.kind, failed.code) == ("WorkerFailed", 1)  # the one that did not stop because of another
    assert (other.kind, other.error, other.code) == ("Stopped", "worker 1 failed", 10)


@pytest.mark.timed
@pytest.mark.parametrize("rank", [0, 2])
def test_a_process_that_dies_is_noticed_at_once(rank: int, tmp_path: Path) -> None:
    def call() -> Any:
        return train(
            "allreduce", tmp_path / "run", cluster=Attached(patience=60), model=paced(*[0.02] * 3), budget=Steps(999)
        )

    with Processes([call] * 3) as processes:
        await_training(tmp_path / "run")
        began = time.monotonic()
        os.kill(processes.pid(rank), signal.SIGKILL)
        outcomes = processes.outcomes()
        assert time.monotonic() - began < 10
    assert outcomes[rank].kind == "killed"
    for outcome in (o for i, o in enumerate(outcomes) if i != rank):
        assert outcome.code == 6
        assert f"worker {rank} died: its connection" in outcome.error
    assert not list((tmp_path / "run").glob(".launch*"))


def test_under_torchrun(tmp_path: Path) -> None:
    """The command of the README; process 0 alone speaks."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = ["-m", "orchestra", "run", "regression", "--steps", "5", "--out", str(tmp_path / "run"), "--json"]
    done = subprocess.run([*torchrun, *run], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)  # one object: one process spoke
    assert record["steps"] == 5
    assert record["workers"] == 2


@pytest.mark.parametrize("strategy", ["allreduce", "slowmo(tau=2)"])
def test_on_a_trusted_network_torch_takes_the_means(strategy: str, tmp_path: Path) -> None:
    """Equal but for the order of sums; and to resume what messages began is refused."""
    here = train(strategy, tmp_path / "here", workers=3, budget=Steps(8), model=make_large)

    def call(**given: Any) -> Any:
        cluster = Attached(patience=20, trusted=True)
        more: dict[str, Any] = {"model": make_large, "budget": Steps(8), "checkpoint_every": Steps(5)} | given
        result = train(strategy, tmp_path / "there", cluster=cluster, **more)
        return result.model.state_dict(), result.summary.sent_total

    for state, sent in values(together(3, call)):
        for name, tensor in here.model.state_dict().items():
            torch.testing.assert_close(state[name], tensor, rtol=2e-5, atol=2e-6)
        assert sent == here.summary.sent_total
    assert [len(pair) for pair in values(together(3, lambda: call(resume=True, budget=Steps(9))))] == [2, 2, 2]


def test_a_process_that_dies_during_a_mean_of_torch_is_named(tmp_path: Path) -> None:
    def call() -> Any:
        cluster = Attached(patience=30, trusted=True)
        return train("allreduce", tmp_path / "run", cluster=cluster, model=paced(*[0.02] * 3), budget=Steps(999))

    with Processes([call] * 3) as processes:
        await_training(tmp_path / "run")
        os.kill(processes.pid(2), signal.SIGKILL)
        outcomes = processes.outcomes()
    for outcome in outcomes[:2]:
        assert outcome.code == 6, outcome.error
        assert "worker 2 died" in outcome.error


@pytest.mark.timed
@pytest.mark.parametrize("how", ["fails", "dies"])
def test_a_process_that_ends_before_torch_is_connected_is_noticed(how: str, tmp_path: Path) -> None:
    def call() -> Any:
        from orchestra.worlds import torch_collectives

        def end(*args: Any) -> Any:
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no such device")

        if os.environ["RANK"] == "2":
            torch_collectives._backend = end  # type: ignore[assignment]
        return train("allreduce", tmp_path / "run", cluster=Attached(patience=60, trusted=True))

    began = time.monotonic()
    home, other, _ = together(3, call)
    assert time.monotonic() - began < 20
    told = {"fails": "worker 2 failed", "dies": "worker 2 died"}[how]
    assert told in home.error
    assert told in other.error


def test_a_failed_conclusion_ends_every_process(tmp_path: Path) -> None:
    def scores(model: torch.nn.Module, data: Any) -> dict[str, float]:
        if (tmp_path / "run" / "events-0.jsonl").exists():  # after training, which is over then
            raise ValueError("cannot be scored")
        return {"score": 0.0}

    given: dict[str, Any] = {"evaluate": scores, "evaluation_data": lambda: None, "evaluate_every": Steps(99)}
    home, other = together(2, lambda: train("allreduce", tmp_path / "run", cluster=Attached(patience=20), **given))
    assert "cannot be scored" in home.error
    assert (other.kind, other.code) == ("Stopped", 10)
    assert "worker 0 left before it sent the outcome" in other.error
