# SPDX-License-Identifier: Apache-2.0
"""Consistencies: when a parameter server answers, and how it treats late gradients. One file for each paper.

    BSP, ASP                                    Li et al. 2014, Dean et al. 2012    rounds, and none
    SSP                                         Ho et al. 2013                      clocks at most s apart
    BoundedDelay                                Li et al. 2014                      iterations at most τ ahead
    BackupWorkers                               Chen et al. 2016                    the first N of N + b
    KSync, KBatchSync, KAsync, KBatchAsync      Dutta et al. 2018                   the first K
    SoftSync                                    Zhang et al. 2016                   every ⌊λ/n⌋ gradients

Corrections of stale gradients: StalenessAware (Zhang et al. 2016), DelayCompensated (Zheng et al. 2017).
"""

from orchestra.strategies.parameter_server.consistency.asynchronous import ASP
from orchestra.strategies.parameter_server.consistency.backup_workers import BackupWorkers
from orchestra.strategies.parameter_server.consistency.base import Consistency, Correction, ServerState
from orchestra.strategies.parameter_server.consistency.bounded_delay import BoundedDelay
from orchestra.strategies.parameter_server.consistency.bulk import BSP
from orchestra.strategies.parameter_server.consistency.delay_compensated import DelayCompensated
from orchestra.strategies.parameter_server.consistency.first_k import KAsync, KBatchAsync, KBatchSync, KSync
from orchestra.strategies.parameter_server.consistency.stale_synchronous import SSP
from orchestra.strategies.parameter_server.consistency.staleness_aware import AsPushed, SoftSync, StalenessAware

CONSISTENCIES: tuple[type[Consistency], ...] = (
    ASP,
    BSP,
    SSP,
    BoundedDelay,
    BackupWorkers,
    KSync,
    KBatchSync,
    KAsync,
    KBatchAsync,
    SoftSync,
)
CORRECTIONS: tuple[type[Correction], ...] = (AsPushed, StalenessAware, DelayCompensated)

__all__ = [
    "ASP",
    "BSP",
    "CONSISTENCIES",
    "CORRECTIONS",
    "SSP",
    "AsPushed",
    "BackupWorkers",
    "BoundedDelay",
    "Consistency",
    "Correction",
    "DelayCompensated",
    "KAsync",
    "KBatchAsync",
    "KBatchSync",
    "KSync",
    "ServerState",
    "SoftSync",
    "StalenessAware",
]
