# SPDX-License-Identifier: Apache-2.0
"""All-reduce between machines against DistributedDataParallel, on hosts of a lab: who takes how long for a step?

python -m benchmarks.attached [--rounds R] [--only WORD ...] as root; a word is of a setting: lenet, 4, 100mbit, ...
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.common import Outcome, Turns, interleave, machine, quiet_parent, scratch
from benchmarks.groups import Peers
from orchestra.lab import Lab

KINDS = {
    "ddp": "DDP",
    "ddp-view": "DDP, gradient_as_bucket_view",
    "torch": "ours, torch.distributed",
    "trusted": "ours, messages",
    "messages": "ours, messages over TLS",
}
RATES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "unshaped": "unshaped"}
WITHIN = 1.03  # of DDP


@dataclass(frozen=True)
class Setting:
    """What is trained where."""

    workload: str
    hosts: int
    rate: str

    @property
    def steps(self) -> int:
        """Of a turn, the first ones dropped: about a second, or as few as there can be."""
        if self.workload == "lenet":
            return 40
        return {"100mbit": 3, "1gbit": 5, "unshaped": 10}[self.rate]

    @property
    def warmup(self) -> int:
        """Steps that do not count."""
        return 1 if self.steps < 5 else 2

    def __str__(self) -> str:
        return f"{self.workload}, {self.hosts} hosts, {RATES[self.rate]}"


SETTINGS = [Setting(*given) for given in itertools.product(("lenet", "mlp10m"), (2, 4), RATES)]


def measure(setting: Setting, rounds: int, kinds: Sequence[str]) -> Turns:
    """Everyone in turn, on the same hosts."""
    rate = None if setting.rate == "unshaped" else setting.rate
    with ExitStack() as stack:
        lab = stack.enter_context(Lab(hosts=setting.hosts, rate=rate, name=f"bench{os.getpid()}"))
        folder = str(stack.enter_context(scratch()))
        groups = {
            kind: stack.enter_context(
                Peers(
                    kind,
                    setting.workload,
                    setting.hosts,
                    setting.steps,
                    folder,
                    keep_memory=True,
                    module="benchmarks.attached_peer",
                    lab=lab,
                )
            )
            for kind in kinds
        }
        for group in groups.values():
            group.steps(0)  # DDP arranges its buckets again after the first
        return interleave({kind: lambda g=g: g.steps(setting.warmup) for kind, g in groups.items()}, rounds)  # type: ignore[misc]


def table(settings: Sequence[Setting], rounds: int, kinds: Sequence[str]) -> Outcome:
    """Run them one after the other."""
    outcome = Outcome(
        "All-reduce between machines",
        "LeNet-5 (61,706 parameters) and an MLP of 10 M, batch 64 on each host, SGD with momentum, one thread each; "
        "hosts are network namespaces of one machine, whose cores they share. Milliseconds of a step: median of the "
        "rounds' medians (least to most); ratios to DDP round by round.",
    )
    rows, slow, ratios = [], [], []
    for setting in settings:
        turns = measure(setting, rounds, kinds)
        result, least, processor = turns.by(statistics.median), turns.by(min), turns.processor_by(setting.steps)
        for kind in kinds:
            ratio = result.ratio(kind, "ddp")
            used = processor.ratio(kind, "ddp")
            rows.append(
                [
                    str(setting),
                    KINDS[kind],
                    result[kind].show(1, 1e3),
                    ratio.show(2),
                    f"{min(least[kind].values) * 1e3:.1f}",
                    used.show(2),
                ]
            )
            print(" | ".join(rows[-1]), file=sys.stderr)
            if kind == "torch":
                ratios.append(ratio.median)
                slow += [f"{setting} ({ratio.median:.2f})"] if ratio.median > WITHIN else []
    outcome.table(["setting", "contestant", "step, ms", "against DDP", "least, ms", "processor time against DDP"], rows)
    if ratios:
        outcome.say(
            f"Medians of ours, torch.distributed, against DDP: {min(ratios):.2f} to {max(ratios):.2f}, of settings: "
            f"{len(ratios)}."
        )
    outcome.goal(
        "means by torch.distributed take at most 3 % more than DDP everywhere"
        + (f"; not {', '.join(slow)}" if slow else ""),
        not slow,
    )
    return outcome


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", nargs="*", default=[], help="words that a setting must have, such as lenet 4 1gbit")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), help=f"among {', '.join(KINDS)}; ddp is needed")
    given = parser.parse_args()
    quiet_parent()
    print(machine(), end="\n\n")
    chosen = [s for s in SETTINGS if {*given.only} <= {s.workload, str(s.hosts), s.rate}]
    print(table(chosen, given.rounds, given.kinds))


if __name__ == "__main__":
    main()
