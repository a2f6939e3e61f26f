# SPDX-License-Identifier: Apache-2.0
"""The disks that keep runs and data sets: whether a file can be written whole, the room left and the speed."""

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
    """Try the folder for runs, `runs` in the current folder."""
    return _look(Path("runs").absolute(), "give another folder with --out")


def cache() -> Finding:
    """Try the folder for downloaded data sets."""
    from orchestra.data import fetch  # imported here: it takes longer than most checks

    return _look(fetch.cache().absolute(), "set ORCHESTRA_DATA to another folder")


def _look(folder: Path, otherwise: str) -> Finding:
    # A folder that does not exist yet is tried in the nearest parent that does.
    place = next(path for path in (folder, *folder.parents) if path.exists())
    where = str(folder) + ("" if place == folder else f" (to be created in {place})")
    try:
        free = shutil.disk_usage(place).free
        rate = _write(place)
    except OSError as error:
        return broken(f"{where}: {error.strerror}", f"Free some space or change the permissions there, or {otherwise}.")
    found = f"{where}: {size(free)} free, {size(rate)}/s written"
    if free < _ENOUGH:
        return limited(found, f"Free some space there, or {otherwise}.")
    return fine(found)


def _write(place: Path) -> float:
    """Write a file the way checkpoints are: draft, fsync, rename, fsync of the folder. Return bytes per second."""
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
