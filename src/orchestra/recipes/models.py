# SPDX-License-Identifier: Apache-2.0
"""The models of the recipes: a perceptron, LeNet-5 and a small causal transformer.

Plain modules without dropout or batch statistics: the gradient is a function of parameters and batch alone, so a run
can be repeated to the bit, and `torch.func` may batch many replicas into one evaluation.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def mlp(*widths: int) -> nn.Sequential:
    """Return linear layers of these widths with ReLU between; `mlp(64, 128, 10)` has one hidden layer."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class LeNet5(nn.Module):
    """LeNet-5 for 28x28 grey images in the form used today, with ReLU and max-pooling: 61,706 parameters.

    LeCun, Bottou, Bengio, Haffner. "Gradient-based learning applied to document recognition", 1998.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 6, kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, kernel_size=5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = mlp(16 * 5 * 5, 120, 84, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, 1, 28, 28) to logits (N, classes)."""
        scores: Tensor = self.head(self.features(images).flatten(1))
        return scores


class Block(nn.Module):
    """One layer of the transformer: causal attention, then a perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Map activations (N, T, width) to activations of the same shape."""
        samples, length, width = x.shape
        q, k, v = (
            part.view(samples, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.before_attention(x)).split(width, dim=-1)
        )
        # Not the fused attention of torch: it has no batching rule on CPU, and sequences here are short.
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(later, float("-inf")).softmax(-1)
        mixed = weights @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        y: Tensor = x + self.mlp(self.before_mlp(x))
        return y


class CharGPT(nn.Module):
    """A causal transformer over characters, pre-norm, with learned positions; the last layer shares the embedding."""

    def __init__(self, *, kinds: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(kinds, width)
        self.position = nn.Parameter(torch.empty(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                # The output of each block starts small, so that the sum over all blocks is as large as one block.
                small = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(weight, std=0.7 * (width * (2 * layers if small else 1)) ** -0.5)

    def forward(self, characters: Tensor) -> Tensor:
        """Map numbers of characters (N, T) to the logits of the next characters, (N, T, kinds)."""
        x = self.embedding(characters) + self.position[: characters.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.embedding.weight)
