# SPDX-License-Identifier: Apache-2.0
"""The settings that runs share, those in which they differ, and the commands that repeat the runs."""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from orchestra.runs import reading
from orchestra.runs.budget import words
from orchestra.runs.reading import RunRecord, own_budget

# Not a condition: what is compared, chance, and the folder in which the command was typed.
_IDENTITY = ("strategy", "servers", "seed", "version of the working directory")
_NOT_TYPED = ("out", "sim", "token_file", "trusted", "order")


def settings_of(run: RunRecord) -> dict[str, str]:
    """Return all settings of a run, as text."""
    config, options = run.config, run.options
    cluster = config["cluster"]
    versions = config.get("versions")
    race = run.note.get("race")
    # A run of `Solo` has the straggler of its comparison as a condition, and may have another machine itself.
    slow = (race.get("straggler") if isinstance(race, dict) else None) or options.get("straggler")
    budget = own_budget(run.config)
    versions = versions if isinstance(versions, dict) else {}
    chosen: dict[str, Any] = {
        "strategy": config["strategy"],
        "recipe": run.note.get("recipe"),
        **{name: config.get(name) for name in ("workers", "servers", "seed", "batch")},
        "budget": None if budget is None else words(budget),
        "world": "virtual time" if run.facts.virtual else cluster.get("kind"),
        "network": cluster.get("network") or options.get("network"),
        "compute time": _compute_time(options) or (None if slow else _compute_time(cluster)),
        "straggler": slow,
        "numerics": cluster.get("numerics"),
        **{name: config.get(name) for name in ("optimizer", "schedule", "clip", "precision", "accumulate")},
        **{name: config.get(name) for name in ("partition", "device", "threads", "data", "parameters", "model")},
        **{f"version of {name}": version for name, version in sorted(versions.items())},
    }
    return {name: _text(value) for name, value in chosen.items() if value is not None}


def _compute_time(named: Mapping[str, Any]) -> Any:
    """Return the compute time of options or of a cluster. Older run folders call it `delay`."""
    return named.get("compute_time") or named.get("delay")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def split(all_settings: Sequence[dict[str, str]]) -> tuple[dict[str, str], list[str]]:
    """Return the settings that are equal in all runs, and the names of the others."""
    names = list(dict.fromkeys(name for settings in all_settings for name in settings))
    values = {name: {settings.get(name) for settings in all_settings} for name in names}
    equal = {name: found for name in names if len(values[name]) == 1 and (found := next(iter(values[name])))}
    return equal, [name for name in names if name not in equal]


def workloads(folders: Iterable[Path]) -> dict[str, list[Path]]:
    """Return the run folders by what they train: the recipe, if it is known, and the size of the data."""
    of_data: dict[str, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for folder in folders:
        with suppress(reading.Unreadable, OSError):
            config = reading.config_of(folder)
            recipe = Path(str(config["note"].get("recipe") or "")).name
            of_data[_text(config.get("data") or "data unknown")][recipe].append(folder)
    found: dict[str, list[Path]] = {}
    for data, by_recipe in of_data.items():
        unknown = by_recipe.pop("", [])  # of a script's own `train`: they go with another recipe of these data
        for recipe, runs in (by_recipe or {"": []}).items():
            found[f"{recipe} ({data})" if recipe else data] = [*runs, *unknown]
            unknown = []
    return found


# Conditions: settings that vary apart from the strategy and the seed.


def conditions(all_settings: Sequence[dict[str, str]]) -> list[str]:
    """Return the condition of every run, in a few words; empty where there is only one."""
    # Batched gradients equal single ones up to rounding, and which kind is used depends on what is faster.
    all_settings = [s | {"numerics": "real"} if s.get("numerics") == "batched" else s for s in all_settings]
    varied = [name for name in split(all_settings)[1] if name not in _IDENTITY and _is_varied(name, all_settings)]
    short = {name: shortened([settings.get(name, "-") for settings in all_settings]) for name in varied}
    return [" · ".join(f"{name} {short[name][i]}" for name in varied) for i in range(len(all_settings))]


def _is_varied(name: str, all_settings: Sequence[dict[str, str]]) -> bool:
    """Return whether a setting varies within a strategy: one strategy with fewer workers is no condition."""
    values = defaultdict[str | None, set[str | None]](set)
    for settings in all_settings:
        values[settings.get("strategy")].add(settings.get(name))
    return any(len(found) > 1 for found in values.values())


def shortened(texts: Sequence[str]) -> list[str]:
    """Return the pieces in which texts differ.

    >>> shortened(["constant:0.05 slow:1x1", "constant:0.05 slow:1x5"])
    ['slow:1x1', 'slow:1x5']
    >>> shortened(["4 epochs or 2 seconds", "4 epochs or 3 seconds"]), shortened(["1 epoch or 2 steps", "1 epoch"])
    (['2 seconds', '3 seconds'], ['1 epoch or 2 steps', '1 epoch'])
    >>> shortened(["4 epochs or accuracy=0.9", "8 epochs or accuracy=0.9"])
    ['4 epochs', '8 epochs']
    """
    # A number stays with its noun, and a separator with what is before it.
    pieces = [re.findall(r"(?:[\d.]+ (?=[a-z]))?[^\s,]+(?:,| or\b)?", text) for text in texts]
    front = len([*takewhile(lambda column: len(set(column)) == 1, zip(*pieces, strict=False))])
    left = [found[front:] for found in pieces]
    back = len([*takewhile(lambda column: len(set(column)) == 1, zip(*(found[::-1] for found in left), strict=False))])
    cut = [" ".join(found[: len(found) - back]).strip(" ,").removesuffix(" or") for found in left]
    return [short or text for short, text in zip(cut, texts, strict=True)]


_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12, "ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = re.compile(rf"(\d+(?:\.\d+)?(?:e-?\d+)?)({'|'.join(_UNITS)})?(?![a-z])")


def natural(text: str) -> list[Any]:
    """Return a sort key for conditions that compares numbers with their units.

    >>> sorted(["1gbit", "100mbit", "10mbit"], key=natural)
    ['10mbit', '100mbit', '1gbit']
    """
    pieces: list[Any] = []
    end = 0
    for match in _NUMBER.finditer(text):
        pieces += [text[end : match.start()], float(match[1]) * _UNITS.get(match[2], 1.0)]
        end = match.end()
    return [*pieces, text[end:]]


# Commands.


def commands(runs: Sequence[RunRecord]) -> list[str]:
    """Return the commands that repeat the runs: the command of a whole comparison, else one per run."""
    found = (_command_above(run) or _one(run) for run in runs)
    return [*dict.fromkeys(command for command in found if command is not None)]


def _command_above(run: RunRecord) -> str | None:
    """Return the command of a comparison (two folders above its runs) or of a sweep (three)."""
    for folder in run.path.resolve().parents[1:3]:
        command = reading.object_in(folder / "command.json").get("command")
        if isinstance(command, list):
            return shlex.join(map(str, command))
    return None


def _one(run: RunRecord) -> str | None:
    if "recipe" not in run.note:
        return None
    verb = "sim" if run.options.get("sim") else "run"
    command = ["orchestra", verb, str(run.note["recipe"]), *_flags(run.options)]
    if run.config["cluster"].get("kind") == "attached":
        nodes = run.facts.workers + run.facts.servers
        command = ["torchrun", "--standalone", "--nproc-per-node", str(nodes), "-m", *command]
    args = run.note.get("args")
    return shlex.join([*command, "--", *map(str, args)] if isinstance(args, list) and args else command)


def _flags(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if name in _NOT_TYPED or value is False:
            continue
        yield f"--{name.replace('_', '-')}"
        yield from () if value is True else (str(value),)  # a switch takes no value
