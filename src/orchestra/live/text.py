# SPDX-License-Identifier: Apache-2.0
"""The state of a run as text: lines, a table, bars, sparklines, and a drawing of which nodes are connected."""

from __future__ import annotations

import re
from collections.abc import Sequence

from orchestra.formatting import plural, size
from orchestra.live.moment import NodeNow, RunNow
from orchestra.runs.progress import duration

SORTS = ("node", "step", "wait", "rate", "loss")
_NONE = "–"  # noqa: RUF001 - as in the report
_MOST = 500  # nodes in a drawing
_BLOCKS = "▁▂▃▄▅▆▇█"
_RING = re.compile(r"allreduce(\((algorithm=['\"]?(native|ring)['\"]?)?\))?", re.IGNORECASE)


def spark(values: Sequence[float], width: int) -> str:
    """Draw the last values as a line of blocks, scaled from their least to their greatest.

    >>> spark([1, 2, 3, 8], 6)
    '  ▁▂▃█'
    """
    last = list(values)[-width:] if width > 0 else []
    if not last:
        return " " * width
    low, high = min(last), max(last)
    steps = [round((v - low) / (high - low) * 7) if high > low else 0 for v in last]
    return "".join(_BLOCKS[s] for s in steps).rjust(width)


def bar(share: float, width: int) -> str:
    """Draw a share as a bar, in eighths of a character.

    >>> bar(0.5, 4), bar(1.0, 2)
    ('██  ', '██')
    """
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    return ("█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else "")).ljust(width)


def title(run: RunNow) -> str:
    """Return the strategy and the numbers of nodes."""
    servers = f" + {plural(run.servers, 'server')}" if run.servers else ""
    return f"{run.strategy} · {plural(run.workers, 'worker')}{servers}"


def situation(run: RunNow) -> str:
    """Return the state, progress and latest scores in a line."""
    found = [run.state, run.progress, f"{run.t:,.1f} {'virtual ' if run.virtual else ''}s"]
    if run.loss is not None:
        found.append(f"loss {run.loss:.4g} in the last step")
    if run.latest is not None:
        best = "" if run.best in (None, run.latest) else f", best {run.best:.4g}"
        found.append(f"test {run.metric} {run.latest:.4g}{best}")
    if run.rate and not run.over:
        found.append(f"{run.rate:,.0f} samples/{'virtual ' if run.virtual else ''}s in the last steps")
    if run.left is not None:
        found.append(f"{duration(run.left)} left")
    return " · ".join(found)


def in_order(nodes: Sequence[NodeNow], sort: str) -> list[NodeNow]:
    """Sort the nodes: the slowest, or those with the most waiting or the highest loss, come first."""
    keys = {
        "node": lambda n: n.node,
        "step": lambda n: (n.role == "server", n.step),
        "wait": lambda n: (n.role == "server", -n.wait),
        "rate": lambda n: (n.role == "server", n.rate or 0.0),
        "loss": lambda n: (n.role == "server", -(n.loss or 0.0)),
    }
    return sorted(nodes, key=keys[sort])


def cells(node: NodeNow) -> dict[str, str]:
    """Return the figures of a node as text, by column."""
    known = node.rate is not None or node.state == "done"
    return {
        "node": node.name,
        "step": f"{node.step:,}",
        "loss": _NONE if node.loss is None else f"{node.loss:.4g}",
        "age": _NONE if node.staleness is None else f"{node.staleness:.1f}",
        "comp.": f"{node.compute:.0%}" if known else _NONE,
        "comm.": f"{node.communicate:.0%}" if known else _NONE,
        "wait": f"{node.wait:.0%}" if known else _NONE,
        "samples/s": _NONE if node.rate is None else f"{node.rate:,.0f}",
        "traffic/s": _NONE if node.traffic is None else size(node.traffic),
        "last event": _NONE if node.seconds_since_event is None else f"{duration(node.seconds_since_event)} ago",
        "state": node.state,
    }


def plain(run: RunNow, sort: str = "node", most: int = 32) -> str:
    """Return the state of a run as plain text, for pipes, files and simple terminals."""
    rows = [cells(node) for node in in_order(run.nodes, sort)]
    lines = [run.name, title(run), situation(run), *([run.why] if run.why else [])]
    if rows:
        widths = {name: max(len(name), *(len(row[name]) for row in rows[:most])) for name in rows[0]}
        left = ("node", "state")

        def line(row: dict[str, str]) -> str:
            return "  ".join(row[n].ljust(w) if n in left else row[n].rjust(w) for n, w in widths.items()).rstrip()

        lines += ["", line({name: name for name in widths}), *(line(row) for row in rows[:most])]
    if len(rows) > most:
        lines.append(f"… and {plural(len(rows) - most, 'more node')}")
    return "\n".join(lines)


# Which nodes are connected.


def topology(run: RunNow, width: int) -> list[str]:
    """Draw three lines: workers on a ring, or workers and servers on a common line."""
    labels = _fitting(_numbered("", run.workers), width - 6)
    if run.workers < 2 and not run.servers:
        return ["", f" {''.join(labels)}", ""]
    if not run.servers and _RING.fullmatch(run.strategy):
        middle = " ─ ".join(labels)
        return ["", f"╭─ {middle} ─╮", f"╰{'─' * (len(middle) + 4)}╯"]
    below, places = _placed(labels, 4)
    above = _fitting(_numbered("s", run.servers), len(below))
    at = [round((i + 0.5) * len(below) / max(1, len(above))) for i in range(len(above))]
    top, wire = list(" " * (len(below) + 4)), list("─" * (max([*places, *at]) + 1))
    for place, text in zip(at, above, strict=True):
        top[place : place + len(text)] = text
    for place in {*places, *at}:
        wire[place] = "┼" if place in places and place in at else "┬" if place in places else "┴"
    first = min([*places, *at])
    if wire[first] == "┬" and wire[-1] == "┬" and len(places) > 1:
        wire[first], wire[-1] = "╭╮"
    return ["".join(top).rstrip(), " " * first + "".join(wire[first:]), below]


def _numbered(letter: str, count: int) -> list[str]:
    """Return the labels of all nodes; of many, the first `_MOST` and the last."""
    some = [f"{letter}{i}" for i in range(min(count, _MOST))]
    return some if count <= _MOST else [*some, f"{letter}{count - 1}"]


def _placed(labels: Sequence[str], room: int) -> tuple[str, list[int]]:
    text, places = " ", []
    for label in labels:
        places.append(len(text) + (len(label) - 1) // 2)
        text += label.ljust(max(room, len(label) + 2))
    return text.rstrip(), places


def _fitting(labels: list[str], width: int) -> list[str]:
    """Return all labels, or the first few and the last if there is no room for all."""
    if sum(len(label) + 3 for label in labels) <= width or len(labels) < 4:
        return labels
    room = max(2, (width - 8) // (len(labels[-1]) + 3))
    return [*labels[: room - 1], "…", labels[-1]]
