"""Forward order: which parameter a model uses first, seen from one forward pass that leaves no trace.

The pass runs under a torch-function mode, so a parameter counts as used at the first torch call that takes it
as an argument, whoever makes the call: a module, `torch.nn.functional`, an LSTM's fused kernel or a
parametrization. Module hooks would miss all but the first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gyroscope.errors import LayerError


def forward_order(model: nn.Module, parameters: Sequence[Tensor], sample: object) -> list[int]:
    """Sort the positions of `parameters` (given in registration order) by first use in `model(sample)`.

    Parameters that one call takes together (the matrices of an LSTM) keep their registration order, and one
    that is never used follows the parameter registered before it.

    >>> net = nn.ModuleDict({"last": nn.Linear(2, 1), "first": nn.Linear(3, 2)})
    >>> net.forward = lambda x: net["last"](net["first"](x))
    >>> forward_order(net, [net["last"].weight, net["first"].weight], torch.zeros(1, 3))
    [1, 0]
    """
    used = _first_calls(model, parameters, sample)
    if not used:
        raise LayerError(
            f"none of the {len(parameters)} layers was used by {type(model).__name__} on the given `sample`: "
            "their order of use cannot be found. Check the sample, or leave it out for registration order."
        )
    keys = []
    anchor = (-1, -1)
    for position in range(len(parameters)):
        if position in used:
            anchor = (used[position], position)
        keys.append((*anchor, position))
    return sorted(range(len(parameters)), key=keys.__getitem__)


def _first_calls(model: nn.Module, parameters: Sequence[Tensor], sample: object) -> dict[int, int]:
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    match sample:
        case tuple():
            args = sample
        case Mapping():
            kwargs = dict(sample)
        case _:
            args = (sample,)
    record = _FirstUse(parameters)
    devices = {t.device for t in (*model.parameters(), *model.buffers(), *_tensors((args, kwargs)))}
    with _untouched(model, devices), torch.no_grad():
        try:
            # A compiled forward would hide the parameters inside its graph.
            with torch.compiler.set_stance("force_eager"), record:
                model(*args, **kwargs)
        except Exception as error:
            raise LayerError(
                f"the forward pass of {type(model).__name__} on `sample` failed with "
                f"{type(error).__name__}: {error}. Give a tensor, a tuple of positional arguments or a dict "
                "of keyword arguments, on the model's device; or leave `sample` out for registration order."
            ) from error
    return record.first


class _FirstUse(TorchFunctionMode):
    """Number the torch calls and note the first to take each parameter."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.position = {id(parameter): i for i, parameter in enumerate(parameters)}
        self.first: dict[int, int] = {}
        self.calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        # A call that gives no tensor only read metadata: `weight.dtype` is no use of the weight.
        if func is torch.Tensor.__setitem__ or any(True for _ in _tensors(result)):
            for tensor in _tensors((args, kwargs)):
                position = self.position.get(id(tensor))
                if position is not None:
                    self.first.setdefault(position, self.calls)
        return result


def _tensors(tree: object) -> Iterator[Tensor]:
    match tree:
        case Tensor():
            yield tree
        case list() | tuple():
            for branch in tree:
                yield from _tensors(branch)
        case Mapping():
            yield from _tensors(list(tree.values()))


@contextmanager
def _untouched(model: nn.Module, devices: set[torch.device]) -> Iterator[None]:
    """Evaluation mode and slow attention inside; modules, buffers, weights, RNG and switches as found afterwards."""
    modules = list(model.modules())
    training = [module.training for module in modules]
    # Scripted modules keep their attributes and buffers elsewhere, where a pass cannot exchange them.
    plain = [module for module in modules if not isinstance(module, torch.jit.ScriptModule)]
    attributes = [dict(module.__dict__) for module in plain]
    registered = [dict(module._buffers) for module in plain]
    # An embedding with a `max_norm` scales the rows it looks up, whatever the mode.
    scaled = [m.weight for m in plain if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None]
    # Meta tensors hold nothing to restore.
    written = [t.detach() for t in (*model.buffers(), *scaled) if not t.is_meta]
    values = [tensor.clone() for tensor in written]
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    fastpath = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind in {device.type for device in devices} - {"cpu", "meta"}:
            indices = [device.index or 0 for device in devices if device.type == kind]
            stack.enter_context(torch.random.fork_rng(devices=indices, device_type=kind))
        for weight in scaled:  # graphs that are alive may have saved it, and it will be what it was
            stack.enter_context(torch.autograd.grad_mode._unsafe_preserve_version_counter(weight))
        try:
            for module in modules:
                # Not `eval()`: an overridden `train` may do more than set the flag, such as merge adapters.
                module.training = False
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fastpath)
            for module, found, buffers in zip(plain, attributes, registered, strict=True):
                module.__dict__.clear()
                module.__dict__.update(found)
                module._buffers.clear()
                module._buffers.update(buffers)
            for module, flag in zip(modules, training, strict=True):
                module.training = flag
            for tensor, value in zip(written, values, strict=True):
                # Sparse tensors cannot be compared.
                if tensor.layout is not torch.strided or not torch.equal(tensor, value):
                    tensor.copy_(value)
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002
