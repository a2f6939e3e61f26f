# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/screenshots, from runs to pixels.

    python -m scripts.pictures runs

Runs that the folder has are taken as they are, others are made, which takes minutes. Chromium draws. `top.svg` is not
among them: a terminal draws that one.

A picture of the front page's comparison holds the verdict that it shows, as text that viewers do not display. A test
compares that text with docs/figures/front_page.json, which is written here as well.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from scripts import front_page
from tests.browser.devtools import Browser, Page

SHOTS = Path(__file__).resolve().parents[1] / "docs" / "screenshots"
WORLD = ["--workers", "4", "--network", "20mbit,1ms", "--compute-time", "lognormal:0.02,0.3", "--straggler", "1x3"]
RUNS = {
    "traced": ["sim", "digits", *WORLD, "-s", "ps(consistency=ssp)", "--lr", "0.01", "--trace"],
    "sweep": [
        "sweep", "digits", "--sim", "-n", "4",
        "--grid", "bandwidth=10mbit,100mbit,1gbit", "--grid", "straggler=1x1,1x5",
        "-s", "allreduce,localsgd,ps(consistency=asp),slowmo", "--target", "accuracy=0.9",
    ],
}  # fmt: skip
LIVE = [
    "run", "digits", "-n", "4", "-s", "ps(consistency=ssp)", "--compute-time", "lognormal:0.05,0.3",
    "--straggler", "1x2",
]  # fmt: skip
UNDER_WAY = 45.0  # seconds into a run that is looked at
READY = "document.documentElement?.dataset.ready === 'yes'"
A_FEW = "[...document.querySelectorAll('#timeline button')].find((b) => b.textContent === 'A few steps').click()"


def orchestra(*words: str) -> list[str]:
    """Return an `orchestra` command."""
    return [sys.executable, "-m", "orchestra", *words]


def shown(browser: Browser, url: str, page: str, *, width: int = 1280, dark: bool = False) -> Page:
    """Return a page of a report, drawn."""
    found = browser.open(url, width, 740, dark=dark)
    found.until(READY)
    found.go(page)
    return found


def reports(browser: Browser, folder: Path) -> None:
    """Pages of runs that are over."""
    urls = {}
    for name, words in RUNS.items():
        out = folder / name
        if not out.exists():
            subprocess.run(orchestra(*words, "--out", str(out), "--quiet"), check=True)
        urls[name] = reported(out)
    shown(browser, urls["sweep"], "conditions").picture(SHOTS / "report-conditions.png")
    timeline = shown(browser, urls["traced"], "timeline")
    timeline.ask(A_FEW)
    timeline.settle()
    timeline.picture(SHOTS / "report-timeline.png")


def compared(browser: Browser, folder: Path) -> None:
    """Pages of the front page's comparison, and its figures."""
    out = front_page.compared(folder)
    verdict, url = front_page.write(out), reported(out)
    for name, page, width, dark in (
        ("report-overview", "overview", 1280, False),
        ("report-compare-dark", "compare", 1280, True),
        ("report-phone-dark", "overview", 360, True),
    ):
        path = SHOTS / f"{name}.png"
        shown(browser, url, page, width=width, dark=dark).picture(path)
        path.write_bytes(labelled(path.read_bytes(), verdict))


def reported(out: Path) -> str:
    """Write a report, and return its address."""
    subprocess.run(orchestra("report", str(out), "--quiet"), check=True)
    return (out / "report.html").absolute().as_uri()


def labelled(png: bytes, text: str) -> bytes:
    """Return a picture with a description that viewers do not display."""
    body = b"iTXtDescription\0\0\0\0\0" + text.encode()
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    end = png.rindex(b"IEND") - 4
    return png[:end] + chunk + png[end:]


def labels(png: bytes) -> Iterator[str]:
    """Yield the descriptions in a picture."""
    at = 8
    while at < len(png):
        (length,) = struct.unpack_from(">I", png, at)
        body = png[at + 4 : at + 8 + length]
        if body.startswith(b"iTXtDescription\0"):
            yield body.split(b"\0", 5)[5].decode()
        at += length + 12


def live(browser: Browser, folder: Path) -> None:
    """Picture the workers of a real run while it goes on."""
    out = str(folder / "live")
    run = subprocess.Popen(orchestra(*LIVE, "--lr", "0.01", "--epochs", "60", "--out", out, "--quiet"))
    time.sleep(UNDER_WAY)
    watch = subprocess.Popen(orchestra("watch", out, "--no-browser"), stdout=subprocess.PIPE, text=True)
    assert watch.stdout is not None
    page = shown(browser, watch.stdout.readline().strip(), "workers")
    page.until("document.querySelector('#now td') !== null")
    page.picture(SHOTS / "watch.png")
    for process in (watch, run):
        process.terminate()
        process.wait(60)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, Browser(Path(profile)) as chromium:
        compared(chromium, Path(sys.argv[1]))
        reports(chromium, Path(sys.argv[1]))
        live(chromium, Path(sys.argv[1]))
