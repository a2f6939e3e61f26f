# SPDX-License-Identifier: Apache-2.0
"""The same as `benchmarks.batched` on one GPU, with 256 workers."""

from __future__ import annotations

from benchmarks.batched import compare
from benchmarks.common import Outcome, main


def measure(rounds: int) -> Outcome:
    """On one GPU."""
    return compare("cuda", 256, 64, rounds)


if __name__ == "__main__":
    main(measure, rounds=3)
