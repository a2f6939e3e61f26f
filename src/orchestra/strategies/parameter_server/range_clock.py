# SPDX-License-Identifier: Apache-2.0
"""Range vector clocks: the clock of a node on every key, stored by ranges of keys.

Li, Andersen, Park, Smola, et al. "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, §4.1.
https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu

    vc_i(k)     the clock of node i on key k; vc_i(R) = t says that it is t on every k in R
    initially one range holds every key, at 0
    vc_i(R) ← t:    every tracked S that meets R becomes  S left of R, at its old clock;  S ∩ R, at t;  S right of R

A range is cut into at most three, and neighbours with equal clocks are merged. So a node needs as many entries as there
are different ranges, not as many as there are keys.
"""

from __future__ import annotations

Piece = tuple[int, int, int]  # start, stop, clock


class RangeClock:
    """The clocks of one node. `pieces` is a plain list in the order of the keys, which is changed in place.

    >>> clock = RangeClock([(0, 10, 0)])
    >>> clock.set(3, 5, 1)
    >>> clock.pieces, clock.least(0, 10), clock.least(3, 5)
    ([(0, 3, 0), (3, 5, 1), (5, 10, 0)], 0, 1)
    """

    __slots__ = ("pieces",)

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces

    def set(self, start: int, stop: int, t: int) -> None:
        """vc(R) ← t for R from `start` to before `stop`; R is not empty, unless there is no key at all."""
        if start <= self.pieces[0][0] and self.pieces[-1][1] <= stop:  # the usual case: the whole range
            self.pieces[:] = [(start, stop, t)]
            return
        left = [(a, min(b, start), s) for a, b, s in self.pieces if a < start]
        right = [(max(a, stop), b, s) for a, b, s in self.pieces if b > stop]
        merged: list[Piece] = []
        for a, b, s in (*left, (start, stop, t), *right):
            if merged and merged[-1][2] == s:
                a = merged.pop()[0]
            merged.append((a, b, s))
        self.pieces[:] = merged

    def least(self, start: int, stop: int) -> int:
        """Return the smallest clock on a range."""
        if len(self.pieces) == 1:  # the usual case, between two pushes
            return self.pieces[0][2]
        return min(t for a, b, t in self.pieces if a < stop and start < b)
