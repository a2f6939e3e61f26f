# SPDX-License-Identifier: Apache-2.0
"""Links shared by flows: every flow gets its max-min fair rate, recomputed when one starts or ends.

    rate r of flow f:   some link of its route is saturated, and no flow through that link is faster than f

The flows for which a link is the bottleneck all have the same rate there, ρ. So each link keeps one count of bytes
served to any of them, V, growing at rate ρ: a flow of B bytes that joins at V ends when the count reaches V + B, and a
change of ρ applies to all of them at once.

The start or the end of a flow usually concerns one link: then ρ = capacity / flows. If links interact (the bottleneck
of a flow might move), the rates of all connected flows are recomputed by filling up: raise all rates together, fix
those whose link is full, continue with the rest (Bertsekas and Gallager, Data Networks, §6.5.2).
"""

from __future__ import annotations

import bisect
import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

from orchestra.worlds.simulated.kernel import Kernel

_FEW = 16  # flows on a link that are summed up rather than bounded
_ROOM = 1 + 1e-12  # tolerance for rounding, relative to a capacity
_NOTHING = 1e-12  # tolerance for rounding, relative to a count
_NEVER = float("inf")


class Link:
    """A capacity that flows share."""

    __slots__ = (
        "alone", "capacity", "due", "flows", "kind", "left", "name", "rho", "served", "since", "unfixed", "waiting"
    )  # fmt: skip

    def __init__(self, name: str, capacity: float, kind: int = 0) -> None:
        self.name = name
        self.kind = kind  # flows that cross two links of one kind share no other link
        self.capacity = capacity  # bytes per second
        self.flows: dict[Flow, None] = {}  # all that cross it
        self.waiting: deque[tuple[float, int, Flow]] = deque()  # those it limits, by the count at which they end
        self.rho = 0.0  # the rate of those
        self.served = 0.0  # V, at `since`
        self.since = 0.0
        self.due = _NEVER  # when to check whether the next flow ends; events of other times are void
        self.alone = True  # if it limits any flow: it limits all that cross it, and no other link limits those
        self.left = 0.0  # while rates are recomputed: capacity not assigned yet
        self.unfixed = 0  # while rates are recomputed: flows whose rate is not known yet

    def advance(self, now: float) -> None:
        """Update V to the present."""
        self.served += self.rho * (now - self.since)
        self.since = now


class Flow:
    """A transfer of bytes in progress."""

    __slots__ = ("about", "arrived", "at", "end", "left", "links", "number")

    def __init__(self, number: int, links: tuple[Link, ...], arrived: Callable[..., None], about: Any) -> None:
        self.number = number
        self.links = links
        self.arrived, self.about = arrived, about
        self.at: Link | None = None  # its bottleneck
        self.end: float  # the count of that link at which it ends
        self.left: float  # bytes, while rates are recomputed

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.at.rho if self.at is not None else 0.0


class Flows:
    """All flows in progress."""

    def __init__(self, kernel: Kernel, *, single: bool = False) -> None:
        """Create an empty network of flows.

        `single`: of the flows that cross a link, at most one crosses each link of any other kind. Then a link is
        crossed by at most one flow of every link of another kind, and is not full if the rates of all those links
        together are at most the smallest capacity.
        """
        self._kernel = kernel
        self._count = 0
        self._single = single
        self._hot: dict[Link, None] = {}  # links that limit flows
        self._rates: dict[int, float] = defaultdict(float)  # the sum of their ρ, by kind
        self._least = float("inf")  # smallest capacity seen
        self._dirty: dict[Link, None] = {}  # links whose flows get new rates at the present time
        self.filled = 0  # how often rates were recomputed
        self.touched = 0  # the total number of flows whose rates were recomputed

    def start(self, links: tuple[Link, ...], size: float, arrived: Callable[..., None], *about: Any) -> Flow:
        """Start a flow over links; `arrived` is called when its last byte has left."""
        self._count += 1
        flow = Flow(self._count, links, arrived, about)
        if size <= 0 or not links:
            self._kernel.at(self._kernel.now, arrived, *about)
            return flow
        for link in links:
            if link.capacity < self._least:
                self._least = link.capacity
        dirty = self._dirty
        host = None if dirty and any(link in dirty for link in links) else self._joins_alone(flow)
        for link in links:
            link.flows[flow] = None
        if host is not None:
            host.alone = True
            self._join(flow, host, size)
            self._share(host)
            if host.due == _NEVER or host.waiting[0][2] is flow:  # the others only end later than expected
                self._await(host)
        else:
            self._join(flow, links[0], size)  # somewhere, for no time at all
            self._soon(links)
        return flow

    def _soon(self, links: Iterable[Link]) -> None:
        """Schedule the recomputation of rates after all events of the present time."""
        if not self._dirty:
            self._kernel.at(self._kernel.now, self._settle)
        self._dirty.update(dict.fromkeys(links))

    def _settle(self) -> None:
        dirty, self._dirty = self._dirty, {}
        self._fill(dirty)

    # One link at a time.

    def _joins_alone(self, flow: Flow) -> Link | None:
        """Return the bottleneck of a new flow, if only the flows that this link limits already are affected."""
        host: Link | None = None
        for link in flow.links:
            if link.waiting:
                if host is not None or not link.alone:
                    return None
                host = link
        if host is None:
            empty = [link for link in flow.links if not link.flows]
            if not empty:
                return None
            host = min(empty, key=lambda link: link.capacity)
        rho = host.capacity / (len(host.waiting) + 1)
        if self._single and self._rates[host.kind] - host.rho + rho <= self._least:
            return host
        for link in flow.links:
            if link is not host and self._load(link, host, rho) + rho > link.capacity * _ROOM:
                return None
        return host

    def _load(self, link: Link, host: Link, rho: float) -> float:
        """Return an upper bound on the load of a link if `host` serves its flows at rate ρ."""
        if len(link.flows) <= _FEW:
            load = 0.0
            for flow in link.flows:
                at = flow.at
                load += rho if at is host else at.rho if at is not None else 0.0
            return load
        return len(link.flows) * max([rho, *(other.rho for other in self._hot)])

    def _leaves_alone(self, host: Link) -> bool:
        """Return whether the flows that a link still limits may share all of it."""
        if not host.waiting:
            return True
        if not host.alone:
            return False
        rho = host.capacity / len(host.waiting)
        if self._single and self._rates[host.kind] - host.rho + rho <= self._least:
            return True
        others = [link for _, _, flow in host.waiting for link in flow.links if link is not host]
        for link in others if self._single else {*others}:
            load = rho if len(link.flows) == 1 else self._load(link, host, rho)
            if load > link.capacity * _ROOM:
                return False
        return True

    def _join(self, flow: Flow, host: Link, size: float) -> None:
        now, waiting = self._kernel.now, host.waiting
        host.served += host.rho * (now - host.since)  # as `advance`, inlined: this is the inner loop
        host.since = now
        flow.at = host
        flow.end = end = host.served + size
        if not waiting:
            self._hot[host] = None
        if not waiting or waiting[-1][0] <= end:  # the usual case: flows of equal size end in the order of their start
            waiting.append((end, flow.number, flow))
        else:
            bisect.insort(waiting, (end, flow.number, flow))

    def _share(self, host: Link) -> None:
        """Divide the capacity of an updated link, which limits all its flows, equally."""
        rho = host.capacity / len(host.waiting)
        self._rates[host.kind] += rho - host.rho
        host.rho = rho

    def _await(self, host: Link) -> None:
        """Schedule the end of the next flow of a link; if the flow then needs longer, the end is scheduled again."""
        now = self._kernel.now
        left = host.waiting[0][0] - host.served
        due = now + left / host.rho if left > 0 else now
        if due < host.due:
            host.due = due
            self._kernel.at(due, self._end, host, due)

    def _end(self, host: Link, due: float) -> None:
        if due != host.due:
            return
        host.due = _NEVER
        waiting, now = host.waiting, self._kernel.now
        host.served += host.rho * (now - host.since)
        host.since = now
        end = waiting[0][0]
        left = end - host.served
        if left > _NOTHING * end and (due := now + left / host.rho) > now:
            host.due = due
            self._kernel.at(due, self._end, host, due)
            return
        host.served = end  # exactly, so that equal flows end at equal times
        ended = [waiting.popleft()[2]]
        while waiting and waiting[0][0] <= end:
            ended.append(waiting.popleft()[2])
        # Flows that shared another link with them may now be faster, if that link limits any flow.
        others = []
        for flow in ended:
            for link in flow.links:
                del link.flows[flow]
                if link is not host and link.waiting:
                    others.append(link)
        if not waiting:
            self._rates[host.kind] -= host.rho
            host.rho = host.served = 0.0
            del self._hot[host]
        if others or host in self._dirty or not self._leaves_alone(host):
            self._soon([host, *others])
        elif waiting:
            self._share(host)
            self._await(host)
        for flow in ended:
            flow.arrived(*flow.about)

    # All connected links.

    def _fill(self, links: Iterable[Link]) -> None:
        """Recompute the rates of all flows connected to some links."""
        now = self._kernel.now
        touched, flows = _connected(links)
        self.filled += 1
        self.touched += len(flows)
        hot = [link for link in touched if link.waiting]
        for link in hot:
            link.advance(now)
        for flow in flows:
            assert flow.at is not None
            flow.left = flow.end - flow.at.served
        for link in hot:
            link.waiting.clear()
            link.due = _NEVER
            self._rates[link.kind] -= link.rho
            link.rho = 0.0
            del self._hot[link]
        levels = _levels(touched, flows)
        for link, rho, held in levels:
            self._rates[link.kind] += rho
            link.rho, link.since = rho, now
            for flow in held:
                flow.end = link.served + flow.left
            link.waiting.extend(sorted([(flow.end, flow.number, flow) for flow in held]))
            self._hot[link] = None
            self._await(link)
        for link, _, held in levels:
            link.alone = len(held) == len(link.flows) and not any(
                other.waiting for flow in held for other in flow.links if other is not link
            )


def _connected(links: Iterable[Link]) -> tuple[list[Link], list[Flow]]:
    """Return all links and flows that are connected to these links, directly or through others."""
    seen = dict.fromkeys(links)
    flows: dict[Flow, None] = {}
    todo = deque(seen)
    while todo:
        for flow in todo.popleft().flows:
            if flow not in flows:
                flows[flow] = None
                for link in flow.links:
                    if link not in seen:
                        seen[link] = None
                        todo.append(link)
    return list(seen), list(flows)


def _levels(links: list[Link], flows: list[Flow]) -> list[tuple[Link, float, list[Flow]]]:
    """Return the bottleneck links with their rates and the flows that they limit, by filling up."""
    for flow in flows:
        flow.at = None
    for link in links:
        link.left, link.unfixed = link.capacity, len(link.flows)
    heap = [(link.capacity / link.unfixed, i, link) for i, link in enumerate(links) if link.unfixed]
    heapq.heapify(heap)
    fixed, found = 0, []
    while fixed < len(flows):
        share, i, link = heapq.heappop(heap)
        if not link.unfixed:
            continue
        rho = max(0.0, link.left) / link.unfixed
        if rho > share * _ROOM:  # other links limited some of its flows: it is full only later
            heapq.heappush(heap, (rho, i, link))
            continue
        held = [flow for flow in link.flows if flow.at is None]
        for flow in held:
            flow.at = link
            for other in flow.links:
                other.left -= rho
                other.unfixed -= 1
        fixed += len(held)
        found.append((link, rho, held))
    return found
