# SPDX-License-Identifier: Apache-2.0
"""A node of a run on many machines that begins, saves and stops together with the others."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from orchestra.board import name_of
from orchestra.ops import Traffic
from orchestra.transports.attached import AttachedTransport
from orchestra.transports.exchange import Exchange
from orchestra.transports.memory import STOP_ASKED, STOP_AT, Plan
from orchestra.transports.wire import BadFrame


class SharedWords:
    """The words that processes of one machine have in common memory, here told to everybody as they change."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._values: defaultdict[int, int] = defaultdict(int)

    def __getitem__(self, index: int) -> int:
        return self._values[index]

    def set(self, index: int, value: int) -> None:
        """Write, and tell everybody."""
        self._values[index] = value
        self._exchange.tell_all({"kind": "word", "word": index, "is": value})

    announce = set

    def learn(self, index: int, value: int) -> None:
        """Somebody has written: no need to tell."""
        self._values[index] = value


class JoinedTransport(AttachedTransport):
    """Carries out one node's ops, and agrees with the others on what concerns all of them."""

    def __init__(self, rank: int, plan: Plan, exchange: Exchange, traffic: Traffic) -> None:
        super().__init__(rank, plan.nodes, exchange, traffic)
        self.words = SharedWords(exchange)
        self.mailbox = exchange
        self.begun = 0  # the step that this worker is in
        self._plan = plan
        self._going = False

    def go(self, resumed_at: float) -> None:
        """Everybody is ready: the clock starts now."""
        self.began = time.perf_counter() - resumed_at
        self.exchange.begin()
        self._going = True

    def await_go(self) -> None:
        """Block until every node is ready."""
        self.exchange.attend(lambda: self._going, lambda: "the other nodes to be ready", forever=True, starting=True)

    def await_saved(self, node: int, label: int, *, in_step: bool) -> None:
        """Block until a server has saved a checkpoint, which it does when every worker has."""
        words, plan = self.words, self._plan
        word = plan.word("saved", node)

        def whom() -> str:
            late = [w for w in range(plan.workers) if words[plan.word("saved", w)] < label]
            return ", ".join(name_of(n, plan.workers) for n in late or [node]) + " to save a checkpoint"

        # Where each goes its own pace, the others may have been told to stop before they saw that they should save.
        self.exchange.attend(lambda: words[word] >= label or (not in_step and words[STOP_AT] != 0), whom)

    def await_bell(self, ready: Callable[[], bool]) -> None:
        """Block, for as long as it takes, until something happens that concerns this node."""
        self.exchange.attend(ready, lambda: "the others", forever=True)

    def ring_everybody(self) -> None:
        """Nothing to do: words wake whoever waits."""

    def proceed(self, step: int, *, in_step: bool) -> bool:
        """Whether to begin `step`: not before it is known which is the last, once somebody has asked to stop."""
        self.begun = step
        self.exchange.poll()
        if not self.words[STOP_ASKED]:
            return True
        waiting_for = "worker 0 to say after which step to stop"
        self.exchange.attend(lambda: self.words[STOP_AT] != 0, lambda: waiting_for)
        return in_step and step < self.words[STOP_AT]

    def hear(self, said: dict[str, Any]) -> bool:
        """Take note of what everybody should know; whether it was that."""
        match said["kind"]:
            case "word":
                if said["word"] >= self._plan.words:
                    raise BadFrame(f"somebody sent word {said['word']}, and there are {self._plan.words}")
                self.words.learn(said["word"], said["is"])
            case "go":
                self.go(float(said["at"]))
            case _:
                return False
        return True
