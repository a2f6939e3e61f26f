# SPDX-License-Identifier: Apache-2.0
"""Where the model is cut among servers: evenly, or between layers, which changes nothing but who holds what."""

from __future__ import annotations

from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.cases import in_both_worlds
from tests.zoo import adam, assert_close, assert_same, make_large, momentum, plain, simulate, train

from orchestra import ASP, LAMB, LARS, AllReduce, ConfigError, KSync, Local, ParameterServer, Simulated, Steps
from orchestra.core.vectors import ranges_of_layers
from orchestra.model.flat_optimizer import Factory

lars: Factory = partial(LARS, lr=0.5, eta=0.02, weight_decay=1e-3)
lamb: Factory = partial(LAMB, lr=0.02)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_no_layer_is_cut_and_the_largest_range_is_as_small_as_it_can_be(layers: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(layers)))
    found = ranges_of_layers(layers, parts)
    ends = [sum(layers[:i]) for i in range(len(layers) + 1)]
    assert [part.start for part in found] + [sum(layers)] == [0] + [part.stop for part in found]
    assert {part.stop for part in found} <= {*ends[1:]}
    assert len(found) == parts
    assert all(part.stop > part.start for part in found)
    every = [[0, *cuts, ends[-1]] for cuts in combinations(ends[1:-1], parts - 1)]
    least = min(max(b - a for a, b in pairwise(cuts)) for cuts in every)
    assert max(part.stop - part.start for part in found) == least


@in_both_worlds(
    "servers, optimizer", [1, 2, 5], [momentum, adam],
    local=Local(workers=3), simulated=Simulated(workers=3), real=lambda servers, optimizer: servers == 2,
)  # fmt: skip
def test_between_layers_bsp_is_all_reduce_bit_for_bit(
    servers: int, optimizer: Factory, cluster: Any, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"cluster": cluster, "optimizer": optimizer, "budget": Steps(12)}
    strategy = ParameterServer(servers=servers, placement="layers")
    all_reduce = train(AllReduce(), tmp_path / "allreduce", **given).model
    assert_same(train(strategy, tmp_path / "ps", **given).model, all_reduce)


@pytest.mark.parametrize("optimizer", [momentum, adam], ids=["momentum", "adam"])
def test_between_large_layers_bsp_is_all_reduce_but_for_rounding(optimizer: Factory, tmp_path: Path) -> None:
    """Fused kernels treat the last few numbers of a range a little differently, and here it ends where a layer does."""
    given: dict[str, Any] = {"workers": 2, "optimizer": optimizer, "budget": Steps(6), "model": make_large}
    centred = simulate(ParameterServer(servers=2, placement="layers"), tmp_path / "ps", **given)
    assert_close(centred.model, simulate(AllReduce(), tmp_path / "allreduce", **given).model)


@pytest.mark.parametrize(
    ("optimizer", "placed"),
    [
        (lars, {"servers": 2, "placement": "layers"}),
        (lamb, {"servers": 1}),
        pytest.param(lars, {"servers": 1}, marks=pytest.mark.nightly),
        pytest.param(lamb, {"servers": 2, "placement": "layers"}, marks=pytest.mark.nightly),
    ],
)
def test_servers_of_whole_layers_take_optimizers_that_look_at_them(
    optimizer: Factory, placed: dict[str, Any], tmp_path: Path
) -> None:
    given: dict[str, Any] = {"workers": 3, "optimizer": optimizer, "budget": Steps(12)}
    all_reduce = train(AllReduce(), tmp_path / "allreduce", **given).model
    assert_close(train(ParameterServer(**placed), tmp_path / "ps", **given).model, all_reduce)
    asked: dict[str, Any] = {"workers": 3, "checkpoint_every": Steps(2), "optimizer": optimizer}
    for consistency in (ASP(), KSync(k=3)):
        strategy, out = ParameterServer(consistency=consistency, **placed), tmp_path / type(consistency).__name__
        train(strategy, out, budget=Steps(4), **asked)
        assert train(strategy, out, budget=Steps(12), resume=True, **asked).summary.steps == 12
    assert_close(train("ps", tmp_path / "whole", **given).model, all_reduce)


def by_group(params: Any, *, kind: Any = torch.optim.SGD) -> torch.optim.Optimizer:
    """By place and by shape, as factories do; the last layer is in no group."""
    first, *others, _ = params
    biases, weights = [p for p in others if p.dim() < 2], [p for p in others if p.dim() > 1]
    made: torch.optim.Optimizer = kind([{"params": [first, *weights]}, {"params": biases, "lr": 0.2}], lr=0.05)
    made.param_groups[0]["weight_decay"] = 0.1
    return made


@pytest.mark.parametrize("optimizer", [by_group, partial(by_group, kind=torch.optim.Adagrad)], ids=["sgd", "adagrad"])
def test_groups_of_layers_are_the_same_on_servers_as_on_workers(optimizer: Factory, tmp_path: Path) -> None:
    """Bit for bit; and alone it is plain torch."""
    given: dict[str, Any] = {"cluster": Simulated(workers=3), "optimizer": optimizer, "budget": Steps(7)}
    expected = train(AllReduce(), tmp_path / "allreduce", **given).model
    for i, placed in enumerate(({}, {"servers": 3}, {"servers": 2, "placement": "layers"})):
        assert_same(train(ParameterServer(**placed), tmp_path / str(i), **given).model, expected)  # type: ignore[arg-type]
    alone = train("ps", tmp_path / "alone", **given | {"cluster": Simulated(workers=1)}).model
    assert_same(alone, plain(optimizer=optimizer, steps=7))


def test_groups_on_servers_are_resumed(tmp_path: Path) -> None:
    strategy, optimizer = ParameterServer(servers=2), partial(by_group, kind=torch.optim.Adagrad)
    asked: dict[str, Any] = {"workers": 2, "checkpoint_every": Steps(2), "optimizer": optimizer}
    train(strategy, tmp_path, budget=Steps(4), **asked)
    parts = train(strategy, tmp_path, budget=Steps(7), resume=True, **asked).model
    given: dict[str, Any] = {"cluster": Simulated(workers=2), "optimizer": optimizer, "budget": Steps(7)}
    whole = train(strategy, tmp_path / "whole", **given).model
    assert_same(parts, whole)


class Own(torch.optim.SGD):
    """An optimizer that cannot be made without an argument of its own."""

    def __init__(self, params: Any, *, secret: float) -> None:
        super().__init__(params, lr=secret)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "complaint"),
    [
        (ParameterServer(servers=6, placement="layers"), momentum, "is more than the 5 layers"),
        (ParameterServer(placement="odd"), momentum, "must be one of even, layers"),  # type: ignore[arg-type]
        (ParameterServer(servers=2), lars, "looks at whole layers, but a server of ParameterServer"),
        (
            ParameterServer(servers=2, placement="layers"),
            lambda params: Own([{"params": params[:2]}, {"params": params[2:]}], secret=0.1),
            "has groups, and cannot be made for some of their layers only: .*'secret'.*Use servers=1",
        ),
    ],
)
@pytest.mark.usefixtures("no_process")
def test_what_cannot_be_placed_is_refused(
    strategy: ParameterServer, optimizer: Factory, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        simulate(strategy, tmp_path, workers=3, optimizer=optimizer, budget=Steps(1))
