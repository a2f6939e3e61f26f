# SPDX-License-Identifier: Apache-2.0
"""The shape of the source: imports point one way, files take one sitting, the public surface is a list."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import orchestra
from orchestra.cli import part_text as known
from orchestra.strategies.catalogue import PARTS, STRATEGIES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "orchestra"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): p for p in FILES}
FOLDERS = ("src", "tests", "benchmarks", "scripts", "examples", "experiments")
TEXTS = sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def lines_with(pattern: str, path: Path) -> list[str]:
    """The lines of a file in which something occurs, each with its place."""
    lines = enumerate(text_of(path).splitlines(), 1)
    return [f"{shown(path)}:{n}: {line}" for n, line in lines if re.search(pattern, line)]


@functools.cache
def imports(path: Path, *, lazy: bool = True) -> set[str]:
    """What a file imports, as full names of modules; those for type checkers are left out, lazy ones if asked."""
    found: set[str] = set()
    for node in _statements(tree_of(path), lazy):
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
    "lab": {"errors", "launchers", "runs", "worlds"},
    "report": _ENGINE,
    "live": _BELOW_ENGINE | {"report"},
    "probe": _ENGINE | {"_train", "clusters"},
    "doctor": _BELOW_ENGINE | {"_train", "clusters", "launchers", "worlds"},
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


CLOCKS_AND_DICE = {"time", "random", "datetime", "os", "threading", "socket", "multiprocessing"}
NOT_IN_STRATEGIES = (
    r"torch\.(?:rand|randn|randint|randperm|manual_seed|distributed)\b|numpy\.random|(?i:simulat|virtual|greenlet)"
    r"|if node\.rank|hasattr|super\(\)"
)


def test_strategies_have_no_clock_no_dice_and_no_process_group() -> None:
    files = [path for path in FILES if path.is_relative_to(PACKAGE / "strategies")]
    strange = [
        f"{shown(path)} imports {name}"
        for path in files
        for name in sorted(imports(path))
        if name.split(".")[0] in CLOCKS_AND_DICE or name.startswith("torch.distributed")
    ]
    strange += [line for path in files for line in lines_with(NOT_IN_STRATEGIES, path)]
    assert not strange, "\n".join(strange)


def test_nothing_but_the_command_line_imports_the_command_line() -> None:
    strange = [
        f"{name} imports {other}"
        for name, path in MODULES.items()
        if not name.startswith(("orchestra.cli", "orchestra.__main__"))
        for other in sorted(own(path))
        if other.startswith("orchestra.cli")
    ]
    assert not strange, "\n".join(strange)


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


UNPICKLES = r"pickle\.loads?\(|torch\.load\(|marshal|yaml\.load|(?<![.\w])(?:eval|exec)\("


def test_nothing_is_unpickled_but_the_hand_over() -> None:
    strange = [line for path in FILES if path.name != "child.py" for line in lines_with(UNPICKLES, path)]
    assert not strange, "\n".join(strange)


# One sitting.


def test_a_file_takes_one_sitting_and_a_function_one_screen() -> None:
    strange = []
    for path in FILES:
        text = text_of(path)
        page = path.parent.name in ("strategies", "collectives") and path.name != "catalogue.py"
        most, length = 150 if page else 400, len(text.splitlines())
        if length > most:
            strange.append(f"{shown(path)} has {length} lines: at most {most}")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1 - _documentation(node)
                if length > 40:
                    strange.append(f"{shown(path)}: {node.name} has {length} lines without its docstring: at most 40")
    assert not strange, "\n".join(strange)


def _documentation(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    if ast.get_docstring(node) is None:
        return 0
    return (first.end_lineno or 0) - first.lineno + 1


LICENCE = "# SPDX-License-Identifier: Apache-2.0"


def test_a_file_begins_with_its_licence_and_says_what_it_is() -> None:
    assert len(TEXTS) > len(FILES)
    strange = []
    for path in TEXTS:
        lines = text_of(path).splitlines()
        first = lines[1:2] if lines and lines[0].startswith("#!") else lines[:1]
        if first != [LICENCE]:
            strange.append(f"{shown(path)} does not begin with {LICENCE}")
        if not ast.get_docstring(tree_of(path)):
            strange.append(f"{shown(path)} does not say what it is")
    assert not strange, "\n".join(strange)


LEFT_FOR_LATER = r"\b(?:TODO|FIXME|XXX|HACK)\b(?! ?\(?#\d+)|^\s*#\s*[-=*#]{4,}|\*\*kwargs"


def test_nothing_is_left_for_later_without_a_plan() -> None:
    """Nor are there banners, nor functions that take any option at all."""
    strange = [line for path in FILES for line in lines_with(LEFT_FOR_LATER, path)]
    assert not strange, "\n".join(strange)


# House words that an engineer would not say; each has a plain one, such as simulation, predicted, again, fix, option.
# They are also found inside names, between underscores.
ODD_WORDS = (
    r"(?i)(?<![^\W_])(?:rehears[a-z]*|foret(?:old|ell[a-z]*)|anew|in[ _]vain|mend(?:s|ed|ing)?|knobs?|whoever[a-z]*"
    r"|(?:no|some|every)body[a-z]*)(?![^\W_])"
)


def test_plain_words_are_used() -> None:
    files = [
        path
        for folder in ("src", "tests", "scripts", "docs", "examples", "benchmarks", "experiments")
        for path in (ROOT / folder).rglob("*")
    ]
    texts = [p for p in files if p.suffix in (".py", ".js", ".css", ".md") and "vendor" not in p.parts]
    texts.remove(Path(__file__).resolve())  # which lists the words
    texts += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    odd = [line for path in sorted(texts) for line in lines_with(ODD_WORDS, path)]
    assert not odd, "\n".join(odd)


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (ODD_WORDS, "Nobody waits."),
        (ODD_WORDS, "time foretold by rehearsals"),
        (ODD_WORDS, "def test_nobody_waits() -> None:"),
        (LEFT_FOR_LATER, "x = 1  # TODO later"),
        (LEFT_FOR_LATER, "# ======= ops ======="),
        (LEFT_FOR_LATER, "def f(**kwargs): ..."),
        (UNPICKLES, "value = eval(text)"),
        (UNPICKLES, "pickle.loads(b)"),
        (NOT_IN_STRATEGIES, "    if node.rank == 0:"),
        (NOT_IN_STRATEGIES, "noise = torch.randn(3)"),
        (NOT_IN_STRATEGIES, "# in a Simulation"),
    ],
)
def test_the_rules_find_what_breaks_them(pattern: str, line: str, tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(f"fine = 1  # TODO #12\n{line}\n")
    assert lines_with(pattern, path) == [f"{path}:2: {line}"]


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
    (block,) = [node for node in tree_of(PACKAGE / "__init__.py").body if isinstance(node, ast.If)]
    known, seen = {cls.__name__ for cls in (*STRATEGIES, *PARTS)}, set[str]()
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        names = {alias.name for alias in node.names}
        seen |= names if names != {"*"} else known & vars(importlib.import_module(str(node.module))).keys()
    assert seen == set(orchestra.__all__)


def test_every_public_name_is_documented() -> None:
    values = {name: getattr(orchestra, name) for name in orchestra.__all__}
    values = {name: v for name, v in values.items() if inspect.isclass(v) or inspect.isfunction(v)}  # no unions
    assert len(values) > 40
    bare = [name for name, value in values.items() if not inspect.getdoc(value)]
    bare += [
        f"{name}.{member}"
        for name, value in values.items()
        if inspect.isclass(value)
        for member, what in vars(value).items()
        if not member.startswith("_") and (inspect.isfunction(what) or isinstance(what, property))
        if not inspect.getdoc(what)
    ]
    bare += [v.__module__ for v in values.values() if not importlib.import_module(v.__module__).__doc__]
    assert not bare, "\n".join(bare)


def test_every_strategy_reads_like_its_paper() -> None:
    lacking = []
    for cls in STRATEGIES:
        text = inspect.getdoc(inspect.getmodule(cls)) or ""
        if not re.search(r"^ {4}repeat|^ {4}worker", text, re.MULTILINE):
            lacking.append(f"{cls.__name__}: pseudo-code")
        if "Bytes" not in text:
            lacking.append(f"{cls.__name__}: the bytes that it sends")
        if cls.__name__ != "Solo" and not re.search(r"https?://|\b(19|20)\d\d\b|^Not from a paper", text, re.MULTILINE):
            lacking.append(f"{cls.__name__}: a citation, or that it is from no paper")
    assert not lacking, "\n".join(lacking)


def test_the_readme_is_short_and_the_strategies_that_it_names_exist() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    start = next(number for number, line in enumerate(lines) if line.startswith("| family |"))
    families = list(itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :]))
    named = re.findall(r"`(\w+)`", " ".join(families))
    assert len(named) > len(families) > 5
    assert {known.find(name) for name in named} <= set(STRATEGIES)


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


# The page that describes the source.


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_path_in_the_architecture_page_exists() -> None:
    """In the package or at the root of the repository."""
    quoted = re.findall(r"`([\w./<>-]+\.py)(?:: [^`]*)?`", ARCHITECTURE)
    quoted += re.findall(r"`((?:tests|docs|examples|benchmarks|scripts|\w+)/[\w/]*)`", ARCHITECTURE)
    assert len(quoted) > 60
    missing = [
        path
        for path in sorted({*quoted})
        if "<" not in path and not any((folder / path).exists() for folder in (PACKAGE, ROOT))
    ]
    assert not missing, "\n".join(missing)


def test_every_name_in_the_architecture_page_exists() -> None:
    """As in `engine/node_loop.py: record`: defined in that file; as in `node.gradient`: a method of a node."""
    named = re.findall(r"`([\w/]+\.py): (\w+)`", ARCHITECTURE)
    named += [("core/node.py", name) for name in re.findall(r"`node\.(\w+)", ARCHITECTURE)]
    assert len(named) > 50
    missing = [
        f"{path}: {name}"
        for path, name in named
        if not re.search(rf"^ *(?:def|class) {name}\b|^{name}\b.* = ", text_of(PACKAGE / path), re.MULTILINE)
    ]
    assert not missing, "\n".join(missing)
    assert {path for path, _ in re.findall(r"`([\w/]+\.py): ([^`]*)`", ARCHITECTURE)} <= {path for path, _ in named}


def test_the_architecture_page_has_the_arrows() -> None:
    lines = re.findall(r"^    (\w+) {2,}(\S.*)$", ARCHITECTURE, re.MULTILINE)
    told = {name: set(allowed.split(", ")) - {"nothing"} for name, allowed in lines}
    base = told.pop("base")
    assert {
        name: (packages - {"base"}) | (base if "base" in packages else set()) for name, packages in told.items()
    } == ARROWS


# Files of one name: the folder says the rest.
TOLD_BY_FOLDER = {
    "base.py",  # of a kind of part of a server
    "control.py", "coordinator.py", "supervisor.py", "transport.py",  # of one world, or what all worlds share
    "network.py", "processes.py",  # what the doctor looks at
    "resume.py",  # the command
    "server.py",  # of parameters, of pages
}  # fmt: skip


def test_a_class_name_means_one_thing() -> None:
    found: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in found.items() if len(places) > 1} == {}


def test_a_file_name_recurs_only_where_its_folder_says_the_rest() -> None:
    names = [path.name for path in FILES if path.name not in {"__init__.py", "__main__.py"}]
    assert {name for name in names if names.count(name) > 1} <= TOLD_BY_FOLDER
