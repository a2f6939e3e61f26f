# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits with a perceptron: the first thing to run, done in seconds, and nothing to download."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from orchestra.data.load import digits
from orchestra.metrics import accuracy
from orchestra.recipes.models import mlp
from orchestra.recipes.recipe import Recipe

RECIPE = Recipe(
    name="digits",
    about="a perceptron (17,226 parameters) on 1,437 handwritten digits: about 1 s on one core",
    model=functools.partial(mlp, 64, 128, 64, 10),
    data=functools.partial(digits, "train"),
    loss=F.cross_entropy,
    optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    batch=16,
    epochs=20,
    evaluate=accuracy,
    evaluation_data=functools.partial(digits, "test"),
    target="accuracy=0.95",
)
