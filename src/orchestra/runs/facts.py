# SPDX-License-Identifier: Apache-2.0
"""Facts: the figures of one run, computed from its event files alone."""

from __future__ import annotations

import gc
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from orchestra.formatting import plural
from orchestra.runs import dropped_events as dropped
from orchestra.runs import files, learning
from orchestra.runs.dropped_events import Dropped
from orchestra.runs.events import Event, Logged, NodeEnded, NodeStarted, Sampled, Scored, Skipped, Stepped, read


@dataclass(frozen=True)
class TimeShare:
    """How a node spent its time, as fractions of the run."""

    node: int
    role: str
    compute: float
    communicate: float
    wait: float


@dataclass(frozen=True)
class Facts:
    """The figures of a run."""

    strategy: str
    workers: int
    servers: int
    seed: int
    steps: int  # of the slowest worker
    samples: int  # of all workers
    seconds: float  # of training, without setup and evaluation
    setup: float  # seconds until the last node was ready
    samples_per_second: float
    loss: float | None  # mean over the last tenth of each worker's steps
    metrics: dict[str, float]  # of the final model
    sent_per_worker: float  # bytes
    received_per_worker: float  # bytes
    sent_total: int  # bytes, of all nodes, servers included
    shares: list[TimeShare]
    staleness_mean: float | None
    staleness_max: int | None
    staleness_counts: dict[int, int]
    skipped: int
    stopped_by: str
    parameters: int
    virtual: bool = False  # seconds are those of a simulation
    trained: bool = True  # False: the simulation computed no gradients
    most_steps: int | None = None  # of the fastest worker
    must_log: str | None = None  # the figure that the strategy must log at least once
    happened: tuple[int, float] | None = None  # step and second at which it was first logged
    afterwards: dict[str, float] = field(default_factory=dict)  # momentum and rate that the strategy set then
    last_s: float | None = None  # distance of the loss from a plateau at the end
    used: int | None = None  # samples whose gradients were applied, if some were not
    retired: tuple[int, ...] = ()  # workers that stopped because servers took over their machine
    dropped: int = 0  # gradients that were dropped because too few workers were left for an update
    learned: bool | None = None  # None: unknown, for example because the run is short or not over
    unlearned: str | None = None  # a short statement that it did not learn, with the suspected reason
    why_unlearned: str | None = None  # the figures behind it, and what to do

    def as_dict(self) -> dict[str, Any]:
        """Return a dict that JSON can hold."""
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any]) -> Self:
        """Make facts from what `as_dict` returned, also after a round trip through JSON."""
        counts = {int(staleness): count for staleness, count in record["staleness_counts"].items()}
        again = {"shares": [TimeShare(**share) for share in record["shares"]], "staleness_counts": counts}
        happened = record["happened"] and tuple(record["happened"])
        return cls(**record | again | {"happened": happened, "retired": tuple(record["retired"])})

    @property
    def made(self) -> str:
        """Steps and seconds, in words."""
        return f"{plural(self.steps, 'step')} in {self.seconds:.2f} {'virtual ' if self.virtual else ''}s"

    @property
    def missing(self) -> str | None:
        """The event that defines the strategy, if it never happened: the run then does not show what it is about."""
        if self.must_log is None or self.happened is not None:
            return None
        so_far = "" if self.last_s is None else f" (s was {self.last_s:.3g} at last)"
        return (
            f"NEVER {self.must_log.upper()} in {plural(self.steps, 'step')}{so_far}: figures of its first part alone. "
            "A larger threshold, latest=0.5 or when=atshare would make it"
        )

    @property
    def warning(self) -> str | None:
        """A warning that the run did not learn, with figures and what to do."""
        return None if self.unlearned is None else f"{self.strategy} {self.unlearned}: {self.why_unlearned}"

    def share(self, kind: str) -> float:
        """Return the workers' mean share of time for `compute`, `communicate` or `wait`."""
        shares: list[float] = [getattr(s, kind) for s in self.shares if s.role == "worker"]
        return sum(shares) / len(shares) if shares else 0.0


def events_of(run: Path) -> list[Event]:
    """Return all events of a run, grouped by node."""
    # None of the events is garbage, and the collector would search them for as long as it takes to read them.
    collects = gc.isenabled()
    gc.disable()
    try:
        return [event for path in sorted(run.glob("events-*.jsonl")) for event in read(path)]
    finally:
        if collects:
            gc.enable()


def scores_of(run: Path) -> list[Scored]:
    """Return the evaluated snapshots of a run, in order."""
    scored = [event for event in read(run / "scores.jsonl") if isinstance(event, Scored)]
    return sorted(scored, key=lambda s: s.number)


Said = dict[str | None, list[Logged]]  # logged events, by name


def _apart(events: Sequence[Event]) -> tuple[list[Event], Said, Dropped]:
    """Separate logged events from all others, and sum up the dropped ones: of many events nearly all are logged."""
    others: list[Event] = []
    said: Said = defaultdict(list)
    for event in events:
        if isinstance(event, Logged):
            said[event.name].append(event)
        else:
            others.append(event)
    return others, said, dropped.of(others)


def _staleness(said: Said, lost: Dropped) -> dict[str, Any]:
    counts = Counter(int(e.value) for e in said["staleness"]) + lost.values("staleness")
    return {
        "staleness_mean": sum(value * n for value, n in counts.items()) / counts.total() if counts else None,
        "staleness_max": max(counts, default=None),
        "staleness_counts": dict(sorted(counts.items())),
    }


def _switching(config: dict[str, Any], said: Said) -> dict[str, Any]:
    must_log = config.get("must_log")
    happened = [(e.step, e.t) for e in said[must_log] if e.node < config["workers"]]
    last = max(said["s"], key=lambda e: e.t, default=None)
    then = {name: said[f"{name} after the switch"] for name in ("momentum", "rate")}
    return {
        "must_log": must_log,
        "happened": min(happened, default=None),
        "afterwards": {name: min(found, key=lambda e: e.node).value for name, found in then.items() if found},
        "last_s": None if last is None else last.value,
    }


def facts_of(run: Path, events: Sequence[Event] | None = None, scores: Sequence[Scored] | None = None) -> Facts:
    """Compute the facts of a run folder; events and scores that are given are not read again."""
    config = files.read_json(run / "config.json")
    ending = files.read_json(p) if (p := run / "ending.json").exists() else {}
    events = events_of(run) if events is None else events
    return facts_from(config, ending, events, scores_of(run) if scores is None else scores)


def facts_from(
    config: dict[str, Any], ending: dict[str, Any], everything: Sequence[Event], scores: Sequence[Scored]
) -> Facts:
    """Compute the facts of a run whose files are already read; only a finished run is judged on whether it learned."""
    facts = _figures(config, ending, everything, scores)
    if not facts.trained or not ending:
        return facts
    stepped = [e for e in everything if isinstance(e, Stepped)]
    stale = bool(config.get("stale") or facts.staleness_max)
    found = learning.judge(stepped, scores, config.get("labels"), steps=facts.steps, stale=stale)
    return replace(facts, **asdict(found))


def _figures(
    config: dict[str, Any], ending: dict[str, Any], everything: Sequence[Event], scores: Sequence[Scored]
) -> Facts:
    events, said, lost = _apart(everything)
    began = [e for e in events if isinstance(e, NodeStarted)]
    stepped = [e for e in events if isinstance(e, Stepped)]
    ended = {e.node: e for e in events if isinstance(e, NodeEnded)}
    roles = {e.node: e.role for e in began}
    latest = _latest(stepped, ended)
    workers = [e for node, e in latest.items() if roles.get(node) == "worker"]
    retired = {e.node for e in said["retired"]}
    seconds = max((e.t for e in workers), default=max((e.t for e in stepped), default=0.0))
    samples = sum(e.samples for e in workers)
    trained = config.get("cluster", {}).get("numerics") != "off"
    return Facts(
        strategy=config["strategy"],
        workers=config["workers"],
        servers=config["servers"],
        seed=config["seed"],
        steps=min((e.step for e in workers if e.node not in retired), default=_most(stepped)),
        samples=samples,
        seconds=seconds,
        setup=max((e.setup for e in began), default=0.0),
        samples_per_second=samples / seconds if seconds else 0.0,
        loss=final_loss([e for e in stepped if e.node not in retired]) if trained else None,
        metrics=scores[-1].metrics if scores and trained and scores[-1].number else {},
        sent_per_worker=_mean([e.sent for e in workers]),
        received_per_worker=_mean([e.received for e in workers]),
        sent_total=sum(e.sent for e in latest.values()),
        shares=[_share(e, roles.get(node, "worker")) for node, e in sorted(latest.items())],
        **_staleness(said, lost),
        stopped_by=ending.get("stopped_by", "unknown"),
        parameters=config["parameters"],
        virtual=config.get("cluster", {}).get("kind") == "simulated",
        trained=trained,
        most_steps=max((e.step for e in workers), default=None),
        **_switching(config, said),
        **_losses(events, said, lost, [e for node, e in ended.items() if roles.get(node) == "server"]),
        retired=tuple(sorted(retired)),
    )


def _latest(stepped: Sequence[Stepped], ended: dict[int, NodeEnded]) -> dict[int, Stepped | NodeEnded]:
    """Return the totals of each node; for a worker that has not ended, those of its last step."""
    return {**{e.node: e for e in stepped}, **ended}


def _most(stepped: Sequence[Stepped]) -> int:
    return max((e.step for e in stepped), default=0)


def _losses(events: Sequence[Event], said: Said, lost: Dropped, servers: Sequence[NodeEnded]) -> dict[str, Any]:
    """Count skipped and dropped gradients; `used` is set if some gradients came too late or were abandoned."""
    unused = any(said[name] or lost.count(name) for name in ("late", "abandoned", "dropped"))
    return {
        "skipped": sum(isinstance(e, Skipped) for e in events) + lost.kinds["skipped"],
        "used": max(e.samples for e in servers) if unused and servers else None,
        "dropped": int(sum(e.value for e in said["dropped"]) + lost.sum("dropped")),
    }


def final_loss(stepped: Sequence[Stepped]) -> float | None:
    """Return the mean training loss over the last tenth of each worker's steps, so that no single batch dominates."""
    by_node: dict[int, list[Stepped]] = {}
    for e in stepped:
        by_node.setdefault(e.node, []).append(e)
    if any(isinstance(e, Sampled) for e in stepped):
        return _loss_of_samples(by_node)
    last = [e.loss for es in by_node.values() for e in es[-max(1, len(es) // 10) :] if e.loss is not None]
    return _mean(last) if last else None


def _loss_of_samples(by_node: dict[int, list[Stepped]]) -> float | None:
    """Return the same mean where steps were dropped: a sample stands for all steps since the previous sample."""
    found = [
        (e.loss, e.step - before.step)
        for es in by_node.values()
        for before, e in pairwise(es)
        if e.loss is not None and e.step > 0.9 * es[-1].step
    ]
    steps = sum(weight for _, weight in found)
    return sum(loss * weight for loss, weight in found) / steps if steps > 0 else None


def _share(e: Stepped | NodeEnded, role: str) -> TimeShare:
    whole = e.t or math.inf
    return TimeShare(e.node, role, e.compute / whole, e.communicate / whole, e.wait / whole)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
