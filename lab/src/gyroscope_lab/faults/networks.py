"""The networks that faults are put into: small, of every common kind, on data that is shipped with Python packages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import Optimizer

from gyroscope_lab.data.digits import stored_digits

Batch = tuple[Tensor, Tensor]
# The number of examples of each data set that are not trained on.
_TESTED = 360


@dataclass(frozen=True)
class Network:
    """A network, its data and the recipe that trains it well.

    Attributes:
        name: the name of the network.
        make: returns the model for a seed.
        data: returns all inputs and targets.
        optimizer: returns the optimizer for parameter groups.
        steps: the number of steps.
        batch: examples per step.
        warmup: steps over which the learning rate grows from a tenth.
        clip: the largest norm of all gradients together; None for no clipping.
        held_out: whether no threshold was set by looking at it.
    """

    name: str
    make: Callable[[int], nn.Module]
    data: Callable[[], Batch]
    optimizer: Callable[[Iterable[Any]], Optimizer]
    steps: int = 300
    batch: int = 64
    warmup: int = 0
    clip: float | None = None
    held_out: bool = False

    def batches(self, seed: int) -> Iterator[Batch]:
        """Batches without end, in an order of their own for each seed; an epoch has each example once."""
        x, y = (part[_TESTED:] for part in self.data())
        generator = torch.Generator().manual_seed(1000 + seed)
        while True:
            order = torch.randperm(len(x), generator=generator)
            for at in range(0, len(x) - self.batch + 1, self.batch):
                chosen = order[at : at + self.batch]
                yield x[chosen], y[chosen]

    def tested(self) -> Batch:
        """Examples that are not trained on."""
        x, y = self.data()
        return x[:_TESTED], y[:_TESTED]


@cache
def digits() -> Batch:
    """Scikit-learn's digits, [1797, 1, 8, 8], standardized."""
    pixels, labels = stored_digits()
    x = pixels.float()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return ((x - x.mean()) / x.std())[order], labels[order]


@cache
def text(length: int = 32, sequences: int = 4000) -> Batch:
    """Characters of the manual that is shipped with Python, and the character after each: [sequences, length]."""
    from pydoc_data.topics import topics

    characters = "".join(topics[name] for name in sorted(topics)).encode("ascii", "replace")
    codes = torch.tensor([min(c, 127) for c in characters[: 16 * sequences + length + 1]])
    starts = torch.arange(sequences) * 16
    index = starts[:, None] + torch.arange(length + 1)
    windows = codes[index]
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    return windows[order, :-1].contiguous(), windows[order, 1:].contiguous()


@cache
def masks() -> Batch:
    """Digits, and which of their pixels are bright: a picture to segment."""
    x, _ = digits()
    return x + 0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)), (x[:, 0] > 0).long()


def loss(outputs: Tensor, y: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of logits [N, ..., classes], or [N, classes, H, W] of pictures, in nats."""
    if y.ndim == 2:
        outputs = outputs.flatten(0, 1)
    return F.cross_entropy(outputs, y.flatten() if y.ndim == 2 else y, label_smoothing=label_smoothing)


def seeded(build: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """Return a function that builds the network from a seed, without touching the random numbers of others."""

    def make(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build()

    return make


def _mlp4() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


def _conv(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def _cnn() -> nn.Module:
    return nn.Sequential(
        *_conv(1, 16), *_conv(16, 16), *_conv(16, 32, 2), *_conv(32, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.scale = 1.0
        self.activation: Callable[[Tensor], Tensor] = F.relu

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        branch = self.bn2(self.conv2(self.activation(self.bn1(self.conv1(x)))))
        return self.activation(self.shortcut(x) + self.scale * branch)


def _resnet20() -> nn.Module:
    widths = [8, 8, 8, 16, 16, 16, 32, 32, 32]
    before = [8, *widths[:-1]]
    blocks = [Block(i, o, 1 if i == o else 2) for i, o in zip(before, widths, strict=True)]
    return nn.Sequential(*_conv(1, 8), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class Attention(nn.Module):
    """Self-attention of two heads and a perceptron, each behind a layer normalization."""

    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.causal, self.scale = causal, 1.0
        self.activation: Callable[[Tensor], Tensor] = F.gelu

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.scale * self.out(mixed.transpose(1, 2).reshape(n, t, width))
        out: Tensor = x + self.scale * self.down(self.activation(self.up(self.norm2(x))))
        return out


class Characters(nn.Module):
    """A pre-LN transformer of characters."""

    def __init__(self, width: int = 48, depth: int = 3, length: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Attention(width, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        out: Tensor = self.head(self.norm(self.blocks(self.embedding(x) + self.places)))
        return out


class Layer(nn.Module):
    """A linear layer, a batch normalization and a ReLU, added to the input where the widths agree."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(inputs, outputs, bias=False), nn.BatchNorm1d(outputs)
        self.skips, self.scale = inputs == outputs, 1.0
        self.activation: Callable[[Tensor], Tensor] = F.relu

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        branch = self.activation(self.bn(self.linear(x)))
        return x + self.scale * branch if self.skips else branch


def _mlp100() -> nn.Module:
    # Without skip connections its gradients explode, by 1.47 per layer, and it does not learn in so few steps.
    return nn.Sequential(
        nn.Flatten(), Layer(64, 32), *(Layer(32, 32) for _ in range(98)), nn.LayerNorm(32), nn.Linear(32, 10)
    )


class Recurrent(nn.Module):
    """An LSTM or GRU of characters."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 32)
        self.cells = kind(32, width, batch_first=True)
        self.head = nn.Linear(width, 128)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        out: Tensor = self.head(self.cells(self.embedding(x))[0])
        return out


class ViT(nn.Module):
    """A vision transformer of patches of 2x2 pixels."""

    def __init__(self, width: int = 48, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.places = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.Sequential(*(Attention(width, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        out: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return out


class Mixer(nn.Module):
    """An MLP-mixer of patches of 2x2 pixels."""

    class Layer(nn.Module):
        """A perceptron over the patches and one over the channels."""

        def __init__(self, tokens: int, width: int) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
            self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            self.scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            """Return the outputs."""
            x = x + self.scale * self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
            out: Tensor = x + self.scale * self.channels(self.norm2(x))
            return out

    def __init__(self, width: int = 48, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, 2)
        self.blocks = nn.Sequential(*(self.Layer(16, width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        out: Tensor = self.head(self.norm(self.blocks(self.patches(x).flatten(2).transpose(1, 2))).mean(1))
        return out


class UNet(nn.Module):
    """A U-Net of two levels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1 = nn.Sequential(*_conv(1, width), *_conv(width, width))
        self.down2 = nn.Sequential(*_conv(width, 2 * width, 2), *_conv(2 * width, 2 * width))
        self.bottom = nn.Sequential(*_conv(2 * width, 4 * width, 2), *_conv(4 * width, 4 * width))
        self.up2 = nn.Sequential(*_conv(6 * width, 2 * width))
        self.up1 = nn.Sequential(*_conv(3 * width, width))
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs."""
        one = self.down1(x)
        two = self.down2(one)
        up = self.up2(torch.cat([two, F.interpolate(self.bottom(two), scale_factor=2.0)], 1))
        out: Tensor = self.head(self.up1(torch.cat([one, F.interpolate(up, scale_factor=2.0)], 1)))
        return out


def _sgd(lr: float, decay: float = 0.0) -> Callable[[Iterable[Any]], Optimizer]:
    return lambda groups: torch.optim.SGD(groups, lr=lr, momentum=0.9, weight_decay=decay)


def _adamw(lr: float, decay: float = 0.01) -> Callable[[Iterable[Any]], Optimizer]:
    return lambda groups: torch.optim.AdamW(groups, lr=lr, weight_decay=decay)


NETWORKS = {
    network.name: network
    for network in (
        Network("mlp-4", seeded(_mlp4), digits, _sgd(0.05)),
        Network("cnn", seeded(_cnn), digits, lambda groups: torch.optim.Adam(groups, lr=2e-3)),
        Network("resnet-20", seeded(_resnet20), digits, _sgd(0.1, 5e-4)),
        Network("transformer", seeded(Characters), text, _adamw(3e-3), batch=32, warmup=30, clip=1.0),
        Network("mlp-100", seeded(_mlp100), digits, _sgd(0.02), batch=128),
        Network("lstm", seeded(lambda: Recurrent(nn.LSTM)), text, _adamw(4e-3, 0.0), batch=32, clip=1.0),
        Network("vit", seeded(ViT), digits, _adamw(2e-3, 0.05), warmup=30, held_out=True),
        Network("gru", seeded(lambda: Recurrent(nn.GRU)), text, _adamw(4e-3, 0.0), batch=32, clip=1.0, held_out=True),
        Network("unet", seeded(UNet), masks, lambda groups: torch.optim.Adam(groups, lr=2e-3), held_out=True),
        Network("mixer", seeded(Mixer), digits, _adamw(2e-3, 0.01), held_out=True),
    )
}
