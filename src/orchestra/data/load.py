# SPDX-License-Identifier: Apache-2.0
"""The data sets as tensors: `digits("train")` is `(inputs, targets)`, ready for a model.

Each loader takes `split="train"` or `"test"`, verifies the files it reads, and returns the same tensors every time.
The splits are fixed, disjoint, and together the whole set.

>>> inputs, labels = digits("test")
>>> inputs.shape, labels.shape
(torch.Size([360, 64]), torch.Size([360]))
"""

from __future__ import annotations

import io
import lzma
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestra.data import sets
from orchestra.data.fetch import ensure, read
from orchestra.data.sets import DataSet
from orchestra.errors import ConfigError, Problem

Split = Literal["train", "test"]
Pair = tuple[Tensor, Tensor]

WINDOW = 64  # characters of one sample of `shakespeare`
STEPS_PER_WEEK = 7 * 24 * 6  # of `appliances`, which has one row every ten minutes

ROOMS = tuple(f"T{room}" for room in range(1, 10))
"""The targets of `appliances`, in order."""

SENSORS = (
    *("Appliances", "lights", "T_out", "Press_mm_hg", "RH_out", "Windspeed", "Visibility", "Tdewpoint"),
    *(f"RH_{room}" for room in range(1, 10)),
)
"""The inputs of `appliances`, in order."""


def digits(split: Split = "train") -> Pair:
    """Return handwritten digits, 8x8: inputs (N, 64) floats in 0..1, labels (N,) int64; 1,437 to train and 360 to test.

    The split is stratified, drawn once and stored in the file.
    """
    arrays = _npz(sets.DIGITS, "digits.npz")
    rows = arrays["test"] if _is_test(split) else ~arrays["test"]
    pixels = torch.from_numpy(arrays["pixels"][rows]).float() / 16
    return pixels, torch.from_numpy(arrays["labels"][rows]).long()


def appliances(split: Split = "train") -> Pair:
    """Return readings of a house over 4.5 months: 17 sensors (N, 17) to 9 room temperatures (N, 9), standardised.

    Rows are ten minutes apart and similar, so with a random split a model can copy neighbouring rows (a small MLP gets
    R² 0.90 that way). Here whole weeks are held out: the third of every five, 4 weeks in all. Holding out the last
    weeks would be another task: they are in spring, warmer than the training data, and a linear model gets R² -0.67.
    With the middle week of each five it gets 0.71 and a small MLP 0.77: known seasons, but no neighbours to copy. The
    choice of the week matters (0.48 for a linear model with the fifth of five), so compare scores on this split only.

    Inputs and targets are standardised by the mean and deviation of the training rows alone. Columns:
    `SENSORS` and `ROOMS`.
    """
    arrays = _npz(sets.APPLIANCES, "appliances.npz")
    columns = [str(name) for name in arrays["columns"]]
    values = np.cumsum(arrays["differences"], axis=1, dtype=np.int64).T / 100
    held_out = (np.arange(len(values)) // STEPS_PER_WEEK) % 5 == 2
    values = (values - values[~held_out].mean(axis=0)) / values[~held_out].std(axis=0)
    rows = values[held_out if _is_test(split) else ~held_out].astype(np.float32)
    inputs, targets = ([columns.index(name) for name in names] for names in (SENSORS, ROOMS))
    return torch.from_numpy(rows[:, inputs]), torch.from_numpy(rows[:, targets])


def shakespeare(split: Split = "train") -> Pair:
    """Return nine plays in windows of 64 characters: inputs (N, 64) and the same one character later, both int64.

    The first nine tenths of the text are for training, the last tenth (most of The Tempest) for the test. Characters
    are numbered by `alphabet()`.
    """
    text = np.frombuffer(_text(), dtype=np.uint8)
    number = np.zeros(256, dtype=np.int64)
    kinds = np.unique(text)
    number[kinds] = np.arange(len(kinds))
    cut = len(text) * 9 // 10
    part = number[text[cut:] if _is_test(split) else text[:cut]]
    windows = (len(part) - 1) // WINDOW
    inputs, targets = part[: windows * WINDOW], part[1 : windows * WINDOW + 1]
    return torch.from_numpy(inputs.reshape(-1, WINDOW)), torch.from_numpy(targets.reshape(-1, WINDOW))


def alphabet() -> str:
    """Return the characters of `shakespeare`, in the order of their numbers."""
    return "".join(sorted(set(_text().decode("ascii"))))


def mnist(split: Split = "train") -> Pair:
    """Return MNIST: normalised images (N, 1, 28, 28), labels (N,) int64; 60,000 and 10,000. Fetched if missing."""
    return _images(sets.MNIST, split, mean=0.1307, deviation=0.3081)


def fashion_mnist(split: Split = "train") -> Pair:
    """Return Fashion-MNIST, in the format of MNIST: normalised images (N, 1, 28, 28), labels (N,) int64."""
    return _images(sets.FASHION_MNIST, split, mean=0.2860, deviation=0.3530)


def _images(entry: DataSet, split: Split, *, mean: float, deviation: float) -> Pair:
    part = "t10k" if _is_test(split) else "train"
    ensure(entry)
    pixels = _idx(read(entry, f"{part}-images-idx3-ubyte"))
    labels = _idx(read(entry, f"{part}-labels-idx1-ubyte"))
    images = torch.from_numpy(pixels).float().div_(255).sub_(mean).div_(deviation)
    return images.unsqueeze(1), torch.from_numpy(labels).long()


def _idx(data: bytes) -> NDArray[np.uint8]:
    """Read an IDX file: two zeros, the type 8, the number of axes, their lengths big-endian, then the numbers."""
    axes = data[3]
    shape = np.frombuffer(data, dtype=">i4", count=axes, offset=4)
    return np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * axes).reshape(shape).copy()  # writable, for torch


def _npz(entry: DataSet, name: str) -> dict[str, NDArray[Any]]:
    with np.load(io.BytesIO(read(entry, name)), allow_pickle=False) as arrays:
        return {key: arrays[key] for key in arrays}


def _text() -> bytes:
    return lzma.decompress(read(sets.SHAKESPEARE, "shakespeare.txt.xz"))


def _is_test(split: Split) -> bool:
    if split not in ("train", "test"):
        raise ConfigError([Problem(where="split", value=split, message="must be 'train' or 'test'")])
    return split == "test"
