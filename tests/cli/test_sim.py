# SPDX-License-Identifier: Apache-2.0
"""Simulations from the command line, and real runs slowed down by the same delays."""

from __future__ import annotations

import json
import os
import statistics
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Orchestra
from tests.zoo import SEED, Trap, events, train, trapped

from orchestra import AllReduce, Local, Simulated, Steps
from orchestra.cli import sweep
from orchestra.cli.options import COMPUTE_TIME, NETWORK, Options
from orchestra.engine.compute_times import parse, sampler
from orchestra.errors import WorkerLost
from orchestra.report import model
from orchestra.runs.budget import Target
from orchestra.runs.events import Stepped
from orchestra.worlds.simulated.networks import parse as parse_network

SIM = (
    "sim", "digits", "--workers", "6", "--steps", "4", "--network", "100mbit,1ms",
    "--compute-time", "lognormal:0.05,0.3",
)  # fmt: skip


def test_a_simulation_is_repeated_to_the_last_digit(orchestra: Orchestra) -> None:
    first, again = (orchestra(*SIM, "--seed", "7", "--out", out, "--json").json for out in ("a", "b"))
    assert first["virtual"]
    assert first["steps"] == 4
    assert {**first, "run": "", "model": ""} == {**again, "run": "", "model": ""}


def test_the_summary_says_that_seconds_are_virtual(orchestra: Orchestra) -> None:
    said = orchestra(*SIM)
    assert said.code == 0
    assert "virtual s" in said.out


def test_timing_only_takes_hundreds_of_workers(orchestra: Orchestra) -> None:
    said = orchestra("sim", "digits", "-n", "300", "--batch", "4", "--steps", "3", "--numerics", "off", "--json")
    assert said.json["workers"] == 300
    assert said.json["steps"] == 3


def test_compare_in_virtual_time(orchestra: Orchestra) -> None:
    race = (
        "compare",
        "digits",
        "--no-tune",
        "--seeds",
        "1",
        "--sim",
        "-s",
        "allreduce,localsgd",
        "-n",
        "4",
        "--epochs",
        "4",
    )
    said = orchestra(*race, "--network", "10mbit,1ms", "--target", "accuracy=0.9")
    assert said.code == 0
    assert "localsgd reached accuracy" in said.out
    assert "shared" not in said.out  # no cores were


@pytest.mark.nightly
def test_sweep_over_conditions(orchestra: Orchestra, tmp_path: Path) -> None:
    said = orchestra(
        "sweep", "digits", "--sim", "-n", "4", "--epochs", "4", "--target", "accuracy=0.9", "--out", "swept",
        "--no-tune", "-s", "allreduce,localsgd", "--grid", "bandwidth=1mbit,1gbit", "--grid", "straggler=1x1,1x3",
    )  # fmt: skip
    assert said.code == 0
    assert said.out.count("◂") == 1 + 4  # once in the title, once under each condition
    record = json.loads((tmp_path / "swept" / "sweep.json").read_text())
    times = {
        tuple(c["values"].values()): {row["strategy"]: row["seconds_to_target"] for row in c["table"]["rows"]}
        for c in record["conditions"]
    }
    assert times["1mbit", "1x1"]["allreduce"] > 5 * times["1gbit", "1x1"]["allreduce"]
    assert times["1gbit", "1x3"]["allreduce"] > 2 * times["1gbit", "1x1"]["allreduce"]
    assert (tmp_path / "swept" / "sweep.md").read_text().count("|") > 20
    words = " ".join(said.out.split())
    assert model.build([tmp_path / "swept"], target=Target("accuracy", 0.9))["verdict"]["sentence"] in words


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ("speed=1", "is not an axis"),
        ("straggler=", "needs values"),
        ("workers=many", "must be a whole number of at least 1"),
        ("bandwidth=1mbit", "needs --sim"),
    ],
)
def test_bad_grids_are_refused(grid: str, said: str, orchestra: Orchestra) -> None:
    answer = orchestra("sweep", "digits", "--grid", grid)
    assert answer.code == 2
    assert said in answer.err


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--network", "fast", "is not a rate"),
        ("--compute-time", "often", "is not a compute time"),
        ("--numerics", "some", "one of auto, real"),
    ],
)
def test_bad_worlds_are_refused(option: str, value: str, said: str, orchestra: Orchestra) -> None:
    answer = orchestra("sim", "digits", option, value)
    assert answer.code == 2
    assert said in answer.err


def test_a_simulation_refuses_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="repeated, not resumed"):
        train(AllReduce(), tmp_path / "run", cluster=Simulated(workers=2), checkpoint_every=Steps(2))


@pytest.mark.timed
@pytest.mark.nightly
def test_real_workers_are_as_slow_as_virtual_ones(tmp_path: Path) -> None:
    """Who is late, and by how much, is the same in both worlds."""
    delay = "exponential:0.4,0.24 slow:1x2"  # long beside what a busy machine adds
    worlds = {
        "real": Local(workers=2, compute_time=delay),
        "virtual": Simulated(workers=2, compute_time=delay, network="1000gbit,0s"),
    }
    steps: dict[str, list[float]] = {}
    for name, cluster in worlds.items():
        train(AllReduce(), tmp_path / name, cluster=cluster, budget=Steps(5))
        steps[name] = [e.compute for e in events(tmp_path / name, 0) if isinstance(e, Stepped)]
    assert all(a >= b - 1e-3 for a, b in zip(steps["real"], steps["virtual"], strict=True))
    longest = [sorted(range(5), key=of.__getitem__) for of in steps.values()]
    assert longest[0] == longest[1]


def test_delays_go_on_where_they_were(tmp_path: Path) -> None:
    """A resumed run meets the delays of its own steps, not those of the first ones again."""
    cluster = Local(workers=2, compute_time="exponential:0.01,0.1")
    given: dict[str, Any] = {"cluster": cluster, "checkpoint_every": Steps(4)}
    die = Trap.at(0, 6, partial(os._exit, 1), size=2)
    with pytest.raises(WorkerLost):
        train(AllReduce(), tmp_path, budget=Steps(8), model=trapped(die), **given)
    train(AllReduce(), tmp_path, budget=Steps(8), model=trapped(), resume=True, **given)
    totals = [0.0, *(e.compute for e in events(tmp_path, 0) if isinstance(e, Stepped))]
    delay = parse("exponential:0.01,0.1")
    expected = [sampler(delay, SEED, 0)(step) for step in range(8)]
    longer = [b - a - wanted for (a, b), wanted in zip(pairwise(totals), expected, strict=True)]
    assert min(longer) > -0.001, "no step is shorter than its delay"
    assert statistics.median(longer) < 0.02, "a busy machine lets some sleep longer, not most"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--grid", "straggler=1x2,1x2"], "names a value twice"),
        (["--grid", "straggler=1x0"], "must be a finite number above 0"),
        (["--grid", "straggler=ax5"], "how many times slower, such as 1x5"),
        (["--grid", "lr=1x0.1"], "must be a finite number above 0"),
        (["--grid", "workers=2.7"], "must be a whole number"),
        (["--grid", "bandwidth=1mbit", "--network", "hosts.yaml"], "not a file"),
    ],
)
def test_grids_that_mean_nothing_are_refused(arguments: list[str], said: str, orchestra: Orchestra) -> None:
    answer = orchestra("sweep", "digits", "--sim", *arguments)
    assert answer.code == 2
    assert said in answer.err


def test_a_grid_changes_nothing_but_its_axis() -> None:
    base = Options(network="10mbit,1ms,2us racks:4x8", compute_time="constant:0.1")
    assert sweep._bandwidth(base, "1gbit").network == "1gbit,1ms,2us racks:4x8"
    assert sweep._latency(base, "5ms").network == "10mbit,5ms,2us racks:4x8"
    assert [sweep._straggler(base, value).straggler for value in ("1x1", "2x3", "3")] == ["1x1", "2x3", "1x3"]


def test_a_network_needs_a_simulation(orchestra: Orchestra) -> None:
    answer = orchestra("compare", "digits", "--network", "10mbit")
    assert answer.code == 2
    assert "needs --sim" in answer.err


SCRIPT = """
import functools, torch, orchestra
orchestra.train(
    model=functools.partial(torch.nn.Linear, 2, 1),
    data=lambda: (torch.zeros(64, 2), torch.zeros(64, 1)),
    loss=torch.nn.functional.mse_loss,
    optimizer=functools.partial(torch.optim.SGD, lr=0.1),
    batch=2,
    budget=orchestra.Steps(2),
    {more}
)
"""


def test_a_script_keeps_its_own_virtual_cluster(orchestra: Orchestra, tmp_path: Path) -> None:
    cluster = "orchestra.Simulated(workers=3, network='1mbit,100ms', compute_time='constant:3', ties=4)"
    (tmp_path / "script.py").write_text(SCRIPT.format(more=f"out='out', cluster={cluster}"))
    assert orchestra("sim", "script.py", "--workers", "2").code == 0
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert about["workers"] == 2
    assert about["cluster"]["ties"] == 4
    assert about["cluster"]["compute_time"] == "ConstantTime(time=3.0)"


def test_time_that_stands_still_is_noticed(orchestra: Orchestra) -> None:
    answer = orchestra("sim", "regression", "-n", "2", "--compute-time", "constant:0", "--seconds", "1",
                       "--network", "1gbit", "--numerics", "off", "-s", "localsgd(tau=1000000)")  # fmt: skip
    assert answer.code != 0
    assert "stands still" in answer.err


def test_thousands_of_workers_need_no_samples(orchestra: Orchestra) -> None:
    said = orchestra("sim", "digits", "-n", "2000", "--steps", "3", "--numerics", "off", "--network", "10gbit,50us")
    assert said.code == 0, said.err
    assert "timing only: nothing was trained" in said.out
    assert "accuracy" not in said.out


def test_what_to_try_next_is_in_the_same_world(orchestra: Orchestra) -> None:
    said = orchestra(*SIM)
    assert '--sim --network "100mbit,1ms" --compute-time "lognormal:0.05,0.3"' in said.err


def test_steps_of_fast_and_slow_workers_are_told_apart(orchestra: Orchestra) -> None:
    said = orchestra("sim", "digits", "-n", "4", "--seconds", "1", "-s", "ps(consistency=asp())",
                     "--straggler", "1x5")  # fmt: skip
    assert "\n  simulated: network 10gbit,0.1ms, compute time constant:0.05, straggler 1x5\n" in said.out
    assert "4 to 20 steps of each worker" in said.out or "5 to 20 steps of each worker" in said.out


def test_a_comparison_says_where_it_took_place(orchestra: Orchestra, tmp_path: Path) -> None:
    said = orchestra("compare", "digits", "--sim", "--network", "10mbps,1ms", "--epochs", "0.2", "-s", "allreduce",
                     "--out", "out", "--no-tune")  # fmt: skip
    assert "virtual seconds: network 10mbps,1ms, compute time constant:0.05" in said.out
    assert "The simulation assumes 50 ms for a step of each worker" in said.out
    assert "on this machine a step takes about " in said.err
    assert "virtual seconds" in (tmp_path / "out" / "table.md").read_text()


def test_a_bad_condition_is_refused_before_the_first_runs(orchestra: Orchestra, tmp_path: Path) -> None:
    answer = orchestra("sweep", "digits", "--sim", "--grid", "bandwidth=10mbit,1gbx")
    assert answer.code == 2
    assert "'1gbx' is not a rate" in answer.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("topic", "word"), [("compute-time", "lognormal:0.05,0.3"), ("network", "hosts.yaml")])
def test_worlds_are_explained(topic: str, word: str, orchestra: Orchestra) -> None:
    assert word in orchestra("explain", topic).out


def test_a_script_may_end_as_scripts_do(orchestra: Orchestra, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(more="") + "raise SystemExit(0)\n")
    said = orchestra("sim", "script.py", "-n", "2")
    assert said.code == 0
    assert "allreduce · 2 workers" in said.out


def test_defaults_are_those_of_the_cluster() -> None:
    assert Simulated().get_network() == parse_network(NETWORK)
    assert Simulated().compute_time == COMPUTE_TIME


def test_workers_with_equal_shares_of_the_time_are_one_row(orchestra: Orchestra) -> None:
    cluster = ("--network", "10mbit,1ms", "--compute-time", "constant:0.01", "--steps", "2", "--numerics", "off")
    said = orchestra("sim", "digits", "-n", "32", *cluster, "--out", "many")
    assert said.code == 0, said.err
    rows = [line for line in said.out.splitlines() if line.startswith("  worker")]
    assert len(rows) == 1
    assert rows[0].startswith("  workers 0-31 ")
    assert "samples/s on average" in said.out


def test_every_command_prints_a_warning_once(orchestra: Orchestra) -> None:
    asp = ("-s", "ps(consistency=asp)", "--momentum", "0.9", "--steps", "2")
    said = orchestra("sim", "digits", "-n", "2", *asp, "--out", "warned")
    assert said.code == 0, said.err
    assert said.err.count("amplifies them") == 1
    assert json.loads(Path("warned/ending.json").read_text())["warnings"]
    raced = ("compare", "digits", "--sim", "-n", "2", *asp[:2], "--epochs", "1", "--seeds", "2", "--no-tune")
    said = orchestra(*raced, "--out", "raced")
    assert said.code == 0, said.err
    assert said.err.count("amplifies them") == 1
