# SPDX-License-Identifier: Apache-2.0
"""The settings tried when a strategy is tuned: momentum, main option, and learning rates around the recipe's.

    synchronous     up to three values of the main option, where none was given
    asynchronous    the recipe's momentum and none, and without momentum a second value of the main option

Each of these settings is tried with equally many rates, so that all strategies have equally many tries. A rate is a
factor on γ/(1 − μ), by which x moves in the long run: without momentum γ itself is larger.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_RATIOS = {12: 1.5, 6: 2.5, 4: 4.0}  # between two neighbours, by the number of rates


@dataclass(frozen=True)
class Setting:
    """A strategy with its momentum and learning rate."""

    strategy: str
    momentum: float | None = None  # None: the recipe's own
    own: float = math.nan  # the recipe's learning rate
    factor: float = 1.0  # on that
    given: float | None = None  # in place of that

    @property
    def options(self) -> dict[str, Any]:
        """The setting as options of a run."""
        factor = None if self.factor == 1 else self.factor
        found = {"lr": self.given, "lr_factor": factor, "momentum": self.momentum}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.factor * self.own if self.given is None else self.given

    @property
    def size(self) -> float:
        """The learning rate, or the factor if the rate is unknown."""
        return self.factor if math.isnan(self.rate) else self.rate

    def __str__(self) -> str:
        """Return the learning rate, or the factor if the rate is unknown; and a momentum other than the recipe's.

        >>> str(Setting("ps", momentum=0.0, own=0.05, factor=2.5))
        'lr 0.125, momentum 0'
        """
        rate = f"lr x {self.factor:.3g}" if math.isnan(self.rate) else f"lr {self.rate:.3g}"
        return rate + ("" if self.momentum is None else f", momentum {self.momentum:g}")


def settings(text: str, *, fixed: bool, own: float, momentum: float) -> list[Setting]:
    """Return the settings of a strategy to try, at the recipe's `own` rate.

    `fixed`: its main option was given. `momentum`: the recipe's.

    >>> [s.strategy for s in settings("localsgd", fixed=False, own=0.1, momentum=0.9)]
    ['localsgd(tau=16)', 'localsgd(tau=4)', 'localsgd(tau=64)']
    >>> [str(s) for s in settings("ps(consistency=asp)", fixed=False, own=0.1, momentum=0.9)]
    ['lr 0.1', 'lr 1, momentum 0']
    """
    from orchestra.engine import expression
    from orchestra.strategies.catalogue import row_of

    strategy: Any = expression.parse(text)
    texts, tuned = [text], row_of(strategy).tuned_option
    if tuned is not None and not fixed:
        option, values = tuned
        texts = [expression.show(dataclasses.replace(strategy, **{option: value})) for value in values]
    if strategy.layout.updates.synchronous or not momentum:
        return [Setting(text, own=own) for text in texts[:3]]
    plain = [Setting(text, momentum=0.0, own=own, factor=1 / (1 - momentum)) for text in texts[:2]]
    return [Setting(texts[0], own=own), *plain]


def chosen_option(setting: Setting, tried: Iterable[Setting]) -> str:
    """Return the value of the main option and those that were tried, if there were several.

    >>> chosen_option(Setting("localsgd(tau=4)"), settings("localsgd", fixed=False, own=0.1, momentum=0.9))
    'tau 4 (of 16, 4, 64), '
    """
    from orchestra.engine import expression
    from orchestra.strategies.catalogue import row_of

    strategies = [expression.parse(text) for text in dict.fromkeys(s.strategy for s in tried)]
    chosen = expression.parse(setting.strategy)
    if len(strategies) < 2 or (tuned := row_of(chosen).tuned_option) is None:
        return ""
    values = ", ".join(f"{getattr(strategy, tuned[0])}" for strategy in strategies)
    return f"{tuned[0]} {getattr(chosen, tuned[0])} (of {values}), "


def fixed(texts: Iterable[str]) -> frozenset[str]:
    """Return the strategies whose main option is given."""
    from orchestra.engine import expression
    from orchestra.strategies.catalogue import row_of

    found = []
    for text in texts:
        tuned = row_of(strategy := expression.parse(text)).tuned_option
        if tuned is not None and re.search(rf"\b{tuned[0]}\s*=", text):
            found.append(expression.show(strategy))
    return frozenset(found)


def factors(count: int, side: int = 0) -> list[float]:
    """Return `count` rates around 1; or, beyond them on one `side` (-1 or 1), half as many.

    >>> factors(4), factors(4, 1), factors(4, -1)
    ([0.0625, 0.25, 1.0, 4.0], [16.0, 64.0], [0.00390625, 0.015625])
    """
    ratio, lowest = _RATIOS[count], -(count * 7 // 12)
    highest, more = lowest + count - 1, count // 2
    exponents: Iterable[int] = range(lowest, highest + 1)
    if side:
        exponents = range(lowest - more, lowest) if side < 0 else range(highest + 1, highest + 1 + more)
    return [ratio**exponent for exponent in exponents]


def grid(found: list[Setting], tries: int, side: int = 0) -> list[Setting]:
    """Return settings times rates: as many as there are tries, or half as many on one side of those."""
    rates = factors(tries // len(found), side)
    return [dataclasses.replace(setting, factor=setting.factor * rate) for setting in found for rate in rates]
