# SPDX-License-Identifier: Apache-2.0
"""Do the disk, the memory and the descriptors of a long run stay flat?

    python -m benchmarks.soak --minutes 60 --strategy "ps(consistency=asp())" --workers 2 --json soak.json

A run with checkpoints and scores goes on in a process of its own. Meanwhile this one looks, every few seconds, at all
processes of the run and at its folder, and at the end prints the trend of each figure over the time after the warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import orchestra

FEATURES, CLASSES, SAMPLES = 64, 10, 4096
WARM_UP = 0.25  # of the time: until files have reached their limits, and the allocators what they need


@dataclass(frozen=True)
class Look:
    """One moment."""

    t: float  # seconds since the first look
    processes: int
    rss: float  # MB, of all processes together; pages that they share count for each
    uss: float  # MB, of their own pages alone
    descriptors: int
    disk: float  # MB in the run folder
    checkpoints: float  # MB of that
    files: int
    steps: int  # of worker 0, as far as its file tells


def samples() -> tuple[Tensor, Tensor]:
    """Noise around a centre for each class."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    return centres[y] + torch.randn(SAMPLES, FEATURES, generator=generator), y


def model() -> nn.Module:
    """A small network: many steps a second, so that files grow fast."""
    return nn.Sequential(nn.Linear(FEATURES, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, CLASSES))


def accuracy(module: nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Share of samples that are recognised."""
    x, y = data
    return {"accuracy": float((module(x).argmax(1) == y).float().mean())}


def sgd(parameters: object) -> torch.optim.Optimizer:
    """Plain, at a rate that never diverges."""
    return torch.optim.SGD(parameters, lr=0.01)  # type: ignore[arg-type]


def train(asked: argparse.Namespace) -> None:
    """Be the run."""
    orchestra.train(
        model=model,
        data=samples,
        loss=F.cross_entropy,
        optimizer=sgd,
        strategy=asked.strategy,
        cluster=orchestra.Local(workers=asked.workers),
        batch=asked.batch,
        budget=orchestra.Seconds(60 * asked.minutes),
        evaluate=accuracy,
        evaluation_data=samples,
        evaluate_every=orchestra.Steps(asked.score_every),
        checkpoint_every=orchestra.Steps(asked.save_every),
        out=asked.out,
        progress=False,
    )


# Looking.


def look(root: psutil.Process, run: Path, t: float) -> Look:
    """All processes of the run, and its folder, as they are now."""
    rss = uss = 0.0
    count = descriptors = 0
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.Error):
            memory, files = process.memory_full_info(), process.num_fds()
            rss, uss, descriptors, count = rss + memory.rss, uss + memory.uss, descriptors + files, count + 1
    sizes = {path: size_of(path) for path in run.rglob("*")}
    saved = sum(size for path, size in sizes.items() if "checkpoints" in path.parts)
    disk = sum(sizes.values())
    return Look(
        round(t, 1), count, rss / 1e6, uss / 1e6, descriptors, disk / 1e6, saved / 1e6, len(sizes), last_step(run)
    )


def size_of(path: Path) -> int:
    """Bytes on the disk; nothing if the file is gone already."""
    with suppress(OSError):
        return path.lstat().st_blocks * 512
    return 0


def last_step(run: Path) -> int:
    """The last step that worker 0 has written down."""
    with suppress(OSError, ValueError, IndexError), (run / "events-0.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - 4096))
        steps = [json.loads(line) for line in file.read().split(b"\n")[1:-1] if b'"step"' in line]
        return int(steps[-1]["step"])
    return 0


def watch(asked: argparse.Namespace) -> list[Look]:
    """Start the run, and look at it until it is over."""
    command = [sys.executable, "-m", "benchmarks.soak", "--run", *sys.argv[1:], "--out", asked.out]
    process = subprocess.Popen(command)
    root, began, looks = psutil.Process(process.pid), time.monotonic(), list[Look]()
    try:
        while process.poll() is None:
            t = time.monotonic() - began
            with suppress(psutil.Error):
                looks.append(look(root, Path(asked.out), t))
            if asked.verbose and looks:
                print(json.dumps(asdict(looks[-1])), file=sys.stderr)
            with suppress(subprocess.TimeoutExpired):
                process.wait(asked.every)
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
    if process.returncode:
        raise SystemExit(f"the run ended with code {process.returncode}")
    return looks


# What it comes to.


def trends(looks: list[Look]) -> dict[str, dict[str, float]]:
    """Of each figure after the warm-up: its median, least and most, and how much it grows in an hour."""
    whole = looks[-1].t
    steady = [now for now in looks if WARM_UP * whole <= now.t and now.processes == looks[len(looks) // 2].processes]
    hours = [now.t / 3600 for now in steady]
    found = {}
    for name in ("rss", "uss", "descriptors", "disk", "checkpoints", "files"):
        values = [float(getattr(now, name)) for now in steady]
        slope = statistics.linear_regression(hours, values).slope if len(steady) > 2 else 0.0
        middle = len(values) // 2
        found[name] = {
            "median": statistics.median(values),
            "least": min(values),
            "most": max(values),
            "first half": statistics.mean(values[:middle] or values),
            "second half": statistics.mean(values[middle:]),
            "an hour": slope,
        }
    return found


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long to train")
    parser.add_argument("--strategy", default="ps(consistency=asp())")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--save-every", type=int, default=2000, metavar="STEPS", help="steps between checkpoints")
    parser.add_argument("--score-every", type=int, default=500, metavar="STEPS", help="steps between scores")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="between two looks")
    parser.add_argument("--out", help="the run folder; a temporary one by default")
    parser.add_argument("--json", metavar="FILE", help="where to write all looks and the trends")
    parser.add_argument("--verbose", action="store_true", help="print every look")
    parser.add_argument("--steady", action="store_true", help="fail if memory or descriptors grow by more than a tenth")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        train(asked)
        return
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        asked.out = asked.out or os.path.join(folder, "run")
        looks = watch(asked)
        found = trends(looks)
    last = looks[-1]
    print(f"{last.t / 60:.1f} min, {max(now.steps for now in looks):,} steps of worker 0, {len(looks)} looks")
    print(f"{'':<12}{'median':>10}{'least':>10}{'most':>10}{'1st half':>10}{'2nd half':>10}{'an hour':>12}")
    for name, figures in found.items():
        unit = "MB" if name in ("rss", "uss", "disk", "checkpoints") else ""
        print(f"{name:<12}" + "".join(f"{value:>10.1f}" for value in figures.values()) + f" {unit}")
    if asked.json:
        record = {"asked": vars(asked), "trends": found, "looks": [asdict(now) for now in looks]}
        Path(asked.json).write_text(json.dumps(record, indent=1), encoding="utf-8")
    grown = [name for name in ("uss", "descriptors") if found[name]["second half"] > 1.1 * found[name]["first half"]]
    if asked.steady and grown:
        raise SystemExit(f"grew by more than a tenth between the halves of the time: {', '.join(grown)}")


if __name__ == "__main__":
    main()
