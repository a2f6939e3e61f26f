# SPDX-License-Identifier: Apache-2.0
"""The other processes of a loop that several of them run: that all are there, and leave together.

Workers that go in step must make equally many steps. Who finishes says after how many; who hears of fewer than it has
begun says so instead of waiting for ever, or of taking the other's last mean for one of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from orchestra.board import name_of
from orchestra.errors import ClusterError, OrchestraError, Stopped, WorkerLost
from orchestra.launch import notes
from orchestra.launch.party import hang_up
from orchestra.transports.exchange import Exchange

_FORGOTTEN = "ended without optimizer.finish()"


class Company:
    """What the others say about the run as a whole."""

    def __init__(self, exchange: Exchange, rank: int, workers: int) -> None:
        self._exchange, self._rank, self._workers = exchange, rank, workers
        self._finished: dict[int, int] = {}  # after how many steps
        self._begun: Callable[[], int | None] = lambda: None  # this worker's steps, if it goes in step with the others
        self.rates: Callable[[list[float]], None] = lambda rates: None  # a schedule says new learning rates
        self.name = name_of(rank, workers)
        self._parted = False
        exchange.hear, exchange.when_waiting = self._hear, self._glance

    def go_in_step(self, begun: Callable[[], int | None]) -> None:
        """From now on the others must do as many steps as this worker, unless it has none to count."""
        self._begun = begun

    def _hear(self, source: int, said: dict[str, Any]) -> None:
        notes.check(source, said)
        match said["kind"]:
            case "finished":
                self._finished[source] = said["steps"]
            case "rates":
                self.rates([float(rate) for rate in said["rates"]])
            case "stopped":
                raise Stopped(said["message"], said["code"])

    def _glance(self) -> None:
        for node, cause in self._exchange.lost.items():
            raise WorkerLost(name_of(node, self._workers), cause)
        begun = self._begun()
        for node, steps in self._finished.items():
            if begun is not None and steps < begun:
                raise self._uneven(node, steps, begun)

    def _uneven(self, node: int, steps: int, begun: int) -> ClusterError:
        """Not all make equally many steps: tell the others, too."""
        message = (
            f"{name_of(node, self._workers)} finished after {steps:,} steps, but {self.name} has begun step {begun:,}: "
            "all must make equally many. Give the loader to orchestra.prepare, or see to it that every process has as "
            "many batches."
        )
        self.give_up(message, ClusterError.exit_code)
        return ClusterError(message)

    def tell_rates(self, servers: tuple[int, ...], rates: list[float]) -> None:
        """Let servers know of new learning rates, before the next push."""
        for server in servers:
            self._exchange.note(server, {"kind": "rates", "rates": rates})

    def finish(self, steps: int) -> None:
        """Wait until every worker has made its last step."""
        self._finished[self._rank] = steps
        self._exchange.tell_all({"kind": "finished", "steps": steps})
        self._exchange.attend(
            lambda: len(self._finished) == self._workers, lambda: "the others to finish", forever=True
        )
        self._glance()
        late = max(self._finished, key=lambda node: self._finished[node])
        if self._begun() is not None and self._finished[late] > steps:  # it will say so itself
            self._exchange.attend(lambda: False, lambda: f"{name_of(late, self._workers)} to say that it is late")

    def part(self) -> None:
        """Hang up, now that everything is said."""
        if not self._parted:
            self._parted = True
            hang_up(self._exchange)

    def give_up(self, message: str, code: int) -> None:
        """Tell the others why this process ends before its time, and hang up."""
        with contextlib.suppress(OrchestraError, OSError):
            if not self._parted:
                self._exchange.tell_all({"kind": "stopped", "message": message[-notes.LONGEST :], "code": code})
        self.part()


class Exit:
    """The end of the script: an error reaches the other processes, a forgotten `finish` is noticed."""

    def __init__(self, company: Company) -> None:
        self._company = company
        self._before = sys.excepthook
        sys.excepthook = self._failed
        atexit.register(self._forgotten)

    def close(self) -> None:
        """All went well."""
        if sys.excepthook == self._failed:
            sys.excepthook = self._before
        atexit.unregister(self._forgotten)

    def _failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.close()
        name = self._company.name
        if isinstance(error, Stopped):
            self._company.part()
        elif isinstance(error, WorkerLost):
            self._company.give_up(str(error), error.exit_code)
        elif isinstance(error, OrchestraError):
            self._company.give_up(f"{name}: {error}", error.exit_code)
        elif isinstance(error, KeyboardInterrupt):
            self._company.give_up(f"{name} was stopped by SIGINT", 130)
        else:
            last = "".join(traceback.format_exception_only(error)).strip()
            self._company.give_up(f"{name} failed: {last}", 1)
        if isinstance(error, OrchestraError):
            # It says what is wrong and what to do; the way through these files would only hide that.
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            raise SystemExit(error.exit_code)
        self._before(kind, error, trace)

    def _forgotten(self) -> None:
        message = f"{self._company.name} {_FORGOTTEN}"
        print(
            f"orchestra: {message}: its model lacks the strategy's last step, and the others may wait for it. Call it "
            "after the loop.",
            file=sys.stderr,
        )
        self._company.give_up(message, 1)
