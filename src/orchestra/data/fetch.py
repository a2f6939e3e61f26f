# SPDX-License-Identifier: Apache-2.0
"""Download of the files of a data set, with verification.

    folder_of(entry)       the folder of its files: inside the package, or in the cache
    read(entry, name)      the bytes of one file, or an error that names the file if its checksum is wrong
    fetch(entry)           try the sources in order until one provides every file with the right checksum

The cache is `$ORCHESTRA_DATA/NAME`, or else `orchestra/data/NAME` in the user's XDG cache folder. Files are written
under a temporary name and renamed once verified, so that a reader never sees an incomplete file.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from orchestra.data.file_sources import DataFile, FileSource, SourceFailed
from orchestra.data.sets import BUNDLED, DataSet
from orchestra.errors import EnvironmentProblem

_log = logging.getLogger(__name__)


def cache() -> Path:
    """Return the folder of fetched data sets, each in its own folder."""
    own = os.environ.get("ORCHESTRA_DATA")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orchestra" / "data"


def folder_of(entry: DataSet) -> Path:
    """Return the folder in which the files of this data set are, or will be."""
    return BUNDLED if entry.bundled else cache() / entry.name


def read(entry: DataSet, name: str) -> bytes:
    """Return the bytes of one file, verified. The file is read once, so that the verified bytes are returned."""
    file = next(file for file in entry.files if file.name == name)
    path = folder_of(entry) / name
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EnvironmentProblem(f"{path} cannot be read: {error.strerror or error}. {_remedy(entry)}") from error
    found = hashlib.sha256(data).hexdigest()
    if found != file.sha256:
        message = f"{path} is not the file it should be: its sha256 is {found}, expected {file.sha256}."
        raise EnvironmentProblem(f"{message} {_remedy(entry)}")
    return data


def trouble(entry: DataSet, file: DataFile) -> str | None:
    """Return what is wrong with one file on disk; None if it exists with the right checksum."""
    path = folder_of(entry) / file.name
    try:
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return None if found == file.sha256 else f"sha256 is {found}, expected {file.sha256}"


def available(entry: DataSet) -> bool:
    """Return whether every file exists with the right size, without reading it."""
    paths = [(folder_of(entry) / file.name, file.nbytes) for file in entry.files]
    return all(path.is_file() and path.stat().st_size == nbytes for path, nbytes in paths)


def ensure(entry: DataSet) -> Path:
    """Return the folder with the files; fetch them if any is missing.

    A file with a wrong checksum is not fetched again without the user's request: `read` raises an error that names it.
    """
    folder = folder_of(entry)
    if not entry.bundled and not all((folder / file.name).exists() for file in entry.files):
        fetch(entry, tell=True)
    return folder


def fetch(entry: DataSet, *, tell: bool = False) -> Path:
    """Fetch every file of `entry` that is missing or wrong; return the folder. `tell`: print what was fetched."""
    folder = folder_of(entry)
    if entry.bundled:
        for file in entry.files:
            read(entry, file.name)
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            wanted = [file for file in entry.files if trouble(entry, file) is not None]
            if wanted:
                _try_each_way(entry, wanted, folder)
                if tell:
                    nbytes = sum(file.nbytes for file in wanted)
                    print(f"fetched {entry.name} ({nbytes / 1e6:.0f} MB) to {folder}", file=sys.stderr)
    except OSError as error:
        message = f"{error.filename or folder} cannot be written: {error.strerror or error}."
        raise EnvironmentProblem(f"{message} Set ORCHESTRA_DATA to a folder that can hold {entry.name}.") from error
    return folder


def _try_each_way(entry: DataSet, wanted: Sequence[DataFile], folder: Path) -> None:
    failures = []
    for way in entry.ways:
        try:
            _bring(way, wanted, folder)
        except SourceFailed as failure:
            _log.info("%s: %s: %s", entry.name, way, failure)
            failures.append(f"  {way}: {failure}")
        else:
            _log.info("%s: got %d files by %s", entry.name, len(wanted), way)
            return
    names = ", ".join(file.name for file in entry.files)
    raise EnvironmentProblem(
        "\n".join(
            [
                f"{entry.name} could not be fetched. Tried:",
                *failures,
                f"Make one of these work, or put the unpacked files ({names}) into {folder}, "
                "or set ORCHESTRA_DATA to a folder that has them.",
            ]
        )
    )


def _bring(way: FileSource, wanted: Sequence[DataFile], folder: Path) -> None:
    """Let one source write the files to a temporary folder; move them to their places if all are right."""
    with tempfile.TemporaryDirectory(prefix=".coming-", dir=folder) as scratch:
        way.bring(wanted, Path(scratch))
        for file in wanted:
            path = Path(scratch) / file.name
            found = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "that of no file"
            if found != file.sha256:
                raise SourceFailed(f"brought another {file.name}: its sha256 is {found}, expected {file.sha256}")
        for file in wanted:
            (Path(scratch) / file.name).replace(folder / file.name)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Allow one fetch at a time per data set, since all workers of a run may start one."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, even by a crash
        yield


def _remedy(entry: DataSet) -> str:
    if entry.bundled:
        return "Install the package again: this file is part of it."
    return f"Fetch it again with: orchestra data fetch {entry.name}"
