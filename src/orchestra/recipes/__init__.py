# SPDX-License-Identifier: Apache-2.0
"""The recipes that come with the package, by name.

>>> from orchestra import recipes
>>> recipes.names()
('digits', 'regression', 'mnist-lenet', 'fashion-lenet', 'char-gpt')
>>> recipes.get("digits").target
'accuracy=0.95'

A recipe `some-name` is the constant `RECIPE` of the module `some_name` beside this one, imported when asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from orchestra.errors import ConfigError, Problem, nearest

if TYPE_CHECKING:
    from orchestra.recipes.recipe import Recipe

__all__ = ["get", "names"]

# From the quickest to the slowest, and none imported: listing them must not wait for torch.
_NAMES = ("digits", "regression", "mnist-lenet", "fashion-lenet", "char-gpt")


def names() -> tuple[str, ...]:
    """The names of all recipes."""
    return _NAMES


def get(name: str) -> Recipe:
    """The recipe of that name; a `ConfigError` with the nearest name when there is none."""
    if name not in _NAMES:
        message = f"there is no recipe of this name; {nearest(name, _NAMES)}"
        raise ConfigError([Problem(where="recipe", value=name, message=message)])
    recipe: Recipe = importlib.import_module(f"orchestra.recipes.{name.replace('-', '_')}").RECIPE
    return recipe
