# SPDX-License-Identifier: Apache-2.0
"""Optimizers which torch does not have, used like torch's own: for large mini-batches, and for models with zeros.

    optimizer=partial(orchestra.LARS, lr=0.5, eta=0.02)                 in Python
    --optimizer "lars(lr=0.5, eta=0.02)"                                on the command line
    --optimizer "adamw(lr=3e-3, betas=(0.9, 0.98))"                     likewise torch's: sgd, adam, rmsprop, ...

They go with any strategy. LARS and LAMB look at whole layers, so of several servers each must hold whole ones:
`ps(servers=2, placement="layers")`. Their pages: `orchestra explain lars`, `orchestra explain lamb`. What goes well
with them: `orchestra explain schedule`.
"""

from orchestra.model.optimizers.lamb import LAMB
from orchestra.model.optimizers.lars import LARS
from orchestra.model.optimizers.proximal import ProximalSGD

__all__ = ["LAMB", "LARS", "ProximalSGD"]
