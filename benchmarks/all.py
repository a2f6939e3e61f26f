# SPDX-License-Identifier: Apache-2.0
"""Ask every question and write `benchmarks/RESULTS.md`."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.common import ROOT

SCRIPTS = (
    "sync_step", "lenet_step", "server_throughput", "memory", "overhead", "startup", "simulation",
    "simulated_means", "kernels", "prediction", "crossover", "carriers", "links", "attached", "race", "lab_flows",
    "lab_prediction", "lab_levels", "batched", "batched_gpu",
)  # fmt: skip
RESULTS = Path(__file__).with_name("RESULTS.md")

_HEAD = """# Benchmarks

Measured side by side in one run, everyone in turn, every other round backwards. A round in which other programs used
much of the machine does not count, as long as enough rounds are left. Differences and ratios are taken within a round.
Figures are medians over the rounds, with the least and the most in brackets. To repeat: `python -m benchmarks.all`, or
one script by itself with the command given.
"""


def main() -> None:
    """Run the scripts one after the other, each in a process of its own; sections of those not run are kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    needs = {"batched_gpu": torch.cuda.is_available(), "attached": os.geteuid() == 0, "race": os.geteuid() == 0}
    here = [name for name in SCRIPTS if needs.get(name, True)]
    parser.add_argument("scripts", nargs="*", default=here, help=f"which of {', '.join(SCRIPTS)}; all by default")
    sections = _sections(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in parser.parse_args().scripts:
        if name not in SCRIPTS:
            parser.error(f"there is no benchmarks.{name}: choose from {', '.join(SCRIPTS)}")
        sections[name] = _run(name)
        print(sections[name], flush=True)
        ordered = [sections[other] for other in SCRIPTS if other in sections]
        RESULTS.write_text("\n".join([_HEAD, *ordered]), encoding="utf-8")


def _run(name: str) -> str:
    """A script's section."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}"], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False
    )
    if done.returncode:
        return f"## {name}\n\n`python -m benchmarks.{name}` failed with exit code {done.returncode}.\n"
    machine, _, rest = done.stdout.partition("## ")
    title, _, body = rest.partition("\n")
    return f"## {title}\n\n`python -m benchmarks.{name}`, {machine.strip()}\n{body.rstrip()}\n"


def _sections(text: str) -> dict[str, str]:
    """The sections of a results file by the script that made them."""
    parts = text.split("\n## ")[1:]
    found = [re.search(r"`python -m benchmarks\.(\w+)[^`]*`", part) for part in parts]
    return {match[1]: f"## {part.rstrip()}\n" for match, part in zip(found, parts, strict=True) if match}


if __name__ == "__main__":
    main()
