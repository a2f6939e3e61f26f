# SPDX-License-Identifier: Apache-2.0
"""One moment of a run, as people want to see it: functions of what is known of it and of the time.

    a run     setting up → running → scoring → done         it came to its end
                                   ↘ stopped, failed        it did not: it was asked to stop, or there was an error
                                   ↘ died                   it did not, and left no word
                                   ↘ silent                 nobody knows: no lock, and nothing heard for long
    a node    setting up → running, waiting or serving → done;  silent;  as the run where that is over

Shares and rates are those of a node's last steps.
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
_PATIENT = 5.0  # seconds, and five steps, after which a node is said to be silent
_LONG = 60.0  # seconds without any event after which a run without a lock is said to be


@dataclass(frozen=True)
class NodeNow:
    """One node: totals, and shares and rates over its last steps."""

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
    heard: float | None  # real seconds since its last word
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
    news: tuple[tuple[float, str, str], ...]  # when, who, what; the newest last

    @property
    def over(self) -> bool:
        """Whether nothing more will come, unless it is resumed."""
        return self.state in OVER

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def moment(run: Follower, now: float) -> RunNow | None:
    """The run as it is at `now`, in seconds since the epoch; None if there is nothing of it yet."""
    config = run.config
    if config is None:
        return None
    workers, servers = config["workers"], config["servers"]
    virtual = config["cluster"].get("kind") == "simulated"
    state, why = _state(run, now)
    working = [pulse for node, pulse in run.nodes.items() if node < workers]
    spent = _spent(config.get("budget"), working)
    fraction = min(1.0, max(s.share for s in spent)) if spent else None
    metric = _metric(config.get("budget"), run)
    values = [s.metrics[metric] for s in run.scores if metric in s.metrics and s.number]  # not before training
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
        news=tuple((n.t, _who(n, workers), n.text) for n in run.news),
    )
    return RunNow(**{name: harmless(value) if isinstance(value, str) else value for name, value in vars(found).items()})


def _who(news: NewEvent, workers: int) -> str:
    return "model" if news.node is None else name_of(news.node, workers)


# States.


def _state(run: Follower, now: float) -> tuple[str, str]:
    """What a run does, and why it does no more."""
    assert run.config is not None
    everybody = run.config["workers"] + run.config["servers"]
    ended = len(run.nodes) >= everybody and all(pulse.ended for pulse in run.nodes.values())
    if run.ending is not None:
        return "done", {"target": "the target was reached", "seconds": "the time was up"}.get(_stopped_by(run), "")
    if fate := run.word.fate:
        return fate, "its processes are gone and left no word" if fate == "died" else _last_words(run.word.why)
    if ended:
        return ("scoring", "") if run.word.alive else ("stopped", "it left no ending")
    if run.word.alive is None and now - run.changed > _LONG:
        return "silent", f"nothing was heard for {duration(now - run.changed)}"
    return ("running" if any(pulse.steps for pulse in run.nodes.values()) else "setting up"), ""


def _last_words(why: str) -> str:
    """The end of an error: of another process's, what was raised there and which process that was."""
    return " · ".join([line.strip() for line in why.splitlines() if line.strip()][-2:])


def _stopped_by(run: Follower) -> str:
    found = (run.ending or {}).get("stopped_by")
    return found if isinstance(found, str) else ""


def _node_state(pulse: NodeState, role: str, run: str, wait: float, silence: float, patience: float) -> str:
    if run in OVER or pulse.ended is not None:
        return run if run in OVER else "done"
    if not pulse.began:
        return "setting up"
    if role == "server":  # which says nothing for as long as nobody is stale
        return "serving"
    if silence > patience:
        return f"silent {duration(silence)}"
    return "waiting" if wait > 0.5 else "running" if pulse.steps else "setting up"


# Nodes.


def _node(number: int, pulse: NodeState, workers: int, virtual: bool, run: str, now: float) -> NodeNow:
    role = "worker" if number < workers else "server"
    last = [*islice(pulse.steps, max(0, len(pulse.steps) - RECENT), None)]
    parts = shares(last)
    seconds = last[-1].t - last[0].t if len(last) > 1 else 0.0
    if pulse.ended is not None and role == "server" and pulse.ended.t > 0:
        parts = {kind: min(1.0, max(0.0, getattr(pulse.ended, kind) / pulse.ended.t)) for kind in parts}
    moved = last[-1].sent + last[-1].received - last[0].sent - last[0].received if last else 0
    silence = max(0.0, now - pulse.file.changed)
    patience = _PATIENT + (0.0 if virtual or not seconds else 5 * seconds / (len(last) - 1))
    return NodeNow(
        node=number,
        name=name_of(number, workers),
        role=role,
        state=_node_state(pulse, role, run, parts["wait"], silence, patience),
        step=int(pulse.step),
        samples=int(pulse.samples),
        loss=pulse.loss,
        staleness=sum(pulse.stale) / len(pulse.stale) if pulse.stale else None,
        **parts,
        rate=(last[-1].samples - last[0].samples) / seconds if seconds > 0 else None,
        traffic=moved / seconds if seconds > 0 else None,
        heard=None if run in OVER else silence,
        times=tuple(max(0.0, b.t - a.t) for a, b in pairwise(pulse.steps)),
        losses=tuple(e.loss for e in pulse.steps if e.loss is not None),
    )


# How far.


@dataclass(frozen=True)
class _Spent:
    share: float
    words: str


def _spent(budget: Any, working: list[NodeState]) -> list[_Spent]:
    """How much of each part of a budget is spent, in the order in which they were given."""
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
    """Real seconds to the end of the budget, at the speed of the last looks."""
    if fraction is None:
        return None
    if not run.seen or now > run.seen[-1][0]:
        run.seen.append((now, fraction))
    since, had = run.seen[0]
    return (1 - fraction) * (now - since) / (fraction - had) if fraction > had and now > since else None


def _metric(budget: Any, run: Follower) -> str | None:
    """The score that matters: that of the target, else accuracy, else the first."""
    names = sorted({name for score in run.scores for name in score.metrics})
    parts = [str(part) for part in budget] if isinstance(budget, list) else []
    wanted = [p.removeprefix("target=").rpartition(":")[0] for p in parts if p.startswith("target=")]
    return next((name for name in (*wanted, "accuracy", *names) if name in names), None)
