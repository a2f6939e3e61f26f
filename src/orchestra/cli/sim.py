# SPDX-License-Identifier: Apache-2.0
"""`orchestra sim`: simulate a run on a cluster."""

from __future__ import annotations

from orchestra.cli import options as o
from orchestra.cli.options import Options
from orchestra.cli.run import carry_out, conclude, find


def sim(
    recipe: o.What, args: o.Args = None,
    strategy: o.Strategy = None, batch: o.Batch = None, lr: o.Lr = None, lr_factor: o.LrFactor = None,
    momentum: o.Momentum = None, optimizer: o.Optimizer = None, schedule: o.Schedule = None, clip: o.Clip = None,
    precision: o.Precision = None, partition: o.Spread = None, seed: o.Seed = None,
    epochs: o.Epochs = None, steps: o.Steps = None, seconds: o.Seconds = None, target: o.Goal = None,
    workers: o.Workers = None, servers: o.Servers = None, device: o.Device = None,
    compute_time: o.ComputeTime = None, straggler: o.Straggler = None,
    network: o.Network = None, numerics: o.Numerics = None,
    out: o.Out = None, trace: o.Trace = False, json_: o.Json = False, quiet: o.Quiet = False,
) -> None:  # fmt: skip
    """Simulate a run on a cluster, in virtual time: the same strategies, real gradients, real convergence.

    A simulation takes as long as this machine needs to compute the gradients: no process waits or sleeps. The same seed
    gives the same run, to the last digit. The run folder is like that of a real run; its seconds are virtual.

    For example:

      orchestra sim digits --workers 16 --network 100mbit,1ms
      orchestra sim digits -s "ps(consistency=asp())" -n 8 --straggler 1x5
      orchestra sim digits -n 1000 --steps 100 --numerics off
    """
    chosen = Options(
        strategy=strategy, workers=workers, servers=servers, epochs=epochs, steps=steps, seconds=seconds,
        target=target, seed=seed, batch=batch, lr=lr, lr_factor=lr_factor, momentum=momentum,
        optimizer=optimizer, schedule=schedule,
        out=str(out) if out else None, device=device,
        partition=partition, precision=precision, clip=clip, sim=True, network=network,
        compute_time=compute_time, straggler=straggler, numerics=numerics,
        trace=trace or None,
    )  # fmt: skip
    source = find(recipe, chosen)
    conclude(source, chosen, carry_out(source, chosen, args or [], quiet=quiet), as_json=json_, quiet=quiet)
