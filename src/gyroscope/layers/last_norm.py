"""The remedy for very deep networks: a normalization before the last linear layer.

The conditioning paper (section 5) finds that very deep residual networks are hard to train because of their last linear
layer h = Wx: the largest eigenvalue of Σx = E[xxᵀ] grows with depth, W follows it into weight domination, and the
network guesses. Its ResNet_LastBN normalizes x there, h = W BN(x), and changes nothing else.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gyroscope.base.accepted import choice, whole
from gyroscope.errors import LayerError
from gyroscope.layers.class_names import ancestry, unwrapped
from gyroscope.layers.layer import Layer
from gyroscope.layers.output_layer import around, features, last_linear, owner

Kind = Literal["batch", "layer"]
Gain = Literal["uniform", "ones"]

#: The name of the normalization: an attribute of the layer's module, and so a part of the names in `state_dict`.
ATTRIBUTE = "last_norm"


@dataclass(frozen=True)
class LastNorm:
    """The result of `last_norm`; it prints as text.

    Attributes:
        layer: the layer whose input is normalized.
        features: the number of its inputs.
        module: the normalization: `BatchNorm1d` or `LayerNorm`.
        name: the name of that module; its entries in `state_dict` begin with it.
        gain: the initialization of γ.
        parameters: the number of parameters that were added.
    """

    layer: Layer
    features: int
    module: nn.Module = field(repr=False, compare=False)
    name: str
    gain: Gain
    parameters: int

    def __str__(self) -> str:
        what = "Batch" if isinstance(self.module, nn.BatchNorm1d) else "Layer"
        start = "from U(0, 1)" if self.gain == "uniform" else "1"
        return (
            f"{what} normalization of {self.features} features now precedes {self.layer.name!r}. It is {self.name!r} "
            f"and adds {self.parameters} parameters (γ {start}, β 0). Create the optimizer after this. No other name "
            "has changed."
        )


def last_norm(
    model: nn.Module,
    sample: object = None,
    *,
    layer: str | None = None,
    kind: Kind = "batch",
    gain: Gain = "uniform",
    seed: int = 0,
) -> LastNorm:
    """Put a normalization before the last linear layer of `model`, in place: h = Wx + b becomes h = W BN(x) + b.

    The normalization becomes a part of the layer's own module, which applies it to its input first. So the module and
    every name in `state_dict` stay the same, and the names of the normalization are added ("fc.last_norm.weight" next
    to "fc.weight"). Load earlier checkpoints with `strict=False`.

    It adds parameters: call this before the optimizer is created, and before `torch.compile`, DDP or FSDP2. The random
    state is not changed. If anything is invalid, nothing is changed. Without a `sample` to show that the layer is
    called once, the first forward pass warns if the normalization does not run in it, or runs more than once.

    Args:
        model: any module that ends with one linear layer.
        sample: an input (a tensor, a tuple of positional arguments or a dict of keyword arguments) for one forward
            pass, which shows which layer is last, and its input. Without it, the layer registered last is taken; if the
            registered layers do not fit together, the error asks for a sample.
        layer: the name of the layer, if another is meant ("fc" or "fc.weight").
        kind: "batch", as in the paper, or "layer", for sequences: it normalizes each example or token on its own. Batch
            normalization of inputs [..., features] takes every position for an example.
        gain: the initialization of γ: "uniform", from U(0, 1), as in the paper, or "ones". β starts at 0.
        seed: the seed of that draw; equal seeds give equal gains, on all ranks and devices.

    Raises:
        LayerError: there is no linear layer, or not one at the end; several layers could be meant; its input is already
            normalized; its weight or module is shared, or its module is not called exactly once; it is lazy,
            sharded or on the meta device, or the model is already compiled or distributed.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> done = last_norm(net)
    >>> done.layer.name, done.features, done.name
    ('2.weight', 8, '2.last_norm')
    >>> print(done)
    Batch normalization of 8 features now precedes '2.weight'. It is '2.last_norm' and adds 16 parameters (γ from
    U(0, 1), β 0). Create the optimizer after this. No other name has changed.
    >>> last_norm(net)
    Traceback (most recent call last):
    gyroscope.errors.LayerError: The input of '2.weight' is already normalized by '2.last_norm'.
    """
    choice(kind, "kind", ("batch", "layer"), LayerError)
    choice(gain, "gain", ("uniform", "ones"), LayerError)
    drawn = whole(seed, 0)
    if drawn is None or drawn >= 2**32:
        raise LayerError(f"`seed` must be a whole number from 0 to 2³² − 1, got {seed!r}. Try 0.")
    chosen = last_linear(model, sample, layer=layer)
    name = ".".join(filter(None, [owner(chosen), ATTRIBUTE]))
    if ATTRIBUTE in chosen.module._modules:
        raise LayerError(f"The input of {chosen.name!r} is already normalized by {name!r}.")
    _refuse_wrapped(model, chosen, kind)
    norm = _made(chosen, kind, gain, drawn)
    chosen.module.add_module(ATTRIBUTE, norm)
    # After the existing hooks, so that the layer multiplies its result; hooks registered later see it normalized.
    chosen.module.register_forward_pre_hook(_normalize, with_kwargs=True)
    if sample is None:
        _FirstPass(name).watch(model, norm)
    return LastNorm(chosen, features(chosen), norm, name, gain, sum(p.numel() for p in norm.parameters()))


def _made(layer: Layer, kind: Kind, gain: Gain, seed: int) -> nn.Module:
    weight, make = layer.parameter, nn.BatchNorm1d if kind == "batch" else nn.LayerNorm
    norm: nn.Module = make(features(layer), device=weight.device, dtype=weight.dtype)
    if gain == "uniform":
        # Drawn on the CPU in float32, so that it is the same on every device.
        generator = torch.Generator("cpu").manual_seed(int(seed))
        drawn = torch.rand(features(layer), generator=generator, dtype=torch.float32, device="cpu")
        norm.load_state_dict({"weight": drawn}, strict=False)
    return norm.train(layer.module.training)


def _refuse_wrapped(model: nn.Module, layer: Layer, kind: Kind) -> None:
    for module in around(model, layer):
        names = ancestry(module)
        if "OptimizedModule" in names or module._compiled_call_impl is not None:
            raise LayerError("The model is compiled, and would run without the normalization. Compile it afterwards.")
        if "DistributedDataParallel" in names or "FullyShardedDataParallel" in names:
            raise LayerError(f"{names[0]} would ignore parameters that are added later. Wrap the model afterwards.")
        if kind == "batch" and "ActivationWrapper" in names:
            raise LayerError(
                f"{layer.name!r} is run again in the backward pass (activation checkpointing), which would count every "
                "batch twice in the running averages. Leave the last layer out of it, or use kind='layer'."
            )


class _FirstPass:
    """Warns after the first forward pass of a model if the normalization did not run exactly once, and removes itself.

    Its hooks are methods of one object, so that copies and saved models have their own object. Nothing is counted in
    compiled, traced or replicated modules, where hooks do not run once per pass.
    """

    def __init__(self, name: str) -> None:
        self.name, self.runs = name, 0

    def watch(self, model: nn.Module, norm: nn.Module) -> None:
        model = unwrapped(model)
        model.register_forward_pre_hook(self.begin)
        norm.register_forward_hook(self.count)
        model.register_forward_hook(self.end)

    def begin(self, model: nn.Module, args: Any) -> None:
        if self._counts(model):
            self.runs = 0

    def count(self, norm: nn.Module, args: Any, output: Any) -> None:
        if self._counts(norm):
            self.runs += 1

    def end(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self._counts(model) or isinstance(output, torch.fx.Proxy):
            return
        for module in model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]:
                    del hooks[key]
        if self.runs != 1:
            how = "did not run" if self.runs == 0 else f"ran {self.runs} times"
            warnings.warn(
                f"{self.name!r} {how} in the first forward pass of {type(model).__name__}, but must run once: the "
                "layer is not called as a module, or is called again. Create the model again and pass `sample` to "
                "last_norm, which shows how the model ends.",
                stacklevel=2,
            )

    @staticmethod
    def _counts(module: Any) -> bool:
        return not torch.compiler.is_compiling() and not getattr(module, "_is_replica", False)


def _normalize(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Apply the normalization: the hook. It is not a closure, so that models can be copied, pickled and compiled."""
    norm: Any = module.get_submodule(ATTRIBUTE)
    if args:
        return (_normalized(norm, args[0]), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, kwargs | {name: _normalized(norm, kwargs[name])}


def _normalized(norm: nn.Module, x: Tensor) -> Tensor:
    # BatchNorm1d would take the features of [batch, positions, features] for positions.
    rows = x if x.dim() == 2 or isinstance(norm, nn.LayerNorm) else x.reshape(-1, x.shape[-1])
    normalized: Tensor = norm(rows)
    return normalized if rows is x else normalized.reshape(x.shape)
