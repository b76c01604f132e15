"""The end of a network: the layers whose outputs reach its own through no other layer, seen in one forward pass.

The pass runs under a torch-function mode. Activations are what the sample leads to, and each carries the set of layers
it comes from: a call that takes a layer's weight (or something made of weights alone, such as a cast or a
parametrization of one) and an activation gives one that comes from that layer, any other call passes the sets on.
Residual branches join their sets, and the next layer ends them all. Matrices that are no layers are looked out for on
the way, and so is what normalizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from gyroscope.errors import LayerError
from gyroscope.layers.class_names import is_norm, wrapped_in
from gyroscope.layers.layer import Layer
from gyroscope.layers.untouched import tensors, untouched

_NORMALIZES = ("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm", "normalize")

# What is as normalized as what it was made of: the same numbers, or each times a constant, or plus one.
_PASSES_ON = re.compile(
    "add|bfloat16|chunk|clone|contiguous|cpu|cuda|detach|div|double|dropout|expand|flatten|float|gather|getitem|half|"
    "index_select|movedim|mul|narrow|neg|permute|reshape|rsub|select|split|squeeze|sub|swapaxes|t|to|transpose|"
    "true_divide|type|type_as|unbind|unflatten|unsqueeze|view|get"  # `__get__` is a property such as .T
)

# Where outputs may have the shape of an activation that was multiplied by a square matrix.
_MULTIPLIES = re.compile(
    "addbmm|addmm|addmv|baddbmm|bilinear|bmm|cdist|conv.*|cosine_similarity|einsum|inner|linear|matmul|mm|mv|"
    "pairwise_distance|rmatmul|scaled_dot_product_attention|tensordot"
)

# What takes nothing but the shape or the type of its second argument.
_RESEMBLES = ("expand_as", "reshape_as", "to", "type_as", "view_as")

_Mark = tuple[int, str, Callable[[], bool] | None]


@dataclass(frozen=True)
class Ending:
    """What a forward pass showed.

    Attributes:
        last: positions of the layers that the outputs come from, but for those that feed another of them.
        calls: how often the module of each layer was called.
        normalized: for each layer, what normalized the input of its module, in words, if anything did: a module by
            its name in quotes, or a function.
        after: for each of `last`, what lies between it and the outputs that is more than a function of single numbers:
            "a product with 'w'", "a normalization", "a sum with earlier layers", or nothing.
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

    >>> from gyroscope.layers.layer import layers
    >>> net = nn.ModuleDict({"head": nn.Linear(2, 1), "body": nn.Linear(3, 2), "norm": nn.LayerNorm(2)})
    >>> net.forward = lambda x: net["head"](net["norm"](net["body"](x)))
    >>> ending(net, layers(net), torch.zeros(1, 3))
    Ending(last=(0,), calls=(1, 1), normalized=("'norm'", None), after=('',))
    """
    # A parallel wrapper would send the sample elsewhere.
    while (wrapped := wrapped_in(model)) is not None:
        model = getattr(model, wrapped)
    args = sample if isinstance(sample, tuple) else () if isinstance(sample, Mapping) else (sample,)
    kwargs = dict(sample) if isinstance(sample, Mapping) else {}
    follow = _Follow([layer.parameter for layer in layers], matrices(model, layers), tensors((args, kwargs)))
    with untouched(model), _plainly(model), _Inputs(model, layers, follow) as inputs, torch.no_grad():
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


def matrices(model: nn.Module, layers: Sequence[Layer]) -> dict[str, nn.Parameter]:
    """Return the parameters of two or more dimensions that are no layers, by name.

    >>> from gyroscope.layers.layer import layers
    >>> net = nn.Linear(3, 2)
    >>> net.prototypes = nn.Parameter(torch.zeros(5, 2))
    >>> list(matrices(net, layers(net)))
    ['prototypes']
    """
    known = {id(layer.parameter) for layer in layers}
    return {name: one for name, one in model.named_parameters() if one.dim() > 1 and id(one) not in known}


class _Follow(TorchFunctionMode):
    """Keep, for every activation, the layers it comes from, directly and by way of others.

    Sets of layers are bits of whole numbers: thousands of residual layers end up in the same ones. The bits of
    matrices that are no layers come after those of layers.
    """

    def __init__(self, weights: Sequence[Tensor], matrices: Mapping[str, Tensor], inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self.weights: Any = WeakTensorKeyDictionary(
            {weight: 1 << i for i, weight in enumerate([*weights, *matrices.values()])}
        )
        # Of each: the layers it comes from directly, all before it, those it comes from by way of a normalization, and
        # the matrices on the way from the layers that it comes from directly.
        self.activations: Any = WeakTensorKeyDictionary(dict.fromkeys(inputs, (0, 0, 0, 0)))
        self.before = [0] * len(weights)
        self._layers, self._names = (1 << len(weights)) - 1, ["" for _ in weights] + list(matrices)
        # Of those that are normalized: at which version, by what, and what is still to be asked about it.
        self._marks: Any = WeakTensorKeyDictionary()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        given = tensors((args, kwargs or {}))
        # Before it is called: what works in place changes the version that a mark is of.
        marks = [self._marked(tensor) for tensor in given if tensor in self.activations]
        result = func(*args, **(kwargs or {}))
        made = given[:1] if func is Tensor.__setitem__ else tensors(result)
        came = [tensor for tensor in given if tensor in self.activations]
        used = reduce(or_, (self.weights[tensor] for tensor in given if tensor in self.weights), 0)
        if came:
            known = [self.activations[tensor] for tensor in came]
            direct, all_before, normed, crossed = (reduce(or_, bits) for bits in zip(*known, strict=True))
            used = 0 if name in _RESEMBLES else used
            weights = used & self._layers
            for position in _positions(weights):
                self.before[position] |= all_before
            if name in _NORMALIZES:
                normed |= direct
            elif _MULTIPLIES.fullmatch(name.strip("_")) or any(y.shape not in [x.shape for x in came] for y in made):
                crossed |= used & ~self._layers
            self._pass_on_marks(name, marks, made)
            for tensor in made:
                since = (0, 0) if weights else (normed, crossed)
                self.activations[tensor] = (weights or direct, all_before | weights, *since)
        elif used:
            for tensor in made:
                self.weights[tensor] = used
        return result

    def _pass_on_marks(self, name: str, marks: Sequence[_Mark | None], made: Iterable[Tensor]) -> None:
        mark: _Mark | None = (0, f"a call of {name}", None) if name in _NORMALIZES else None
        if _PASSES_ON.fullmatch(name.strip("_")) and len(marks) == 1:
            mark = marks[0]
        for tensor in made:
            self._marks.pop(tensor, None)
            if mark is not None:
                self.mark(tensor, *mark[1:])

    def mark(self, tensor: Tensor, how: str, ask: Callable[[], bool] | None = None) -> None:
        """Remember what normalized a tensor, or would if `ask` says so."""
        self._marks[tensor] = _version(tensor), how, ask

    def _marked(self, tensor: Tensor) -> _Mark | None:
        mark: _Mark | None = self._marks.get(tensor)
        # A ReLU in place leaves the tensor and changes the version.
        return mark if mark is not None and mark[0] == _version(tensor) else None

    def normalized(self, tensor: Tensor, *, asking: bool = True) -> str | None:
        """What normalized a tensor, if anything did."""
        mark = self._marked(tensor)
        return mark[1] if mark is not None and (not asking or mark[2] is None or mark[2]()) else None

    def note_normalization(self, tensor: Tensor) -> None:
        """A module of unknown doings has normalized `tensor`."""
        if tensor in self.activations:
            direct, all_before, normed, crossed = self.activations[tensor]
            self.activations[tensor] = direct, all_before, normed | direct, crossed

    def last(self, outputs: Iterable[Tensor]) -> tuple[int, ...]:
        """The layers that the outputs come from, without those that feed another of them."""
        found = _positions(reduce(or_, (self._of(tensor)[0] for tensor in outputs), 0))
        # Layers in a loop come before each other, and before themselves.
        return tuple(p for p in found if not any(self._feeds(p, q) and not self._feeds(q, p) for q in found))

    def after(self, outputs: Iterable[Tensor], position: int) -> str:
        """What lies between a layer and the outputs that come from it."""
        mine = [known for known in map(self._of, outputs) if known[0] >> position & 1]
        crossed = _positions(reduce(or_, (matrices for _, _, _, matrices in mine), 0))
        if crossed:
            return "a product with " + " and ".join(repr(self._names[one]) for one in crossed)
        if any(normed >> position & 1 for _, _, normed, _ in mine):
            return "a normalization"
        return "a sum with earlier layers" if any(direct != 1 << position for direct, *_ in mine) else ""

    def _of(self, tensor: Tensor) -> tuple[int, int, int, int]:
        known: tuple[int, int, int, int] = self.activations.get(tensor, (0, 0, 0, 0))
        return known

    def _feeds(self, one: int, other: int) -> bool:
        return bool(self.before[other] >> one & 1)


def _version(tensor: Tensor) -> int:
    # Tensors made in inference mode have none.
    return 0 if tensor.is_inference() else tensor._version


def _positions(bits: int) -> list[int]:
    return [position for position in range(bits.bit_length()) if bits >> position & 1]


class _Inputs:
    """Count the calls of layers' modules, and see which are given what is normalized; hooks that come and go."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer], follow: _Follow) -> None:
        self.calls = [0] * len(layers)
        self.normalized: list[str | None] = [None] * len(layers)
        self._follow, self._handles = follow, []
        own = {id(layer.module) for layer in layers}
        for name, module in model.named_modules():
            its_class: Any = type(module)
            if is_norm(its_class):
                self._handles.append(module.register_forward_hook(self._gave(name)))
            elif not its_class.__module__.startswith("torch.nn.") and own.isdisjoint(map(id, module.modules())):
                self._handles.append(module.register_forward_hook(self._may_have_given(name)))
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
                self._follow.mark(tensor, repr(name))
                self._follow.note_normalization(tensor)

        return hook

    def _may_have_given(self, name: str) -> Callable[..., None]:
        """Of a class that says nothing and holds no layer; whether it normalizes is asked where a layer takes it."""

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            given, gave = tensors(inputs), tensors(output)
            if len(given) == len(gave) == 1 and given[0].is_floating_point() and given[0].shape == gave[0].shape:
                x, y = given[0], gave[0]
                if self._follow.normalized(y, asking=False) is None:
                    self._follow.mark(y, repr(name), partial(_forgets_scale, module, x))

        return hook

    def _takes(self, position: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.calls[position] += 1
            for x in tensors((args, kwargs))[:1]:
                self.normalized[position] = self._follow.normalized(x) or self.normalized[position]

        return hook


def _forgets_scale(module: nn.Module, like: Tensor) -> bool:
    """Whether f(2x) = f(x) for a module's f, without being the same for all x."""
    generator = torch.Generator("cpu").manual_seed(0)
    x, other = (torch.randn(like.shape, generator=generator, device="cpu").to(like) for _ in range(2))
    try:
        y, twice, others = (module.forward(one).double() for one in (x, 2 * x, other))
    except Exception:  # what it takes is its own affair; then nothing is known of it
        return False
    near = 0.02 * y.abs().mean()
    return bool((twice - y).abs().max() <= near < (others - y).abs().max())


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
