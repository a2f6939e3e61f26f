# SPDX-License-Identifier: Apache-2.0
"""Tuning before a comparison: learning rate, momentum and main option, with equally many tries for all strategies.

    first rung      all tries, for a small part of the epochs, on a seed that the comparison does not use
    wider grid      if the best rate of a strategy is at the edge: more rates on that side, for all strategies
    second rung     the best few of each, three times as long, on a second seed; the comparison uses the best one

Tries that reach the target are ranked by time. The others are ranked by their best score up to the time at which the
first of them ends; whole runs of a loop, by their best score. In the first rung a try ends at the target. In the second
it goes on, and one that collapses ranks below all that do not. Tries are simulated unless --tune-real is given, and
kept in tuning.json.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from orchestra.cli import candidates, fairness, sources, summary, tuning_cache, tuning_plan
from orchestra.cli.candidates import Setting
from orchestra.cli.loop_runs import OWN_RATE, Loop
from orchestra.cli.tuning_plan import SNAPSHOTS, TuningPlan
from orchestra.cli.tuning_results import TuningResult, rank, result_of
from orchestra.errors import ConfigError, Interrupted, Problem
from orchestra.formatting import listed, plural, rough_duration
from orchestra.runs.budget import lower_is_better

if TYPE_CHECKING:
    from orchestra.cli.race import Race

_MINUTE = 60.0  # seconds between lines of progress where there is no terminal
_FEW_STEPS = 20
_ENDLESS = (
    "the data is a stream that did not end within a minute, so its length in steps is unknown: give its Dataset a "
    "__len__, the samples of a pass"
)


def read(text: str, source: sources.Source | None = None) -> tuple[float, ...]:
    """Read rates between commas, or raise a `ConfigError`."""
    if source is not None and source.holds_loop:
        raise ConfigError([Problem("lrs", text, f"{source.label}.py {OWN_RATE}")])
    try:
        rates = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        rates = ()
    if len(rates) < 2 or len(set(rates)) < len(rates) or not all(0 < rate < math.inf for rate in rates):
        raise ConfigError([Problem("lrs", text, "must be two or more different rates above 0: 0.02,0.05,0.1")])
    return rates


def contradicts(option: str, value: object, fixed: str | None) -> Iterator[Problem]:
    """Yield a problem if an option asks for tuning and another fixes the learning rate."""
    if value is not None and fixed is not None:
        yield Problem(option, value, f"tunes learning rates, and {fixed} fixes them: leave one of them out")


@dataclass
class Tuning:
    """The search for the settings with which strategies are compared."""

    race: Race
    worth: float  # runs of each strategy in the race: tuning may cost as many
    rates: tuple[float, ...] = ()  # given, in place of the grid
    real: bool = False  # tries run as the race does, not in simulation
    quiet: bool = False
    share_of_epochs: float = 1.0  # that a run of the race takes
    _kept: dict[str, dict[str, Any]] = field(default_factory=dict)  # results of earlier tries
    _told: float = field(default_factory=time.monotonic)  # when a line on the progress was printed

    @cached_property
    def own(self) -> tuple[float, float]:
        """Learning rate and momentum of the recipe."""
        recipe, changes = self.race.recipe, self.race.shared.changes()
        if isinstance(recipe, Loop):
            return math.nan, 0.0  # only the loop knows
        factory = changes["optimizer"](recipe.optimizer) if "optimizer" in changes else recipe.optimizer
        made = factory([*recipe.model().parameters()])
        group = made.param_groups[0]
        return float(group["lr"]), float(group.get("momentum") or 0.0)

    @cached_property
    def plan(self) -> TuningPlan:
        """The number and length of tries: no longer than the race, or as an earlier call in this folder started."""
        race, costs = self.race, self._measure()
        planned = TuningPlan(
            len(race.strategies), race.epochs, self.worth, costs, self.share_of_epochs,
            race_is_real=not race.shared.sim, real=not race.shared.sim and (self.real or race.lab is not None),
            given=len(self.rates), snapshots=race.snapshots,
        )  # fmt: skip
        if kept := tuning_cache.read_plan(race, *self._known_by):
            return dataclasses.replace(planned, **kept)
        found = planned.fitted()
        if not found.fits and planned.race_is_real and (other := dataclasses.replace(planned, real=True).fitted()).fits:
            return other  # real processes on many cores are faster than a simulation on one
        return found

    def _measure(self) -> tuning_plan.Costs:
        if self.quiet and self.race.shared.sim:
            return tuning_plan.Costs(run=0.0, score=0.0, epoch=1.0, real=1.0)  # the estimate alone needs them
        return tuning_plan.measure(self.race)

    @property
    def _known_by(self) -> tuple[Any, ...]:
        return self.worth, self.rates, self.real, self.share_of_epochs

    def run(self) -> Race:
        """Tune, and return the same race, each strategy with its best setting."""
        race = self.race
        self._kept = tuning_cache.read(race.out)
        try:
            return self._run_loop() if isinstance(race.recipe, Loop) else self._run()
        except KeyboardInterrupt as error:
            self._show("")
            shutil.rmtree(race.out / "tuning", ignore_errors=True)  # the try that was interrupted
            told = Interrupted(tuning_cache.how_to_go_on(race, len(self._kept)))
            told.exit_code = getattr(error, "exit_code", told.exit_code)  # type: ignore[misc]
            raise told from None

    def _run(self) -> Race:
        race = self.race
        if race.stream is not None and math.isinf(race.stream):
            return self._untuned(_ENDLESS)
        plan = self.plan
        if not plan.fits:
            times = plan.seconds / plan.race_seconds
            longer = f"{times:.{0 if times >= 10 else 1}f} times as long as the race"
            return self._untuned(f"the shortest tries would take {longer}: more --seeds allow for it")
        if not self.quiet:
            summary.say(self._estimate())
        tried: dict[str, dict[Setting, TuningResult]] = {name: {} for name in race.strategies}
        for name in race.strategies:
            self._try(self._grid(name), tried[name], plan.first, race.seeds)
        for _ in range(plan.widenings):
            sides = Counter(side for name in race.strategies if (side := self._edge(tried[name])))
            for side, _ in sides.most_common(1):
                self._tell_wider(tried, side)
                for name in race.strategies:
                    self._try(self._grid(name, side), tried[name], plan.first, race.seeds)
        final: dict[str, list[Setting]] = {}
        for name in race.strategies:
            best = self._rank(tried[name])[: plan.kept]
            last: dict[Setting, TuningResult] = {}
            self._try(best, last, 3 * plan.first, race.seeds + 1, whole=True)
            untested = {setting: found for setting, found in tried[name].items() if setting not in last}
            lasting = {setting: found for setting, found in last.items() if not found.collapsed}
            final[name] = self._rank(lasting) or self._rank(untested) or self._rank(last) or best
        return self._conclude(tried, final)

    def _tell_wider(self, tried: Mapping[str, dict[Setting, TuningResult]], side: int) -> None:
        """Print for which strategies the grid is widened on one side."""
        if self.quiet:
            return
        at_edge = [name for name, found in tried.items() if self._edge(found) == side]
        failed = [name for name in at_edge if not self._rank(tried[name])]
        best = [name for name in at_edge if name not in failed]
        lower = side < 0
        why = [f"the best rate of {listed(best)} is the {'lowest' if lower else 'highest'} one tried"] if best else []
        why += [f"every rate of {listed(failed)} failed"] if failed else []
        self._show("")
        summary.say(f"{' and '.join(why)}: {self.plan.more} {'lower' if lower else 'higher'} ones for each strategy")

    def _run_loop(self) -> Race:
        """Tune a loop, which runs to its end in each try: as many tries as there are seeds, at most five."""
        race = self.race
        count = (0, 0, 2, 3, 3, 5)[min(5, int(self.worth))]
        if not count:
            cost = "" if race.took is None else f" The race takes {self._race_of_loop(race.took)}."
            return self._untuned("a try is a whole run of the script: --seeds 2 or more allow for it", cost)
        if not self.quiet:
            summary.say(self._estimate_of_loop(count))
        factors = [3.0**exponent for exponent in range(-(count // 2), (count + 1) // 2)]
        tried: dict[str, dict[Setting, TuningResult]] = {name: {} for name in race.strategies}
        for name in race.strategies:
            for setting in [Setting(name, factor=factor) for factor in factors]:
                began, known = time.monotonic(), len(self._kept)
                self._try([setting], tried[name], race.epochs, race.seeds)
                if len(self._kept) == 1 > known and race.took is None and not self.quiet:
                    took = time.monotonic() - began
                    summary.say(f"a run took {rough_duration(took)}: {self._both(count, took)}.")
        return self._conclude(tried, {name: self._rank(found) for name, found in tried.items()})

    def _estimate_of_loop(self, count: int) -> str:
        race = self.race
        strategies, about = len(race.strategies), "" if race.took is None else f"; {self._both(count, race.took)}"
        return (
            f"tuning {plural(strategies, 'strategy')}, {count} tries each, {self.where}, seed {race.seeds}: "
            f"{count * strategies} whole runs of the script, and {round(strategies * self.worth)} in the race{about}. "
            "--no-tune skips it."
        )

    def _both(self, count: int, took: float) -> str:
        """Return how long tuning and the race take, if every run takes as long as one did."""
        strategies = len(self.race.strategies)
        return f"tuning takes {rough_duration(strategies * count * took)}, the race {self._race_of_loop(took)}"

    def _race_of_loop(self, took: float) -> str:
        return rough_duration(len(self.race.strategies) * self.worth * took)

    def _untuned(self, why: str, cost: str = "") -> Race:
        if not self.quiet:
            summary.say(f"untuned: {why}.{cost}")
        return dataclasses.replace(self.race, tuning=why)

    def _conclude(self, tried: Mapping[str, dict[Setting, TuningResult]], final: Mapping[str, list[Setting]]) -> Race:
        """Choose the settings, print them and save them."""
        race, chosen, edges = self.race, dict[str, Setting](), set[str]()
        for name in race.strategies:
            setting = self._choose(name, final[name], tried[name], chosen)
            chosen[setting.strategy] = setting
            if _side(setting, tried[name]):
                edges.add(setting.strategy)
            if not self.quiet:
                self._show("")
                others = "" if isinstance(race.recipe, Loop) else ": --lrs tries others"
                edge = f", {fairness.AT_EDGE}{others}" if setting.strategy in edges else ""
                option = candidates.chosen_option(setting, tried[name])
                summary.say(f"tuned {name if option else setting.strategy}: {option}{setting}{edge}")
        shutil.rmtree(race.out / "tuning", ignore_errors=True)
        self._save(chosen)
        tries = max(len(found) for found in tried.values())
        how = self.where + ("" if isinstance(race.recipe, Loop) else _briefly(tried))
        found: dict[str, Any] = {"settings": chosen, "tries": tries, "tuning": how, "edges": frozenset(edges)}
        return dataclasses.replace(race, strategies=tuple(chosen), **found)

    @property
    def _sign(self) -> int:
        return 1 if lower_is_better(self.race.target.metric) else -1

    def _rank(self, found: Mapping[Setting, TuningResult]) -> list[Setting]:
        return rank(found, self._sign, whole=isinstance(self.race.recipe, Loop))

    def _settings(self, name: str) -> list[Setting]:
        own, momentum = self.own
        return candidates.settings(name, fixed=name in self.race.fixed, own=own, momentum=momentum)

    def _grid(self, name: str, side: int = 0) -> list[Setting]:
        if self.rates:
            return [Setting(name, given=rate) for rate in self.rates]
        return candidates.grid(self._settings(name), self.plan.tries, side)

    def _edge(self, tried: Mapping[Setting, TuningResult]) -> int:
        """Return -1 or 1 if the best rate is the smallest or the largest tried with these settings, else 0."""
        best = next(iter(self._rank(tried)), None)
        if best is None:
            return -1  # every rate failed
        return _side(best, tried)

    def _choose(
        self, name: str, ranked: list[Setting], tried: Mapping[Setting, TuningResult], taken: Mapping[str, Setting]
    ) -> Setting:
        """Return the best setting; another one of the strategy if two named strategies would be equal."""
        if not ranked and self.rates:
            why = next((found.failed for found in tried.values() if found.failed), "nothing was scored")
            shown = ",".join(f"{rate:g}" for rate in self.rates)
            raise ConfigError([Problem("lrs", shown, f"{name} has a score with none of them: {why}")])
        if not ranked:
            return Setting(name, own=self.own[0])  # its runs in the race fail or not
        every = [*ranked, *self._rank(tried)]
        return next((setting for setting in every if setting.strategy not in taken), ranked[0])

    # Tries.

    def _try(
        self, settings: Iterable[Setting], found: dict[Setting, TuningResult], epochs: float, seed: int,
        *, whole: bool = False,
    ) -> None:  # fmt: skip
        for setting in settings:
            found[setting] = self._one(setting, epochs, seed, whole=whole)

    def _one(self, setting: Setting, epochs: float, seed: int, *, whole: bool = False) -> TuningResult:
        from orchestra.engine import warnings

        race = self._race_of(setting, epochs, whole=whole)
        key = tuning_cache.key(race, setting.strategy, seed)
        if key not in self._kept:
            length = "" if math.isnan(epochs) else f", {epochs:.3g} epochs"
            self._show(f"tuning {setting.strategy}: {setting}{length}")
            with warnings.silent():
                outcome = race.run_one(setting.strategy, seed, "", quiet=True, first=False)
            self._kept[key] = dataclasses.asdict(result_of(outcome, race.target.metric, self._sign))
            shutil.rmtree(outcome.run, ignore_errors=True)
            tuning_cache.write(self.race.out, self._record())
        record = self._kept[key]
        curve = tuple((t, score) for t, score in record["curve"])
        return TuningResult(**{**record, "curve": curve})

    def _show(self, text: str) -> None:
        """Print what is tried now: in a line of the terminal that the next one replaces; elsewhere once a minute."""
        terminal, now = sys.stderr.isatty(), time.monotonic()
        if not self.quiet and not terminal and text and now - self._told >= _MINUTE:
            self._told = now
            summary.say(f"{text} (try {len(self._kept) + 1})")
        elif not self.quiet and terminal:
            sys.stderr.write(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}" if text else "\r\033[K")
            sys.stderr.flush()

    def _race_of(self, setting: Setting, epochs: float, *, whole: bool = False) -> Race:
        """Return a race of one try, until the target or of all these epochs."""
        race = self.race
        if isinstance(race.recipe, Loop):
            return dataclasses.replace(race, settings={setting.strategy: setting}, out=race.out / "tuning")
        target = None if whole else f"{race.target.metric}={race.target.value:g}"
        shared = dataclasses.replace(
            race.shared, epochs=epochs, target=target, sim=self._simulates(setting.strategy) or None
        )
        return dataclasses.replace(
            race, shared=shared, settings={setting.strategy: setting}, snapshots=SNAPSHOTS, out=race.out / "tuning"
        )

    def _simulates(self, strategy: str) -> bool:
        """Return whether the tries of a strategy are simulated."""
        from orchestra.engine import expression

        race = self.race
        if race.shared.sim or isinstance(race.recipe, Loop) or self.plan.real:
            return bool(race.shared.sim)
        return expression.parse(strategy).layout.model_location != "shared"

    @property
    def where(self) -> str:
        """How tries run, in words."""
        if self.race.lab is not None:
            return "in the lab"
        apart = [name for name in self.race.strategies if not self._simulates(name)]
        if len(apart) == len(self.race.strategies):
            return "on real processes"
        return "in simulation" + (f", {' and '.join(apart)} on real processes" if apart else "")

    def _estimate(self) -> str:
        """Return in words how much is tried, how long it takes at most, and how long the race takes."""
        plan, race = self.plan, self.race
        tuning, raced = (rough_duration(plan.costs.busy * seconds) for seconds in (plan.seconds, plan.race_seconds))
        network = ", and the time of its network" if race.lab is not None else ""
        more = f" ({plan.more} more each if the best rate of one is at the edge)" if plan.widenings else ""
        steps, short = plan.first * plan.costs.steps, ""
        if steps < _FEW_STEPS:
            short = f"\n{_brief(max(1, round(steps)))}: more --epochs or --seeds allow for longer ones."
        return (
            f"tuning {plural(plan.strategies, 'strategy')}, {plan.tries} tries each{more}, {self.where}, seeds "
            f"{race.seeds} and {race.seeds + 1}: {tuning} at most{network}, for fewer epochs than those of the race. "
            f"--no-tune skips it.\nthe race, {plural(plan.runs, 'run')} of {plural(plan.epochs, 'epoch')}"
            f"{' at most' if race.shared.target else ''}: {raced}{network}.{short}"
        )

    def _record(self) -> dict[str, Any]:
        if isinstance(self.race.recipe, Loop):
            return {"tries": self._kept}
        plan = tuning_cache.plan_record(self.race, self.plan, *self._known_by)
        return {"plan": plan, "tries": self._kept}

    def _save(self, chosen: Mapping[str, Setting]) -> None:
        epochs = None if isinstance(self.race.recipe, Loop) else [self.plan.first, 3 * self.plan.first]
        found = {name: {"lr": s.rate, "lr_factor": s.factor, "momentum": s.momentum} for name, s in chosen.items()}
        seeds = [self.race.seeds, self.race.seeds + 1]
        tuning_cache.write(self.race.out, {"seeds": seeds, "epochs": epochs, "chosen": found} | self._record())


def _side(setting: Setting, tried: Iterable[Setting]) -> int:
    """Return -1 or 1 if its rate is the smallest or largest tried with its other settings; else 0."""
    alike = [s.size for s in tried if (s.strategy, s.momentum) == (setting.strategy, setting.momentum)]
    return 0 if setting.size not in alike else -1 if setting.size == min(alike) else int(setting.size == max(alike))


def _briefly(tried: Mapping[str, Mapping[Setting, TuningResult]]) -> str:
    """Return the words on tries of the first rung that had few steps; none if the longest had enough."""
    steps = max(result.steps for found in tried.values() for result in found.values())
    return f" ({_brief(steps)})" if 0 < steps < _FEW_STEPS else ""


def _brief(steps: int) -> str:
    return f"the first tries have only {plural(steps, 'step')} of a worker, in which rates hardly differ"
