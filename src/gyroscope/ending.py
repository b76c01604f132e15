"""The end of a network: the layers whose outputs reach its own through no other layer, seen in one forward pass.

The pass runs under a torch-function mode. Activations are what the sample leads to, and each carries the set of layers
it comes from: a call that takes a layer's weight (or something made of weights alone, such as a cast or a
parametrization of one) and an activation gives one that comes from that layer, any other call passes the sets on.
Residual branches join their sets, and the next layer ends them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from gyroscope.class_names import is_norm, wrapped_in
from gyroscope.conditioning.untouched import untouched
from gyroscope.conditioning.uses import tensors
from gyroscope.errors import LayerError
from gyroscope.layer import Layer

_NORMALIZES = ("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm")


@dataclass(frozen=True)
class Ending:
    """What a forward pass showed.

    Attributes:
        last: positions of the layers that the outputs come from, but for those that feed another of them.
        calls: how often the module of each layer was called.
        normalized: for each layer, the name of the normalization whose output its module was given as it was, if any.
        after: for each of `last`, what lies between it and the outputs that is more than a function of single numbers:
            "a normalization", "a sum with earlier layers", or nothing.
    """

    last: tuple[int, ...]
    calls: tuple[int, ...]
    normalized: tuple[str | None, ...]
    after: tuple[str, ...] = ()


def ending(model: nn.Module, layers: Sequence[Layer], sample: object) -> Ending:
    """Run `model` on `sample` once, in evaluation mode, and see how it ends; model and random state stay as found.

    Args:
        model: the model.
        layers: its layers, in any order.
        sample: a tensor, a tuple of positional arguments or a dict of keyword arguments.

    >>> from gyroscope.layer import layers
    >>> net = nn.ModuleDict({"head": nn.Linear(2, 1), "body": nn.Linear(3, 2), "norm": nn.LayerNorm(2)})
    >>> net.forward = lambda x: net["head"](net["norm"](net["body"](x)))
    >>> ending(net, layers(net), torch.zeros(1, 3))
    Ending(last=(0,), calls=(1, 1), normalized=('norm', None), after=('',))
    """
    # A parallel wrapper would send the sample elsewhere.
    while (wrapped := wrapped_in(model)) is not None:
        model = getattr(model, wrapped)
    args = sample if isinstance(sample, tuple) else () if isinstance(sample, Mapping) else (sample,)
    kwargs = dict(sample) if isinstance(sample, Mapping) else {}
    follow = _Follow([layer.parameter for layer in layers], tensors((args, kwargs)))
    with untouched(model), _plainly(model), _Inputs(model, layers) as inputs, torch.no_grad():
        try:
            with follow:
                outputs = model(*args, **kwargs)
        except Exception as error:
            raise LayerError(
                f"the forward pass of {type(model).__name__} on `sample` failed with {type(error).__name__}: {error}. "
                "Give a tensor, a tuple of positional arguments or a dict of keyword arguments, on the model's device."
            ) from error
    ends = tensors(outputs)
    last = follow.last(ends)
    after = tuple(follow.after(ends, position) for position in last)
    return Ending(last, tuple(inputs.calls), tuple(inputs.normalized), after)


class _Follow(TorchFunctionMode):
    """Keep, for every activation, the layers it comes from, directly and by way of others.

    Sets of layers are bits of whole numbers: thousands of residual layers end up in the same ones.
    """

    def __init__(self, weights: Sequence[Tensor], inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self.weights: Any = WeakTensorKeyDictionary({weight: 1 << i for i, weight in enumerate(weights)})
        # Of each: the layers it comes from directly, all before it, those it comes from by way of a normalization.
        self.activations: Any = WeakTensorKeyDictionary(dict.fromkeys(inputs, (0, 0, 0)))
        self.before = [0] * len(weights)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = tensors((args, kwargs or {}))
        made = given[:1] if func is Tensor.__setitem__ else tensors(result)
        came = [self.activations[tensor] for tensor in given if tensor in self.activations]
        used = reduce(or_, (self.weights[tensor] for tensor in given if tensor in self.weights), 0)
        if came:
            direct, all_before, normed = (reduce(or_, bits) for bits in zip(*came, strict=True))
            for position in _positions(used):
                self.before[position] |= all_before
            if getattr(func, "__name__", "") in _NORMALIZES:
                normed |= direct
            for tensor in made:
                self.activations[tensor] = (used or direct, all_before | used, 0 if used else normed)
        elif used:
            for tensor in made:
                self.weights[tensor] = used
        return result

    def last(self, outputs: Iterable[Tensor]) -> tuple[int, ...]:
        """The layers that the outputs come from, without those that feed another of them."""
        found = _positions(reduce(or_, (self._of(tensor)[0] for tensor in outputs), 0))
        # Layers in a loop come before each other, and before themselves.
        return tuple(p for p in found if not any(self._feeds(p, q) and not self._feeds(q, p) for q in found))

    def after(self, outputs: Iterable[Tensor], position: int) -> str:
        """What lies between a layer and the outputs that come from it."""
        mine = [known for known in map(self._of, outputs) if known[0] >> position & 1]
        if any(normed >> position & 1 for _, _, normed in mine):
            return "a normalization"
        return "a sum with earlier layers" if any(direct != 1 << position for direct, _, _ in mine) else ""

    def _of(self, tensor: Tensor) -> tuple[int, int, int]:
        known: tuple[int, int, int] = self.activations.get(tensor, (0, 0, 0))
        return known

    def _feeds(self, one: int, other: int) -> bool:
        return bool(self.before[other] >> one & 1)


def _positions(bits: int) -> list[int]:
    return [position for position in range(bits.bit_length()) if bits >> position & 1]


class _Inputs:
    """Count the calls of layers' modules, and see which are given what a normalization gave; hooks that come and go."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        self.calls = [0] * len(layers)
        self.normalized: list[str | None] = [None] * len(layers)
        # By where they lie; held until the end of the pass, so that no other tensor comes to lie there.
        self._given: dict[int, tuple[Tensor, int, str]] = {}
        modules: list[tuple[str, nn.Module, Any]] = [(name, one, type(one)) for name, one in model.named_modules()]
        self._handles = [one.register_forward_hook(self._gave(name)) for name, one, kind in modules if is_norm(kind)]
        for position, layer in enumerate(layers):
            takes = self._takes(position)
            self._handles.append(layer.module.register_forward_pre_hook(takes, with_kwargs=True))

    def __enter__(self) -> _Inputs:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _gave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in tensors(output)[:1]:
                self._given[tensor.untyped_storage().data_ptr()] = tensor, tensor._version, name

        return hook

    def _takes(self, position: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.calls[position] += 1
            for x in tensors((args, kwargs))[:1]:
                _, version, name = self._given.get(x.untyped_storage().data_ptr(), (x, None, None))
                # A ReLU in place leaves the memory and changes the version.
                if x._version == version:
                    self.normalized[position] = name

        return hook


@contextmanager
def _plainly(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, nothing compiled, and no fused attention that bypasses modules; `untouched` restores modes."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(torch.backends.mha.set_fastpath_enabled, fastpath)
        torch.backends.mha.set_fastpath_enabled(False)
        for module in model.modules():
            # Not `eval()`: an overridden `train` may do more than set the flag, such as merge adapters.
            module.training = False
        yield
