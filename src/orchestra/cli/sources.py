# SPDX-License-Identifier: Apache-2.0
"""What a command trains: a recipe by name, a file with a recipe in it, or a script that calls `train` or `prepare`."""

from __future__ import annotations

import ast
import importlib.util
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from orchestra import recipes
from orchestra.engine import overrides, script_names
from orchestra.engine.overrides import Change
from orchestra.engine.tracebacks import from_users_code
from orchestra.errors import ConfigError, Problem, nearest

if TYPE_CHECKING:
    from orchestra.recipes.recipe import Recipe
    from orchestra.runs.progress import Display
    from orchestra.user_loop.handle import LoopHandle

_NAMES = ("RECIPE", "recipe")


@dataclass(frozen=True)
class Source:
    """A recipe or script that was found, but not imported yet."""

    name: str  # name of a recipe, or absolute path of a file
    path: Path | None
    args: tuple[str, ...] = ()  # for a script

    @property
    def label(self) -> str:
        """Its name in one word."""
        return self.name if self.path is None else self.path.stem

    @property
    def holds_recipe(self) -> bool:
        """Whether it is a recipe or a file that defines one; a script that trains by itself is neither."""
        return self.path is None or _defines_recipe(self.path)

    @property
    def holds_loop(self) -> bool:
        """Whether it is a script with a training loop of its own under `orchestra.prepare`."""
        if self.path is None or self.holds_recipe:
            return False
        return self.calls("prepare") > 0 and not self.calls("train")

    def calls(self, name: str) -> int:
        """Return in how many places the script calls a function of this package, read from its source."""
        return 0 if self.path is None else [*_called(_parsed(self.path))].count(name)


def find(text: str, args: Sequence[str] = ()) -> Source:
    """Find a recipe or script. Only names and files are read: a misspelt word is refused before torch is imported."""
    path = Path(text)
    if text not in recipes.names() and path.is_file() and path.suffix == ".py":
        return Source(str(path.resolve()), path.resolve(), tuple(args))
    if text in recipes.names():
        if args:
            raise ConfigError([Problem("arguments", " ".join(args), "are for scripts; a recipe takes none")])
        return Source(text, None)
    if path.suffix == ".py" or path.exists() or len(path.parts) > 1:
        why = "is not a Python file: name a recipe or a .py file" if path.exists() else "there is no such file"
        raise ConfigError([Problem("recipe", text, why)])
    known = ", ".join(recipes.names())
    hint = nearest(text, recipes.names())
    hint = hint if hint.startswith("known") else f"{hint} Known: {known}"
    raise ConfigError([Problem("recipe", text, f"there is no recipe of this name, nor such a .py file; {hint}")])


def load(source: Source) -> Recipe:
    """Return the recipe of a source, or what its script gives to `train`. A script runs once, up to that call."""
    if source.path is None:
        return recipes.get(source.name)
    with at_home(source.path, source.args):
        if not source.holds_recipe:
            from orchestra.cli import scripts

            return scripts.capture(source)
        module = _import(source.path)
    return _recipe_in(module, source.path)


def arguments(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as arguments of `train`."""
    from orchestra.runs.budget import Epochs

    return {
        "model": recipe.model,
        "data": recipe.data,
        "loss": recipe.loss,
        "optimizer": recipe.optimizer,
        "batch": recipe.batch,
        "budget": Epochs(recipe.epochs),
        "evaluate": recipe.evaluate,
        "evaluation_data": recipe.evaluation_data,
        "schedule": recipe.schedule,
        **recipe.more,
    }


def train_recipe(recipe: Recipe, changes: Mapping[str, Change], **more: Any) -> Any:
    """Train a recipe with changes, and return the `Result`."""
    from orchestra._train import train

    given = arguments(recipe) | more
    return train(**given | overrides.changed(given, changes))


def problems_of(source: Source, changes: Mapping[str, Change]) -> list[Problem]:
    """Return the problems of a recipe with these changes. Those of a script show only when it runs."""
    from orchestra import _train

    if source.path is not None:
        return []
    given = arguments(load(source))
    return _train.problems_of(**given | overrides.changed(given, changes))


def perform(
    source: Source, changes: Mapping[str, Change], args: Sequence[str], display: Display, handles: list[LoopHandle]
) -> None:
    """Train a recipe or run a script. Afterwards the display has the run folders, and `handles` the script's loops."""
    if source.path is None:
        if args:
            raise ConfigError([Problem("arguments", " ".join(args), "are for scripts; a recipe takes none")])
        train_recipe(load(source), changes)
        return
    with at_home(source.path, args), overrides.using(changes, handles=handles) as use:
        if not source.holds_recipe:
            _run(source.path, use)
        else:
            module = _import(source.path)
            # A script may keep a recipe in a variable and train with it: then the training is done.
            if not display.runs:
                with overrides.using({}):
                    train_recipe(_recipe_in(module, source.path), changes)
    if not display.runs and not use.loops:
        why = (
            "neither called orchestra.train(...) or orchestra.prepare(...) nor defined a RECIPE = orchestra.Recipe(...)"
        )
        raise ConfigError([Problem("script", str(source.path), why)])


def _run(path: Path, use: overrides.ActiveOverrides) -> None:
    """Run a script as Python would."""
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:  # a script may end so, also without an error
        if end.code not in (None, 0):
            raise
    except BaseException as error:
        if not use.loops:
            raise
        # A process of a loop has a hook, which reports the error to the other processes.
        trace = from_users_code(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None


# Read, not run: running a script means training.


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise ConfigError([Problem("script", str(path), f"cannot be read as Python: {error}")]) from None


def _called(tree: ast.Module) -> Iterator[str]:
    """Yield the functions of this package that a script calls, read from its source."""
    whole: set[str] = set()
    parts: dict[str, str] = {}
    for part in ast.walk(tree):
        match part:
            case ast.Import(names=names):
                whole |= {alias.asname or alias.name for alias in names if alias.name == "orchestra"}
            case ast.ImportFrom(module="orchestra", names=names):
                parts |= {alias.asname or alias.name: alias.name for alias in names}
    for part in ast.walk(tree):
        match part:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=called)) if name in whole:
                yield called
            case ast.Call(func=ast.Name(id=name)) if name in parts:
                yield parts[name]


def _defines_recipe(path: Path) -> bool:
    """Return whether a file defines a recipe at its top level."""
    return any(name in _NAMES for statement in _parsed(path).body for name in _bound(statement))


def _bound(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.Assign(targets=targets):
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name
        case ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name for alias in names)


def _import(path: Path) -> ModuleType:
    """Import a file as a module whose functions are pickled by value: workers cannot import it by name."""
    import cloudpickle

    name = f"_orchestra_script_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    cloudpickle.register_pickle_by_value(module)
    spec.loader.exec_module(module)
    script_names.add(vars(module))
    return module


def _recipe_in(module: ModuleType, path: Path) -> Recipe:
    from orchestra.recipes.recipe import Recipe

    found = next((getattr(module, name) for name in _NAMES if hasattr(module, name)), None)
    if not isinstance(found, Recipe):
        why = f"its RECIPE is a {type(found).__name__}, not an orchestra.Recipe"
        raise ConfigError([Problem("script", str(path), why)])
    return found


@contextmanager
def at_home(path: Path, args: Sequence[str]) -> Iterator[None]:
    """Give a script what it has when run by Python: its folder in the path, its arguments, no hook of typer."""
    before, sys.argv = sys.argv, [str(path), *args]
    hook, sys.excepthook = sys.excepthook, sys.__excepthook__
    sys.path.insert(0, str(path.parent))
    try:
        yield
    finally:
        # The path stays: what the script imported may still be needed when its functions are called later.
        sys.argv, sys.excepthook = before, hook
