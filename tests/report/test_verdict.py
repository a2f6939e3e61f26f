# SPDX-License-Identifier: Apache-2.0
"""One sentence, and when there is too little to say one."""

from __future__ import annotations

import pytest

from orchestra.budget import Target
from orchestra.report.verdict import Mark, judge, pairs

TARGET = Target("accuracy", 0.9)


def mark(strategy: str, seed: int, seconds: float | None, *, condition: str = "", since: float = 0.0) -> Mark:
    return Mark(strategy, condition, seed, seconds, since, 0.95 if seconds else 0.8, 0.95 if seconds else 0.8)


def test_a_clear_lead_has_its_interval() -> None:
    slow = [mark("allreduce", i, t) for i, t in enumerate((10.0, 11.0, 12.0, 10.5, 11.5))]
    fast = [mark("slowmo", i, t) for i, t in enumerate((5.0, 5.6, 6.1, 5.2, 5.8))]
    found = judge([*slow, *fast], TARGET, "accuracy")
    assert found.sentence.startswith("slowmo reached accuracy ≥ 0.9 in 5.6 s, the median of 5 runs, 1.99 times as fast")
    assert "95 % interval 1.9" in found.sentence
    assert "chance" not in found.sentence
    (base, ahead) = found.against
    assert base.speed is None
    assert ahead.p is not None
    assert ahead.p < 0.001


def test_a_lead_that_may_be_chance_says_so() -> None:
    a = [mark("allreduce", i, t) for i, t in enumerate((5.0, 9.0, 6.0))]
    b = [mark("slowmo", i, t) for i, t in enumerate((6.0, 5.0, 5.5))]
    found = judge([*a, *b], TARGET, "accuracy")
    assert "may be chance" in found.sentence


def test_seeds_are_compared_with_themselves() -> None:
    marks = [mark("a", 0, 1.0), mark("a", 1, 10.0), mark("b", 1, 20.0), mark("b", 0, 2.0), mark("b", 2, 5.0)]
    assert pairs(marks, "b", "a", lambda m: m.seconds) == ([2.0, 20.0], [1.0, 10.0])


def test_one_seed_is_too_little() -> None:
    found = judge([mark("allreduce", 0, 10.0), mark("slowmo", 0, 5.0)], TARGET, "accuracy")
    assert "too little for an interval" in found.sentence
    assert any("One seed only" in doubt for doubt in found.doubts)


def test_two_seeds_that_disagree_have_no_interval_worth_the_name() -> None:
    marks = [mark("allreduce", 0, 10.0), mark("allreduce", 1, 5.0), mark("slowmo", 0, 5.0), mark("slowmo", 1, 4.9)]
    assert "too few for an interval that says anything" in judge(marks, TARGET, "accuracy").sentence


def test_less_than_one_snapshot_is_a_tie() -> None:
    marks = [mark("allreduce", i, 10.0 + i, since=9.0) for i in range(3)]
    marks += [mark("slowmo", i, 9.5 + i) for i in range(3)]
    assert any("a tie" in doubt for doubt in judge(marks, TARGET, "accuracy").doubts)


def test_who_missed_the_target_is_not_ranked() -> None:
    marks = [mark("allreduce", i, 10.0) for i in range(3)]
    marks += [mark("ps", 0, 1.0), mark("ps", 1, 1.0), mark("ps", 2, None)]
    found = judge(marks, TARGET, "accuracy")
    assert found.sentence.startswith("allreduce reached")
    assert "nobody else did in every run" in found.sentence
    assert any("ps" in doubt for doubt in found.doubts)


def test_nobody_reached_it() -> None:
    found = judge([mark("ps", 0, None), mark("allreduce", 0, None)], TARGET, "accuracy")
    assert found.sentence.startswith("No strategy reached accuracy ≥ 0.9 in every run")


def test_several_conditions_are_counted() -> None:
    marks = []
    for i, condition in enumerate(("near", "far", "slow")):
        marks += [mark("allreduce", 0, 10.0, condition=condition), mark("ps", 0, 5.0 + 6.0 * i, condition=condition)]
    found = judge(marks, TARGET, "accuracy")
    assert found.sentence.startswith("allreduce reached accuracy ≥ 0.9 first under 2 of 3 conditions, ps under 1")


def test_without_a_target_the_last_score_counts() -> None:
    marks = [Mark("allreduce", "", i, None, 0.0, None, 0.90 + i / 100) for i in range(3)]
    marks += [Mark("ps", "", i, None, 0.0, None, 0.95 + i / 100) for i in range(3)]
    found = judge(marks, None, "accuracy")
    assert found.sentence.startswith("ps ended with accuracy 0.96, the best: +0.05 beside allreduce")
    assert any("--target" in doubt for doubt in found.doubts)


def test_alone_there_is_nothing_to_compare() -> None:
    assert "nothing to compare it with" in judge([mark("ps", 0, 3.0)], TARGET, "accuracy").sentence
    assert "nothing was scored" in judge([Mark("ps", "", 0, None, 0.0, None, None)], None, None).sentence


def test_where_nothing_was_scored_speed_counts() -> None:
    marks = [Mark("allreduce", "", i, None, 0.0, None, None, 100.0 + i) for i in range(3)]
    marks += [Mark("ps", "", i, None, 0.0, None, None, 200.0 + i) for i in range(3)]
    for target in (None, TARGET):
        sentence = judge(marks, target, None).sentence
        assert sentence.startswith("Nothing was scored; ps went through 201 samples a second, 1.99 times as fast as")
    assert judge(marks[:1], None, None).sentence == "Nothing was scored; allreduce went through 100 samples a second."


def test_of_losses_lower_is_better() -> None:
    marks = [Mark("allreduce", "", 0, None, 0.0, 0.4, 0.4), Mark("ps", "", 0, None, 0.0, 0.3, 0.3)]
    assert "ps came closest with 0.3" in judge(marks, Target("loss", 0.1), "loss").sentence
    assert judge(marks, None, "loss").sentence.startswith("ps ended")


@pytest.mark.parametrize("seconds", [0.0])
def test_reached_at_once_is_no_ratio(seconds: float) -> None:
    found = judge([mark("allreduce", 0, seconds), mark("ps", 0, 1.0)], TARGET, "accuracy")
    assert found.sentence.startswith("allreduce reached accuracy ≥ 0.9 in 0 s")
