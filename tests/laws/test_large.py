# SPDX-License-Identifier: Apache-2.0
"""The laws once more, for a model so large that x is shared, work is divided, vectors are lent and kernels fused."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.laws.examples import bytes_sent, each_of, in_processes, path
from tests.zoo import (
    Dicey,
    Jittery,
    Trap,
    assert_close,
    assert_same,
    die_after,
    ended,
    make_data,
    make_large,
    momentum,
    note_and_die,
    plain,
    press_ctrl_c,
    sgd,
    train,
    trapped,
)

from orchestra import (
    ASP,
    EASGD,
    AllReduce,
    Downpour,
    Hogwild,
    LocalSGD,
    ParameterServer,
    SlowMo,
    Solo,
    Steps,
    Strategy,
    SyncEASGD,
)
from orchestra.clusters.runners import LocalRunner
from orchestra.core.vectors import LARGE, is_small
from orchestra.engine import checkpoint
from orchestra.engine.expression import show
from orchestra.engine.runner import Ending, PreparedRun
from orchestra.errors import Interrupted, WorkerLost
from orchestra.model.flat_optimizer import Factory

S = Strategy[Any]
LAYERS = [p.numel() for p in make_large().parameters()]
PARAMETERS = sum(LAYERS)

EXAMPLES: list[S] = [
    AllReduce(),
    LocalSGD(tau=2),
    SlowMo(tau=2),
    SlowMo(tau=2, buffers="average"),
    ParameterServer(),
    ParameterServer(servers=2),
    ParameterServer(consistency=ASP(), servers=2),
    Downpour(n_push=2, n_fetch=2, servers=2),
    EASGD(tau=2, servers=2),
    SyncEASGD(tau=2),
    Hogwild(),
]
every = each_of(EXAMPLES)
every_path = in_processes(EXAMPLES, of=path)
synchronous = in_processes([s for s in EXAMPLES if s.layout.updates.synchronous])

# A large ε: else Adam takes a whole step in a direction that is nothing but rounding.
OPTIMIZERS: dict[str, Factory] = {
    "momentum": momentum,
    "nesterov with decay": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": partial(torch.optim.Adam, lr=0.002, eps=1e-3),
    "adam with decay": partial(torch.optim.Adam, lr=0.002, eps=1e-3, weight_decay=1e-2),
    "adamw": partial(torch.optim.AdamW, lr=0.002, eps=1e-3, weight_decay=1e-2),
}
optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def large(strategy: S, out: Path, **given: Any) -> Any:
    return train(strategy, out, **{"model": make_large, "workers": 2, **given})


def test_the_model_of_these_tests_is_large() -> None:
    assert not is_small(PARAMETERS, 1)
    assert PARAMETERS >= 4 * LARGE
    assert all(PARAMETERS % n for n in (2, 3, 64))


@pytest.mark.parametrize(
    ("strategy", "given", "shared"),
    [
        (AllReduce(), {}, True),
        (AllReduce(), {"clip": 1.0}, False),
        (LocalSGD(tau=2), {}, False),
        (ParameterServer(), {}, False),
        (Hogwild(), {"clip": 1.0}, True),
    ],
)
def test_x_is_shared_where_it_can_be(
    strategy: S, given: dict[str, Any], shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tests here would not test what they say."""
    seen: set[bool] = set()
    carry_out = LocalRunner.carry_out

    def look(runner: LocalRunner, prepared: PreparedRun) -> Ending:
        seen.add(prepared.spec.shares_x)
        return carry_out(runner, prepared)

    monkeypatch.setattr(LocalRunner, "carry_out", look)
    large(strategy, tmp_path, budget=Steps(2), **given)
    assert seen == {shared}


# Paths.


@pytest.mark.parametrize("workers", [1, 2, 3])
@optimizers
def test_all_reduce_is_large_batch_training(workers: int, optimizer: Factory, tmp_path: Path) -> None:
    steps = -(-101 // (6 * workers)) + 2 if workers > 1 else 6  # past an epoch: its last step has fewer samples
    result = large(AllReduce(), tmp_path, workers=workers, optimizer=optimizer, budget=Steps(steps))
    expected = plain(model=make_large, optimizer=optimizer, size=workers, steps=steps)
    assert_close(result.model, expected, tolerance=2e-6)


@pytest.mark.parametrize("optimizer", [momentum, OPTIMIZERS["adam"]], ids=["momentum", "adam"])
def test_all_reduce_with_one_worker_equals_solo_bit_for_bit(optimizer: Factory, tmp_path: Path) -> None:
    given: dict[str, Any] = {"workers": 1, "optimizer": optimizer, "budget": Steps(4)}
    one = large(Solo(), tmp_path / "solo", **given)
    assert_same(one.model, large(AllReduce(), tmp_path / "allreduce", **given).model)


@pytest.mark.parametrize("workers", [2, 3])
def test_clipping_bounds_the_mean_gradient(workers: int, tmp_path: Path) -> None:
    result = large(AllReduce(), tmp_path, workers=workers, clip=0.05)
    assert_close(result.model, plain(model=make_large, size=workers, clip=0.05))
    unclipped = plain(model=make_large, size=workers)
    assert not torch.allclose(next(result.model.parameters()), next(unclipped.parameters()), atol=1e-4)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("optimizer", [momentum, OPTIMIZERS["adam with decay"]], ids=["momentum", "adam"])
def test_bsp_is_all_reduce_bit_for_bit(servers: int, optimizer: Factory, tmp_path: Path) -> None:
    given: dict[str, Any] = {"workers": 3, "optimizer": optimizer, "budget": Steps(8)}
    centred = large(ParameterServer(servers=servers), tmp_path / "ps", **given)
    assert_same(centred.model, large(AllReduce(), tmp_path / "allreduce", **given).model)


@pytest.mark.parametrize("workers", [2, 3])
def test_local_sgd_with_tau_1_is_all_reduce(workers: int, tmp_path: Path) -> None:
    given: dict[str, Any] = {"workers": workers, "optimizer": sgd, "budget": Steps(7)}
    apart = large(LocalSGD(tau=1), tmp_path / "local", **given)
    assert_close(apart.model, large(AllReduce(), tmp_path / "allreduce", **given).model)
    assert_close(apart.model, plain(model=make_large, size=workers, optimizer=sgd, steps=7))


@pytest.mark.parametrize("workers", [2, 3])
def test_slowmo_without_momentum_is_local_sgd(workers: int, tmp_path: Path) -> None:
    given: dict[str, Any] = {"workers": workers, "budget": Steps(7)}
    slow = large(SlowMo(tau=3, alpha=1.0, beta=0.0, buffers="maintain"), tmp_path / "slowmo", **given)
    assert_close(slow.model, large(LocalSGD(tau=3), tmp_path / "local", **given).model)


def test_slowmo_with_tau_1_is_large_batch_sgd_with_momentum_beta(tmp_path: Path) -> None:
    slow = large(SlowMo(tau=1, alpha=1.0, beta=0.6), tmp_path, optimizer=sgd)
    expected = plain(model=make_large, optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.6), size=2)
    assert_close(slow.model, expected, tolerance=1e-5)


def test_whole_layers_and_ranges_give_the_same(tmp_path: Path) -> None:
    def two_groups(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return momentum([{"params": [p for p in params if p.dim() == d]} for d in (1, 2)])

    by_layer = large(AllReduce(), tmp_path / "layers", optimizer=two_groups)
    assert_close(by_layer.model, large(AllReduce(), tmp_path / "ranges").model)


@synchronous
def test_same_seed_same_model_whatever_the_timing(strategy: S, tmp_path: Path) -> None:
    first = large(strategy, tmp_path / "first", workers=3, budget=Steps(6))
    late = large(strategy, tmp_path / "late", workers=3, budget=Steps(6), model=partial(Jittery, make_large))
    torch.testing.assert_close([*first.model.parameters()], [*late.model.parameters()], rtol=0, atol=0)


def test_a_gradient_that_is_not_finite_is_left_out_of_the_mean(tmp_path: Path) -> None:
    """Worker 1's loss is infinite in its second step: that step is worker 0's alone."""
    bad = make_data()[1][Trap.at(1, 1, time.time, size=2).sample]

    def spoilt(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(y, t) * (float("inf") if bool((t == bad).any()) else 1.0)

    strategies: tuple[S, ...] = (AllReduce(), ParameterServer())
    first, second = (large(s, tmp_path / show(s), loss=spoilt, budget=Steps(4)) for s in strategies)
    assert first.summary.skipped == second.summary.skipped == 1
    assert all(bool(torch.isfinite(p).all()) for p in first.model.parameters())
    assert_same(first.model, second.model)


# Save, stop, go on.

restless = partial(Dicey, make_large)


@in_processes(EXAMPLES)
def test_stopped_by_a_death_and_resumed_is_never_stopped(strategy: S, tmp_path: Path) -> None:
    out = tmp_path / "run"
    given: dict[str, Any] = {"budget": Steps(7), "checkpoint_every": Steps(3)}
    rank = 1 if strategy.layout.updates.synchronous else 0  # as in the law for small models
    death = Trap.at(rank, 4, partial(die_after, out / "checkpoints" / "step-00000003"), size=2)
    with pytest.raises(WorkerLost):
        large(strategy, out, model=trapped(death, model=restless), **given)
    resumed = large(strategy, out, model=trapped(model=restless), resume=True, **given)
    assert resumed.summary.steps == 7
    if strategy.layout.updates.synchronous:
        never = large(strategy, tmp_path / "never", model=trapped(model=restless), **given)
        assert_same(resumed.model, never.model)
        assert resumed.summary.sent_per_worker == never.summary.sent_per_worker


@pytest.mark.timed
@every_path
def test_stopped_by_ctrl_c_and_resumed_is_never_stopped(strategy: S, tmp_path: Path) -> None:
    out = tmp_path / "run"
    pressed = Trap.at(0, 3, partial(press_ctrl_c, os.getpid()), size=2)
    waiting = Trap.at(1, 3, partial(time.sleep, 0.3), size=2)
    with pytest.raises(Interrupted, match="A checkpoint of step"):
        large(strategy, out, model=trapped(pressed, waiting, model=restless), budget=Steps(8))
    saved, complaints = checkpoint.newest(out / "checkpoints")
    assert not complaints
    assert len(saved.manifest["files"]) == 2 + strategy.layout.servers
    resumed = large(strategy, out, model=trapped(model=restless), budget=Steps(8), resume=True)
    assert resumed.summary.steps == 8
    if strategy.layout.updates.synchronous:
        never = large(strategy, tmp_path / "never", model=trapped(model=restless), budget=Steps(8))
        assert_same(resumed.model, never.model)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_shared_x_is_restored_for_every_worker(workers: int, tmp_path: Path) -> None:
    """From a checkpoint that only worker 0 keeps x in; with Adam, whose state lies in ranges."""
    given: dict[str, Any] = {"workers": workers, "optimizer": OPTIMIZERS["adam"], "checkpoint_every": Steps(3)}
    out = tmp_path / "run"
    large(AllReduce(), out, budget=Steps(4), **given)
    resumed = large(AllReduce(), out, budget=Steps(6), resume=True, **given)
    assert_same(resumed.model, large(AllReduce(), tmp_path / "never", budget=Steps(6), **given).model)
    assert_close(resumed.model, plain(model=make_large, optimizer=OPTIMIZERS["adam"], size=workers, steps=6))


# Bytes, deaths.


@every
def test_bytes_on_the_wire_are_those_of_the_docstring(strategy: S, tmp_path: Path) -> None:
    workers = 2 + EXAMPLES.index(strategy) % 2
    large(strategy, tmp_path, workers=workers, budget=Steps(3))
    nodes = range(workers + strategy.layout.servers)
    by_worker, by_server = bytes_sent(strategy, workers, 3, LAYERS)
    assert [ended(tmp_path, node).sent for node in nodes] == by_worker + by_server
    assert [ended(tmp_path, node).received for node in nodes] == by_worker + by_server


@pytest.mark.timed
@every_path
def test_a_killed_worker_ends_the_run_soon(strategy: S, tmp_path: Path, promised: Callable[[float], float]) -> None:
    victim = EXAMPLES.index(strategy) % 2
    death = Trap.at(victim, 2, partial(note_and_die, tmp_path / "death"), size=2)
    with pytest.raises(WorkerLost, match=f"worker {victim} died: killed by SIGKILL"):
        large(strategy, tmp_path / "run", model=trapped(death, model=make_large))
    assert time.time() - float((tmp_path / "death").read_text()) < promised(2)
