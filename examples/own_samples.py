# SPDX-License-Identifier: Apache-2.0
"""A loop that reads its own samples, follows a validation loss, and keeps a moving average of the model.

    torchrun --standalone --nproc-per-node 4 examples/own_samples.py
    orchestra run examples/own_samples.py -n 4 -s "slowmo(tau=8)"

Without a loader each worker must read other samples, so the data is cut before `prepare`. All workers must have the
same learning rate, so the scheduler sees the mean of the validation loss. `finish` makes one model of the workers'
replicas, and one average of their averages.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import orchestra
from orchestra.data import digits

BATCH = 16

parser = argparse.ArgumentParser()
parser.add_argument("--strategy", default="localsgd(tau=4)")
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

rank, workers = orchestra.rank(), orchestra.world_size(args.strategy)
inputs, labels = (t[rank::workers] for t in digits("train"))
tests, answers = (t[rank::workers] for t in digits("test"))
steps = len(digits("train")[0]) // (BATCH * workers)  # as many everywhere, although one worker may have a sample more

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model, optimizer = orchestra.prepare(model, optimizer, strategy=args.strategy)
scheduler = ReduceLROnPlateau(optimizer, patience=1)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))

for _ in range(args.epochs):
    model.train()
    for chosen in torch.randperm(len(inputs))[: steps * BATCH].split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        optimizer.step()
        average.update_parameters(model)
    model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(tests), answers)
    scheduler.step(optimizer.orchestra.mean(loss, weight=len(tests)))
optimizer.finish(also=[average])

tests, answers = digits("test")
with torch.no_grad():
    accuracy = (average(tests).argmax(1) == answers).float().mean().item()
if optimizer.orchestra.is_coordinator:
    print(f"accuracy {accuracy:.3f}, workers: {optimizer.orchestra.workers}")
