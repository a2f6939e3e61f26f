# SPDX-License-Identifier: Apache-2.0
"""The outcome of a script's own loop, on standard error: standard output is the script's.

If there is a run folder, its figures are those of all nodes; else they are those of worker 0.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from orchestra.cli import summary
from orchestra.formatting import percents, plural, size

if TYPE_CHECKING:
    from orchestra.user_loop.handle import LoopHandle
    from orchestra.user_loop.outcome import LoopOutcome


@contextmanager
def afterwards(handles: Sequence[LoopHandle]) -> Iterator[None]:
    """Print the outcome of each loop that a script prepares inside, and ends inside or when the interpreter ends.

    `handles`: a list to which the handle of each loop is appended meanwhile.
    """

    def show() -> None:
        ended = [outcome for handle in handles if (outcome := handle.outcome()) is not None]
        if ended:
            summary.say("\n".join(map(describe, ended)))

    atexit.register(show)  # before the script, since the hook that calls a missing `finish` has to run first
    yield
    if all(handle.outcome() is not None for handle in handles):
        atexit.unregister(show)
        show()


def describe(outcome: LoopOutcome) -> str:
    """Return the figures of a loop, in a few lines."""
    if outcome.folder is not None:
        from orchestra.runs.facts import facts_of

        return summary.describe(outcome.folder, facts_of(outcome.folder))
    servers = f" + {plural(outcome.servers, 'server')}" if outcome.servers else ""
    rate = outcome.samples / outcome.seconds if outcome.seconds else 0.0
    loss = "unknown: optimizer.step(loss=loss) reports it" if outcome.loss is None else f"{outcome.loss:.4g}"
    scores = "".join(f" · {name} {value:.4g}" for name, value in outcome.scores.items())
    whole = outcome.seconds or 1.0
    shares = percents([part / whole for part in (outcome.compute, outcome.communicate, outcome.wait)])
    compute, communicate, wait, other = shares
    workers, parameters = plural(outcome.workers, "worker"), plural(outcome.parameters, "parameter")
    lines = [
        f"{outcome.strategy} · {workers}{servers} · {parameters}",
        f"  worker 0 made {plural(outcome.steps, 'step')} in {outcome.seconds:.2f} s ({rate:,.0f} samples/s)",
        f"  training loss of the last step {loss}{scores}",
        f"  worker 0 sent {size(outcome.sent)} and received {size(outcome.received)}",
        f"  its time: compute {compute}%, communicate {communicate}%, wait {wait}%, other {other}%",
        "  no run folder was kept: --out FOLDER keeps the figures of all nodes, and a page",
    ]
    return "\n".join(lines)
