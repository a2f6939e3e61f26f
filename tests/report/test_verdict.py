# SPDX-License-Identifier: Apache-2.0
"""One sentence, and when there is too little to say one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from orchestra.report.results import Achieved, RunResult, achieved, standing
from orchestra.report.verdict import against_baseline, firsts, judge, pairs
from orchestra.runs.budget import Target
from orchestra.runs.events import Scored

TARGET = Target("accuracy", 0.9)


def mark(strategy: str, seed: int, seconds: float | None, *, condition: str = "", gap: float = 0.1) -> RunResult:
    """A run that was scored every `gap` seconds."""
    since = max(0.0, seconds - gap) if seconds else 0.0
    return RunResult(strategy, condition, seed, seconds, since, 0.95 if seconds else 0.8, 0.95 if seconds else 0.8)


def marks_of(gap: float = 0.1, /, **times: Sequence[float | None]) -> list[RunResult]:
    return [mark(name, i, t, gap=gap) for name, found in times.items() for i, t in enumerate(found)]


def test_a_clear_lead_has_its_interval() -> None:
    slow = [mark("allreduce", i, t) for i, t in enumerate((10.0, 11.0, 12.0, 10.5, 11.5))]
    fast = [mark("slowmo", i, t) for i, t in enumerate((5.0, 5.6, 6.1, 5.2, 5.8))]
    found = judge([*slow, *fast], TARGET, "accuracy")
    assert found.sentence.startswith("slowmo reached accuracy ≥ 0.9 in 5.6 s, the median of 5 runs, 1.99 times as fast")
    assert "95 % interval 1.9" in found.sentence
    assert "chance" not in found.sentence
    base, ahead = against_baseline([*slow, *fast])
    assert base.speed is None
    assert ahead.p is not None
    assert ahead.p < 0.001


def test_a_lead_that_may_be_chance_says_so() -> None:
    a = [mark("allreduce", i, t) for i, t in enumerate((5.0, 9.0, 6.0))]
    b = [mark("slowmo", i, t) for i, t in enumerate((6.0, 5.0, 5.5))]
    found = judge([*a, *b], TARGET, "accuracy")
    assert "may be chance" in found.sentence
    swapped = judge([*a, *b], TARGET, "accuracy", baseline="slowmo")
    assert "times as fast as allreduce" in swapped.sentence
    assert "may be chance" in swapped.sentence
    assert swapped.doubts == (), "said once"


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
    marks = [mark("allreduce", i, 10.0 + i, gap=2.0) for i in range(3)]
    marks += [mark("slowmo", i, 9.5 + i) for i in range(3)]
    found = judge(marks, TARGET, "accuracy")
    assert found.sentence.startswith("slowmo and allreduce are tied: they reached accuracy ≥ 0.9 in 10.5 and 11 s")
    assert "slowmo was less than one snapshot of the model before allreduce, 1.05 times as fast" in found.sentence
    assert found.tied == ("slowmo", "allreduce")
    assert found.doubts == (), "said once"


def test_a_small_lead_that_may_be_chance_is_a_tie_and_a_large_one_is_not() -> None:
    near = judge(marks_of(localsgd=(5.0, 5.2, 5.4), slowmo=(5.4, 5.0, 5.9), allreduce=(9.0, 9.5, 10.0)), TARGET, "")
    assert near.tied == ("localsgd", "slowmo")
    assert near.sentence.startswith(
        "localsgd and slowmo are tied: they reached accuracy ≥ 0.9 in 5.2 and 5.4 s, medians"
    )
    assert "localsgd was before slowmo, 1.04 times as fast as slowmo (95 % interval" in near.sentence
    assert ", and 1.83 times as fast as allreduce (95 % interval" in near.sentence
    far = judge(marks_of(localsgd=(5.0, 5.2, 5.4), slowmo=(7.0, 5.1, 9.0), allreduce=(12.0, 14.0, 13.0)), TARGET, "")
    assert far.tied == ()
    assert far.sentence.startswith("localsgd reached")
    assert any("Its lead over slowmo could be chance" in doubt for doubt in far.doubts)


def test_a_tie_without_the_baseline_says_what_became_of_it() -> None:
    found = judge(marks_of(localsgd=(5.0,), slowmo=(5.05,), allreduce=(None,)), TARGET, "accuracy")
    assert "in 5 and 5.05 s; allreduce did not; localsgd was less than one snapshot" in found.sentence


def test_what_did_not_learn_is_named_with_the_reason() -> None:
    why = "did not learn (rate too large for stale gradients?)"
    lost = [replace(found, unlearned=why) for found in marks_of(ps=(None, None))]
    found = judge([*marks_of(allreduce=(5.0, 5.1)), *lost], TARGET, "accuracy")
    assert f"ps {why}." in found.doubts
    some = judge([*marks_of(allreduce=(5.0, 5.1), ps=(3.0,)), lost[1]], TARGET, "accuracy")
    assert "ps did not learn in 1 of 2 runs (rate too large for stale gradients?)." in some.doubts
    assert f"ps {why}." in judge(lost, None, "accuracy").doubts
    assert judge(lost, TARGET, "accuracy").sentence == "No strategy reached accuracy ≥ 0.9, and none learned anything."


def test_who_missed_the_target_is_not_ranked() -> None:
    marks = [mark("allreduce", i, 10.0) for i in range(3)]
    marks += [mark("ps", 0, 1.0), mark("ps", 1, 1.0), mark("ps", 2, None)]
    found = judge(marks, TARGET, "accuracy")
    assert found.sentence.startswith("allreduce reached")
    assert "no other did in every run" in found.sentence
    assert any("ps" in doubt for doubt in found.doubts)


def test_a_target_that_no_run_reached_is_said() -> None:
    found = judge([mark("ps", 0, None), mark("allreduce", 0, None)], TARGET, "accuracy")
    assert found.sentence.startswith("No strategy reached accuracy ≥ 0.9 in every run")


def test_several_conditions_are_counted() -> None:
    marks = []
    for i, condition in enumerate(("near", "far", "slow")):
        marks += [mark("allreduce", 0, 10.0, condition=condition), mark("ps", 0, 5.0 + 6.0 * i, condition=condition)]
    found = judge(marks, TARGET, "accuracy")
    assert found.sentence.startswith("allreduce reached accuracy ≥ 0.9 first under 2 of 3 conditions, ps under 1")


def test_conditions_are_no_seeds() -> None:
    """Ten conditions with one seed are not ten pairs of equal ones: what is told is how far the ratio ranges."""
    marks = [mark("allreduce", 0, 10.0, condition=str(i)) for i in range(10)]
    marks += [mark("ps", 0, 5.0 - 0.3 * i, condition=str(i)) for i in range(10)]
    found = judge([*marks, mark("slowmo", 0, None, condition="3")], TARGET, "accuracy")
    assert found.sentence == (
        "ps reached accuracy ≥ 0.9 first under 10 of 10 conditions; under all of them it was 2.00 to 4.35 times as "
        "fast as allreduce."
    )
    assert [doubt[:12] for doubt in found.doubts] == ["The target w", "One seed onl"]
    assert "slowmo" in found.doubts[0]


def test_a_tie_is_no_lead() -> None:
    marks = [mark(name, 0, 5.0, condition=c) for name in ("allreduce", "ps") for c in ("near", "far")]
    assert judge(marks, TARGET, "accuracy").sentence.startswith("No strategy alone reached accuracy ≥ 0.9 first")
    marks += [mark("allreduce", 0, 5.0, condition="slow"), mark("ps", 0, 4.0, condition="slow")]
    marks += [mark("allreduce", 0, None, condition="lost"), mark("ps", 0, None, condition="lost")]
    assert judge(marks, TARGET, "accuracy").sentence == (
        "ps reached accuracy ≥ 0.9 first under 1 of 4 conditions, several at once under 2, none in every run under "
        "1; under the 3 where both always did it was 1.00 to 1.25 times as fast as allreduce."
    )


def test_all_that_cannot_be_told_apart_may_have_been_first() -> None:
    near = [mark("allreduce", 0, 5.05, gap=0.2), mark("ps", 0, 5.0), mark("localsgd", 0, 5.1)]
    assert firsts(near, TARGET) == ["ps", "allreduce"]
    assert "ps was less than one snapshot of the model before allreduce" in judge(near, TARGET, "accuracy").sentence
    assert firsts([mark("ps", 0, 0.0), mark("allreduce", 0, 0.0)], TARGET) == ["allreduce", "ps"], "both at once"
    assert firsts([mark("ps", 0, None)], TARGET) == []


def test_seeds_that_coincide_are_no_certainty() -> None:
    """In virtual time every seed may come to the target in the same snapshot."""
    few = judge(marks_of(allreduce=(1.0, 1.0), ps=(0.95, 0.95)), TARGET, "accuracy").sentence
    assert "that differ by less than the time between snapshots, which may be chance" in few
    assert against_baseline(marks_of(allreduce=(1.0, 1.0), ps=(0.2, 0.2)))[1].p is None
    near, far = (marks_of(allreduce=(1.0,) * 5, ps=(t,) * 5) for t in (0.95, 0.2))
    for marks, below in ((near, False), (far, True)):
        p = against_baseline(marks)[1].p
        assert p is not None
        assert (p < 0.05) is below
    assert (
        "snapshots are too far apart" in judge(marks_of(9.0, allreduce=(9.0, 9.0), ps=(8.0, 8.0)), TARGET, "").sentence
    )


def test_there_is_no_ratio_to_who_came_once() -> None:
    marks = marks_of(allreduce=(6.0, None, None, None, None), ps=(5.0, 5.1, 5.2, 5.1, 5.3))
    assert judge(marks, TARGET, "accuracy").sentence.endswith("the median of 5 runs; allreduce did in 1 of 5 runs.")
    assert [found.speed for found in against_baseline(marks)] == [None, None]
    marks = marks_of(allreduce=(None, None), ps=(5.0, 5.1))
    assert judge(marks, TARGET, "accuracy").sentence.endswith("; allreduce did not.")


def test_a_lead_is_chance_in_the_sentence_where_it_is_in_the_test() -> None:
    """Alone it would pass; it is one of six."""
    times = {"allreduce": (10.0, 11.0, 12.0), "ps": (8.0, 9.5, 9.3)}
    alone = judge(marks_of(**times), TARGET, "accuracy").sentence
    assert "chance" not in alone
    others = {name: (15.0 + i, 9.0, 13.0) for i, name in enumerate("abcde")}
    among = judge(marks_of(**times, **others), TARGET, "accuracy").sentence
    assert "ps reached" in among
    assert among.endswith("which may be chance where so many are compared).")


def test_the_baseline_is_who_is_wanted() -> None:
    marks = marks_of(localsgd=(5.0, 5.5, 6.0), slowmo=(8.0, 9.0, 9.5), allreduce=(7.0, 7.5, 8.0))
    assert judge(marks, TARGET, "accuracy", baseline="slowmo").baseline == "slowmo"
    assert "times as fast as slowmo" in judge(marks, TARGET, "accuracy", baseline="slowmo").sentence
    assert "times as fast as allreduce" in judge(marks, TARGET, "accuracy", baseline="gone").sentence


def test_the_order_is_that_of_how_often_and_how_near() -> None:
    kinds = ((9.0, 9.0, 9.0), (5.0, 5.0, None), (1.0, None, None), (None, None, None))
    always, often, once, never = (marks_of(x=times) for times in kinds)
    nearer = [replace(found, best=0.89) for found in never]
    failed = [replace(found, failed=True) for found in often]
    order = [always, often, once, nearer, never, failed]
    assert sorted(order[::-1], key=lambda found: standing(found, TARGET)) == order


def test_a_score_that_is_no_number_is_not_the_best() -> None:
    values = (math.nan, 0.5, math.inf, 0.8, math.nan)
    scores = [Scored(float(i), i, i, i, {"loss": value}) for i, value in enumerate(values)]
    found = achieved(scores, Target("loss", 0.6))
    assert (found.seconds, found.since, found.best) == (1.0, 0.0, 0.5)
    assert found.final is not None
    assert math.isnan(found.final), "nor does what came before stand for the end"
    assert achieved(scores[:1], Target("loss", 0.6)).best is None
    assert achieved(scores, Target("accuracy", 0.9)) == Achieved()


def test_without_a_target_the_best_is_compared_with_the_next() -> None:
    """Not with the strategy that was named first."""
    finals = {"allreduce": 0.9, "ps": 0.5, "slowmo": 0.8}
    marks = [RunResult(name, "", i, None, 0.0, None, f + i / 100) for name, f in finals.items() for i in range(3)]
    assert "+0.1 beside slowmo" in judge(marks, None, "accuracy").sentence
    assert "3 pairs of runs with equal seeds, all alike" in judge(marks, None, "accuracy").sentence
    both = [*marks, *(replace(found, condition="far") for found in marks)]
    assert judge(both, None, "accuracy").sentence.endswith("0.91, the best on average over 2 conditions.")


def test_without_a_target_the_last_score_counts() -> None:
    marks = [RunResult("allreduce", "", i, None, 0.0, None, 0.90 + i / 100) for i in range(3)]
    marks += [RunResult("ps", "", i, None, 0.0, None, 0.95 + i / 100) for i in range(3)]
    found = judge(marks, None, "accuracy")
    assert found.sentence.startswith("ps ended with accuracy 0.96, the best: +0.05 beside allreduce")
    assert any("--target" in doubt for doubt in found.doubts)


def test_alone_there_is_nothing_to_compare() -> None:
    assert "nothing to compare it with" in judge([mark("ps", 0, 3.0)], TARGET, "accuracy").sentence
    assert "nothing was scored" in judge([RunResult("ps", "", 0, None, 0.0, None, None)], None, None).sentence


def test_where_nothing_was_scored_speed_counts() -> None:
    marks = [RunResult("allreduce", "", i, None, 0.0, None, None, 100.0 + i) for i in range(3)]
    marks += [RunResult("ps", "", i, None, 0.0, None, None, 200.0 + i) for i in range(3)]
    for target in (None, TARGET):
        sentence = judge(marks, target, None).sentence
        assert sentence.startswith("Nothing was scored; ps went through 201 samples a second, 1.99 times as fast as")
    both = [*marks, *(replace(found, condition="far") for found in marks)]
    assert judge(both, None, None).sentence.endswith("201 samples a second, on average over 2 conditions.")
    assert judge(marks[:1], None, None).sentence == "Nothing was scored; allreduce went through 100 samples a second."


def test_of_losses_lower_is_better() -> None:
    marks = [RunResult("allreduce", "", 0, None, 0.0, 0.4, 0.4), RunResult("ps", "", 0, None, 0.0, 0.3, 0.3)]
    assert "ps came closest with 0.3" in judge(marks, Target("loss", 0.1), "loss").sentence
    assert judge(marks, None, "loss").sentence.startswith("ps ended with loss 0.3")


@pytest.mark.parametrize("seconds", [0.0])
def test_reached_at_once_is_no_ratio(seconds: float) -> None:
    found = judge([mark("allreduce", 0, seconds), mark("ps", 0, 1.0)], TARGET, "accuracy")
    assert found.sentence.startswith("allreduce reached accuracy ≥ 0.9 in 0 s")
