# SPDX-License-Identifier: Apache-2.0
"""`optimizer.state_dict()` where servers hold the optimizer's state."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.prepare.loops import equal, make_loader
from tests.processes import together, values
from tests.zoo import SEED, adam, make_model, momentum, sgd
from torch import nn

import orchestra
from orchestra import Attached
from orchestra.data.random_state import seed_everything
from orchestra.errors import CheckpointError
from orchestra.model.flat_optimizer import Factory

Each = Callable[[nn.Module, Any], None]


def grouped(make: Factory, model: nn.Module) -> torch.optim.Optimizer:
    """Biases in a group of their own, which comes first."""
    biases = [p for p in model.parameters() if p.dim() == 1]
    others = [p for p in model.parameters() if p.dim() != 1]
    return make([{"params": biases, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.01}])


def script(
    strategy: str,
    *,
    optimizer: Callable[[nn.Module], Any] = lambda model: momentum(model.parameters()),
    before: Each = lambda model, optimizer: None,
    each: Each = lambda model, optimizer: None,
    steps: int = 8,
    **given: Any,
) -> dict[str, Any] | None:
    """The model after some steps; None on a server."""
    seed_everything(SEED)
    model = make_model()
    asked: dict[str, Any] = {"seed": SEED, "cluster": Attached(patience=30), "steps": steps} | given
    try:
        model, made, loader = orchestra.prepare(
            model, optimizer(model), make_loader(shuffle=False), strategy=strategy, **asked
        )
    except SystemExit:
        return None
    before(model, made)
    steps_until(steps, model, made, loader, each)
    made.finish()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def steps_until(steps: int, model: nn.Module, optimizer: Any, loader: Any, each: Each) -> None:
    while optimizer.orchestra.steps < steps:
        for x, y in loader:
            if optimizer.orchestra.steps == steps:
                break
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step(loss=loss)
            each(model, optimizer)


def saved(model: nn.Module, optimizer: Any) -> bytes:
    """What a script writes to a file."""
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    return buffer.getvalue()


def load(model: nn.Module, optimizer: Any, *, file: bytes) -> None:
    found = torch.load(io.BytesIO(file), weights_only=True)
    optimizer.load_state_dict(found["optimizer"])  # in either order: servers take the model at the next step
    model.load_state_dict(found["model"])


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "momentum": lambda model: momentum(model.parameters()),
    "adam": lambda model: adam(model.parameters()),
    "groups": partial(grouped, adam),
    "plain": lambda model: sgd(model.parameters()),
}


def same(a: Any, b: Any) -> bool:
    """Whether two states have the same keys, shapes and values."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(value, b[name]) for name, value in a.items())
    return bool(a == b)


def ordinary(file: bytes) -> Any:
    """The part of a saved state that torch knows."""
    found = torch.load(io.BytesIO(file), weights_only=True)["optimizer"]
    return {"state": found["state"], "groups": [group["params"] for group in found["param_groups"]]}


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_state_is_that_of_all_reduce(kind: str, servers: int) -> None:
    """Synchronous servers are all-reduce, bit for bit: so is what they hold, however x is cut."""

    def call(strategy: str) -> list[bytes]:
        found: list[bytes] = []

        def each(model: nn.Module, optimizer: Any) -> None:
            if optimizer.orchestra.steps == 5 or optimizer.orchestra.steps == 7:
                found.append(saved(model, optimizer))

        script(strategy, optimizer=OPTIMIZERS[kind], each=each)
        return found

    expected = values(together(2, partial(call, "allreduce")))
    found = values(together(2 + servers, partial(call, f"ps(servers={servers})")))
    for mine, theirs in zip(found[:2], expected, strict=True):
        assert [same(ordinary(a), ordinary(b)) for a, b in zip(mine, theirs, strict=True)] == [True, True]


# Any worker, at any time.

STRATEGIES = [
    *(f"ps(consistency={name})" for name in (
        "bsp", "asp", "ssp(staleness=1)", "boundeddelay(tau=1)", "backupworkers(b=1)", "ksync(k=1)", "kbatchsync(k=1)",
        "kasync(k=2)", "kbatchasync(k=2)", "softsync(n=1)",
    )),
    "ps(consistency=asp, correction=delaycompensated)",
    "ps(pieces=3, filter=significant)",
    "downpour(n_push=2, n_fetch=3)",
    "easgd(tau=2)",
    "switch(first=allreduce, then=ps(consistency=asp), when=atshare(share=0.5), momenta=reset, momentum=0.9)",
]  # fmt: skip


def test_any_worker_asks_by_itself_in_every_strategy() -> None:
    """Worker 1 saves after every step, while worker 0 waits for it outside of the strategy."""

    def call() -> list[Any]:
        found = []
        for strategy in STRATEGIES:
            rank = int(os.environ["RANK"])
            states: list[Any] = []

            def each(model: nn.Module, optimizer: Any, rank: int = rank, states: list[Any] = states) -> None:
                if rank == 1:
                    states.append(optimizer.state_dict())
                optimizer.orchestra.mean(1.0)

            model = script(strategy, before=each, each=each)
            found.append((model, states))
        return found

    mine, theirs, _ = values(together(3, call, seconds=240))
    shapes = [p.shape for p in make_model().parameters()]
    for strategy, (model, none), (other, states) in zip(STRATEGIES, mine, theirs, strict=True):
        assert none == []
        assert equal(model, other), strategy
        assert states[0]["state"] == {}, strategy  # as torch's own before its first step
        for number, shape in enumerate(shapes):
            last = states[-1]["state"][number]["momentum_buffer"]
            assert last.shape == shape
            assert last.abs().sum() > 0, strategy


# Loading.


def goes_on(strategy: str, at: int, total: int, size: int, *, then: str | None = None, **given: Any) -> None:
    """A run that is saved by worker 0 alone, and another one in which all load that, end with the same model."""

    def begin() -> tuple[Any, bytes]:
        kept = []

        def each(model: nn.Module, optimizer: Any) -> None:
            if optimizer.orchestra.is_coordinator and optimizer.orchestra.steps == at:
                kept.append(saved(model, optimizer))

        return script(strategy, each=each, steps=total, **given), b"".join(kept)

    (whole, file), *_ = values(together(size, begin, seconds=120))
    resume = partial(script, then or strategy, steps=total, before=partial(load, file=file), **given)
    for resumed in values(together(size, resume, seconds=120)):
        assert resumed is None or equal(whole, resumed), (then or strategy, at)


@pytest.mark.parametrize("kind", ["momentum", "groups"])
def test_what_worker_0_saved_loads_everywhere_with_synchronous_servers(kind: str) -> None:
    goes_on("ps(servers=2)", 5, 9, 4, optimizer=OPTIMIZERS[kind])


@pytest.mark.parametrize(
    ("strategy", "kind"), [("allreduce", "adam"), ("localsgd(tau=3)", "plain"), ("slowmo(tau=3)", "plain")]
)
def test_what_worker_0_saved_loads_everywhere_without_servers(strategy: str, kind: str) -> None:
    """At the end of a round, when all replicas are equal."""
    goes_on(strategy, 6, 11, 3, optimizer=OPTIMIZERS[kind])


@pytest.mark.parametrize(
    "strategy",
    [
        "ps(consistency=asp)",
        "ps(consistency=ssp)",
        "ps(consistency=kasync(k=1))",
        "ps(consistency=asp, correction=delaycompensated)",
        "downpour",
        "easgd(tau=2)",
    ],
)
def test_one_worker_and_an_asynchronous_server_go_on_bit_for_bit(strategy: str) -> None:
    goes_on(strategy, 5, 9, 2, optimizer=OPTIMIZERS["adam"])


def test_after_a_switch_to_servers_the_second_strategy_goes_on() -> None:
    then = "ps(consistency=asp)"
    switch = f"switch(first=allreduce, then={then}, when=atshare(share=0.4), momenta=reset)"
    goes_on(switch, 7, 12, 2, then=then)
    goes_on(switch, 3, 12, 2)


@pytest.mark.parametrize("strategy", ["ps", "ps(consistency=asp)", "easgd(tau=2)", "downpour(n_push=2)"])
def test_servers_take_the_model_of_worker_0(strategy: str) -> None:
    """Without another step the run ends with the model that was loaded."""
    seed_everything(SEED + 1)
    model = make_model()
    optimizer = momentum(model.parameters())
    file = saved(model, optimizer)
    call = partial(script, strategy, steps=0, before=partial(load, file=file))
    for found in values(together(3, call))[:2]:
        assert equal(found, model.state_dict())


@pytest.mark.parametrize("strategy", ["ps", "ps(consistency=asp)", "downpour(n_push=2, n_fetch=2)"])
def test_what_is_loaded_at_once_changes_nothing(strategy: str) -> None:
    """Some libraries read the state of an optimizer and load it again before the first step."""

    def again(model: nn.Module, optimizer: Any) -> None:
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.state_dict()["state"] == {}

    size = 3 if strategy == "ps" else 2  # of several workers, which comes first is not determined elsewhere
    plain, *_ = values(together(size, partial(script, strategy)))
    for found in values(together(size, partial(script, strategy, before=again)))[:-1]:
        assert equal(found, plain)


@pytest.mark.parametrize(("strategy", "size"), [("ps(servers=2)", 4), ("ps(consistency=ssp, filter=significant)", 2)])
def test_a_run_may_go_back_in_the_middle(strategy: str, size: int) -> None:
    """Synchronous, or of one worker: the second time is the first once more."""

    def call() -> Any:
        seed_everything(SEED)
        model = make_model()
        try:
            model, optimizer, loader = orchestra.prepare(
                model,
                momentum(model.parameters()),
                make_loader(shuffle=False),
                strategy=strategy,
                cluster=Attached(patience=30),
            )
        except SystemExit:
            return None
        file, found = saved(model, optimizer), []
        for _ in range(2):
            steps_until(7, model, optimizer, loader, lambda model, optimizer: None)
            found.append(saved(model, optimizer))
            load(model, optimizer, file=file)
        optimizer.finish()
        return found

    for found in values(together(size, call)):
        if found is not None:
            assert same(*map(ordinary, found))
            assert same(*(torch.load(io.BytesIO(file), weights_only=True)["model"] for file in found))


def test_the_state_of_a_plain_optimizer_goes_to_the_servers() -> None:
    """One worker and one server go on with it as torch does."""

    def begin(model: nn.Module, optimizer: Any, steps: int) -> None:
        for x, y in [*make_loader(shuffle=False)][:steps]:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    seed_everything(SEED)
    model = make_model()
    optimizer = adam(model.parameters())
    begin(model, optimizer, 4)
    file = saved(model, optimizer)
    begin(model, optimizer, 6)
    call = partial(script, "ps", optimizer=OPTIMIZERS["adam"], steps=6, before=partial(load, file=file))
    found, _ = values(together(2, call))
    assert equal(found, model.state_dict())


# What cannot be.


def test_after_the_end_there_is_no_state() -> None:
    def call() -> str:
        kept: list[Any] = []
        if script("ps", each=lambda model, optimizer: kept.append(optimizer)) is None:
            return ""
        with pytest.raises(CheckpointError) as told:
            kept[0].state_dict()
        return str(told.value)

    told, _ = values(together(2, call))
    assert "Call optimizer.state_dict() before optimizer.finish()" in told


@pytest.mark.parametrize("servers", [1, 2])
def test_each_parameter_has_its_own_count_of_steps_on_servers(servers: int) -> None:
    """A parameter that once had no gradient is a step behind, in the file, on the servers, and in what they give."""
    model = make_model()
    optimizer = adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    next(model.parameters()).grad = None
    optimizer.step()
    file = saved(model, optimizer)

    def call(strategy: str) -> list[bytes]:
        found: list[bytes] = []
        script(
            strategy,
            optimizer=OPTIMIZERS["adam"],
            before=partial(load, file=file),
            each=lambda model, optimizer: found.append(saved(model, optimizer)),
            steps=2,
        )
        return found

    expected = values(together(1, partial(call, "allreduce")))[0]
    found = values(together(1 + servers, partial(call, f"ps(servers={servers})")))[0]
    assert [same(ordinary(a), ordinary(b)) for a, b in zip(found, expected, strict=True)] == [True, True]
    steps = [float(state["step"]) for state in ordinary(found[-1])["state"].values()]
    assert steps == [3.0, *[4.0] * (len(steps) - 1)]


def test_many_small_parameters_with_groups() -> None:
    """The names of what is kept take more room than the values."""

    def call() -> Any:
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(80)))
        made: Any
        try:
            model, made = orchestra.prepare(
                model, grouped(adam, model), strategy="ps(servers=2)", cluster=Attached(patience=30)
            )
        except SystemExit:
            return None
        model(torch.ones(1, 1)).sum().backward()
        made.step()
        state = made.state_dict()
        made.load_state_dict(state)
        model(torch.ones(1, 1)).sum().backward()
        made.step()
        again = made.state_dict()
        made.finish()
        return [len(state["state"]), float(state["state"][7]["step"]), float(again["state"][7]["step"])]

    for found in values(together(3, call)):
        assert found in (None, [160, 1.0, 2.0])
