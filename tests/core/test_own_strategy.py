# SPDX-License-Identifier: Apache-2.0
"""A strategy defined outside the package is as good as any other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.zoo import train

from orchestra import LocalSGD, Node, Strategy, option
from orchestra.engine import expression, script_names
from orchestra.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EverySo(Strategy[None]):
    """Local SGD as a user would write it in a minute."""

    often: int = option(2, "steps between two means", least=1)

    def init(self, node: Node) -> None:
        """Nothing to remember."""

    def step(self, node: Node, s: None) -> None:
        """A local step, and now and then a mean."""
        node.local_step()
        if node.steps % self.often == 0:
            node.comm.mean_(node.x)

    def finish(self, node: Node, s: None) -> None:
        """One model in the end."""
        node.comm.mean_(node.x)


def test_an_own_strategy_has_a_name_and_trains_like_the_one_it_copies(tmp_path: Path) -> None:
    with script_names.scope():
        script_names.add(globals())
        assert expression.parse("everyso(often=3)") == EverySo(often=3)
    with pytest.raises(ConfigError, match="no strategy or part is called 'everyso'"):
        expression.parse("everyso(often=3)")
    mine = train(EverySo(often=2), tmp_path / "mine", workers=2)
    theirs = train(LocalSGD(tau=2), tmp_path / "theirs", workers=2)
    for a, b in zip(mine.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)
