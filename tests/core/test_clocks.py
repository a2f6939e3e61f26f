# SPDX-License-Identifier: Apache-2.0
"""A clock per range is a clock per key."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from orchestra.strategies.parameter_server.range_clock import RangeClock

FIRST, LAST = 5, 25
ranges = st.tuples(st.integers(FIRST, LAST), st.integers(FIRST, LAST)).filter(lambda r: r[0] != r[1]).map(sorted)


@given(st.lists(st.tuples(ranges, st.integers(0, 4)), max_size=30), ranges)
def test_a_clock_per_range_is_a_clock_per_key(changes: list[tuple[list[int], int]], asked: list[int]) -> None:
    clock, keys = RangeClock([(FIRST, LAST, 0)]), [0] * LAST
    for (start, stop), t in changes:
        before = len(clock.pieces)
        clock.set(start, stop, t)
        keys[start:stop] = [t] * (stop - start)
        assert len(clock.pieces) <= before + 2
        assert [t for a, b, t in clock.pieces for _ in range(a, b)] == keys[FIRST:]
        assert clock.pieces[0][0] == FIRST
        assert all(a[1] == b[0] and a[2] != b[2] for a, b in pairwise(clock.pieces))  # no gaps, nothing to merge
        assert clock.least(*asked) == min(keys[asked[0] : asked[1]])


def test_of_no_keys_at_all_there_is_still_a_clock() -> None:
    clock = RangeClock([(7, 7, 0)])
    clock.set(7, 7, 3)
    assert clock.pieces == [(7, 7, 3)]
    assert clock.least(7, 7) == 3
