# SPDX-License-Identifier: Apache-2.0
"""Virtual time and fibers: order, determinism, deadlocks, unwinding; greenlets and threads alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from orchestra.core.fibers import Kind
from orchestra.errors import Deadlock
from orchestra.worlds.simulated.kernel import Kernel, Promise

both = pytest.mark.parametrize("kind", ["greenlet", "thread"])


def nap(kernel: Kernel, seconds: float) -> None:
    promise: Promise[None] = Promise(kernel, lambda: "time to pass")
    kernel.after(seconds, promise.keep, None)
    promise.wait()


def walk(kernel: Kernel, name: str, seconds: float, log: list[tuple[float, str]]) -> Callable[[], None]:
    def body() -> None:
        for _ in range(3):
            nap(kernel, seconds)
            log.append((kernel.now, name))

    return body


@both
def test_tasks_take_turns_in_the_order_of_time(kind: Kind) -> None:
    kernel, log = Kernel(fiber=kind), list[tuple[float, str]]()
    kernel.spawn("slow", walk(kernel, "slow", 2.0, log))
    kernel.spawn("fast", walk(kernel, "fast", 1.5, log))
    kernel.run()
    assert log == [(1.5, "fast"), (2.0, "slow"), (3.0, "fast"), (4.0, "slow"), (4.5, "fast"), (6.0, "slow")]


def order_of(kind: Kind, ties: int | None) -> list[str]:
    kernel, log = Kernel(fiber=kind, ties=ties), list[tuple[float, str]]()
    for name in "abcdef":
        kernel.spawn(name, walk(kernel, name, 1.0, log))
    kernel.run()
    return [name for _, name in log]


@both
def test_at_equal_times_first_come_first_served_or_as_the_seed_says(kind: Kind) -> None:
    assert order_of(kind, None) == [*"abcdef"] * 3
    assert order_of(kind, 1) == order_of(kind, 1)
    assert len({tuple(order_of(kind, ties)) for ties in range(20)}) > 10


def test_greenlets_and_threads_agree() -> None:
    for ties in (None, *range(10)):
        assert order_of("greenlet", ties) == order_of("thread", ties)


@both
def test_whether_gradients_are_recorded_is_each_tasks_own(kind: Kind) -> None:
    kernel, seen = Kernel(fiber=kind), list[tuple[bool, bool]]()

    def body(recording: bool) -> None:
        with torch.set_grad_enabled(recording):
            for _ in range(3):
                nap(kernel, 1.0)
                seen.append((recording, torch.is_grad_enabled()))

    kernel.spawn("with", lambda: body(True))
    kernel.spawn("without", lambda: body(False))
    kernel.run()
    assert len(seen) == 6
    assert all(wanted == found for wanted, found in seen)


@both
def test_a_deadlock_says_who_waits_for_what_and_where(kind: Kind) -> None:
    kernel = Kernel(fiber=kind)
    unwound: list[str] = []

    def stuck() -> None:
        try:
            nap(kernel, 0.5)
            Promise[None](kernel, lambda: "a message from worker 1").wait()
        finally:
            unwound.append("yes")

    kernel.spawn("worker 0", stuck)
    pattern = (
        r"at 0\.5 s no node can continue:\n  worker 0 waits for a message from worker 1 \(test_kernel\.py:\d+, stuck\)"
    )
    with pytest.raises(Deadlock, match=pattern):
        kernel.run()
    assert unwound == ["yes"]


@both
def test_what_one_raises_ends_the_run_and_unwinds_the_others(kind: Kind) -> None:
    kernel = Kernel(fiber=kind)
    unwound: list[str] = []

    def patient() -> None:
        try:
            nap(kernel, 100.0)
        finally:
            unwound.append("patient")

    def hasty() -> None:
        nap(kernel, 1.0)
        raise ZeroDivisionError("hasty")

    kernel.spawn("patient", patient)
    kernel.spawn("hasty", hasty)
    kernel.spawn("late", lambda: nap(kernel, 5.0))
    with pytest.raises(ZeroDivisionError, match="hasty"):
        kernel.run()
    assert unwound == ["patient"]


@both
def test_a_task_may_begin_another(kind: Kind) -> None:
    kernel, seen = Kernel(fiber=kind), list[tuple[object, object]]()

    def child() -> None:
        nap(kernel, 1.0)
        seen.append(("child", kernel.now))

    def parent() -> None:
        kernel.spawn("child", child)
        nap(kernel, 2.0)
        seen.append(("parent", kernel.now))

    kernel.spawn("parent", parent)
    kernel.run()
    assert seen == [("child", 1.0), ("parent", 2.0)]


@both
def test_modes_of_torch_are_each_task_s_own(kind: Kind) -> None:
    kernel, seen = Kernel(fiber=kind), list[tuple[object, object]]()

    def quiet() -> None:
        with torch.no_grad(), torch.autocast("cpu"):
            nap(kernel, 2.0)

    def other() -> None:
        seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    kernel.spawn("quiet", quiet)
    kernel.spawn("other", other)
    kernel.run()
    assert seen == [(True, False)]
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("t", [-1.0, float("nan")])
def test_time_goes_forward(t: float) -> None:
    with pytest.raises(ValueError, match="already"):
        Kernel().at(t, print)
