# SPDX-License-Identifier: Apache-2.0
"""What the environment says of this process, for those who cannot wait for torch."""

from __future__ import annotations

import os

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
WORKERS = "ORCHESTRA_WORKERS"  # how many of the processes are meant to be workers, where somebody has said it


def launched() -> bool:
    """Whether this process was started as one of several: by torchrun, `orchestra launch` or the like."""
    return all(os.environ.get(name) for name in NEEDED)


def is_member() -> bool:
    """Whether another process of the run speaks for it."""
    return launched() and os.environ["RANK"] != "0"
