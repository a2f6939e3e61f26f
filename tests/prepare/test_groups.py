# SPDX-License-Identifier: Apache-2.0
"""Groups of layers with settings of their own: servers treat each layer as its group says, and follow schedules."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tests.prepare.loops import equal
from tests.processes import together, values
from tests.zoo import SEED, make_data, make_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

import orchestra
from orchestra import Attached
from orchestra.data.random_state import seed_everything
from orchestra.model.flat_optimizer import ELEMENTWISE, FlatOptimizer
from orchestra.model.param_groups import on_range
from orchestra.user_loop.peers import Peers
from orchestra.worlds.sockets import control_messages
from orchestra.worlds.sockets.messenger import Messenger

BATCH, STEPS = 6, 8


def by_kind(kind: Callable[..., torch.optim.Optimizer], model: nn.Module, **given: Any) -> torch.optim.Optimizer:
    """No decay and a rate of their own for biases, and a last layer that is not trained at all."""
    *trained, _ = model.parameters()
    weights, biases = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() < 2]
    more = {"betas": (0.8, 0.9)} if kind is torch.optim.Adam else {"momentum": 0.5 * given.get("momentum", 0.0)}
    return kind([{"params": biases, "weight_decay": 0.0, "lr": 0.1, **more}, {"params": weights}], **given)


sgd = partial(by_kind, torch.optim.SGD, lr=0.02, momentum=0.9, weight_decay=0.1)
adam = partial(by_kind, torch.optim.Adam, lr=0.01, weight_decay=0.1)
Make = Callable[[nn.Module], torch.optim.Optimizer]
Schedulers = Callable[[Any], list[Any]]


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def script(
    strategy: str | None,
    *,
    optimizer: Make = sgd,
    schedulers: Schedulers = lambda o: [],
    size: int = 1,
    before_finish: list[dict[str, Tensor]] | None = None,
) -> dict[str, Tensor] | None:
    """The model after some steps, on the batches of `size` workers; without a strategy, of all of them together."""
    seed_everything(SEED)
    model = make_model()
    made: Any = optimizer(model)
    rank = 0
    if strategy is not None:
        try:
            model, made = orchestra.prepare(model, made, strategy=strategy, steps=STEPS, cluster=Attached(patience=20))
        except SystemExit:
            return None
        rank = made.orchestra.rank
    x, y = (t.chunk(size)[rank] if strategy is not None else t for t in make_data(BATCH * size))
    following = schedulers(made)
    for _ in range(STEPS):
        made.zero_grad()
        F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        made.step()
        for scheduler in following:
            scheduler.step()
    if before_finish is not None:
        before_finish.append(copied(model))
    if strategy is not None:
        made.finish()
    return copied(model)


def among(size: int, servers: int, *asked: dict[str, Any]) -> list[Any]:
    """What the workers have in the end of each script, which is the same; one after the other, as a script may."""

    def call() -> list[Any]:
        return [script(size=size - servers, **given) for given in asked]

    first, *others = values(together(size, call))[: size - servers]
    assert all(equal(one, same) for other in others for one, same in zip(first, other, strict=True))
    return list(first)


CASES: list[dict[str, Any]] = [
    {"optimizer": sgd, "schedulers": lambda o: [OneCycleLR(o, [0.1, 0.05], total_steps=STEPS + 1)]},  # momenta as well
    {
        "optimizer": adam,
        "schedulers": lambda o: [LambdaLR(o, lambda t: 0.8**t), CyclicLR(o, 0.01, 0.1, step_size_up=3)],
    },
    {
        "optimizer": lambda model: torch.optim.AdamW(model.parameters()),
        "schedulers": lambda o: [OneCycleLR(o, 0.1, total_steps=STEPS + 1)],
    },
]


def test_one_worker_and_one_server_are_plain_torch() -> None:
    """Bit for bit, whatever a schedule changes."""
    found = among(2, 1, *({"strategy": "ps", **given} for given in CASES))
    for given, state in zip(CASES, found, strict=True):
        expected = script(None, **given)
        assert expected is not None
        assert equal(state, expected), given


def test_synchronous_servers_are_all_reduce_wherever_they_cut() -> None:
    (expected,) = among(2, 0, {"strategy": "allreduce"})
    (one,) = among(3, 1, {"strategy": "ps"})
    even, layers = among(4, 2, {"strategy": "ps(servers=2)"}, {"strategy": 'ps(servers=2, placement="layers")'})
    assert equal(one, expected)
    assert equal(even, expected)
    assert equal(layers, expected)


def test_every_strategy_with_servers_takes_groups() -> None:
    """And all workers end with one model, of which the layer in no group is as it was."""
    switched = "switch(then=ps(consistency=bsp), when=atshare(share=0.5), momenta=reset)"
    strategies = ["ps(consistency=asp)", "downpour(n_push=2)", "easgd(tau=2)", "ps(consistency=ssp)", switched]
    found = among(3, 1, *({"strategy": strategy, "optimizer": adam} for strategy in strategies))
    seed_everything(SEED)
    begun = copied(make_model())
    for state in found:
        assert equal({"3.weight": state["3.weight"]}, begun)
        assert not torch.equal(state["0.weight"], begun["0.weight"])
        assert not torch.equal(state["0.bias"], begun["0.bias"])


def test_replicas_between_two_exchanges_go_as_their_groups_do() -> None:
    """Of one worker that pushes at the end only, downpour's own steps are plain SGD; the last layer is in no group."""
    plain, never = partial(by_kind, torch.optim.SGD, lr=0.02), 2 * STEPS
    seen: list[dict[str, Tensor]] = []

    def call() -> list[dict[str, Tensor]]:
        script(f"downpour(n_push={never}, n_fetch={never})", optimizer=plain, before_finish=seen)
        return seen

    (state,), _ = values(together(2, call))
    expected = script(None, optimizer=plain)
    assert expected is not None
    assert all(torch.allclose(state[name], tensor, rtol=1e-5, atol=1e-7) for name, tensor in expected.items())


def test_what_a_schedule_said_before_a_server_listened_is_not_lost() -> None:
    """Worker 0 goes on while the server is still being made."""
    heard: list[Any] = []
    peers = Peers(mock.Mock(spec=Messenger), 1, 1)
    peers.on_control(0, {"kind": "settings", "name": "lr", "first_group": 0, "by_group": [0.1]})
    peers.when_settings_change(lambda *said: heard.append(said))
    peers.on_control(0, {"kind": "settings", "name": "betas", "first_group": 1, "by_group": [[0.8, 0.9]]})
    assert heard == [("lr", 0, [0.1]), ("betas", 1, [(0.8, 0.9)])]


def test_groups_are_told_in_as_many_notes_as_it_takes() -> None:
    messenger = mock.Mock(spec=Messenger)
    rates = [i / 1000 for i in range(2500)]
    Peers(messenger, 0, 1).tell_settings((1,), "lr", rates)
    inner = FlatOptimizer(
        lambda layers: torch.optim.SGD([{"params": [p], "lr": 1.0} for p in layers]),
        torch.zeros(2500),
        layers=[nn.Parameter(torch.zeros(1)) for _ in rates],
    )
    inner.rescale(0.5)
    for call in messenger.send_control.call_args_list:
        said = json.loads(json.dumps(call.args[1]))
        control_messages.check(0, said)
        inner.follow(said["name"], said["first_group"], said["by_group"])
    assert [group["lr"] for group in inner.optimizer.param_groups] == [rate / 2 for rate in rates]


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_pieces_of_layers_go_as_the_layers_do(kind: Callable[..., torch.optim.Optimizer]) -> None:
    """Wherever x is cut: bit for bit what torch does to the layers, those in no group included."""
    seed_everything(SEED)
    layers = [nn.Parameter(torch.randn(shape)) for shape in ((3, 4), (4,), (), (2, 5), (0,), (5,))]
    x = torch.cat([p.detach().reshape(-1) for p in layers])

    def factory(given: Any) -> torch.optim.Optimizer:
        first, second, third, *_, last = given
        return kind([{"params": [third, first]}, {"params": [second, last], "lr": 0.02, "weight_decay": 0.1}], lr=0.1)

    cuts = [0, 1, 9, 14, len(x)]
    ranges = [slice(start, stop) for start, stop in pairwise(cuts)]
    inners = []
    for part in ranges:
        made, pieces = on_range(factory, [tuple(p.shape) for p in layers], part, x[part])
        inners.append(FlatOptimizer(made, x[part], layers=pieces))
    whole = factory(layers)
    for _ in range(4):
        g = torch.randn_like(x)
        FlatOptimizer.around(whole, layers).step(g)
        for inner, part in zip(inners, ranges, strict=True):
            inner.step(g[part])
    assert torch.equal(x, torch.cat([p.detach().reshape(-1) for p in layers]))


class Peculiar:
    """Looks like an optimizer of torch, and cannot be made without its secret."""

    def __init__(self, params: Any, secret: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": [p], "lr": secret} for p in params]
        self.state: dict[Any, Any] = {}

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            group["params"][0].grad = None

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["params"][0].sub_(group["params"][0].grad, alpha=group["lr"])


def test_without_servers_no_second_optimizer_is_made() -> None:
    peculiar: Any = lambda model: Peculiar(model.parameters(), secret=0.02)  # noqa: E731
    found = script("localsgd", optimizer=peculiar)
    expected = script(None, optimizer=peculiar)
    assert found is not None
    assert expected is not None
    assert equal(found, expected)


def test_a_note_says_nothing_of_what_a_group_holds() -> None:
    p = nn.Parameter(torch.ones(2))
    inner = FlatOptimizer(partial(torch.optim.SGD, lr=0.1), torch.ones(2), layers=[p])
    inner.follow("params", 0, [3])
    inner.follow("lr", 0, [0.2])
    assert inner.optimizer.param_groups[0]["params"] == [p]
    assert inner.lr == 0.2


@pytest.mark.parametrize("strategy", ["slowmo(tau=2)", "slowmo(tau=2, beta=0.5, alpha=0.7)"])
def test_slow_momentum_goes_by_the_rate_of_each_group_whichever_comes_first(strategy: str) -> None:
    """Also where a group is not trained at all, or its rate has become too small for any number to be divided by it."""

    def order(model: nn.Module, *, turn: int) -> torch.optim.Optimizer:
        first, second, *rest = model.parameters()
        groups = [{"params": [first], "lr": 0.0}, {"params": [second], "lr": 1e-45}, {"params": rest, "lr": 0.05}]
        return torch.optim.SGD(groups[turn:] + groups[:turn], lr=0.1)

    alone = script(strategy, optimizer=lambda model: torch.optim.SGD([*model.parameters()][2:], lr=0.05)) or {}
    assert all(tensor.isfinite().all() for tensor in alone.values())
    for turn in range(3):
        assert equal(script(strategy, optimizer=partial(order, turn=turn)) or {}, alone)
