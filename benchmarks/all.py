# SPDX-License-Identifier: Apache-2.0
"""Answer every question again: each script writes its file in `benchmarks/results/`.

A file is named by the script and by the cores of the machine. `benchmarks/RESULTS.md` is the table of claims. It is
written by hand; `tests/docs/test_figures.py` compares its figures with the files, and names those that differ.
"""

from __future__ import annotations

import argparse
import os
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
RESULTS = Path(__file__).with_name("results")
_VIRTUAL = {"crossover"}  # in virtual time, the same on every machine


def main() -> None:
    """Run the scripts one after the other, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    needs = {"batched_gpu": torch.cuda.is_available(), "attached": os.geteuid() == 0, "race": os.geteuid() == 0}
    here = [name for name in SCRIPTS if needs.get(name, True)]
    parser.add_argument("scripts", nargs="*", default=here, help=f"which of {', '.join(SCRIPTS)}; all by default")
    failed = []
    for name in parser.parse_args().scripts:
        if name not in SCRIPTS:
            parser.error(f"there is no benchmarks.{name}: choose from {', '.join(SCRIPTS)}")
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
        if done.returncode:
            failed.append(name)
            continue
        machine, _, rest = done.stdout.partition("## ")
        title, _, body = rest.partition("\n")
        suffix = "" if name in _VIRTUAL else f"-{os.cpu_count()}-cores"
        page = f"# {title}\n\n`python -m benchmarks.{name}`, {machine.strip()}\n{body.rstrip()}\n"
        (RESULTS / f"{name}{suffix}.md").write_text(page, encoding="utf-8")
        print(page, flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
