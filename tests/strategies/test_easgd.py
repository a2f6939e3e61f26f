# SPDX-License-Identifier: Apache-2.0
"""The elastic force: what it conserves, where it is stable, and the path of the centre in closed form."""

from __future__ import annotations

import cmath
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.strategies.points import START, end_of, quadratic, slope, walk
from tests.zoo import assert_close, assert_same, momentum, sgd, simulate, train

from orchestra import EASGD, ConfigError, Local, LocalSGD, Node, Simulated, Steps, SyncEASGD
from orchestra.model.flat_optimizer import Factory
from orchestra.runs.facts import scores_of

# The asynchronous form.


def test_the_moving_rate_is_beta_over_p_unless_given(tmp_path: Path) -> None:
    world = Simulated(workers=4, compute_time="lognormal:0.05,0.5")
    divided, given = (
        train(strategy, tmp_path / f"{i}", cluster=world, budget=Steps(9))
        for i, strategy in enumerate((EASGD(tau=2, beta=0.8), EASGD(tau=2, beta=7.0, alpha=0.2)))
    )
    assert_same(divided.model, given.model)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0, 1.7])
@pytest.mark.parametrize("servers", [1, 2])
def test_an_exchange_conserves_the_sum(
    alpha: float, servers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a gradient of 1 everywhere, Σ xⁱ + x̃ falls by γ a step, whatever is exchanged."""
    ends: list[float] = []
    finish = EASGD.finish

    def watched(self: EASGD, node: Node, s: Any) -> None:
        finish(self, node, s)
        ends.append(float(node.x[0]))

    monkeypatch.setattr(EASGD, "finish", watched)
    workers, steps = 3, 11
    world = Simulated(workers=workers, compute_time="lognormal:0.05,0.5", network="10mbit,1ms")
    strategy = EASGD(tau=2, alpha=alpha, servers=servers)
    centre = end_of(walk(strategy, tmp_path, slope, lr=0.25, steps=steps, cluster=world))
    assert len(ends) == workers
    assert sum(ends) + centre == pytest.approx((workers + 1) * START - 0.25 * workers * steps, abs=1e-12)
    assert (centre == START) == (alpha == 0.0)


def radius(alpha: float, eta: float, p: int) -> float:
    """How much one turn of every worker stretches (x̃, x¹, ..., xᵖ) at most, in the long run."""
    turn = torch.eye(p + 1, dtype=torch.float64)
    for i in range(1, p + 1):
        move = torch.eye(p + 1, dtype=torch.float64)
        move[i, i], move[i, 0] = 1 - eta - alpha, alpha
        move[0, 0], move[0, i] = 1 - alpha, alpha
        turn = move @ turn
    return float(torch.linalg.eigvals(turn).abs().max())


@pytest.mark.parametrize("eta", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("p", [1, 3])
def test_easgd_is_stable_up_to_the_bound_of_the_paper(eta: float, p: int, tmp_path: Path) -> None:
    """Equal workers take turns: the round-robin scheme."""
    bound = (4 - 2 * eta) / (4 - eta)
    steps = 300
    for alpha, name in ((0.98 * bound, "inside"), (1.02 * bound, "outside")):
        end = end_of(walk(EASGD(tau=1, alpha=alpha), tmp_path / name, quadratic, lr=eta, steps=steps, workers=p))
        stable = radius(alpha, eta, p) < 1
        assert stable == (name == "inside")
        assert (abs(end) < START) == stable, (alpha, end)


def test_a_turn_of_every_worker_is_the_map_of_the_paper(tmp_path: Path) -> None:
    """The numbers of the round-robin scheme, one by one."""
    eta, alpha, p, steps = 0.3, 0.4, 3, 6
    centre, x = START, [START] * p
    for t in range(steps + 1):
        for i in range(p):
            d = alpha * (x[i] - centre)
            x[i], centre = x[i] - d - (eta * x[i] if t < steps else 0.0), centre + d
    result = walk(EASGD(tau=1, alpha=alpha), tmp_path, quadratic, lr=eta, steps=steps, workers=p)
    assert end_of(result) == pytest.approx(centre, rel=1e-12)


def test_the_exchange_is_over_before_the_gradient_is(tmp_path: Path) -> None:
    """It takes 0.2 s there and 0.2 s back, a gradient 1 s: only the last exchange of all takes any time of its own."""
    world = Simulated(workers=1, network="1000gbit,0.2s", compute_time="constant:1")
    result = walk(EASGD(tau=1), tmp_path, slope, lr=0.1, steps=5, cluster=world)
    assert result.summary.seconds == pytest.approx(5.4, abs=0.05)


# The synchronous form.


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize(("eta", "h", "alpha"), [(0.1, 1.0, 0.05), (0.5, 2.0, 0.2), (0.05, 0.5, 0.01)])
def test_the_centre_follows_the_closed_form(p: int, eta: float, h: float, alpha: float, tmp_path: Path) -> None:
    """Of the centre, as the paper derives it, without noise; β = pα. The move at the end is that of step t."""
    t = 12
    a, c2 = eta * h + (p + 1) * alpha, eta * h * p * alpha
    root = cmath.sqrt(a * a - 4 * c2)
    gamma, phi = 1 - (a - root) / 2, 1 - (a + root) / 2
    u0 = p * (START - alpha / (1 - p * alpha - phi) * START)
    expected = gamma**t * START + (gamma**t - phi**t) / (gamma - phi) * alpha * u0
    assert abs(expected.imag) < 1e-12
    strategy = SyncEASGD(tau=1, beta=p * alpha)
    result = walk(strategy, tmp_path, partial(quadratic, h=h), lr=eta, steps=t - 1, workers=p)
    assert end_of(result) == pytest.approx(expected.real, rel=1e-10)


@pytest.mark.parametrize("optimizer", [sgd, momentum], ids=["sgd", "momentum"])
def test_of_one_worker_both_forms_are_the_same(optimizer: Factory, tmp_path: Path) -> None:
    both = [
        simulate(strategy, tmp_path / type(strategy).__name__, workers=1, optimizer=optimizer, budget=Steps(13))
        for strategy in (EASGD(tau=3, beta=0.4), SyncEASGD(tau=3, beta=0.4))
    ]
    assert_close(both[0].model, both[1].model)


def test_without_a_force_it_is_the_mean_of_workers_apart(tmp_path: Path) -> None:
    apart = train(LocalSGD(tau=1000), tmp_path / "apart", budget=Steps(5))
    assert_close(train(SyncEASGD(alpha=0.0, beta=1.0), tmp_path / "free", budget=Steps(5)).model, apart.model)
    held = train(SyncEASGD(tau=1, alpha=0.3, beta=1.0), tmp_path / "held", budget=Steps(5))
    with pytest.raises(AssertionError):
        assert_close(held.model, apart.model)


@pytest.mark.parametrize("strategy", [EASGD(tau=1), SyncEASGD(tau=1)], ids=repr)
def test_the_centre_of_easgd_is_scored(strategy: EASGD | SyncEASGD, tmp_path: Path) -> None:
    """Of one worker, with α = 0.9: by hand."""

    def place(model: torch.nn.Module, data: Any) -> float:
        return float(next(model.parameters()).detach())

    more: dict[str, Any] = {"evaluate": place, "evaluation_data": lambda: 0, "evaluate_every": Steps(1)}
    walk(strategy, tmp_path, slope, lr=0.1, steps=3, cluster=Local(workers=1), **more)
    scores = [score.metrics["place"] for score in scores_of(tmp_path)]
    centre = [1.5, 1.41, 1.392, 1.3164]
    # After the first step the worker has moved, the centre has not. A server hears of a step when the next one begins.
    expected = [1.5, *centre] if isinstance(strategy, SyncEASGD) else [*centre, 1.3164]
    assert scores == pytest.approx(expected, rel=1e-12)


# Fields.


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"alpha": "much"}, "strategy.alpha = 'much' must be a number"),
        ({"alpha": -0.1}, "strategy.alpha = -0.1 must be at least 0"),
        ({"tau": 0}, "must be at least 1"),
        ({"servers": 9}, "is too many for 2 workers: at most 8"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        simulate(EASGD(**given), tmp_path / "run", workers=2)
    assert said in " ".join(str(caught.value).split())
