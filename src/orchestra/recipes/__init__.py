# SPDX-License-Identifier: Apache-2.0
"""The recipes that come with the package, by name.

>>> from orchestra import recipes
>>> recipes.names()
('digits', 'regression', 'mnist-lenet', 'fashion-lenet', 'char-gpt')
>>> recipes.get("digits").target
'accuracy=0.95'

Each recipe is a constant of a module of this package, which is imported when the recipe is requested.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from orchestra.errors import ConfigError, Problem, nearest

if TYPE_CHECKING:
    from orchestra.recipes.recipe import Recipe

__all__ = ["get", "names"]

# From the quickest to the slowest. Not imported here: listing the names must not wait for torch.
_PLACES = {
    "digits": "images.DIGITS",
    "regression": "regression.RECIPE",
    "mnist-lenet": "images.MNIST",
    "fashion-lenet": "images.FASHION_MNIST",
    "char-gpt": "char_gpt.RECIPE",
}


def names() -> tuple[str, ...]:
    """Return the names of all recipes."""
    return tuple(_PLACES)


def get(name: str) -> Recipe:
    """Return the recipe of that name; raise a `ConfigError` with the nearest name when there is none."""
    if name not in _PLACES:
        message = f"there is no recipe of this name; {nearest(name, _PLACES)}"
        raise ConfigError([Problem(where="recipe", value=name, message=message)])
    module, constant = _PLACES[name].split(".")
    recipe: Recipe = getattr(importlib.import_module(f"orchestra.recipes.{module}"), constant)
    return recipe
