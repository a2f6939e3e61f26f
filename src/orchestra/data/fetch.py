# SPDX-License-Identifier: Apache-2.0
"""Getting the files of a data set, and making sure they are the right ones.

    folder_of(entry)       where its files are: inside the package, or in the cache
    read(entry, name)      the bytes of one file, or an error that names the file when its checksum is wrong
    fetch(entry)           go through the ways until one brings every file, whole and right

The cache is `$ORCHESTRA_DATA/NAME`, or else `orchestra/data/NAME` in the user's XDG cache folder. Files come under a
temporary name and are renamed when whole and verified, so that a reader never meets half a file.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from orchestra.data.file_sources import DataFile, FileSource, SourceFailed
from orchestra.data.sets import BUNDLED, DataSet
from orchestra.errors import EnvironmentProblem

_log = logging.getLogger(__name__)


def cache() -> Path:
    """The folder under which fetched data sets are kept, one folder each."""
    own = os.environ.get("ORCHESTRA_DATA")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "orchestra" / "data"


def folder_of(entry: DataSet) -> Path:
    """Where the files of this data set are, or will be."""
    return BUNDLED if entry.bundled else cache() / entry.name


def read(entry: DataSet, name: str) -> bytes:
    """The bytes of one file, verified. What was hashed is what is returned: nothing is read twice."""
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
    """What is wrong with one file on disk; None when it is there and right."""
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
    """Whether every file is in its place; a look at names and sizes only, so it costs nothing."""
    paths = [(folder_of(entry) / file.name, file.nbytes) for file in entry.files]
    return all(path.is_file() and path.stat().st_size == nbytes for path, nbytes in paths)


def ensure(entry: DataSet) -> Path:
    """The folder with the files, fetched now if any is missing.

    A file that is there but wrong is not fetched again behind the user's back: `read` refuses it by name.
    """
    folder = folder_of(entry)
    if not entry.bundled and not all((folder / file.name).exists() for file in entry.files):
        fetch(entry)
    return folder


def fetch(entry: DataSet) -> Path:
    """Make every file of `entry` present and right, replacing wrong ones; returns the folder."""
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
    """Let one way bring the files beside their places; move them there when all are right."""
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
    """One fetch at a time per data set: the workers of a run would all start one, and the second finds it done."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file closes, also by a crash
        yield


def _remedy(entry: DataSet) -> str:
    if entry.bundled:
        return "Install the package anew: this file is part of it."
    return f"Get it anew with: orchestra data fetch {entry.name}"
