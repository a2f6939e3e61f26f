# SPDX-License-Identifier: Apache-2.0
"""Optimizers that torch does not have, used like torch's own: for large mini-batches, and for sparse models.

    optimizer=partial(orchestra.LARS, lr=0.5, eta=0.02)                 in Python
    --optimizer "lars(lr=0.5, eta=0.02)"                                on the command line
    --optimizer "adamw(lr=3e-3, betas=(0.9, 0.98))"                     likewise torch's: sgd, adam, rmsprop, ...

They work with any strategy. LARS and LAMB use whole layers, so of several servers each must hold whole layers:
`ps(servers=2, placement="layers")`. See `orchestra explain lars`, `orchestra explain lamb`, and for matching schedules
`orchestra explain schedule`.
"""

from orchestra.model.optimizers.lamb import LAMB
from orchestra.model.optimizers.lars import LARS
from orchestra.model.optimizers.proximal import ProximalSGD

__all__ = ["LAMB", "LARS", "ProximalSGD"]
