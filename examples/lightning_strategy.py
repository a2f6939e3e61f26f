# SPDX-License-Identifier: Apache-2.0
"""A Lightning `Strategy` plug-in: `Trainer(strategy=OrchestraStrategy("slowmo(tau=8)"))`.

    pip install "neural-orchestra[lightning]"
    torchrun --standalone --nproc-per-node 4 examples/lightning_strategy.py

Lightning calls the optimizer with a closure; the forward pass is in `training_step`, which begins a step. The training
loader is divided among the workers; every worker validates on all samples. For modules with one optimizer.
"""

import argparse

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import orchestra
from orchestra.data import digits
from orchestra.user_loop.loader import Loader


class OrchestraStrategy(SingleDeviceStrategy):
    """One process of several that torchrun or `orchestra launch` started, under a strategy of Neural Orchestra."""

    strategy_name = "orchestra"

    def __init__(self, strategy="allreduce", *, device="cpu", seed=0, **given):
        super().__init__(device=device)
        self._given = {"strategy": strategy, "seed": seed, **given}
        self._prepared, self._finished = None, False

    def setup(self, trainer):
        super().setup(trainer)
        if len(self.optimizers) != 1:
            return  # nothing is trained here, or more than a strategy knows of
        _, self._prepared = orchestra.prepare(self.lightning_module, self.optimizers[0], **self._given)
        self.optimizers = [self._prepared]
        # `gradient_clip_val` bounds what the optimizer sees, such as the mean over the workers.
        self.precision_plugin.clip_grad_by_norm = lambda optimizer, most: self._prepared.clip_grad_norm_(most)

    @property
    def handle(self):
        """This process among the others."""
        return self._prepared.orchestra

    def process_dataloader(self, dataloader):
        """A share of the training samples; all of the others."""
        if self._prepared is None or not self.lightning_module.trainer.training:
            return dataloader
        shared = Loader(dataloader, seed=self._given["seed"], rank=self.handle.rank, size=self.handle.workers)
        shared.fetched = self._prepared.fetched
        return shared

    def training_step(self, *args, **kwargs):
        """As the module has it, with the parameters at which the strategy wants the gradient."""
        self._prepared.begin()
        return super().training_step(*args, **kwargs)

    def on_train_end(self):
        """All workers have the model of the strategy from here on."""
        self._prepared.finish()
        self._finished = True

    @property
    def is_global_zero(self):
        """Worker 0 prints and saves."""
        return self._prepared is None or self.handle.is_coordinator

    def reduce(self, tensor, *args, **kwargs):
        """The mean over the workers, for `self.log(..., sync_dist=True)`, in training and in validation during it.

        So a scheduler that monitors a validation loss sees the same on every worker. After training all have one model.
        """
        together = self._prepared is not None and not self._finished
        return torch.as_tensor(self.handle.mean(tensor)) if together else tensor


class Digits(pl.LightningModule):
    """A small classifier."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, index):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="slowmo(tau=8)")
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    model = Digits()
    trainer = pl.Trainer(
        max_epochs=args.epochs, strategy=OrchestraStrategy(args.strategy), devices=1, logger=False,
        gradient_clip_val=5.0, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, DataLoader(TensorDataset(*digits("train")), batch_size=32, shuffle=True))
    x, y = digits("test")
    with torch.no_grad():
        accuracy = (model.net(x).argmax(1) == y).float().mean().item()
    if trainer.strategy.is_global_zero:
        print(f"accuracy {accuracy:.3f}, workers: {trainer.strategy.handle.workers}")


if __name__ == "__main__":
    main()
