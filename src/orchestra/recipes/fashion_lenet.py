# SPDX-License-Identifier: Apache-2.0
"""Fashion-MNIST with LeNet-5: the size of `mnist-lenet`, but far from solved at the end."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from orchestra.data.load import fashion_mnist
from orchestra.metrics import accuracy
from orchestra.recipes.models import LeNet5
from orchestra.recipes.recipe import Recipe

RECIPE = Recipe(
    name="fashion-lenet",
    about="LeNet-5 (61,706 parameters) on Fashion-MNIST: about 30 s on one core",
    model=LeNet5,
    data=functools.partial(fashion_mnist, "train"),
    loss=F.cross_entropy,
    optimizer=functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    batch=64,
    epochs=5,
    evaluate=accuracy,
    evaluation_data=functools.partial(fashion_mnist, "test"),
    target="accuracy=0.88",
)
