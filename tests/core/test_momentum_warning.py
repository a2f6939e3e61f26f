# SPDX-License-Identifier: Apache-2.0
"""The warning about momentum on stale gradients, with a remedy, in every world."""

from __future__ import annotations

import contextlib
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.prepare.loops import loop
from tests.processes import together
from tests.zoo import adam, make_model, momentum, train

from orchestra import Attached, Local, Simulated, Steps
from orchestra.engine import expression, warnings

ASYNC = "ps(consistency=asp())"
WARNED = "momentum 0.9 amplifies them"


def said(strategy: str, *, workers: int = 3, optimizer: Any = momentum, options: bool = False) -> str | None:
    made = optimizer(make_model().parameters())
    return warnings.about_momentum(expression.parse(strategy), made, workers, options=options)


@pytest.mark.parametrize(
    "strategy",
    [
        ASYNC, "ps(consistency=ssp(staleness=1))", "ps(consistency=boundeddelay(tau=1))", "ps(consistency=kasync(k=2))",
        "ps(consistency=softsync(n=2))", "downpour", f"switch(first={ASYNC}, then=allreduce)", "switch(momentum=0.95)",
        "switch(then=ps(consistency=ssp()))",
    ],
)  # fmt: skip
def test_momentum_on_stale_gradients_is_warned_of(strategy: str) -> None:
    text = said(strategy)
    assert text is not None
    assert "amplifies them" in text
    assert "momentum=0" in text


@pytest.mark.parametrize(
    "strategy",
    [
        "allreduce", "ps", "localsgd", "easgd", "hogwild", "ps(consistency=backupworkers(b=1))", "switch",
        "ps(consistency=ksync(k=1))", "ps(consistency=ssp(staleness=0))", "ps(consistency=boundeddelay(tau=0))",
        "switch(momentum=0.5)",
    ],
)  # fmt: skip
def test_where_no_gradient_is_stale_or_no_momentum_is_left_nothing_is_said(strategy: str) -> None:
    assert said(strategy) is None


def test_less_momentum_adam_and_one_worker_are_fine() -> None:
    assert said(ASYNC, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.89)) is None
    assert said(ASYNC, optimizer=adam) is None
    assert said(ASYNC, workers=1) is None


def test_a_setting_that_tuning_found_is_not_warned_of() -> None:
    """Without momentum was tried as well: a warning on the report would advise what was worse."""
    with warnings.once(momentum_tuned=True):
        assert said(ASYNC) is None
    assert said(ASYNC) is not None


def test_a_comparison_prints_each_warning_once(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.silent():
        assert warnings.say("of a try") == ["of a try"]
    for _ in range(2):
        with warnings.once(momentum_tuned=True):
            warnings.say("of all seeds", "of a try")
    assert capsys.readouterr().err == "warning: of all seeds\nwarning: of a try\n"


@pytest.mark.parametrize(
    ("options", "name", "remedy"),
    [
        (False, "ParameterServer", "Use momentum=0 and lr=0.067 in the optimizer, or"),
        (True, "ps(consistency=asp)", "Use --momentum 0 --lr 0.067, or"),
    ],
    ids=["in a script", "on the command line"],
)
def test_the_remedy_is_what_a_switch_would_do(options: bool, name: str, remedy: str) -> None:
    """γ/(1 − μ)/N: what `StrategySwitch` goes on with."""
    text = str(said(ASYNC, options=options))
    assert text.startswith(f"{name} applies gradients")
    assert remedy in text
    assert "Use momentum=0 in the strategy, or" in str(said("switch(momentum=0.95)", options=options))


@pytest.mark.parametrize("cluster", [Local(workers=2), Simulated(workers=2)], ids=["local", "simulated"])
def test_the_warning_is_printed_once_and_kept(cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(ASYNC, tmp_path, cluster=cluster, budget=Steps(2))
    assert capfd.readouterr().err.count(WARNED) == 1
    assert WARNED in json.loads((tmp_path / "ending.json").read_text())["warnings"][0]


def test_where_nothing_is_trained_nothing_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train(ASYNC, tmp_path, cluster=Simulated(workers=2, numerics="off"), budget=Steps(2))
    assert WARNED not in capfd.readouterr().err


@pytest.mark.parametrize("how", ["train", "prepare"])
def test_one_process_of_many_says_it(how: str, tmp_path: Path) -> None:
    def call() -> str:
        with contextlib.redirect_stderr(io.StringIO()) as heard, contextlib.suppress(SystemExit):
            if how == "train":
                train(ASYNC, tmp_path / "run", cluster=Attached(patience=20), budget=Steps(2))
            else:
                loop(ASYNC, steps=2, out=tmp_path / "run")
        return heard.getvalue()

    outcomes = together(3, call)
    assert not any(outcome.kind for outcome in outcomes), outcomes
    assert [outcome.value.count(WARNED) for outcome in outcomes] == [1, 0, 0]
    assert WARNED in json.loads((tmp_path / "run" / "ending.json").read_text())["warnings"][0]
