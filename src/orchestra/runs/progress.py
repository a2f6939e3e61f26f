# SPDX-License-Identifier: Apache-2.0
"""The display of a run while it goes on, on standard error.

A `Display` is passed to `train(progress=...)`. On a terminal it redraws a few lines; elsewhere it prints a plain line
now and then, or nothing. It draws only when a redraw is due, so calling it often costs nothing.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from orchestra.formatting import plural
from orchestra.runs import files
from orchestra.runs.status import RunStatus, name_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_WINDOW = 3.0  # seconds over which the speed is averaged
_QUICK, _BAR = 1.0, 30  # seconds that need no bar, and how long one is
_TAIL = 4096  # bytes at the end of scores.jsonl that surely hold its last line
_KINDS = (("compute", "█", "green"), ("communicate", "▓", "yellow"), ("wait", "░", "red"))


# What is displayed.


@dataclass(frozen=True)
class NodeLine:
    """One node: its step, and its shares of time so far."""

    name: str
    step: int
    compute: float
    communicate: float
    wait: float

    @property
    def busy(self) -> bool:
        """Whether it has reported anything yet."""
        return self.step > 0 or self.compute + self.communicate + self.wait > 0


@dataclass(frozen=True)
class Picture:
    """One moment of a run."""

    title: str
    t: float  # seconds of training
    real: float | None  # real seconds, if `t` is virtual
    step: int  # of the slowest worker
    last_step: int | None
    fraction: float | None  # of the budget that is used up
    left: float | None  # real seconds until the end
    loss: float | None
    rate: float  # samples per second of training
    metrics: dict[str, float]
    nodes: list[NodeLine]

    def share(self, kind: str) -> float:
        """Return the workers' mean share of time for `compute`, `communicate` or `wait`."""
        shares: list[float] = [getattr(node, kind) for node in self.nodes if node.name.startswith("worker")]
        return sum(shares) / max(1, len(shares))


@dataclass
class Observer:
    """Turn statuses into pictures, of one run after another."""

    title: str = ""
    seconds: float | None = None  # budget in seconds, if there is one
    _seen: deque[tuple[float, float]] = field(default_factory=deque)
    _run: Path | None = None

    def look(self, now: RunStatus) -> Picture:
        """Return a picture of the run as it is now."""
        if now.run != self._run:
            self._run = now.run
            self._seen.clear()
        fraction = self._fraction(now)
        passed = now.t if now.real is None else now.real
        return Picture(
            title=self.title or _title(now),
            t=now.t,
            real=now.real,
            step=now.step,
            last_step=now.last_step,
            fraction=fraction,
            left=passed * (1 - fraction) / fraction if fraction and passed > 0.5 else None,
            loss=now.loss,
            rate=self._rate(now.t, now.samples),
            metrics=latest_score(now.run),
            nodes=[
                NodeLine(name_of(i, now.workers), int(row.step), *(s / (row.t or math.inf) for s in row[3:6]))
                for i, row in enumerate(now.nodes)
            ],
        )

    def _fraction(self, now: RunStatus) -> float | None:
        spent = [now.step / now.last_step] if now.last_step else []
        spent += [now.t / self.seconds] if self.seconds else []
        return min(1.0, max(spent)) if spent else None

    def _rate(self, t: float, samples: float) -> float:
        self._seen.append((t, samples))
        while len(self._seen) > 2 and self._seen[1][0] < t - _WINDOW:
            self._seen.popleft()
        first_t, first = self._seen[0]
        return (samples - first) / (t - first_t) if t > first_t else 0.0


def latest_score(run: Path) -> dict[str, float]:
    """Return the newest scores of a run in progress; empty until the first evaluation after the initial one."""
    try:
        with files.open_regular(run / "scores.jsonl") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL))
            score = json.loads(file.read().rsplit(b"\n", 2)[-2])
            metrics = {str(name): float(v) for name, v in score["metrics"].items() if v is not None}
            return metrics if score["number"] else {}
    except (OSError, ValueError, LookupError, TypeError):
        return {}


def _title(now: RunStatus) -> str:
    servers = f" + {plural(now.servers, 'server')}" if now.servers else ""
    return f"{now.strategy} · {plural(now.workers, 'worker')}{servers}"


# How it is displayed.


class Screen(Protocol):
    """Shows the progress of a run: redrawn lines on a terminal, or one line now and then."""

    delay: float  # seconds before the first picture
    every: float  # seconds between two pictures
    finale: bool  # whether the last picture is always shown
    redraws: bool  # whether a line replaces the one before

    def show(self, picture: Picture) -> None:
        """Show a picture."""

    def tell(self, text: str) -> None:
        """Show a line in place of a picture."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class PlainScreen:
    """One line every few seconds, for files and pipes; `alone` if there will be no summary at the end."""

    every = 5.0
    redraws = False

    def __init__(self, *, alone: bool = False) -> None:
        self.delay = 0.0 if alone else 5.0  # a short run needs only its summary
        self.finale = alone

    def show(self, picture: Picture) -> None:
        """Print a picture as one line."""
        self.tell(plain_line(picture))

    def tell(self, text: str) -> None:
        """Print a line."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Do nothing: there is nothing to restore."""


def plain_line(p: Picture) -> str:
    """Return a picture as one line of text."""
    shares = "  ".join(f"{kind} {p.share(kind):.0%}" for kind, _, _ in _KINDS)
    return f"[{_clock(p):>9}] {p.title}  {'  '.join(_figures(p))}  {shares}"


def _clock(p: Picture) -> str:
    return f"{p.t:.1f} s" if p.real is None else f"{p.t:.1f} virtual s in {p.real:.1f} s"


def _figures(p: Picture) -> list[str]:
    found = [f"step {p.step:,}" + (f"/{p.last_step:,}" if p.last_step else "")]
    if p.loss is not None:
        found.append(f"loss {p.loss:.4g}")
    if p.rate:
        found.append(f"{p.rate:,.0f} samples/{'' if p.real is None else 'virtual '}s")
    found += [f"test {name} {value:.4g}" for name, value in list(p.metrics.items())[:2]]
    if p.left is not None:
        found.append(f"{duration(p.left)} left")
    return found


def duration(seconds: float) -> str:
    """Return seconds in a readable form.

    >>> duration(7.4), duration(95), duration(7260)
    ('7 s', '1 min 35 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


class LiveScreen:
    """A few lines on a terminal, redrawn in place and removed at the end."""

    delay = 0.0
    every = 0.125
    finale = False
    redraws = True

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        # No thread, and only standard error is redirected: output printed meanwhile stays output.
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=False, vertical_overflow="crop"
        )
        self._console = console

    def show(self, picture: Picture) -> None:
        """Redraw the picture."""
        self._draw(drawing(picture, self._console.width, self._console.height))

    def tell(self, text: str) -> None:
        """Show this line alone."""
        from rich.text import Text

        self._draw(Text(text, no_wrap=True, overflow="ellipsis"))

    def _draw(self, text: Text) -> None:
        if not self._live.is_started:
            self._live.start()
        self._live.update(text, refresh=True)

    def close(self) -> None:
        """Remove the lines."""
        if self._live.is_started:
            self._live.stop()


def drawing(p: Picture, width: int, height: int) -> Text:
    """Return a picture as lines for a terminal of this size."""
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(p.title + "\n", "bold")
    percent = "" if p.fraction is None else f" {p.fraction:4.0%}"
    bar = max(10, min(60, width - 20))
    filled = round(bar * (p.fraction or 0.0))
    text.append("━" * filled, "cyan").append("─" * (bar - filled), "dim").append(f"{percent}  {_clock(p)}\n")
    text.append(" · ".join(_figures(p)))
    room = max(1, height - 5)
    shown = p.nodes if len(p.nodes) <= room else p.nodes[: room - 1]
    digits = max((len(f"{node.step:,}") for node in shown), default=1)
    for node in shown:
        text.append(f"\n{node.name:<10} ")
        if node.busy:  # a node that has not reported yet has only a name
            text.append(f"step {node.step:>{digits},}  ")
            _append_shares(text, node, max(8, min(30, width - 62)))
    if len(shown) < len(p.nodes):
        text.append(f"\n… and {len(p.nodes) - len(shown)} more nodes", "dim")
    return text


def _append_shares(text: Text, node: NodeLine, width: int) -> None:
    cells = 0
    for kind, character, colour in _KINDS:
        count = min(width - cells, round(width * getattr(node, kind)))
        text.append(character * count, colour)
        cells += count
    text.append(" " * (width - cells))
    for kind, _, colour in _KINDS:
        text.append(f"  {'comm.' if kind == 'communicate' else kind} ").append(f"{getattr(node, kind):4.0%}", colour)


class Display:
    """The object for `train(progress=...)`: called with every `RunStatus`, closed when the run is over.

    It also keeps the folders of the runs it saw, so that the command line finds what a script has trained.
    """

    def __init__(self, screen: Screen | None, *, title: str = "", seconds: float | None = None) -> None:
        self.runs: list[Path] = []
        self._screen = screen
        self._observer = Observer(title, seconds)
        self._next: float | None = None
        self._unseen: RunStatus | None = None
        self._due = 0.0

    @property
    def is_silent(self) -> bool:
        """Whether it shows nothing."""
        return self._screen is None

    def __call__(self, now: RunStatus) -> None:
        """Show the run if a redraw is due."""
        if not self.runs or self.runs[-1] != now.run:
            self.runs.append(now.run)
        if self._screen is None or not now.begun:
            return
        clock = time.monotonic()
        if self._next is None:
            self._next = clock + self._screen.delay
        self._unseen = now
        if clock >= self._next:
            self._unseen = None
            self._screen.show(self._observer.look(now))
            # Counted from the end of the drawing, so that a slow terminal does not slow the run down.
            self._next = time.monotonic() + self._screen.every

    def scored(self, done: int, of: int) -> None:
        """Show how many snapshots are scored, but only after a second: a short task needs no display.

        Where a line cannot be redrawn, say once that they are scored.
        """
        if self._screen is None:
            return
        clock = time.monotonic()
        if done == 0:
            self._due = clock + (_QUICK if self._screen.redraws else self._screen.every)
        if clock < self._due:
            return
        if self._screen.redraws:
            filled = round(_BAR * done / max(1, of))
            self._screen.tell(f"scoring snapshots  {'━' * filled}{'─' * (_BAR - filled)}  {done} of {of}")
            self._due = time.monotonic() + self._screen.every
        else:
            self._screen.tell(f"scoring {plural(of, 'snapshot')}")
            self._due = math.inf

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._screen is not None:
            if self._screen.finale and self._unseen is not None:
                self._screen.show(self._observer.look(self._unseen))
            self._unseen = None
            self._screen.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def choose(*, quiet: bool = False, title: str = "", seconds: float | None = None) -> Display:
    """Return the display that suits the current standard error."""
    return Display(None if quiet else _live() or PlainScreen(), title=title, seconds=seconds)


def auto(wish: bool | None, seconds: float | None = None) -> Display:
    """Return a live display on a terminal; elsewhere plain lines if `wish` is True; nothing if it is False."""
    if wish is False:
        return Display(None)
    return Display(_live() or (PlainScreen(alone=True) if wish else None), seconds=seconds)


def is_silent(wish: Callable[[RunStatus], object] | bool | None) -> bool:
    """Return whether `train(progress=wish)` is to print nothing."""
    return wish is False or (isinstance(wish, Display) and wish.is_silent)


def _live() -> Screen | None:
    # Ask the stream itself: FORCE_COLOR makes rich take a file for a terminal, and a file cannot be redrawn.
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    from rich.console import Console

    console: Any = Console(stderr=True)
    return LiveScreen(console) if console.is_terminal and not console.is_dumb_terminal else None
