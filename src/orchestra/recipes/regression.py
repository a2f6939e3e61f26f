# SPDX-License-Identifier: Apache-2.0
"""Nine room temperatures of a house from its weather, humidity and power: regression with many outputs.

Plain SGD with a small step, on purpose: the weather of the held-out weeks differs, and a faster optimizer fits the
training weeks better (R² 0.95) and the held-out weeks worse (0.65). A linear model gets R² 0.71 on the latter.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from orchestra.data.load import appliances
from orchestra.metrics import regression_scores
from orchestra.recipes.models import mlp
from orchestra.recipes.recipe import Recipe

RECIPE = Recipe(
    name="regression",
    about="a perceptron (5,897 parameters) from 17 sensors to 9 room temperatures: about 3 s on one core",
    model=functools.partial(mlp, 17, 64, 64, 9),
    data=functools.partial(appliances, "train"),
    loss=F.mse_loss,
    optimizer=functools.partial(torch.optim.SGD, lr=0.01, weight_decay=1e-3),
    batch=32,
    epochs=20,
    evaluate=regression_scores,
    evaluation_data=functools.partial(appliances, "test"),
    target="r2=0.74",
)
