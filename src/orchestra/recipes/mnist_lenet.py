# SPDX-License-Identifier: Apache-2.0
"""MNIST with LeNet-5: the workload of half the papers in the field."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from orchestra.data.load import mnist
from orchestra.metrics import accuracy
from orchestra.recipes.models import LeNet5
from orchestra.recipes.recipe import Recipe

RECIPE = Recipe(
    name="mnist-lenet",
    about="LeNet-5 (61,706 parameters) on MNIST: about 15 s on one core",
    model=LeNet5,
    data=functools.partial(mnist, "train"),
    loss=F.cross_entropy,
    optimizer=functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    batch=64,
    epochs=3,
    evaluate=accuracy,
    evaluation_data=functools.partial(mnist, "test"),
    target="accuracy=0.98",
)
