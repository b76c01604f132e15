"""Networks that training steps are timed on."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention


def mlp() -> nn.Module:
    """1.2 million parameters on 784 inputs."""
    return nn.Sequential(nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 700), nn.ReLU(), nn.Linear(700, 10))


def small_layers() -> nn.Module:
    """64 linear layers of 32×32: a step is mostly overhead, and so is measuring it."""
    hidden = [layer for _ in range(64) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(32, 10))


def cnn() -> nn.Module:
    """0.6 million parameters on 3×32×32 inputs, with batch normalisation."""

    def block(c_in: int, c_out: int) -> list[nn.Module]:
        return [nn.Conv2d(c_in, c_out, 3, padding=1), nn.BatchNorm2d(c_out), nn.ReLU()]

    return nn.Sequential(
        *block(3, 32), *block(32, 64), nn.MaxPool2d(2), *block(64, 128), nn.MaxPool2d(2), *block(128, 192),
        *block(192, 160), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(160, 10),
    )  # fmt: skip


class _Block(nn.Module):
    """A residual block of convolutions of the given kernel sizes and widths."""

    def __init__(self, width: int, widths: list[int], kernels: list[int], stride: int) -> None:
        super().__init__()
        self.convolutions, self.norms = nn.ModuleList(), nn.ModuleList()
        before = width
        for i, (after, kernel) in enumerate(zip(widths, kernels, strict=True)):
            step = stride if kernel == 3 and i == kernels.index(3) else 1
            self.convolutions.append(nn.Conv2d(before, after, kernel, step, kernel // 2, bias=False))
            self.norms.append(nn.BatchNorm2d(after))
            before = after
        self.short = None
        if stride > 1 or width != before:
            self.short = nn.Sequential(nn.Conv2d(width, before, 1, stride, bias=False), nn.BatchNorm2d(before))

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            out = norm(convolution(out))
            if i + 1 < len(self.norms):
                out = relu(out)
        return relu(out + (x if self.short is None else self.short(x)))


def resnet18(first: int = 64) -> nn.Module:
    """ResNet-18 on 3×32×32 inputs: 11.2 million parameters, 21 layers; `first` is the width of the first stage."""
    blocks, width = [], first
    for stage in range(4):
        for i in range(2):
            blocks.append(_Block(width, [first * 2**stage] * 2, [3, 3], 2 if stage and not i else 1))
            width = first * 2**stage
    stem = [nn.Conv2d(3, first, 3, 1, 1, bias=False), nn.BatchNorm2d(first), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def resnet50(first: int = 64) -> nn.Module:
    """ResNet-50 on 3×224×224 inputs: 25.6 million parameters, 54 layers; `first` is the width of its first layer."""
    stem = [nn.Conv2d(3, first, 7, 2, 3, bias=False), nn.BatchNorm2d(first), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks, width = [], first
    for stage, count in enumerate([3, 4, 6, 3]):
        inner = first * 2**stage
        for i in range(count):
            blocks.append(_Block(width, [inner, inner, 4 * inner], [1, 3, 1], 2 if stage and not i else 1))
            width = 4 * inner
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


def resnet110(count: int = 18) -> nn.Module:
    """ResNet-110 on 3×32×32 inputs: 1.7 million parameters, 112 layers; `count` is how many blocks a stage has."""
    blocks, width = [], 16
    for stage in range(3):
        for i in range(count):
            blocks.append(_Block(width, [16 * 2**stage] * 2, [3, 3], 2 if stage and not i else 1))
            width = 16 * 2**stage
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class _Transformer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2's smallest: 124 million parameters, 50 layers, the output tied to the token embedding."""

    def __init__(self, tokens: int = 50257, length: int = 1024, width: int = 768, depth: int = 12) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Transformer(width, width // 64) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        out = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            out = block(out)
        return self.head(self.norm(out))


class Transformer(GPT2):
    """A small language model: 6 blocks of width 512 with 8 heads, 4,096 tokens, 23.2 million parameters, 25 layers.

    The output is a layer of its own, and logits come as [batch, tokens, length], the way `cross_entropy` takes them
    beside labels [batch, length].
    """

    def __init__(self, tokens: int = 4096, length: int = 128, width: int = 512, depth: int = 6) -> None:
        super().__init__(tokens, length, width, depth)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2)
