# SPDX-License-Identifier: Apache-2.0
"""Classification of small images: digits and two kinds of MNIST.

`digits` is the recipe to begin with: it takes seconds, and nothing is downloaded. MNIST with LeNet-5 is the workload
of half the papers in the field; Fashion-MNIST has the same size and is harder.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F

from orchestra.data import load
from orchestra.metrics import accuracy
from orchestra.recipes.models import LeNet5, mlp
from orchestra.recipes.recipe import Recipe


def _recipe(name: str, data: Callable[[Literal["train", "test"]], Any], *, lr: float, **more: Any) -> Recipe:
    return Recipe(
        name=name,
        data=functools.partial(data, "train"),
        loss=F.cross_entropy,
        optimizer=functools.partial(torch.optim.SGD, lr=lr, momentum=0.9),
        evaluate=accuracy,
        evaluation_data=functools.partial(data, "test"),
        **more,
    )


DIGITS = _recipe(
    "digits",
    load.digits,
    about="a perceptron (17,226 parameters) on 1,437 handwritten digits: about 1 s on one core",
    model=functools.partial(mlp, 64, 128, 64, 10),
    lr=0.05,
    batch=16,
    epochs=20,
    target="accuracy=0.95",
)

MNIST = _recipe(
    "mnist-lenet",
    load.mnist,
    about="LeNet-5 (61,706 parameters) on MNIST: about 15 s on one core",
    model=LeNet5,
    lr=0.02,
    batch=64,
    epochs=3,
    target="accuracy=0.98",
)

FASHION_MNIST = _recipe(
    "fashion-lenet",
    load.fashion_mnist,
    about="LeNet-5 (61,706 parameters) on Fashion-MNIST: about 30 s on one core",
    model=LeNet5,
    lr=0.02,
    batch=64,
    epochs=5,
    target="accuracy=0.88",
)
