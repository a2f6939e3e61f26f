# SPDX-License-Identifier: Apache-2.0
"""A machine is measured, and simulations read what was found."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Orchestra

from orchestra.engine.compute_times import Drawn, Measured, Slow
from orchestra.engine.compute_times import parse as parse_compute_time
from orchestra.runs import measurements
from orchestra.runs.measurements import LinkMeasurement, Probe
from orchestra.worlds.simulated.networks import parse as parse_network

FOUND = Probe(
    workload="digits",
    parameters=17_226,
    machine="a machine",
    threads=1,
    batch=16,
    compute={8: (0.010, 0.012), 16: (0.014, 0.016, 0.018), 64: (0.064,)},
    memory=1e10,
    number=1e-9,
    memory_exchange=LinkMeasurement(rate=2e9, latency=4e-5, message=1e-5),
    loopback=LinkMeasurement(rate=1e9, latency=8e-5, message=2e-5),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "probe.json"
    path.write_text(FOUND.dump(), encoding="utf-8")
    return path


def test_this_machine_is_measured_and_simulated(orchestra: Orchestra) -> None:
    said = orchestra("probe", "digits", "--batches", "8,32", "--json")
    assert said.code == 0, said.err
    found = said.json
    assert sorted(map(int, found["compute"])) == [8, 16, 32]  # its own batch as well
    assert all(0 < t < 1 for times in found["compute"].values() for t in times)
    for way in (found["memory_exchange"], found["loopback"]):
        assert 1e7 < way["rate"] < 1e12
        assert 0 < way["latency"] + way["message"] < 0.1
    sim = orchestra(
        "sim",
        "digits",
        "-n",
        "3",
        "--steps",
        "5",
        "--compute-time",
        "probe.json",
        "--straggler",
        "1x3",
        "--network",
        "probe.json",
        "--json",
    )
    assert sim.code == 0, sim.err
    least = min(found["compute"]["16"])
    assert sim.json["seconds"] > 5 * 3 * least


def test_what_was_written_is_read(file: Path) -> None:
    assert measurements.read(file) == FOUND
    host = parse_network(str(file)).host(0)
    assert (host.up, host.down, host.latency, host.message, host.number) == (16e9, 16e9, 2e-5, 1e-5, 1e-9)
    assert parse_network(f"{file} loopback racks:4x2").host(0).up == 8e9
    assert isinstance(parse_compute_time(f"{file} slow:1x5"), Slow)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (16, 0.016),  # as measured
        (40, 0.040),  # on the line from 16 to 64
        (128, 0.128),  # beyond: on the same line
        (4, 0.0085),  # before: on the line from 8 to 16
        (1, 0.006625),
    ],
)
def test_times_at_other_batches_lie_on_a_line(batch: int, expected: float, file: Path) -> None:
    measured = parse_compute_time(str(file))
    assert isinstance(measured, Measured)
    drawn = measured.at(batch)
    assert isinstance(drawn, Drawn)
    assert statistics.median(drawn.times) == pytest.approx(expected, rel=1e-9)
    assert {drawn.seconds(0, 0, step) for step in range(50)} == set(drawn.times)


def test_a_probe_belongs_to_the_batch_of_the_run(file: Path, orchestra: Orchestra) -> None:
    seconds = [
        orchestra("sim", "digits", "--steps", "9", "--compute-time", str(file), "--batch", batch, "--json").json[
            "seconds"
        ]
        for batch in ("16", "64")
    ]
    assert seconds[1] / seconds[0] == pytest.approx(4, rel=0.2)


def _without(name: str) -> str:
    found = json.loads(FOUND.dump())
    del found[name]
    return json.dumps(found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "cannot be read"),
        ("[1]", "was not written by this version"),
        ('{"format": "orchestra probe 9"}', "was not written by this version"),
        (_without("loopback"), "is damaged"),
        (FOUND.dump().replace("0.064", "-1"), "figures that no machine has"),
        (FOUND.dump().replace("0.064", "0"), "figures that no machine has"),
        (FOUND.dump().replace('"number": 1e-09', '"number": null'), "is damaged"),
        (FOUND.dump().replace('"rate": 2000000000.0', '"rate": "fast"'), "is damaged"),
        (FOUND.dump().replace('"batch": 16', '"batch": "x"'), "is damaged"),
        ("[" * 200_000, "cannot be read"),
        (FOUND.dump().replace('"rate": 2000000000.0', '"rate": 0'), "figures that no machine has"),
        (FOUND.dump().replace('"8": [0.01, 0.012]', '"8": []'), "figures that no machine has"),
    ],
)
def test_other_files_are_refused(text: str, said: str, file: Path, orchestra: Orchestra) -> None:
    file.write_text(text, encoding="utf-8")
    for option in ("--compute-time", "--network"):
        answer = orchestra("sim", "digits", option, str(file))
        assert answer.code == 2
        assert said in answer.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["digits", "--out", "probe.yaml"], "must end in .json"),
        (["digits", "--batches", "8,none"], "whole numbers of at least 1"),
        (["digits", "--threads", "0"], "must be at least 1"),
        (["digit"], "did you mean 'digits'"),
    ],
)
def test_bad_requests_are_refused_at_once(arguments: list[str], said: str, orchestra: Orchestra, tmp_path: Any) -> None:
    answer = orchestra("probe", *arguments)
    assert answer.code == 2
    assert said in answer.err
    assert not list(tmp_path.iterdir())


def test_a_missing_file_says_how_to_make_one(orchestra: Orchestra) -> None:
    answer = orchestra("sim", "digits", "--compute-time", "probe.json")
    assert answer.code == 2
    assert "`orchestra probe RECIPE` writes one" in answer.err
