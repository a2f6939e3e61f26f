# SPDX-License-Identifier: Apache-2.0
"""Accelerate, the Trainer of transformers, and Lightning, for real: `make nightly PART=libraries` installs them."""

from __future__ import annotations

import os
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.prepare.loops import equal, make_loader
from tests.prepare.test_examples import prints
from tests.processes import together
from tests.zoo import flat, make_data, make_model, momentum
from torch import Tensor, nn
from torch.utils.data import Dataset

import orchestra
from orchestra import Attached

CLIP, STEPS = 0.3, 6


def start_as_one_process() -> None:
    """Remove what the libraries would open a process group for."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name)


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_accelerate_saves_and_loads(strategy: str, tmp_path: Path) -> None:
    def call() -> Any:
        import accelerate

        model = make_model()
        try:
            model, optimizer, loader = orchestra.prepare(
                model, momentum(model.parameters()), make_loader(), strategy=strategy, cluster=Attached(patience=20)
            )
        except SystemExit:  # of a server
            return None
        start_as_one_process()
        accelerator = accelerate.Accelerator(cpu=True)
        model, wrapped = accelerator.prepare(model, optimizer)
        for x, y in loader:
            wrapped.zero_grad()
            accelerator.backward(F.mse_loss(model(x), y))
            wrapped.step()
        if optimizer.orchestra.is_coordinator:
            accelerator.save_state(str(tmp_path))
        optimizer.orchestra.mean(1.0)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        accelerator.load_state(str(tmp_path))
        optimizer.finish()
        return before, model.state_dict()

    for outcome in together(2 if strategy == "allreduce" else 3, call, seconds=120):
        assert not outcome.kind, outcome.error
        assert outcome.value is None or equal(*outcome.value)


class Regression(nn.Module):
    """Gives its loss, as the Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.inner(x)
        return {"loss": F.mse_loss(y, labels), "logits": y}


class Named(Dataset[dict[str, Tensor]]):
    """Every second sample, by name."""

    def __init__(self, rank: int) -> None:
        self.x, self.y = (t[rank:96:2] for t in make_data())

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


def trained_by_trainer(strategy: str, folder: Path) -> Any:
    """Train on whole shards, with the mean gradient clipped and two checkpoints; give the model."""
    import transformers

    class Clip(transformers.TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *given: Any, **more: Any) -> None:
            optimizer.clip_grad_norm_(CLIP)

    torch.manual_seed(0)
    model = Regression()
    try:
        model, optimizer = orchestra.prepare(
            model, momentum(model.parameters()), strategy=strategy, cluster=Attached(patience=20)
        )
    except SystemExit:  # of a server
        return None
    own = folder / str(rank := optimizer.orchestra.rank)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, STEPS)
    start_as_one_process()
    given = transformers.TrainingArguments(
        output_dir=str(own), use_cpu=True, per_device_train_batch_size=48, num_train_epochs=STEPS, max_grad_norm=0,
        save_strategy="steps", save_steps=3, logging_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model, given, train_dataset=Named(rank), optimizers=(optimizer, scheduler), callbacks=[Clip()]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages
        trainer.train()
    optimizer.finish()
    return flat(model), sorted(path.name for path in own.iterdir())


def trained_alone() -> Tensor:
    """The same on all samples, in plain torch."""
    torch.manual_seed(0)
    model = Regression()
    optimizer = momentum(model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, STEPS)
    x, y = (t[:96] for t in make_data())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x, y)["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
    return flat(model)


@pytest.mark.parametrize("strategy", ["allreduce", "ps"])
def test_the_trainer_is_plain_training(strategy: str, tmp_path: Path) -> None:
    expected = trained_alone()
    call = partial(trained_by_trainer, strategy, tmp_path)
    for outcome in together(2 if strategy == "allreduce" else 3, call, seconds=120):
        assert not outcome.kind, outcome.error
        if outcome.value is not None:
            model, saved = outcome.value
            torch.testing.assert_close(model, expected, rtol=1e-5, atol=1e-6)
            assert saved == ["checkpoint-3", "checkpoint-6"]


def test_the_trainer_clips_unless_told_otherwise(tmp_path: Path) -> None:
    """The pages say so."""
    import transformers

    assert transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True).max_grad_norm == 1.0


def test_lightning_strategy() -> None:
    found = re.fullmatch(r"accuracy (\S+), workers: 2\n", prints("lightning_strategy.py", "--epochs", "4"))
    assert found is not None
    assert float(found[1]) > 0.8
