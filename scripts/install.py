# SPDX-License-Identifier: Apache-2.0
"""How large an installation is, and how long it takes once everything is downloaded: docs/figures/install.json.

    python -m scripts.install

It makes an environment in a temporary folder as the README says, and deletes it. README.md and docs/quickstart.md quote
the file. Packages are taken from pip's cache where they are in it: run the script twice.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from orchestra.probe import measure

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures" / "install.json"


def main() -> None:
    """Write the file."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "install", "--quiet", "-c", "constraints.txt", ".[top]"]
        subprocess.run(pip, cwd=ROOT, check=True)
        seconds = time.monotonic() - began
        size = subprocess.run(["du", "-s", "-B1", folder], capture_output=True, text=True, check=True).stdout
    found = {
        "made_by": "python -m scripts.install",
        "machine": measure.machine(),
        "torch": version("torch"),
        "gigabytes": int(size.split()[0]) / 1e9,
        "seconds": round(seconds, 1),
    }
    FIGURES.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
