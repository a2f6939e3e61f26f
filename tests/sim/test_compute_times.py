# SPDX-License-Identifier: Apache-2.0
"""Durations: the right distributions, the same whenever they are asked for."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from orchestra.engine.compute_times import (
    ComputeTime,
    ConstantTime,
    LogNormal,
    Markov,
    Pareto,
    Pause,
    RecordedTimes,
    Slow,
    parse,
    sampler,
)
from orchestra.worlds.simulated.networks import Host, Network
from orchestra.worlds.simulated.networks import parse as parse_network

COUNT = 20_000
KINDS = ["constant:0.05", "exponential:0.05,0.02", "pareto:0.05,3", "lognormal:0.05,0.3", "markov:0.05,5,0.02,0.2"]


@pytest.mark.parametrize("text", [*KINDS, "lognormal:0.05,0.3 pause:0.01,2"])
def test_the_mean_of_draws_is_that_of_the_distribution(text: str) -> None:
    compute_time = parse(text)
    draw = sampler(compute_time, 0, 3)
    times = [draw(step) for step in range(COUNT)]
    spread = statistics.stdev(times) / math.sqrt(COUNT)
    correlated = 5 if isinstance(compute_time, Markov) else 1
    assert abs(statistics.fmean(times) - compute_time.mean()) < 4 * correlated * spread + 1e-12


@pytest.mark.parametrize("text", KINDS)
def test_a_duration_belongs_to_seed_worker_and_step(text: str) -> None:
    compute_time, again = parse(text), parse(text)
    times = [compute_time.seconds(1, 2, step) for step in range(50)]
    assert [again.seconds(1, 2, step) for step in reversed(range(50))] == times[::-1]
    if not isinstance(compute_time, ConstantTime):
        long = [compute_time.seconds(1, 2, step) for step in range(500)]
        assert long != [compute_time.seconds(2, 2, step) for step in range(500)]
        assert long != [compute_time.seconds(1, 3, step) for step in range(500)]


def test_tails_of_pareto_and_lognormal() -> None:
    pareto, lognormal = Pareto(1.0, 2.0), LogNormal(1.0, 0.5)
    above = [pareto.seconds(0, 0, step) > 10 for step in range(COUNT)]
    assert sum(above) / COUNT == pytest.approx(0.01, abs=0.003)  # P(T > t) = t^-α
    logs = [math.log(lognormal.seconds(0, 0, step)) for step in range(COUNT)]
    assert statistics.stdev(logs) == pytest.approx(0.5, rel=0.03)


def test_bad_times_come_in_a_row() -> None:
    compute_time = Markov(1.0, 10.0, 0.05, 0.1)
    slow = [compute_time.seconds(0, 0, step) > 1 for step in range(COUNT)]
    after_slow = [now for before, now in pairwise(slow) if before]
    assert sum(after_slow) / len(after_slow) == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize(
    ("text", "compute_time"),
    [
        ("constant:0.1", ConstantTime(0.1)),
        ("constant:0.1 slow:2x4", Slow(ConstantTime(0.1), 2, 4.0)),
        ("constant:0.1;pause:0.5,3", Pause(ConstantTime(0.1), 0.5, 3.0)),
    ],
)
def test_read(text: str, compute_time: ComputeTime) -> None:
    assert parse(text) == compute_time


def test_slow_workers_and_recorded_times() -> None:
    slow = Slow(ConstantTime(0.1), 2, 4.0)
    assert [slow.seconds(0, w, 0) for w in range(3)] == pytest.approx([0.4, 0.4, 0.1])
    trace = RecordedTimes(((1.0, 2.0), (3.0,)))
    assert [trace.seconds(0, w, k) for w in range(3) for k in range(3)] == [1, 2, 1, 3, 3, 3, 1, 2, 1]


def test_hosts_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text("- {rate: 1gbit, latency: 0.2ms}\n- {up: 20mbit, down: 100mbit, message: 5us, keeps: 128kB}\n")
    assert parse_network(str(path)) == Network(
        hosts=(Host(up=1e9, down=1e9, latency=1e-4), Host(up=20e6, down=100e6, message=5e-6, keeps=128e3))
    )
    path.write_text("- {rate: 1gbit, colour: red}\n")
    with pytest.raises(ValueError, match=r"host 0: 'colour' is none of"):
        parse_network(str(path))


LINES = "".join(f"{c}: &{c} [*{p}, *{p}]\n" for p, c in pairwise("abcdefghijklmnopqrstuvw"))
BOMB = f"a: &a [x, x]\n{LINES}hosts: [{{rate: *w}}]\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hosts: [{rate: 1gbit}]\nrack: 4\n", "racks are given as racks:4x8"),
        ("- {rate: 1gbit, 5: 6}\n", "'5' is none of"),
        ("- {rate: [1, 2]}\n", "must be text such as"),
        ("- {rate: 1gbit, keeps: 3ms}\n", "is not a size such as 128kB"),
        ("[" * 3000, "cannot be read"),
        (BOMB, "is not known here"),
        ("- {rate: &a [x, x], up: &b [*a, *a], down: &c [*b, *b]}\n", "must be text such as"),
        ("- {rate: 1gbit}\n" * 100_000, "is larger than"),
    ],
)
def test_files_that_hold_no_hosts_are_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_network(str(path))
    assert said in str(caught.value)
    assert len(str(caught.value)) < 500


def test_constants_by_host() -> None:
    compute_time = parse("constant:0.05,0.1")
    assert [compute_time.seconds(0, worker, 7) for worker in range(4)] == [0.05, 0.1, 0.05, 0.1]


def test_units() -> None:
    assert parse("constant:50ms") == parse("0.05") == parse("50ms") == ConstantTime(0.05)
    assert parse("lognormal: 0.05, 0.3".replace(": ", ":")) == LogNormal(0.05, 0.3)
    assert parse_network("1gbps, 1ms") == parse_network("1Gbit/s,1ms") == parse_network("1000mbit,0.001s")
