# SPDX-License-Identifier: Apache-2.0
"""What the papers on Strategy-Switch compare, with their momentum and rate: shares, orders, rates, momenta.

Provatas, Chalas, Konstantinou, Koziris. "Strategy-Switch", IEEE Access 13, 2025.
https://ieeexplore.ieee.org/document/10836684
Li et al. "Sync-Switch", ICDCS 2021 (the share of synchronous training, the order, the rate at the switch).
https://arxiv.org/abs/2104.08364

    all-reduce          γ for the mean of 8 gradients
    asynchronous        each gradient by itself, at the rate that is best for that
    rule                all-reduce until s ≤ θ, then asynchronous at γ/8; once with momenta kept, once without
    5 % ... 50 %        all-reduce for that share of the samples, then asynchronous at γ/8
    asynchronous first  the other way round, for half of the samples each
    momenta ..., rate ...   as 25 %, but for what becomes of momenta and of γ at the switch
    promoted            as 25 %, but two of the workers become the servers: 8 machines instead of 12

All keep the momentum of 0.9 (`momentum=0.9`), which was the default when this was run, and is not any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from experiments.common import Study, options
from experiments.strategy_switch import setting
from experiments.strategy_switch.setting import ALONE, ASYNC, GAMMA, LOST, PLAIN, SYNC, THETA, WORKERS, Rule, measure
from orchestra import ASP, AtShare, ParameterServer

Switch = partial(setting.Switch, momentum=0.9)
PROMOTED = Switch(then=ParameterServer(consistency=ASP(), servers=2), when=AtShare(share=0.25), promote=True)

VARIANTS = {
    "all-reduce": partial(measure, strategy=SYNC),
    "asynchronous": partial(measure, strategy=ASYNC, lr=ALONE),
    "rule": partial(measure, strategy=Switch(when=Rule(threshold=THETA))),
    "rule, momenta reset": partial(measure, strategy=Switch(when=Rule(threshold=THETA), momenta="reset")),
    "5 %": partial(measure, strategy=Switch(when=AtShare(share=0.05))),
    "10 %": partial(measure, strategy=Switch(when=AtShare(share=0.10))),
    "25 %": partial(measure, strategy=Switch(when=AtShare(share=0.25))),
    "50 %": partial(measure, strategy=Switch(when=AtShare(share=0.50))),
    "asynchronous first": partial(
        measure, lr=GAMMA / WORKERS, strategy=Switch(first=ASYNC, then=SYNC, when=AtShare(share=0.50))
    ),
    "momenta reset": partial(measure, strategy=Switch(when=AtShare(share=0.25), momenta="reset")),
    "momenta / 8": partial(measure, strategy=Switch(when=AtShare(share=0.25), momenta="scale")),
    "rate kept": partial(measure, strategy=Switch(when=AtShare(share=0.25), scale=1.0)),
    "promoted": partial(measure, strategy=PROMOTED),
    "asynchronous, no momentum": partial(measure, strategy=ASYNC, lr=PLAIN, momentum=0.0),
}
NEVER = {"rule, θ = 0": partial(measure, strategy=Switch(when=Rule(threshold=0.0)))}  # one seed shows it
SWEEP = {"asynchronous": 0.0, "5 %": 0.05, "10 %": 0.10, "25 %": 0.25, "50 %": 0.50, "all-reduce": 1.0}


def sweep(study: Study) -> str:
    """By the share of synchronous training, in the shape of Sync-Switch's tables."""
    sooner = setting.race(study, VARIANTS)
    lines = [f"| synchronous | {' | '.join(f'{share:.0%}' for share in SWEEP.values())} |", "|---" * 7 + "|"]
    for figure in ("accuracy", "seconds"):
        lines.append(f"| {figure} | {' | '.join(f'{study[name, figure].mean:.2f}' for name in SWEEP)} |")
    lines.append(f"| times sooner | {' | '.join(f'{sooner[name]:.2f}' for name in SWEEP)} |")
    return "\n".join(lines)


def judge(study: Study) -> None:
    """Check the findings of Strategy-Switch and Sync-Switch."""
    scored = {name: study[name, "accuracy"].mean for name in VARIANTS}
    lasted = {name: study[name, "seconds"].mean for name in VARIANTS}
    for name in ("rule", "rule, momenta reset"):
        behind = scored["all-reduce"] - scored[name]
        study.expect(f"Strategy-Switch ({name}) is within 0.5 points of all-reduce", behind <= 0.5, behind=behind)
        sooner = setting.race(study, VARIANTS)[name]
        words = f"Strategy-Switch ({name}) is at all-reduce's final accuracy less 0.5 points at least 1.5 times sooner"
        study.expect(words, sooner >= 1.5, times_sooner=sooner)
    best = min(scored["all-reduce"], scored["rule"])
    words = "asynchronous at equal samples is less accurate than both"
    study.expect(words, scored["asynchronous"] < best, asynchronous=scored["asynchronous"], worse_of_both=best)
    _judge_sweep(study, scored, lasted)
    first = {"all_reduce_first": scored["50 %"], "asynchronous_first": scored["asynchronous first"]}
    words = "all-reduce first is more accurate than asynchronous first, half of the samples each"
    study.expect(words, first["all_reduce_first"] > first["asynchronous_first"], **first)
    promoted = {"promoted": scored["promoted"], "all_reduce": scored["all-reduce"]}
    words = (
        "with servers promoted from the workers it is within 0.5 points of all-reduce and faster, on as many machines"
    )
    study.expect(
        words,
        promoted["promoted"] >= promoted["all_reduce"] - 0.5 and lasted["promoted"] < lasted["all-reduce"],
        **promoted,
        seconds=lasted["promoted"],
    )
    kept = {"kept": scored["rate kept"], "divided": scored["25 %"]}
    words = "with all-reduce's learning rate kept at the switch training fails: 5 points behind at least"
    study.expect(words, kept["kept"] <= kept["divided"] - 5, **kept)
    _judge_rule(study)


def _judge_sweep(study: Study, scored: Mapping[str, float], lasted: Mapping[str, float]) -> None:
    early, late = {name: scored[name] for name in ("5 %", "25 %")}, {name: lasted[name] for name in ("25 %", "50 %")}
    study.expect("a switch at 5 % costs accuracy, against one at 25 %", early["5 %"] < early["25 %"], **early)
    study.expect("a switch at 50 % costs time, against one at 25 %", late["25 %"] < late["50 %"], **late)
    quarter, whole = (scored[name] - scored["asynchronous"] for name in ("25 %", "all-reduce"))
    words = "accuracy saturates: a quarter of synchronous training has three quarters of what all of it gains"
    study.expect(words, quarter >= 0.75 * whole > 0, quarter=quarter, all=whole)
    start, whole = lasted["asynchronous"], lasted["all-reduce"] - lasted["asynchronous"]
    off = max(abs(lasted[name] - start - share * whole) / whole for name, share in SWEEP.items())
    study.expect("time is linear in the share, within a twentieth of the whole difference", off <= 0.05, off=off)


def _judge_rule(study: Study) -> None:
    shares = [row["synchronous"] for row in study.rows if row["variant"] == "rule"]
    fired = [share for share in shares if share is not None]
    words = "the rule fires in every run, after the first tenth and before half of the samples"
    study.expect(
        words,
        fired == shares and all(10 <= share <= 50 for share in fired),
        least=min(fired, default=0),
        most=max(fired, default=0),
    )
    (never,) = (row for row in study.rows if row["variant"] in NEVER)
    (same,) = (r for r in study.rows if r["variant"] == "all-reduce" and r["seed"] == never["seed"])
    said = "NEVER SWITCHED" in (never["missing"] or "") and never["accuracy"] == same["accuracy"]
    words = "with θ = 0 the run says NEVER SWITCHED, and ends with all-reduce's model"
    study.expect(words, said, least_s=min(s for _, s in never["s"]))


def main() -> int:
    """Run the study."""
    asked = options(__doc__, seeds=3, devices=("cpu", "cuda"))
    study = Study("Strategy-Switch on Fashion-MNIST", folder=asked.out or Path(__file__).parent / "papers")
    on = partial(partial, device=asked.device)
    study.run({name: on(variant) for name, variant in VARIANTS.items()}, seeds=range(asked.seeds), diverged=LOST)
    study.run({name: on(variant) for name, variant in NEVER.items()}, seeds=[0])
    judge(study)
    print(f"\n{sweep(study)}")
    return study.conclude()


if __name__ == "__main__":
    raise SystemExit(main())
