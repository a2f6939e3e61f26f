# SPDX-License-Identifier: Apache-2.0
"""The shape of the source: imports point one way, files take one sitting, the public surface is a list."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import orchestra
from orchestra.strategies import PARTS, STRATEGIES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "orchestra"
FILES = sorted(PACKAGE.rglob("*.py"))
STRATEGY_FILES = sorted((PACKAGE / "strategies").rglob("*.py"))
MODULES = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): p for p in FILES}
FOLDERS = ("src", "tests", "benchmarks", "scripts", "examples", "experiments")
TEXTS = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))


def imports(path: Path, *, lazy: bool = True) -> set[str]:
    """What a file imports, as full names of modules; those for type checkers are left out, lazy ones if asked."""
    found: set[str] = set()
    for node in _statements(ast.parse(path.read_text(encoding="utf-8")), lazy):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} has a relative import"
            found.add(node.module)
            found |= {name for alias in node.names if (name := f"{node.module}.{alias.name}") in MODULES}
    return found


def _statements(tree: ast.AST, lazy: bool) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.FunctionDef) and not lazy:
            continue
        yield node
        yield from _statements(node, lazy)


def own(path: Path, *, lazy: bool = True) -> set[str]:
    """Modules of this package that a file imports."""
    return {name for name in imports(path, lazy=lazy) if name in MODULES and name != "orchestra"}


def test_there_is_something_to_look_at() -> None:
    assert len(FILES) > 30
    assert "orchestra.core.node" in own(PACKAGE / "strategies" / "slowmo.py")


# Imports point one way.

# A package (or a module at the root), and all others that it may import. `docs/architecture.md` has the reasons.
_BELOW_ENGINE = {"_version", "core", "data", "errors", "formatting", "metrics", "model", "runs"}
_ENGINE = _BELOW_ENGINE | {"engine", "strategies"}
_TOOLS = {"cli", "doctor", "lab", "live", "probe", "report"}
ARROWS: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "formatting": set(),
    "core": {"errors"},
    "collectives": {"core"},
    "strategies": {"collectives", "core", "errors"},
    "data": {"core", "errors"},
    "metrics": {"data"},
    "model": {"core", "data", "errors"},
    "runs": {"core", "errors", "formatting"},
    "recipes": {"data", "errors", "metrics"},
    "engine": _BELOW_ENGINE | {"strategies"},
    "worlds": _ENGINE,
    "clusters": _ENGINE | {"worlds"},
    "launchers": {"_version", "engine", "errors"},
    "user_loop": _ENGINE | {"clusters", "worlds"},
    "_train": _ENGINE | {"clusters"},
    "_prepare": _ENGINE | {"clusters", "user_loop", "worlds"},
    "lab": {"errors", "worlds"},
    "report": _ENGINE,
    "live": _BELOW_ENGINE | {"report"},
    "probe": _ENGINE | {"_train", "clusters"},
    "doctor": _BELOW_ENGINE | {"_train", "clusters", "worlds"},
}


def part_of(name: str) -> str:
    """The package below `orchestra`, or the module at the root, that a module belongs to."""
    return name.removeprefix("orchestra.").split(".")[0]


def test_imports_follow_the_arrows() -> None:
    packages = {part_of(name) for name in MODULES} - {"orchestra", "__main__", "cli"}
    assert packages == ARROWS.keys()
    strange = [
        f"{name} imports {other}"
        for name, path in MODULES.items()
        if part_of(name) in ARROWS
        for other in sorted(own(path))
        if other in MODULES and part_of(other) not in ARROWS[part_of(name)] | {part_of(name)}
        # `orchestra.data` is a package of its own: importing a module of it names it as well
    ]
    assert not strange, "\n".join(strange)


def test_the_arrows_have_no_circle() -> None:
    below = {name: parts - {name} for name, parts in ARROWS.items()}
    while below:
        lowest = [name for name, parts in below.items() if not parts & below.keys()]
        assert lowest, f"packages that import each other: {sorted(below)}"
        for name in lowest:
            del below[name]


@pytest.mark.parametrize("path", STRATEGY_FILES, ids=lambda p: p.name)
def test_strategies_have_no_clock_no_dice_and_no_process_group(path: Path) -> None:
    banned = {"time", "random", "datetime", "os", "threading", "socket", "multiprocessing", "numpy.random"}
    for name in imports(path):
        assert name.split(".")[0] not in banned
        assert not name.startswith("torch.distributed")
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"torch\.(rand|randn|randint|randperm|manual_seed|distributed)\b", text)
    assert not re.search(r"simulat|is_simulation|virtual|greenlet", text, re.IGNORECASE)
    assert "if node.rank" not in text
    assert "hasattr" not in text
    assert "super()" not in text


def test_nothing_but_the_command_line_imports_the_command_line() -> None:
    for name, path in MODULES.items():
        if not name.startswith(("orchestra.cli", "orchestra.__main__")):
            assert not [n for n in own(path) if n.startswith("orchestra.cli")], name


def test_there_are_no_circles() -> None:
    below = {name: own(path, lazy=False) - {name} for name, path in MODULES.items() if name != "orchestra"}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above, name])
        if name not in done:
            for other in sorted(below.get(name, ())):
                visit(other, (*above, name))
            done.add(name)

    for name in below:
        visit(name, ())


def test_nothing_is_unpickled_but_the_hand_over() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        if path.name != "child.py":
            assert not re.search(r"pickle\.loads?\(|torch\.load\(|marshal|yaml\.load|(?<![.\w])(eval|exec)\(", text), (
                path
            )


# One sitting.


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_takes_one_sitting(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= (150 if path.parent.name in ("strategies", "collectives") else 400)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_function_takes_one_screen(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1 - _documentation(node)
            assert length <= 40, f"{node.name} has {length} lines without its docstring"


def _documentation(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    if ast.get_docstring(node) is None:
        return 0
    return (first.end_lineno or 0) - first.lineno + 1


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_file_begins_with_its_licence_and_says_what_it_is(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("#!") or lines[0] == "# SPDX-License-Identifier: Apache-2.0"
    assert "# SPDX-License-Identifier: Apache-2.0" in lines[:2]
    assert ast.get_docstring(ast.parse("\n".join(lines)))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_is_left_for_later_without_a_plan(path: Path) -> None:
    for line in path.read_text(encoding="utf-8").splitlines():
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", line):
            assert re.search(r"(TODO|FIXME|XXX|HACK) ?\(?#\d+", line), line
        assert not re.match(r"\s*#\s*[-=*#]{4,}", line), f"a banner: {line}"
        assert "**kwargs" not in line


# The public surface.


def test_all_is_sorted_complete_and_resolves() -> None:
    # As ruff sorts: constants, then classes, then functions.
    names = orchestra.__all__
    assert len(names) == len(set(names))
    kinds = [0 if n.isupper() else 1 if n[0].isupper() else 2 for n in names]
    assert names == [n for _, n in sorted(zip(kinds, names, strict=True))]
    assert set(dir(orchestra)) >= set(names)
    for name in names:
        assert getattr(orchestra, name) is not None
    with pytest.raises(AttributeError):
        _ = orchestra.nothing_of_the_kind


def test_every_strategy_and_part_is_public() -> None:
    for cls in (*STRATEGIES, *PARTS):
        assert cls.__name__ in orchestra.__all__
    assert list(STRATEGIES) == sorted(STRATEGIES, key=lambda cls: cls.__name__)


def test_what_type_checkers_see_is_what_there_is() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    seen = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("orchestra")
        for alias in node.names
    }
    assert seen - {"__version__"} == set(orchestra.__all__)


@pytest.mark.parametrize("name", orchestra.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    value = getattr(orchestra, name)
    if not inspect.isclass(value) and not inspect.isfunction(value):
        return  # a union of documented classes
    assert inspect.getdoc(value)
    if inspect.isclass(value):
        for member, what in vars(value).items():
            if not member.startswith("_") and (inspect.isfunction(what) or isinstance(what, property)):
                assert inspect.getdoc(what), f"{name}.{member}"
    home = importlib.import_module(value.__module__)
    assert home.__doc__


@pytest.mark.parametrize("cls", STRATEGIES, ids=lambda c: c.__name__)
def test_every_strategy_reads_like_its_paper(cls: type) -> None:
    text = inspect.getdoc(inspect.getmodule(cls)) or ""
    assert re.search(r"^ {4}repeat|^ {4}worker", text, re.MULTILINE), "pseudo-code"
    assert "Bytes" in text
    assert cls.__name__ == "Solo" or re.search(r"https?://|\b(19|20)\d\d\b", text), "citation"


def test_the_table_in_the_readme_is_the_catalogue() -> None:
    rows = [line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    listed = [row for row in rows if "src/orchestra/strategies/" in row]
    assert len(listed) == len(STRATEGIES)
    for cls in STRATEGIES:
        path = Path(inspect.getfile(cls))
        (row,) = [r for r in listed if f"`{cls.__name__}`" in r]
        assert f"`{path.relative_to(ROOT).as_posix()}`" in row
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert re.search(rf"\|\s*{lines}\s*\|", row), f"{path.name} has {lines} lines: {row}"


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
