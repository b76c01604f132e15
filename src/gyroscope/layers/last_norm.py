"""The remedy for very deep networks: a normalization before the last linear layer.

The conditioning paper (section 5) finds that what makes very deep residual networks hard to train is their last linear
layer h = Wx: the largest eigenvalue of Σx = E[xxᵀ] grows with depth, W follows it into weight domination, and the
network guesses. Its ResNet_LastBN normalizes x there, h = W BN(x), and nothing else.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gyroscope.base.accepted import whole
from gyroscope.errors import LayerError
from gyroscope.layers.class_names import ancestry, wrapped_in
from gyroscope.layers.layer import Layer
from gyroscope.layers.output_layer import around, features, last_linear, owner

Kind = Literal["batch", "layer"]
Gain = Literal["uniform", "ones"]

#: What the normalization is called: an attribute of the layer's module, and so a part of the names in `state_dict`.
ATTRIBUTE = "last_norm"


@dataclass(frozen=True)
class LastNorm:
    """What `last_norm` did; `print` says it in words.

    Attributes:
        layer: the layer whose input is normalized now.
        features: how many inputs it has.
        module: the normalization: `BatchNorm1d` or `LayerNorm`.
        name: where that is; its entries in `state_dict` begin with this.
        gain: where γ starts.
        parameters: how many numbers there are to train now that were not there before.
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
            f"{what} normalization of {self.features} features now stands before {self.layer.name!r}. It is "
            f"{self.name!r}: {self.parameters} parameters more (γ {start}, β 0), for an optimizer that is made from "
            "here on. No other name has changed."
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

    The normalization becomes a part of the layer's own module, which applies it to its input first. So the module stays
    the one it was, every name in `state_dict` stays, and those of the normalization are added ("fc.last_norm.weight"
    beside "fc.weight"). A checkpoint from before is loaded with `strict=False`.

    It brings new parameters: call this before the optimizer is made, and before `torch.compile`, DDP or FSDP2. The
    random state is left alone. Nothing is changed unless everything can be. Where no `sample` has shown that the layer
    is called once, the first forward pass warns if the normalization does not run in it, or runs more than once.

    Args:
        model: any module that ends with one linear layer.
        sample: an input (a tensor, a tuple of positional arguments or a dict of keyword arguments) for one forward
            pass, which tells which layer is last, and what it is given. Without it, that is the layer registered
            last; where what is registered does not fit together, the sample is asked for.
        layer: the name of the layer, where it is to be another ("fc" or "fc.weight").
        kind: "batch", as in the paper, or "layer", for sequences: it looks at one example or token alone. Batch
            normalization of inputs [..., features] takes every position for an example.
        gain: where γ starts: "uniform", from U(0, 1), as the paper's did, or "ones". β starts at 0.
        seed: of that draw; equal seeds give equal gains, on all ranks and devices.

    Raises:
        LayerError: there is no linear layer, or not one at the end; several layers could be meant; its input is
            normalized already; its weight or module is shared or its module not called just once; it is lazy,
            sharded or without memory, or the model is already compiled or distributed.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> done = last_norm(net)
    >>> done.layer.name, done.features, done.name
    ('2.weight', 8, '2.last_norm')
    >>> print(done)
    Batch normalization of 8 features now stands before '2.weight'. It is '2.last_norm': 16 parameters more (γ from
    U(0, 1), β 0), for an optimizer that is made from here on. No other name has changed.
    >>> last_norm(net)
    Traceback (most recent call last):
    gyroscope.errors.LayerError: the input of '2.weight' is normalized already, by '2.last_norm'.
    """
    if kind not in ("batch", "layer"):
        raise LayerError(f"kind={kind!r} is not known; a normalization is 'batch' or 'layer'.")
    if gain not in ("uniform", "ones"):
        raise LayerError(f"gain={gain!r} is not known; γ starts 'uniform', from U(0, 1), or as 'ones'.")
    drawn = whole(seed, 0)
    if drawn is None or drawn >= 2**32:
        raise LayerError(f"seed={seed!r} draws no gains; it can be a whole number from 0 to 2³² − 1.")
    chosen = last_linear(model, sample, layer=layer)
    name = ".".join(filter(None, [owner(chosen), ATTRIBUTE]))
    if ATTRIBUTE in chosen.module._modules:
        raise LayerError(f"the input of {chosen.name!r} is normalized already, by {name!r}.")
    _refuse_wrapped(model, chosen, kind)
    norm = _made(chosen, kind, gain, drawn)
    chosen.module.add_module(ATTRIBUTE, norm)
    # Last of the hooks there are, so that it is what the layer multiplies; hooks put on later see it normalized.
    chosen.module.register_forward_pre_hook(_normalize, with_kwargs=True)
    if sample is None:
        _FirstPass(name).watch(model, norm)
    return LastNorm(chosen, features(chosen), norm, name, gain, sum(p.numel() for p in norm.parameters()))


def _made(layer: Layer, kind: Kind, gain: Gain, seed: int) -> nn.Module:
    weight, make = layer.parameter, nn.BatchNorm1d if kind == "batch" else nn.LayerNorm
    norm: nn.Module = make(features(layer), device=weight.device, dtype=weight.dtype)
    if gain == "uniform":
        # Drawn on the CPU in float32, so that it is the same wherever the layer lies.
        generator = torch.Generator("cpu").manual_seed(int(seed))
        drawn = torch.rand(features(layer), generator=generator, dtype=torch.float32, device="cpu")
        norm.load_state_dict({"weight": drawn}, strict=False)
    return norm.train(layer.module.training)


def _refuse_wrapped(model: nn.Module, layer: Layer, kind: Kind) -> None:
    for module in around(model, layer):
        names = ancestry(module)
        if "OptimizedModule" in names or module._compiled_call_impl is not None:
            raise LayerError("the model is compiled, and would go on without the normalization: compile it afterwards.")
        if "DistributedDataParallel" in names or "FullyShardedDataParallel" in names:
            raise LayerError(f"{names[0]} knows no parameters that come later: wrap the model afterwards.")
        if kind == "batch" and "ActivationWrapper" in names:
            raise LayerError(
                f"{layer.name!r} is run again in the backward pass (activation checkpointing), which would count every "
                "batch twice in the running averages: leave the last layer out of it, or use kind='layer'."
            )


class _FirstPass:
    """Warn after the first forward pass of a model in which the normalization did not run just once; then be gone.

    Its hooks are methods of one object, so that copies and saved models have an object of their own. Nothing is counted
    in what is compiled, traced or replicated, where hooks run other than once a pass.
    """

    def __init__(self, name: str) -> None:
        self.name, self.runs = name, 0

    def watch(self, model: nn.Module, norm: nn.Module) -> None:
        while (wrapped := wrapped_in(model)) is not None:
            model = getattr(model, wrapped)
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
                f"{self.name!r} {how} in the first forward pass of {type(model).__name__}, and is to run once: the "
                "layer is not called as a module, or called again. Make the model anew and give last_norm a `sample`, "
                "which tells how it ends.",
                stacklevel=2,
            )

    @staticmethod
    def _counts(module: Any) -> bool:
        return not torch.compiler.is_compiling() and not getattr(module, "_is_replica", False)


def _normalize(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The hook: no closure, so that models are copied, pickled and compiled with it."""
    norm: Any = module.get_submodule(ATTRIBUTE)
    if args:
        return (_normalized(norm, args[0]), *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, kwargs | {name: _normalized(norm, kwargs[name])}


def _normalized(norm: nn.Module, x: Tensor) -> Tensor:
    # To BatchNorm1d the features of [batch, positions, features] would be positions.
    rows = x if x.dim() == 2 or isinstance(norm, nn.LayerNorm) else x.reshape(-1, x.shape[-1])
    normalized: Tensor = norm(rows)
    return normalized if rows is x else normalized.reshape(x.shape)
