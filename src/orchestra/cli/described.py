# SPDX-License-Identifier: Apache-2.0
"""The cluster that a user describes to `orchestra recommend`."""

from __future__ import annotations

import re

from orchestra.cli.sources import Source
from orchestra.errors import ConfigError, Problem


def network(text: str | None, source: Source) -> str | None:
    """Return the network with a latency. A loop has none: if one is given, it is refused later."""
    if text is None and not source.holds_loop:
        raise ConfigError([Problem("network", None, "name the network of the machines, such as --network 1gbit,0.5ms")])
    return text if text is None or "," in text else re.sub(r"\S+", r"\g<0>,0.5ms", text, count=1)
