# SPDX-License-Identifier: Apache-2.0
"""Where runs and data sets are kept: that files come whole, and how much and how fast."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

from orchestra.doctor.trial import Finding, broken, fine, limited
from orchestra.formatting import size

_WRITTEN = 1 << 24  # bytes
_ENOUGH = 1 << 30  # bytes free


def runs() -> Finding:
    """The folder for runs, which is made where a command is given."""
    return _look(Path("runs").absolute(), "give another folder with --out")


def cache() -> Finding:
    """The folder for data sets that are fetched."""
    from orchestra.data import fetch  # takes longer to import than most checks take

    return _look(fetch.cache().absolute(), "set ORCHESTRA_DATA to another folder")


def _look(folder: Path, otherwise: str) -> Finding:
    # One that is not there yet is tried where it would be made.
    place = next(path for path in (folder, *folder.parents) if path.exists())
    where = str(folder) + ("" if place == folder else f" (to be made in {place})")
    try:
        free = shutil.disk_usage(place).free
        rate = _write(place)
    except OSError as error:
        return broken(f"{where}: {error.strerror}", f"Make room or get the rights there, or {otherwise}.")
    found = f"{where}: {size(free)} free, {size(rate)}/s written"
    if free < _ENOUGH:
        return limited(found, f"Make room there, or {otherwise}.")
    return fine(found)


def _write(place: Path) -> float:
    """As checkpoints are: beside its place, to the disk, renamed, the folder to the disk. Gives bytes per second."""
    with tempfile.TemporaryDirectory(prefix=".orchestra-doctor-", dir=place) as folder:
        draft, final = Path(folder) / "draft", Path(folder) / "final"
        began = time.perf_counter()
        with draft.open("wb") as file:
            file.write(bytes(_WRITTEN))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(final)
        parent = os.open(folder, os.O_RDONLY)
        os.fsync(parent)
        os.close(parent)
        took = time.perf_counter() - began
        if draft.exists() or final.stat().st_size != _WRITTEN:
            raise OSError(0, "a renamed file is not what was written")
    return _WRITTEN / took
