# SPDX-License-Identifier: Apache-2.0
"""The state of a run at one moment, for display: a function of what its follower has read and of the time.

    a run     setting up → running → scoring → done         it reached its end
                                   ↘ stopped, failed        it was asked to stop, or an error ended it
                                   ↘ died                   its processes are gone, and it recorded no error
                                   ↘ silent                 unknown: no lock, and no event for a minute
    a node    setting up → running, waiting or serving → done;  silent;  once the run is over, the state of the run

Shares and rates are taken over the last steps of a node.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from typing import Any

from orchestra.live.follower import RECENT, Follower, NewEvent, NodeState, shares
from orchestra.runs.budget import lower_is_better
from orchestra.runs.progress import duration
from orchestra.runs.reading import harmless
from orchestra.runs.status import name_of

OVER = ("done", "stopped", "failed", "died")
_PATIENT = 5.0  # seconds, plus five steps, without an event after which a node counts as silent
_LONG = 60.0  # seconds without an event after which a run without a lock counts as silent


@dataclass(frozen=True)
class NodeNow:
    """One node: its totals, and its shares and rates over its last steps."""

    node: int
    name: str
    role: str
    state: str
    step: int
    samples: int
    loss: float | None
    staleness: float | None
    compute: float
    communicate: float
    wait: float
    rate: float | None  # samples a second
    traffic: float | None  # bytes a second, sent and received
    seconds_since_event: float | None  # real seconds since it last wrote an event
    times: tuple[float, ...]  # seconds of its last steps
    losses: tuple[float, ...]  # of its last steps


@dataclass(frozen=True)
class RunNow:
    """One run."""

    name: str
    strategy: str
    workers: int
    servers: int
    virtual: bool
    state: str
    why: str
    step: int  # of the slowest worker
    t: float  # seconds of training
    progress: str  # how far, as the budget counts
    fraction: float | None  # of the budget that is spent
    left: float | None  # real seconds
    loss: float | None  # of the last step, mean over the workers
    rate: float
    metric: str | None
    latest: float | None
    best: float | None
    nodes: tuple[NodeNow, ...]
    news: tuple[tuple[float, str, str], ...]  # (time, node, text), the newest last

    @property
    def over(self) -> bool:
        """Whether the run has ended; it goes on only if it is resumed."""
        return self.state in OVER

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict, for JSON."""
        return asdict(self)


def moment(run: Follower, now: float) -> RunNow | None:
    """Return the state of the run at `now`, in seconds since the epoch; None if its config is not written yet."""
    config = run.config
    if config is None:
        return None
    workers, servers = config["workers"], config["servers"]
    virtual = config["cluster"].get("kind") == "simulated"
    state, why = _state(run, now)
    working = [node for number, node in run.nodes.items() if number < workers]
    spent = _spent(config.get("budget"), working)
    fraction = min(1.0, max(s.share for s in spent)) if spent else None
    metric = _metric(config.get("budget"), run)
    values = [
        s.metrics[metric] for s in run.scores if metric in s.metrics and s.number
    ]  # without those of the untrained model
    losses = [p.loss for p in working if p.loss is not None]
    nodes = tuple(_node(node, run.nodes[node], workers, virtual, state, now) for node in sorted(run.nodes))
    found = RunNow(
        name=str(run.folder),
        strategy=config["strategy"],
        workers=workers,
        servers=servers,
        virtual=virtual,
        state=state,
        why=why,
        step=min((p.step for p in working), default=0),
        t=max((p.t for p in working), default=0.0),
        progress=" · ".join(s.words for s in spent) or f"step {min((p.step for p in working), default=0):,}",
        fraction=fraction,
        left=_left(run, fraction, now) if state == "running" else None,
        loss=sum(losses) / len(losses) if losses and config["cluster"].get("numerics") != "off" else None,
        rate=sum(n.rate or 0.0 for n in nodes if n.role == "worker"),
        metric=metric,
        latest=values[-1] if values else None,
        best=(min if lower_is_better(metric or "") else max)(values, default=None),
        nodes=nodes,
        news=tuple((n.t, _subject(n, workers), n.text) for n in run.news),
    )
    return RunNow(**{name: harmless(value) if isinstance(value, str) else value for name, value in vars(found).items()})


def _subject(news: NewEvent, workers: int) -> str:
    return "model" if news.node is None else name_of(news.node, workers)


# States.


def _state(run: Follower, now: float) -> tuple[str, str]:
    """Return the state of a run, and why it ended, if there is more to say than the state does."""
    assert run.config is not None
    count = run.config["workers"] + run.config["servers"]
    ended = len(run.nodes) >= count and all(node.ended for node in run.nodes.values())
    if run.ending is not None:
        return "done", {"target": "the target was reached", "seconds": "the time was up"}.get(_stopped_by(run), "")
    if fate := run.lock.fate:
        return fate, "its processes are gone and recorded no error" if fate == "died" else _last_words(run.lock.why)
    if ended:
        return ("scoring", "") if run.lock.alive else ("stopped", "it wrote no ending")
    if run.lock.alive is None and now - run.changed > _LONG:
        return "silent", f"no event for {duration(now - run.changed)}"
    return ("running" if any(node.steps for node in run.nodes.values()) else "setting up"), ""


def _last_words(why: str) -> str:
    """Return the last two lines of an error: for one of another process, the exception and the process."""
    return " · ".join([line.strip() for line in why.splitlines() if line.strip()][-2:])


def _stopped_by(run: Follower) -> str:
    found = (run.ending or {}).get("stopped_by")
    return found if isinstance(found, str) else ""


def _node_state(node: NodeState, role: str, run: str, wait: float, silence: float, patience: float) -> str:
    if run in OVER or node.ended is not None:
        return run if run in OVER else "done"
    if not node.began:
        return "setting up"
    if role == "server":  # it logs only the ages of stale gradients, so silence means nothing
        return "serving"
    if silence > patience:
        return f"silent {duration(silence)}"
    return "waiting" if wait > 0.5 else "running" if node.steps else "setting up"


# Nodes.


def _node(number: int, node: NodeState, workers: int, virtual: bool, run: str, now: float) -> NodeNow:
    role = "worker" if number < workers else "server"
    last = [*islice(node.steps, max(0, len(node.steps) - RECENT), None)]
    parts = shares(last)
    seconds = last[-1].t - last[0].t if len(last) > 1 else 0.0
    if node.ended is not None and role == "server" and node.ended.t > 0:
        parts = {kind: min(1.0, max(0.0, getattr(node.ended, kind) / node.ended.t)) for kind in parts}
    moved = last[-1].sent + last[-1].received - last[0].sent - last[0].received if last else 0
    silence = max(0.0, now - node.file.changed)
    patience = _PATIENT + (0.0 if virtual or not seconds else 5 * seconds / (len(last) - 1))
    return NodeNow(
        node=number,
        name=name_of(number, workers),
        role=role,
        state=_node_state(node, role, run, parts["wait"], silence, patience),
        step=int(node.step),
        samples=int(node.samples),
        loss=node.loss,
        staleness=sum(node.stale) / len(node.stale) if node.stale else None,
        **parts,
        rate=(last[-1].samples - last[0].samples) / seconds if seconds > 0 else None,
        traffic=moved / seconds if seconds > 0 else None,
        seconds_since_event=None if run in OVER else silence,
        times=tuple(max(0.0, b.t - a.t) for a, b in pairwise(node.steps)),
        losses=tuple(e.loss for e in node.steps if e.loss is not None),
    )


# How far.


@dataclass(frozen=True)
class _Spent:
    """How much of one part of a budget is spent."""

    share: float
    words: str


def _spent(budget: Any, working: list[NodeState]) -> list[_Spent]:
    """Return how much of each part of a budget is spent, in the order in which the parts were given."""
    found = []
    for part in budget if isinstance(budget, list) and working else ():
        kind, _, text = str(part).partition("=")
        try:
            most = float(text)
        except ValueError:
            continue
        so_far = {
            "steps": min(p.step for p in working),
            "epochs": min(p.epoch for p in working),
            "samples": sum(p.samples for p in working),
            "seconds": max(p.t for p in working),
        }.get(kind)
        if so_far is not None and most > 0 and math.isfinite(most):
            words = f"step {so_far:,.0f} of {most:,.0f}" if kind == "steps" else f"{_short(so_far)} of {most:g} {kind}"
            found.append(_Spent(so_far / most, words))
    return found


def _short(x: float) -> str:
    return f"{x:,.0f}" if x >= 100 else f"{x:.1f}"


def _left(run: Follower, fraction: float | None, now: float) -> float | None:
    """Estimate the real seconds to the end of the budget from the speed of the last looks."""
    if fraction is None:
        return None
    if not run.seen or now > run.seen[-1][0]:
        run.seen.append((now, fraction))
    since, had = run.seen[0]
    return (1 - fraction) * (now - since) / (fraction - had) if fraction > had and now > since else None


def _metric(budget: Any, run: Follower) -> str | None:
    """Return the score to show: that of the target, else accuracy, else the first by name."""
    names = sorted({name for score in run.scores for name in score.metrics})
    parts = [str(part) for part in budget] if isinstance(budget, list) else []
    wanted = [p.removeprefix("target=").rpartition(":")[0] for p in parts if p.startswith("target=")]
    return next((name for name in (*wanted, "accuracy", *names) if name in names), None)
