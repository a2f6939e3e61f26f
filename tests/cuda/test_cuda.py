# SPDX-License-Identifier: Apache-2.0
"""Workers on a GPU: alone or sharing one, they follow the path of workers on the processor."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import orchestra
from orchestra.engine.cluster import Device
from orchestra.worlds import torch_collectives

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 3))


def make_large() -> nn.Module:
    """Enough parameters that each worker updates a range of its own."""
    return nn.Sequential(nn.Linear(20, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 3))


def make_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(515, 20, generator=generator)
    return x, (x @ torch.randn(20, 3, generator=generator)).argmax(1)


def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    return float((model.eval()(data[0]).argmax(1) == data[1]).float().mean())


def run(
    strategy: str,
    device: Device,
    out: Path,
    workers: int = 2,
    model: Callable[[], nn.Module] = make_model,
    lr: float = 0.1,
) -> orchestra.Result:
    return orchestra.train(
        model=model,
        data=make_data,
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=lr, momentum=0.9),
        strategy=strategy,
        cluster=orchestra.Local(workers=workers, device=device),
        batch=16,
        budget=orchestra.Epochs(3),
        evaluate=accuracy,
        evaluation_data=make_data,
        out=out,
    )


@pytest.mark.parametrize("model", [make_model, make_large])
@pytest.mark.parametrize("strategy", ["allreduce", "ps(servers=2)", "localsgd(tau=4)", "slowmo(tau=4)"])
def test_a_shared_gpu_follows_the_processor(strategy: str, model: Callable[[], nn.Module], tmp_path: Path) -> None:
    on_cpu = run(strategy, "cpu", tmp_path / "cpu", model=model)
    on_gpu = run(strategy, "cuda", tmp_path / "gpu", model=model)
    assert on_gpu.summary.sent_per_worker == on_cpu.summary.sent_per_worker
    for name, value in on_cpu.model.state_dict().items():
        torch.testing.assert_close(on_gpu.model.state_dict()[name], value, rtol=2e-3, atol=2e-3)


def test_an_asynchronous_server_trains_gpu_workers(tmp_path: Path) -> None:
    # Stale gradients bear smaller steps.
    assert run("ps(consistency=asp())", "cuda", tmp_path / "gpu", workers=3, lr=0.02).metrics["accuracy"] > 0.8


def test_one_worker_on_a_gpu_is_plain_torch(tmp_path: Path) -> None:
    assert run("solo", "auto", tmp_path / "gpu", workers=1).metrics["accuracy"] > 0.8


def make_dense() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))


def simulate(strategy: str, out: Path, **cluster: Any) -> orchestra.Result:
    return orchestra.train(
        model=make_dense,
        data=make_data,
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.02, momentum=0.9),
        strategy=strategy,
        cluster=orchestra.Simulated(workers=6, compute_time="lognormal:0.05,0.4", network="100mbit,1ms", **cluster),
        batch=16,
        budget=orchestra.Steps(20),
        out=out,
    )


@pytest.mark.parametrize("strategy", ["allreduce", "slowmo(tau=4)", "ps(consistency=asp(), servers=2)"])
def test_simulations_on_a_gpu_agree_with_those_on_the_processor(strategy: str, tmp_path: Path) -> None:
    """In the same virtual time, one gradient at a time or many in one call."""
    processor = simulate(strategy, tmp_path / "cpu", numerics="real")
    x = torch.cat([p.flatten() for p in processor.model.parameters()])
    for numerics in ("real", "batched", "auto"):
        gpu = simulate(strategy, tmp_path / numerics, device="cuda", numerics=numerics)
        assert gpu.summary.seconds == processor.summary.seconds
        assert torch.allclose(torch.cat([p.flatten() for p in gpu.model.parameters()]), x, atol=1e-3)
    chosen = json.loads((tmp_path / "auto" / "config.json").read_text())["cluster"]["numerics"]
    assert chosen == "batched"


def test_means_by_nccl_of_a_worker_with_its_own_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one worker, since two cannot share a GPU there: the mean is its own vector, by all the steps of many."""
    monkeypatch.setattr(torch_collectives, "_BUCKET", 1 << 16)
    gpu = torch.device("cuda", 0)
    means = torch_collectives.TorchCollectives(torch_collectives.file_store(tmp_path / "store", 1), 0, 1, gpu)
    x = torch.randn(100_003, device=gpu)
    for vector in (x, x.double(), x.bfloat16()):
        mean, total = means.mean(vector, 3.0)
        assert total == 3.0
        torch.testing.assert_close(mean, vector)
    ready = means.ahead(x, 6.0, 6.0)
    assert ready is not None
    ready(slice(50_000, 100_003))
    mean, total = means.mean(x, 4.0)  # not what was promised
    assert (total, means.early) == (4.0, 3)
    torch.testing.assert_close(mean, x)
    means.close()


class Late:
    """NCCL, whose sums begin so many cycles of the GPU late: the others may not be there yet."""

    def __init__(self, backend: Any, cycles: int) -> None:
        self.backend, self.cycles = backend, cycles
        self.shutdown, self.abort = backend.shutdown, backend.abort

    def allreduce(self, tensors: list[Tensor]) -> Any:
        torch.cuda._sleep(self.cycles)  # type: ignore[no-untyped-call]
        return self.backend.allreduce(tensors)


@pytest.mark.timed
def test_who_waits_for_others_by_nccl_hears_them_and_is_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than the patience, which is for coming together; and what it hears may end it."""
    gpu, heard, stops = torch.device("cuda", 0), [], False

    def listen() -> None:
        heard.append(time.monotonic())
        if stops:
            raise KeyboardInterrupt

    store = torch_collectives.file_store(tmp_path / "store", 1)
    means = torch_collectives.TorchCollectives(store, 0, 1, gpu, patience=1.0, on_waiting=listen)
    x = torch.randn(1000, device=gpu)
    nccl = means._backend
    means.mean(x, 1.0)
    monkeypatch.setattr(means, "_backend", Late(nccl, 8_000_000_000))  # four seconds
    mean, _ = means.mean(x, 1.0)
    torch.testing.assert_close(mean, x)
    assert len(heard) > 5
    stops = True
    with pytest.raises(KeyboardInterrupt):
        means.mean(x, 1.0)
    means.close()
