# SPDX-License-Identifier: Apache-2.0
"""Training is a guest in the caller's process: it leaves the random generators as it found them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from tests.zoo import train

from orchestra import AllReduce


def test_training_leaves_the_callers_generators_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = (torch.rand(1).item(), random.random(), float(np.random.rand()))
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    train(AllReduce(), tmp_path, workers=2)
    assert (torch.rand(1).item(), random.random(), float(np.random.rand())) == expected
