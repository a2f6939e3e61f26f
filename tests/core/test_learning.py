# SPDX-License-Identifier: Apache-2.0
"""A run that did not learn says so, in every world; a good one and one too short to tell are not accused."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.prepare.loops import loop
from tests.processes import together
from tests.zoo import CLASSES, INPUTS, classifier, sgd
from tests.zoo import train as train_zoo
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import orchestra
from orchestra import Attached, Epochs, Local, Simulated, Steps, recipes
from orchestra.cli.sources import arguments
from orchestra.data.labels import distribution
from orchestra.runs import learning
from orchestra.runs.events import Scored, Stepped
from orchestra.runs.facts import facts_of
from orchestra.runs.learning import FEWEST, Learning

LABELS = {"classes": 10, "count": 1000, "largest": 0.11}
STALE = "did not learn (rate too large for stale gradients?)"
ASYNC = "ps(consistency=asp)"
huge = partial(torch.optim.SGD, lr=30.0, momentum=0.9)
wild = partial(torch.optim.Adam, lr=3.0)


def judged(
    losses: Sequence[float | None],
    accuracies: Sequence[float | None] = (),
    labels: Any = LABELS,
    *,
    stale: bool = False,
) -> Learning:
    """What is said of two workers with these losses."""
    stepped = [
        Stepped(float(k), node, k, 0.0, k, loss, 0.1, 0.0, 0.0, 0.0, 0, 0)
        for node in range(2)
        for k, loss in enumerate(losses, 1)
    ]
    scores: list[Any] = [Scored(0.0, i, i, i, {"accuracy": a}) for i, a in enumerate(accuracies)]  # type: ignore[dict-item]
    return learning.judge(stepped, scores, labels, steps=len(losses), stale=stale)


FALLING = [2.3 * 0.97**k for k in range(100)]
STUCK = [2.31, 9.0, *[2.3] * 98]


def test_a_loss_that_falls_is_learning() -> None:
    assert judged(FALLING) == Learning(True)
    assert judged(FALLING, [0.1, 0.5, 0.9]) == Learning(True)


def test_a_loss_that_does_not_fall_is_none() -> None:
    found = judged([2.3, 2.5, *[2.6] * 98])
    assert found.learned is False
    assert found.unlearned == "did not learn (rate too large?)"
    assert found.why_unlearned == (
        "the training loss was 2.3 in the first step and 2.6 in the end. Use a smaller learning rate, or clip the "
        "gradients."
    )
    assert judged([2.3, 2.5, *[2.6] * 98], stale=True).unlearned == STALE


def test_accuracy_at_chance_is_no_learning_though_the_loss_fell_a_little() -> None:
    found = judged(STUCK, [0.08, 0.1, 0.1], stale=True)
    assert found.unlearned == STALE
    assert "the final accuracy 0.1 is no better than guessing, which scores up to 0.13" in str(found.why_unlearned)
    assert judged(STUCK, [0.08, 0.1, 0.2]) == Learning(True), "better than guessing, and the loss is below the first"


def test_a_good_accuracy_counts_whatever_the_loss_is() -> None:
    assert judged([0.5] * 100, [0.1, 0.9]) == Learning(True)
    assert judged([0.5] * 100, [0.1, 0.4]).learned is False, "not half way to 1, and the loss has not fallen"


def test_a_model_that_was_lost_after_it_was_good_collapsed() -> None:
    assert judged([*FALLING, *[5.0] * 20], [0.1, 0.9, 0.1]).unlearned == "collapsed (rate too large?)"


def test_a_rate_that_is_too_small_is_not_called_too_large() -> None:
    found = judged([2.3 - k / 1e4 for k in range(100)], [0.08, 0.08, 0.09])
    assert found.unlearned == "did not learn (rate too small, or too few steps?)"
    assert "Use a larger learning rate, or train longer." in str(found.why_unlearned)


def test_a_short_run_that_diverged_is_told() -> None:
    found = judged([1.6, 0.6, *[14.0] * 30])
    assert found.unlearned == "did not learn (rate too large?)"
    assert str(found.why_unlearned).startswith("the training loss was 1.6 in the first step and 14 in the end")
    assert judged([1.6, 0.6, *[2.0] * 30]) == Learning(), "noise may be as large"
    assert judged([1.6]) == judged([1.6, 14.0, 1.7]) == judged([-1.0, -0.9]) == Learning()
    assert judged([0.01, 0.03, 0.03]) == judged([0.01, 0.03, 0.012, 0.011]) == Learning(), "too few to tell"
    assert judged([0.01, 0.03, 0.03, 0.03]).learned is False


def test_a_score_that_is_no_longer_a_number_is_no_learning() -> None:
    found = judged(FALLING, [0.1, None], labels=None)
    assert found.learned is False
    assert str(found.why_unlearned).startswith("accuracy of the final model is no number")
    assert judged(FALLING, [None, None], labels=None).learned is True, "it never was one"


@pytest.mark.parametrize(
    ("losses", "accuracies", "labels"),
    [
        ([9.0] * (FEWEST - 1), [0.1, 0.1], LABELS),  # too few steps
        ([None] * 100, (), None),  # no losses
        ([2.0, *[1.0, 3.0] * 50], (), None),  # too noisy
    ],
)
def test_where_nothing_can_be_told_nothing_is_said(losses: Any, accuracies: Any, labels: Any) -> None:
    assert judged(losses, accuracies, labels) == Learning()


def test_chance_is_known_only_of_balanced_labels() -> None:
    assert learning.chance(LABELS) == pytest.approx(0.11 + 2 * (0.09 / 1000) ** 0.5)
    assert learning.chance(LABELS | {"largest": 0.4}) is None
    assert learning.chance({"classes": 2, "count": 1000, "largest": 0.9}) is None
    assert learning.chance(None) is None
    assert learning.chance({"classes": "ten"}) is None
    # A model that always says the frequent label of an uneven set is not accused while its loss falls.
    assert judged(FALLING, [0.5, 0.9, 0.9], {"classes": 2, "count": 1000, "largest": 0.9}) == Learning(True)


def test_labels_are_counted_where_they_can_be_seen() -> None:
    x, y = torch.zeros(6, 2), torch.tensor([0, 1, 1, 2, 2, 2])
    assert distribution((x, y)) == distribution(TensorDataset(x, y)) == {"classes": 3, "count": 6, "largest": 0.5}

    class WithTargets:
        targets: ClassVar = [0, 1, 1, 2, 2, 2]

    assert distribution(WithTargets()) == distribution((x, y))
    assert distribution((x, y.float())) is None, "no classes"
    assert distribution((x, torch.zeros(6, dtype=torch.int64))) is None, "only one"
    assert distribution([(x[0], 1)]) is None, "it would have to be read sample by sample"
    assert distribution(None) is None


# In every world.


def make_thirds(count: int = 240) -> tuple[Tensor, Tensor]:
    """Three labels, equally many of each, that a small model tells apart."""
    y = torch.arange(count) % CLASSES
    generator = torch.Generator().manual_seed(5)
    return F.one_hot(y, INPUTS).float() + 0.1 * torch.randn(count, INPUTS, generator=generator), y


def make_blanks() -> tuple[Tensor, Tensor]:
    """The same labels without anything to tell them by: whatever the order of updates, a model can only guess."""
    x, y = make_thirds()
    return torch.zeros_like(x), y


def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, float]:
    return {"accuracy": (model(data[0]).argmax(1) == data[1]).float().mean().item()}


def train(
    out: Path, cluster: Any, *, data: Any = make_blanks, strategy: str = ASYNC, optimizer: Any = huge, steps: int = 60
) -> orchestra.Result:
    return orchestra.train(
        model=classifier, data=data, loss=F.cross_entropy, optimizer=optimizer, strategy=strategy,
        cluster=cluster, batch=6, budget=Steps(steps), evaluate=accuracy, evaluation_data=data, out=out,
    )  # fmt: skip


WORLDS = [Local(workers=2), Simulated(workers=2)]


@pytest.mark.parametrize("cluster", WORLDS, ids=["local", "simulated"])
def test_a_rate_that_is_too_large_is_told(cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = train(tmp_path, cluster)
    assert result.learned is False
    assert result.summary.unlearned == STALE
    assert STALE in repr(result)
    assert capfd.readouterr().err.count(f"warning: {ASYNC} {STALE}: ") == 1
    assert f"{ASYNC} {STALE}: " in json.loads((tmp_path / "ending.json").read_text())["warnings"][-1]
    assert json.loads((tmp_path / "summary.json").read_text())["learned"] is False


@pytest.mark.parametrize("cluster", WORLDS, ids=["local", "simulated"])
def test_a_good_run_and_a_short_one_are_not_accused(
    cluster: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = partial(torch.optim.SGD, lr=0.5)
    good = train(tmp_path / "good", cluster, data=make_thirds, strategy="allreduce", optimizer=small)
    assert good.learned is True
    short = train(tmp_path / "short", cluster, data=make_thirds, strategy="allreduce", optimizer=small, steps=10)
    assert short.learned is None
    assert "learn (" not in capfd.readouterr().err
    assert "learn (" not in (tmp_path / "short" / "ending.json").read_text()


def test_synchronous_strategies_are_not_told_of_stale_gradients(tmp_path: Path) -> None:
    summary = train(tmp_path, Simulated(workers=2), strategy="allreduce").summary
    assert summary.unlearned == "did not learn (rate too large?)"
    assert summary.made == f"{summary.steps:,} steps in {summary.seconds:.2f} virtual s"


def test_where_nothing_is_trained_nothing_is_told(tmp_path: Path) -> None:
    assert train(tmp_path, Simulated(workers=2, numerics="off")).learned is None


def test_of_a_run_that_goes_on_nothing_is_told(tmp_path: Path) -> None:
    train(tmp_path, Simulated(workers=2))
    (tmp_path / "ending.json").unlink()
    assert facts_of(tmp_path).learned is None


@pytest.mark.parametrize("how", ["train", "prepare"])
def test_many_processes_say_it_once(how: str, tmp_path: Path) -> None:
    def call() -> str:
        with contextlib.redirect_stderr(io.StringIO()) as heard, contextlib.suppress(SystemExit):
            if how == "train":
                assert train(tmp_path / "run", Attached(patience=20)).learned is False
            else:
                loop(ASYNC, optimizer=partial(wild, lr=300.0), epochs=12, told=True, out=tmp_path / "run")
        return heard.getvalue()

    outcomes = together(3, call)
    assert not any(outcome.kind for outcome in outcomes), outcomes
    assert [outcome.value.count(STALE) for outcome in outcomes] == [1, 0, 0]
    assert STALE in json.loads((tmp_path / "run" / "ending.json").read_text())["warnings"][-1]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["learned"] is False


@pytest.mark.parametrize(("told", "learned"), [(True, True), (False, None)])
def test_a_loop_that_learns_or_tells_no_loss_is_not_accused(told: bool, learned: bool | None, tmp_path: Path) -> None:
    outcomes = together(2, lambda: loop("allreduce", optimizer=sgd, epochs=12, told=told, out=tmp_path / "run"))
    assert not any(outcome.kind for outcome in outcomes), outcomes
    assert facts_of(tmp_path / "run").learned is learned


def test_a_regression_is_judged_by_its_loss(tmp_path: Path) -> None:
    good = train_zoo("allreduce", tmp_path / "good", cluster=Simulated(workers=2), budget=Steps(300), optimizer=sgd)
    assert good.learned is True
    lost = train_zoo(ASYNC, tmp_path / "lost", cluster=Simulated(workers=2), budget=Steps(100), optimizer=wild)
    assert lost.summary.unlearned == STALE


@pytest.mark.parametrize("strategy", ["allreduce", "localsgd", "slowmo", "ps(consistency=ssp(staleness=2))", "easgd"])
def test_the_bundled_recipe_learns_with_every_strategy_at_its_own_rate(strategy: str, tmp_path: Path) -> None:
    given = arguments(recipes.get("digits")) | {"budget": Epochs(4), "strategy": strategy, "out": tmp_path}
    result = orchestra.train(**given, cluster=Simulated(workers=4))
    assert result.summary.steps >= FEWEST
    assert result.learned is True
