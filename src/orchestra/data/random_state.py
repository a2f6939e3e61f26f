# SPDX-License-Identifier: Apache-2.0
"""Seeding, saving and restoring of every global random generator that user code may draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed all generators."""
    # torch.manual_seed would also record a traceback for devices that are initialised later.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def get_states(*, cuda: bool = False) -> dict[str, Any]:
    """Return the states of all generators, as plain values and tensors."""
    python = random.getstate()
    numpy: Any = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if cuda else None,
        "python": [python[0], list(python[1]), python[2]],
        "numpy": [numpy[0], numpy[1].tolist(), *numpy[2:]],
    }


def set_states(states: dict[str, Any]) -> None:
    """Restore the states of all generators."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))


def exchange_states(states: Any, *, cuda: bool = False) -> Any:
    """Return the states of all generators in their own format; then set `states`, if given."""
    before = (
        torch.get_rng_state(),
        torch.cuda.get_rng_state() if cuda else None,
        random.getstate(),
        np.random.get_state(),
    )
    if states is not None:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.cuda.set_rng_state(states[1])
        random.setstate(states[2])
        np.random.set_state(states[3])
    return before


@contextmanager
def left_alone() -> Iterator[None]:
    """Restore all generators on leaving."""
    states = get_states()
    try:
        yield
    finally:
        set_states(states)
