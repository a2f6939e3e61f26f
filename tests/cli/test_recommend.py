# SPDX-License-Identifier: Apache-2.0
"""Advice: the whole catalogue takes part, the slow ones leave early, and what is said follows from the figures."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestra import expression
from orchestra.cli.app import app
from orchestra.cli.recommend import Ladder, _scaled
from orchestra.errors import ConfigError
from orchestra.strategies import STRATEGIES, Hogwild


def test_every_strategy_but_those_of_one_memory_is_tried() -> None:
    for cls in STRATEGIES:
        tried = [expression.parse(text) for text in cls.tries]
        assert all(type(strategy) is cls for strategy in tried)
        assert tried or cls is Hogwild, cls


def ask(*words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["recommend", "digits", *words])
    return found.exit_code, found.output


@pytest.mark.timeout(120)
def test_with_a_slow_network_and_a_straggler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 2 Mbit/s a message costs more than a hundred steps: nobody who sends every step can win."""
    runs = Counter[str]()
    real = Ladder._run

    def counted(ladder: Ladder, strategy: str, seed: int, place: str) -> None:
        runs[strategy] += 1
        real(ladder, strategy, seed, place)

    monkeypatch.setattr(Ladder, "_run", counted)
    names = "allreduce, ps, localsgd(tau=4), localsgd(tau=16), localsgd(tau=64)"
    code, output = ask(
        "--network", "2mbit", "-n", "2", "--straggler", "1x2", "-s", names, "--seeds", "2", "--epochs", "2",
        "--target", "accuracy=0.6", "--out", str(tmp_path / "out"), "--json", "-q",
    )  # fmt: skip
    record = json.loads(output.splitlines()[-1])
    assert code == 0
    assert record["recommended"].startswith("localsgd(tau=")
    assert max(runs.values()) == 2
    assert min(runs.values()) == 1  # not all are worth another seed
    advice = " ".join(record["advice"])
    assert f"Take {record['recommended']}" in advice
    assert "fewer bytes a step" in advice
    assert "half the bandwidth" in advice
    assert json.loads((tmp_path / "out/table.json").read_text())["rows"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [(("1gbit", "-s", "localsgd(tau=0)"), "tau"), (("1parsec",), "parsec"), (("1gbit", "--seeds", "0"), "seeds")],
)
def test_what_cannot_be_run_is_said(words: tuple[str, ...], complaint: str) -> None:
    found = CliRunner().invoke(app, ["recommend", "digits", "--network", *words])
    assert isinstance(found.exception, ConfigError)
    assert complaint in str(found.exception)


@pytest.mark.parametrize(("rate", "half"), [("50mbit", "25mbit"), ("1.5gbit", "0.75gbit")])
def test_rates_are_scaled(rate: str, half: str) -> None:
    assert _scaled(rate, 0.5) == half
