# SPDX-License-Identifier: Apache-2.0
"""A small GPT over the characters of nine plays: the recipe whose model is large for its computation."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from orchestra.data.load import WINDOW, shakespeare
from orchestra.metrics import next_character
from orchestra.recipes.models import CharGPT
from orchestra.recipes.recipe import Recipe

CHARACTERS = 80  # kinds of characters in the plays; `orchestra.data.alphabet()` lists them
WARM_UP = 0.1  # epochs until the learning rate reaches its full value


def loss(scores: Tensor, following: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per character: scores (N, T, kinds) against characters (N, T)."""
    return F.cross_entropy(scores.flatten(0, 1), following.flatten())


def schedule(epochs: float) -> float:
    """Return the factor on the learning rate: a linear warm-up, since large first steps upset attention, then 1."""
    return min(1.0, 0.05 + epochs / WARM_UP)


RECIPE = Recipe(
    name="char-gpt",
    about="a causal transformer (244,240 parameters) on the characters of nine plays: about 1 min on one core",
    model=functools.partial(CharGPT, kinds=CHARACTERS, length=WINDOW, width=80, layers=3, heads=4),
    data=functools.partial(shakespeare, "train"),
    loss=loss,
    optimizer=functools.partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.05, betas=(0.9, 0.98)),
    batch=16,
    epochs=2,
    evaluate=next_character,
    evaluation_data=functools.partial(shakespeare, "test"),
    target="accuracy=0.42",
    schedule=schedule,
)
