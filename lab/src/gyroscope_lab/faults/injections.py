"""Faults that people put into trainings without wanting to, each with the answer that is expected.

A fault changes a `Scene`: the model, the optimizer, the data or what happens around a step. It says where it is
(the layers that a diagnosis should name first), since when, and which kinds of finding are accepted as an answer, its
consequences included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import Optimizer

import gyroscope
from gyroscope_lab.faults.networks import Attention, Batch, Block, Layer, Mixer, Network, Recurrent, loss

Act = Callable[[int], None]


@dataclass
class Scene:
    """A training that is about to begin.

    Attributes:
        network: the network that is trained.
        seed: the seed of weights and batches.
        model: the network.
        names: its layers, in forward order.
        batches: the batches it is trained on.
        loss: the loss of (outputs, targets).
        build: returns the optimizer, or several, for a model.
        optimizers: the result of `build`, once the model is final.
        rate: returns the factor on the learning rate at a step.
        clip: the largest norm of all gradients.
        clears: whether gradients are cleared before each backward pass.
        ranks: the number of data-parallel processes that train.
        forward: the module that the forward pass calls instead of the model.
        after_build: called once the optimizers are made.
        before_forward, after_backward, after_step: functions of the step, called at these points.
    """

    network: Network
    seed: int
    model: nn.Module
    names: list[str]
    batches: Iterator[Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    build: Callable[[nn.Module], Optimizer | list[Optimizer]]
    optimizers: list[Optimizer] = field(default_factory=list)
    rate: Callable[[int], float] = lambda step: 1.0
    clip: float | None = None
    clears: bool = True
    ranks: int = 1
    forward: Callable[[Tensor], Tensor] | None = None
    after_build: list[Callable[[], None]] = field(default_factory=list)
    before_forward: list[Act] = field(default_factory=list)
    after_backward: list[Act] = field(default_factory=list)
    after_step: list[Act] = field(default_factory=list)

    def layer(self, name: str) -> nn.Parameter:
        """The weight of a layer."""
        found: nn.Parameter = self.model.get_parameter(name)
        return found

    def module(self, name: str) -> nn.Module:
        """The module that has a layer."""
        return self.model.get_submodule(name.rpartition(".")[0])

    @property
    def lr(self) -> float:
        """The learning rate of the network's own optimizer."""
        lr: float = self.network.optimizer([nn.Parameter(torch.zeros(1))]).defaults["lr"]
        return lr

    def scale_rate(self, factor: Callable[[int], float]) -> None:
        """Multiply the learning rate at each step by a factor."""
        before = self.rate
        self.rate = lambda step: factor(step) * before(step)

    def begin(self) -> None:
        """Make the optimizers, now that the model is final."""
        made = self.build(self.model)
        self.optimizers = made if isinstance(made, list) else [made]
        for act in self.after_build:
            act()


def scene(network: Network, seed: int) -> Scene:
    """A training without a fault."""
    model = network.make(seed)

    def build(model: nn.Module) -> Optimizer:
        return network.optimizer(p for p in model.parameters())

    def rate(step: int) -> float:
        return min(1.0, 0.1 + 0.9 * step / network.warmup) if network.warmup else 1.0

    names = [layer.name for layer in gyroscope.layers(model)]
    return Scene(network, seed, model, names, network.batches(seed), loss, build, rate=rate, clip=network.clip)


def train(it: Scene, *, each: Callable[[int, Tensor], None] | None = None) -> None:
    """Train; `each` is called after every step, with its loss."""
    groups = [(group, group["lr"]) for one in it.optimizers for group in one.param_groups]
    for step in range(it.network.steps):
        for group, lr in groups:
            group["lr"] = lr * it.rate(step)
        x, y = next(it.batches)
        for act in it.before_forward:
            act(step)
        value = it.loss((it.forward or it.model)(x), y)
        if it.clears:
            for one in it.optimizers:
                one.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        for act in it.after_backward:
            act(step)
        if it.clip is not None:
            nn.utils.clip_grad_norm_(it.model.parameters(), it.clip)
        for one in it.optimizers:
            one.step()
        for act in it.after_step:
            act(step)
        if each is not None:
            each(step, value.detach())


def accuracy(it: Scene) -> float:
    """Return the share of right answers on examples that were not trained on; of a diverged network, chance or less."""
    x, y = it.network.tested()
    it.model.eval()
    with torch.no_grad():
        outputs = it.model(x)
    dim = 1 if outputs.ndim == 4 else -1
    return float((outputs.argmax(dim) == y).double().mean())


@dataclass(frozen=True)
class Injected:
    """The place and the time of a fault in a scene.

    Attributes:
        layers: the layers of which a diagnosis should name any one first; empty if no layer is to blame.
        since: the step at which it began; None if it was there from the beginning.
    """

    layers: tuple[str, ...] = ()
    since: int | None = None


@dataclass(frozen=True)
class Fault:
    """A fault and the answer that is expected.

    Attributes:
        name: the name of the fault.
        family: "updates", "structure" or "data".
        inject: changes a scene; None where the network has no place for it.
        accepted: the kinds of finding that answer it, its consequences included; fixed before any was scored.
    """

    name: str
    family: str
    inject: Callable[[Scene], Injected | None]
    accepted: frozenset[str]


FAULTS: dict[str, Fault] = {}
#: The networks that are also trained on two data-parallel ranks, which takes two processes each.
DATA_PARALLEL = ("mlp-4", "cnn", "transformer", "vit", "gru")


def _fault(name: str, family: str, *accepted: str) -> Callable[[Callable[[Scene], Injected | None]], Any]:
    def register(inject: Callable[[Scene], Injected | None]) -> Any:
        FAULTS[name] = Fault(name, family, inject, frozenset(accepted))
        return inject

    return register


def _middle(it: Scene) -> str:
    """A layer of the middle, another for each seed."""
    inner = [name for name in it.names[1:-1] if "embedding" not in name] or it.names[:1]
    third = len(inner) // 3
    return inner[(third + it.seed * max(1, third // 2)) % len(inner)]


def _moment(it: Scene) -> int:
    """A step of the middle of the training, another for each seed."""
    return it.network.steps // 2 + 7 * it.seed


def _groups(it: Scene, **by_name: dict[str, Any]) -> None:
    """Have the optimizer made with groups of their own for some layers."""

    def build(model: nn.Module) -> Optimizer:
        apart = {id(model.get_parameter(name)): options for name, options in by_name.items()}
        rest = [p for p in model.parameters() if id(p) not in apart]
        own = [{"params": [model.get_parameter(name)], **options} for name, options in by_name.items()]
        return it.network.optimizer([{"params": rest}, *own])

    it.build = build


def _stages(model: nn.Module) -> list[nn.Module]:
    """The parts of a network that follow each other, in order."""
    if isinstance(model, nn.Sequential):
        return list(model)
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.Sequential) and not isinstance(child[0], nn.Conv2d) else [child]
    return found


def _below(it: Scene, stages: list[nn.Module], last: int) -> tuple[str, ...]:
    inside = {id(p) for stage in stages[: last + 1] for p in stage.parameters()}
    return tuple(name for name in it.names if id(it.layer(name)) in inside)


# Updates


@_fault("absent", "updates", "not_in_optimizer")
def _absent(it: Scene) -> Injected:
    k = _middle(it)
    it.build = lambda model: it.network.optimizer([p for n, p in model.named_parameters() if n != k])
    return Injected((k,))


@_fault("frozen", "updates", "frozen")
def _frozen(it: Scene) -> Injected:
    k = _middle(it)
    it.layer(k).requires_grad_(False)
    return Injected((k,))


@_fault("detached", "updates", "no_gradient")
def _detached(it: Scene) -> Injected | None:
    stages = _stages(it.model)
    with_layers = [i for i, stage in enumerate(stages) if any(True for _ in stage.parameters())]
    at = with_layers[len(with_layers) // 2 - 1]
    stages[at].register_forward_hook(
        lambda module, inputs, output: (
            output.detach()
            if isinstance(output, Tensor)
            else tuple(o.detach() if isinstance(o, Tensor) else o for o in output)
        )
    )
    return Injected(_below(it, stages, at))


@_fault("no zero_grad", "updates", "gradients_accumulate", "too_fast", "not_finite")
def _no_zero_grad(it: Scene) -> Injected:
    it.clears = False
    return Injected()


@_fault("replaced", "updates", "replaced")
def _replaced(it: Scene) -> Injected:
    def replace() -> None:
        for module in it.model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.detach().clone())

    it.after_build.append(replace)
    return Injected(tuple(it.names))


@_fault("clipped at 1e-5", "updates", "too_slow", "at_chance")
def _clipped(it: Scene) -> Injected:
    it.clip = 1e-5
    return Injected()


@_fault("lr x 300", "updates", "too_fast", "not_finite", "dead_units", "at_chance")
def _fast(it: Scene) -> Injected:
    it.scale_rate(lambda step: 300)
    return Injected()


@_fault("lr x 1e-4", "updates", "too_slow", "at_chance")
def _slow(it: Scene) -> Injected:
    it.scale_rate(lambda step: 1e-4)
    return Injected()


@_fault("lr of k x 1e-3", "updates", "slow_layer")
def _slow_layer(it: Scene) -> Injected:
    k = _middle(it)
    _groups(it, **{k: {"lr": 1e-3 * it.lr}})
    return Injected((k,))


@_fault("coupled decay x 100", "updates", "decay_dominates", "at_chance")
def _decay(it: Scene) -> Injected:
    def build(model: nn.Module) -> Optimizer:
        usual = it.network.optimizer(model.parameters())
        lr = usual.defaults["lr"]
        if isinstance(usual, torch.optim.SGD):
            return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.05)
        return torch.optim.Adam(model.parameters(), lr=lr, weight_decay=1.0)

    it.build = build
    return Injected()


@_fault("Adam's eps = 1", "updates", "too_slow", "at_chance")
def _epsilon(it: Scene) -> Injected:
    def build(model: nn.Module) -> Optimizer:
        lr = it.network.optimizer(model.parameters()).defaults["lr"]
        return torch.optim.Adam(model.parameters(), lr=min(lr, 2e-3), eps=1.0)

    it.build = build
    return Injected()


@_fault("scheduler per batch", "updates", "schedule_collapsed")
def _scheduler(it: Scene) -> Injected:
    since = it.network.steps // 10
    it.scale_rate(lambda step: 0.9 ** max(0, step - since))
    return Injected(since=since)


@_fault("clipped before unscaling", "updates", "too_slow", "at_chance")
def _unscaled(it: Scene) -> Injected:
    it.clip = 1.0 / 65536
    return Injected()


# Structure


@_fault("weights x 100", "structure", "large_weights")
def _large(it: Scene) -> Injected:
    k = _middle(it)
    with torch.no_grad():
        it.layer(k).mul_(100)
    return Injected((k,))


@_fault("weights = 0", "structure", "zero_weights", "no_gradient", "dead_units", "slow_layer", "at_chance")
def _zero(it: Scene) -> Injected:
    k = _middle(it)
    nn.init.zeros_(it.layer(k))
    return Injected((k,))


@_fault("weights constant", "structure", "symmetric")
def _constant(it: Scene) -> Injected:
    k = _middle(it)
    nn.init.constant_(it.layer(k), 0.05)
    return Injected((k,))


@_fault("bias = -20", "structure", "dead_units", "no_gradient", "slow_layer")
def _bias(it: Scene) -> Injected | None:
    k = _middle(it)
    module, after = it.module(k), None
    modules = list(it.model.modules())
    if getattr(module, "bias", None) is not None:
        after = module.bias
    else:
        following = modules[modules.index(module) + 1 :]
        norm = next((m for m in following if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)), None)
        after = None if norm is None else norm.bias
    if after is None or not isinstance(after, Tensor):
        return None
    nn.init.constant_(after, -20.0)
    return Injected((k,))


@_fault("sigmoids", "structure", "saturating", "vanishing", "at_chance")
def _sigmoids(it: Scene) -> Injected | None:
    if isinstance(it.model, Recurrent):
        return None
    for module in it.model.modules():
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ReLU | nn.GELU):
                setattr(module, name, nn.Sigmoid())
        if isinstance(module, Block | Layer | Attention):
            module.activation = torch.sigmoid
    return Injected(tuple(it.names[:3]))


@_fault("normalizer removed", "structure", "vanishing", "slow_layer", "dead_units", "too_fast")
def _removed(it: Scene) -> Injected | None:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm)
    norms = [name for name, module in it.model.named_modules() if isinstance(module, kinds)]
    if not norms:
        return None
    name = norms[len(norms) // 2]
    parent, _, leaf = name.rpartition(".")
    order = [n for n, _ in it.model.named_modules()]
    before = [n for n in it.names if order.index(n.rpartition(".")[0]) < order.index(name)]
    setattr(it.model.get_submodule(parent), leaf, nn.Identity())
    return Injected((before[-1],) if before else ())


@_fault("softmax before the loss", "structure", "double_softmax", "at_chance", "too_slow", "dead_units")
def _softmax(it: Scene) -> Injected:
    usual = it.loss
    dim = 1 if it.network.name == "unet" else -1
    it.loss = lambda outputs, y: usual(F.softmax(outputs, dim), y)
    return Injected((it.names[-1],))


@_fault("branch x 10", "structure", "large_branch", "too_fast", "vanishing", "slow_layer")
def _branch(it: Scene) -> Injected | None:
    blocks = [m for m in it.model.modules() if isinstance(m, Block | Layer | Attention | Mixer.Layer)]
    if not blocks:
        return None
    block = blocks[len(blocks) // 2]
    block.scale = 10.0
    inside = {id(p) for p in block.parameters()}
    return Injected(tuple(name for name in it.names if id(it.layer(name)) in inside))


@_fault("normalization in eval mode", "structure", "eval_mode")
def _evaluated(it: Scene) -> Injected | None:
    norms = [m for m in it.model.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)]
    if not norms:
        return None
    for norm in norms:
        norm.eval()
    return Injected()


# Data and hardware


def _mapped(it: Scene, change: Callable[[Tensor, Tensor], Batch]) -> None:
    batches = it.batches
    it.batches = (change(x, y) for x, y in batches)


@_fault("labels shuffled", "data", "at_chance")
def _shuffled(it: Scene) -> Injected:
    generator = torch.Generator().manual_seed(it.seed)

    def change(x: Tensor, y: Tensor) -> Batch:
        return x, y.flatten()[torch.randperm(y.numel(), generator=generator)].view(y.shape)

    _mapped(it, change)
    return Injected()


@_fault("inputs x 255", "data", "input_scale")
def _inputs(it: Scene) -> Injected | None:
    if not next(iter(it.network.batches(0)))[0].is_floating_point():
        return None
    _mapped(it, lambda x, y: (255 * x, y))
    return Injected((it.names[0],))


@_fault("one batch repeated", "data", "repeated_batch")
def _repeated(it: Scene) -> Injected:
    batch = next(it.batches)
    it.batches = (batch for _ in iter(int, 1))
    return Injected()


@_fault("NaN gradient", "data", "not_finite")
def _nan(it: Scene) -> Injected:
    k, s = _middle(it), _moment(it)

    def act(step: int) -> None:
        if step == s:
            it.layer(k).grad.view(-1)[0] = float("nan")  # type: ignore[union-attr]

    it.after_backward.append(act)
    it.clip = None
    return Injected((k,), s)


@_fault("bit flip", "data", "jump", "not_finite", "too_fast")
def _flip(it: Scene) -> Injected:
    k, s = _middle(it), _moment(it)

    def act(step: int) -> None:
        if step == s:
            with torch.no_grad():  # the highest bit of the exponent: the number grows by 2^128
                flat = it.layer(k).view(-1)
                flat[:1] = (flat[:1].view(torch.int32) ^ (1 << 30)).view(torch.float32)

    it.after_step.append(act)
    return Injected((k,), s)


@_fault("DDP bypassed", "data", "ranks_differ")
def _bypassed(it: Scene) -> Injected | None:
    it.ranks = 2  # the forward pass calls the model, not its wrapper
    return Injected() if it.network.name in DATA_PARALLEL else None
