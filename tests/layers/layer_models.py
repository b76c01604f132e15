"""Small models whose layers are known by heart."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block that registers its 1×1 shortcut before the convolutions and uses it after them."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.shortcut = nn.Conv2d(inside, outside, 1, stride=2, bias=False)
        self.conv1 = nn.Conv2d(inside, outside, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, two such blocks, dropout and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.block1 = Block(4, 8)
        self.block2 = Block(8, 8)
        self.drop = nn.Dropout(0.5)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block2(self.block1(torch.relu(self.stem(x))))
        return self.fc(self.drop(x.mean((2, 3))))


REGISTERED = [
    "stem.weight",
    "block1.shortcut.weight",
    "block1.conv1.weight",
    "block1.conv2.weight",
    "block2.shortcut.weight",
    "block2.conv1.weight",
    "block2.conv2.weight",
    "fc.weight",
]
USED = [
    "stem.weight",
    "block1.conv1.weight",
    "block1.conv2.weight",
    "block1.shortcut.weight",
    "block2.conv1.weight",
    "block2.conv2.weight",
    "block2.shortcut.weight",
    "fc.weight",
]


class Conv1D(nn.Module):
    """The shape of transformers' class of that name: a linear module with weight [in, out]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Holder(nn.Module):
    """A module of a class nobody knows, with parameters of the given names and shapes."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))


def tied() -> nn.Sequential:
    """An embedding and a head on one matrix."""
    model = nn.Sequential()
    model.add_module("embed", nn.Embedding(7, 4))
    model.add_module("body", nn.Linear(4, 4))
    model.add_module("head", nn.Linear(4, 7, bias=False))
    model.head.weight = model.embed.weight
    return model
