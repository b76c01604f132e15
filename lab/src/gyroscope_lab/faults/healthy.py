"""Trainings in which nothing is wrong, hard ones among them: what looks odd and is meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import cos, pi
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import Optimizer

import gyroscope
from gyroscope_lab.faults.injections import DATA_PARALLEL, Scene
from gyroscope_lab.faults.networks import Batch, Characters, Recurrent, loss


@dataclass(frozen=True)
class Healthy:
    """A training that no diagnosis should raise an alarm about.

    Attributes:
        name: the name of the variant.
        prepare: changes a scene; returns False if the network has no place for it.
    """

    name: str
    prepare: Callable[[Scene], bool]


HEALTHY: dict[str, Healthy] = {}


def _healthy(name: str) -> Callable[[Callable[[Scene], bool]], Callable[[Scene], bool]]:
    def register(prepare: Callable[[Scene], bool]) -> Callable[[Scene], bool]:
        HEALTHY[name] = Healthy(name, prepare)
        return prepare

    return register


@_healthy("as it is")
def _plain(it: Scene) -> bool:
    return True


@_healthy("warm-up")
def _warm(it: Scene) -> bool:
    it.scale_rate(lambda step: min(1.0, step / 60))
    return True


@_healthy("cosine to zero")
def _cosine(it: Scene) -> bool:
    steps = it.network.steps
    it.scale_rate(lambda step: 0.5 * (1 + cos(pi * step / (steps - 1))))
    return True


@_healthy("small batches")
def _small(it: Scene) -> bool:
    it.batches = _resized(it, 8)
    it.scale_rate(lambda step: 0.3)
    return True


@_healthy("large batches")
def _large(it: Scene) -> bool:
    it.batches = _resized(it, 256)
    return True


def _resized(it: Scene, size: int) -> Iterator[Batch]:
    return replace(it.network, batch=size).batches(it.seed)


@_healthy("three times the learning rate")
def _faster(it: Scene) -> bool:
    it.scale_rate(lambda step: 3)
    return it.network.name not in ("transformer", "vit", "mixer")  # those diverge without a longer warm-up


@_healthy("a third of the learning rate")
def _slower(it: Scene) -> bool:
    before = it.rate
    it.rate = lambda step: before(step) / 3
    return True


@_healthy("frozen backbone")
def _backbone(it: Scene) -> bool:
    for name in it.names[: len(it.names) // 2]:
        it.layer(name).requires_grad_(False)
    _only_trainable(it)
    return True


@_healthy("head alone in the optimizer")
def _head(it: Scene) -> bool:
    last = it.names[-1]
    it.build = lambda model: it.network.optimizer([model.get_parameter(last)])
    return True


@_healthy("backbone at a hundredth of the rate")
def _discriminative(it: Scene) -> bool:
    def build(model: nn.Module) -> Optimizer:
        head = [p for n, p in model.named_parameters() if n == it.names[-1]]
        rest = [p for n, p in model.named_parameters() if n != it.names[-1]]
        return it.network.optimizer([{"params": rest, "lr": 0.01 * it.lr}, {"params": head}])

    it.build = build
    return True


class LoRA(nn.Module):
    """A frozen linear layer, and a trained product of two thin ones, the second of which begins at zero."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both."""
        out: Tensor = self.base(x) + self.lora_b(self.lora_a(x))
        return out


@_healthy("LoRA")
def _lora(it: Scene) -> bool:
    inner = [name for name, m in it.model.named_modules() if isinstance(m, nn.Linear)][:-1]
    if len(inner) < 2 or len(inner) > 50:
        return False
    for parameter in it.model.parameters():
        parameter.requires_grad_(False)
    for name in inner:
        parent, _, leaf = name.rpartition(".")
        module = it.model.get_submodule(name)
        assert isinstance(module, nn.Linear)
        setattr(it.model.get_submodule(parent), leaf, LoRA(module))
    it.model.get_parameter(it.names[-1]).requires_grad_(True)
    it.names = [layer.name for layer in gyroscope.layers(it.model)]
    _only_trainable(it)
    return True


def _only_trainable(it: Scene) -> None:
    it.build = lambda model: it.network.optimizer([p for p in model.parameters() if p.requires_grad])


@_healthy("tied weights")
def _tied(it: Scene) -> bool:
    if not isinstance(it.model, Characters):
        return False
    it.model.head.weight = it.model.embedding.weight
    it.names = [layer.name for layer in gyroscope.layers(it.model)]
    return True


class Experts(nn.Module):
    """Experts of which a router uses all but one."""

    def __init__(self, width: int, count: int = 4) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Add the output of the experts in use, a third of the examples each."""
        out = x.clone()
        used = list(self.experts)[:-1]
        for i, expert in enumerate(used):
            out[i :: len(used)] = x[i :: len(used)] + F.relu(expert(x[i :: len(used)]))
        return out


@_healthy("an idle expert")
def _expert(it: Scene) -> bool:
    if it.network.name != "mlp-4" or not isinstance(it.model, nn.Sequential):
        return False
    it.model.insert(3, Experts(128))
    it.names = [layer.name for layer in gyroscope.layers(it.model)]
    return True


@_healthy("a third of the units dead")
def _dead(it: Scene) -> bool:
    kinds = (nn.Linear, nn.BatchNorm2d, nn.BatchNorm1d)
    biases = [m.bias for m in it.model.modules() if isinstance(m, kinds) and isinstance(m.bias, Tensor)]
    for own in biases[:-1]:  # the last one is the head's
        if own.numel() > 16:
            with torch.no_grad():
                own[: own.numel() * 3 // 10] -= 10.0
    return it.network.name in ("mlp-4", "cnn", "unet")


@_healthy("zero-initialized head")
def _zero_head(it: Scene) -> bool:
    nn.init.zeros_(it.layer(it.names[-1]))
    return True


@_healthy("dropout")
def _dropout(it: Scene) -> bool:
    for module in list(it.model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ReLU | nn.GELU):
                setattr(module, name, nn.Sequential(child, nn.Dropout(0.2)))
    return not isinstance(it.model, Recurrent)


@_healthy("weight decay")
def _decay(it: Scene) -> bool:
    it.build = lambda model: torch.optim.AdamW(model.parameters(), lr=min(it.lr, 3e-3), weight_decay=0.1)
    return True


@_healthy("label smoothing")
def _smoothing(it: Scene) -> bool:
    it.loss = partial(loss, label_smoothing=0.1)
    return True


@_healthy("distillation")
def _distilled(it: Scene) -> bool:
    teacher = it.network.make(it.seed + 100).eval()
    usual = it.loss
    held: list[Tensor] = []
    batches = it.batches

    def pairs() -> Iterable[Any]:
        for x, y in batches:
            with torch.no_grad():
                held[:] = [teacher(x)]
            yield x, y

    def both(outputs: Tensor, y: Tensor) -> Tensor:
        return usual(outputs, y) + 0.1 * F.mse_loss(outputs, held[0])

    it.batches, it.loss = iter(pairs()), both
    return True


@_healthy("clipping at 1")
def _clipping(it: Scene) -> bool:
    it.clip = 1.0
    return True


@_healthy("gradient accumulation")
def _accumulation(it: Scene) -> bool:
    usual, halves = it.batches, it.network.batch // 2

    def first(step: int) -> None:
        # The first half-batch; the scene's own backward pass adds the second.
        for one in it.optimizers:
            one.zero_grad()
        x, y = next(usual)
        (0.5 * it.loss(it.model(x[:halves]), y[:halves])).backward()  # type: ignore[no-untyped-call]

    it.before_forward.append(first)
    it.clears = False
    return True


@_healthy("Layca")
def _layca(it: Scene) -> bool:
    it.build = lambda model: gyroscope.Layca(torch.optim.SGD(model.parameters(), lr=3**-4, momentum=0.9), model)
    return True


@_healthy("Muon")
def _muon(it: Scene) -> bool:
    inner = [name for name in it.names[1:-1] if it.layer(name).ndim == 2]
    if len(inner) < 2 or len(inner) > 50:
        return False

    def build(model: nn.Module) -> list[Optimizer]:
        rest = [p for n, p in model.named_parameters() if n not in inner]
        muon = torch.optim.Muon([model.get_parameter(name) for name in inner], lr=0.02, weight_decay=0.0)
        return [muon, torch.optim.AdamW(rest, lr=3e-3)]

    it.build = build
    return True


@_healthy("SGD without momentum")
def _sgd(it: Scene) -> bool:
    if it.network.name in ("transformer", "lstm", "gru", "vit", "mixer"):
        return False
    it.build = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    return True


@_healthy("RMSprop")
def _rmsprop(it: Scene) -> bool:
    it.build = lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3)
    return True


@_healthy("two data-parallel ranks")
def _ranks(it: Scene) -> bool:
    it.ranks = 2
    it.forward = it.model  # its wrapper, once there is a process group
    return it.network.name in DATA_PARALLEL
