# SPDX-License-Identifier: Apache-2.0
"""Checks of Python and of the packages other than torch: whether they can be imported, and their versions."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import orchestra
from orchestra.doctor.trial import Finding, broken, fine, limited, short

PYTHON = "3.11"  # or later
NEEDED = {"torch": "2.11", "numpy": "", "safetensors": "", "cloudpickle": "", "pyyaml": "", "typer": "", "rich": ""}
# Packages that a plain local run does without, and what each is for.
OPTIONAL = {
    "greenlet": "without it the simulator uses slower threads",
    "cryptography": "for runs between machines",
}
IN_A_CHECKOUT = {"pyzmq": "for a benchmark", "psutil": "for the tests", "simpy": "for a benchmark"}
_MODULES = {"pyyaml": "yaml", "pyzmq": "zmq"}  # where the module has another name than the package


def python() -> Finding:
    """Compare the interpreter's version with the oldest that the package supports."""
    found = (
        f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()}, "
        f"{sys.executable}"
    )
    if older(platform.python_version(), PYTHON):
        return broken(found, f"The package needs Python {PYTHON} or later.")
    return fine(found)


def packages() -> Finding:
    """Import the required packages; torch has a check of its own."""
    versions, failures = _look({name: "" for name in NEEDED if name != "torch"})
    if failures:
        return broken("; ".join(failures.values()), f"pip install --force-reinstall {' '.join(failures)}")
    return fine(", ".join(versions))


def extras() -> Finding:
    """Import the optional packages."""
    checkout = Path(orchestra.__file__).parents[2]
    versions, failures = _look(OPTIONAL | (IN_A_CHECKOUT if (checkout / "pyproject.toml").exists() else {}))
    if failures:
        return limited(
            ", ".join([*versions, *failures.values()]), f"If you want them: pip install {' '.join(failures)}"
        )
    return fine(", ".join(versions))


def _look(names: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    versions, failures = [], {}
    for name, purpose in names.items():
        reason = f" ({purpose})" if purpose else ""
        try:
            importlib.import_module(_MODULES.get(name, name))
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} of unknown version")
        except ModuleNotFoundError as error:
            other = "" if error.name in (name, _MODULES.get(name)) else f", because {error.name} is"
            failures[name] = f"{name} missing{other}{reason}"
        except Exception as error:  # it is installed and does not work
            failures[name] = f"{name} cannot be imported{reason}: {short(error)}"
    return versions, failures


def older(version: str, least: str) -> bool:
    """Whether a version is older than another, by its leading numbers.

    >>> older("2.9.1+cpu", "2.11"), older("2.13.0+cpu", "2.11"), older("2.11", "2.11")
    (True, False, False)
    """
    own, other = ([int(n) for n in re.findall(r"\d+", text.split("+")[0])] for text in (version, least))
    return own[: len(other)] < other
