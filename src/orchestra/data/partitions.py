# SPDX-License-Identifier: Apache-2.0
"""Partitions: how the samples are divided among the workers.

IID()                every epoch a new random share of everything
LabelSorted()        each worker holds a run of the samples sorted by label: the hardest case
Dirichlet(alpha)     each label is divided in proportions drawn from a Dirichlet distribution;
                     alpha → 0 is one worker per label, alpha → ∞ is i.i.d. (Hsu, Qi, Brown 2019, arXiv 1909.06335)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from orchestra.core.vectors import split


class Partition(Protocol):
    """A fixed division of samples among workers, as a pure function of labels, size and seed."""

    def shards(self, labels: Tensor, size: int, seed: int) -> list[Tensor]:
        """Return the indices of each rank: disjoint, and together all."""
        ...


@dataclass(frozen=True, kw_only=True)
class IID:
    """No fixed shards: every epoch is shuffled as a whole and dealt out."""

    def shards(self, labels: Tensor, size: int, seed: int) -> list[Tensor]:
        """Return one fixed random division."""
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        return [order[part] for part in split(len(labels), size)]


@dataclass(frozen=True, kw_only=True)
class LabelSorted:
    """Sorted by label and cut into equal runs."""

    def shards(self, labels: Tensor, size: int, seed: int) -> list[Tensor]:
        """Return consecutive runs of the sorted samples."""
        order = torch.argsort(labels, stable=True)
        return [order[part] for part in split(len(labels), size)]


@dataclass(frozen=True, kw_only=True)
class Dirichlet:
    """Each label divided in random proportions; small `alpha` means uneven."""

    alpha: float = 0.5

    def shards(self, labels: Tensor, size: int, seed: int) -> list[Tensor]:
        """Draw the proportions of each label and cut its samples accordingly."""
        rng = np.random.default_rng(seed)
        held: list[list[Tensor]] = [[] for _ in range(size)]
        for label in torch.unique(labels).tolist():
            members = torch.nonzero(labels == label).reshape(-1)
            members = members[torch.from_numpy(rng.permutation(len(members)))]
            cuts = np.round(np.cumsum(rng.dirichlet([self.alpha] * size)) * len(members)).astype(int)
            cuts[-1] = len(members)
            for rank, (start, stop) in enumerate(zip([0, *cuts[:-1]], cuts, strict=True)):
                held[rank].append(members[start:stop])
        return [torch.cat(parts) for parts in held]
