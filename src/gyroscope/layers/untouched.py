"""Contexts that run a model and leave it as it was."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gyroscope.errors import ConditioningError, LayerError


@contextmanager
def untouched(model: nn.Module, inputs: object = None) -> Iterator[None]:
    """Restore buffers, random state, attributes and weights that a forward pass rewrites.

    Inside, modules have copies of their buffers, so the real ones are never written to.

    Args:
        model: any module.
        inputs: its inputs, in nested tuples, lists and dicts; the random state of their devices is kept as well.

    >>> net = nn.BatchNorm1d(2)
    >>> with untouched(net):
    ...     _ = net(torch.randn(8, 2)), torch.rand(3)
    >>> net.running_mean, int(net.num_batches_tracked)
    (tensor([0., 0.]), 0)
    """
    every = list(model.modules())
    scripted = [b for m in every if isinstance(m, torch.jit.ScriptModule) for b in m.buffers(recurse=False)]
    modules = [module for module in every if not isinstance(module, torch.jit.ScriptModule)]
    _refuse_open_sums(modules)
    registered = [dict(module._buffers) for module in modules]
    # For example the weight that `torch.nn.utils.spectral_norm` computes in every pass, with its graph.
    attributes = [dict(vars(module)) for module in modules]
    # A buffer that two modules share stays shared.
    copies = _copies({id(b): b for held in registered for b in held.values() if b is not None and not b.is_meta})
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    renormalized = [
        m.weight for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None
    ]
    # Neither these weights nor the buffers of scripted modules can be replaced by copies.
    renormalized += scripted
    weights = [weight.detach().clone() for weight in renormalized]
    with ExitStack() as stack:
        _keep_random_state(every, inputs, stack)
        for weight in renormalized:  # graphs outside may have saved it, and its value will be restored
            stack.enter_context(torch.autograd.grad_mode._unsafe_preserve_version_counter(weight))
        try:
            for module in modules:
                for name, buffer in module._buffers.items():
                    if buffer is not None and not buffer.is_meta:
                        module._buffers[name] = copies[id(buffer)]
            yield
        finally:
            for module, buffers, own in zip(modules, registered, attributes, strict=True):
                vars(module).clear()
                vars(module).update(own)
                module._buffers.clear()
                module._buffers.update(buffers)
            with torch.no_grad():
                for weight, value in zip(renormalized, weights, strict=True):
                    weight.copy_(value)
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002


def _copies(buffers: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return copies by the same keys; small plain ones of a kind are copied together, as there may be hundreds."""
    copies: dict[int, Tensor] = {}
    kinds: defaultdict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
    for key, buffer in buffers.items():
        # Neither booleans nor floating-point numbers of one byte can be multiplied.
        countable = buffer.dtype is not torch.bool and not (buffer.is_floating_point() and buffer.itemsize == 1)
        if type(buffer) is Tensor and buffer.numel() <= 2**16 and countable:
            kinds[buffer.dtype, buffer.device].append(key)
        else:
            copies[key] = buffer.detach().clone()
    with torch.no_grad():
        for keys in kinds.values():
            copies |= zip(keys, torch._foreach_mul([buffers[key] for key in keys], 1), strict=True)
    return copies


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run a model in evaluation mode, uncompiled and without fused attention that bypasses modules.

    >>> net = nn.Dropout()
    >>> with evaluating(net):
    ...     print(net.training)
    False
    >>> net.training
    True
    """
    training = [(module, module.training) for module in model.modules()]
    fastpath = torch.backends.mha.get_fastpath_enabled()
    # A compiled forward pass would hide the parameters inside its graph.
    with torch.compiler.set_stance("force_eager"):
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            for module, _ in training:
                # Not `eval()`: an overridden `train` may do more than set the flag, such as merge adapters.
                module.training = False
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fastpath)
            for module, flag in training:
                module.training = flag


def output_of(model: nn.Module, sample: object, mode: TorchFunctionMode) -> Any:
    """Return the output of `model` for a sample from one forward pass in evaluation mode, seen by `mode`.

    Args:
        model: any module; it and the random state are left as they were.
        sample: a tensor, a tuple of positional arguments or a dict of keyword arguments.
        mode: the torch-function mode that the pass runs under.

    Raises:
        LayerError: the pass fails.
    """
    args = sample if isinstance(sample, tuple) else () if isinstance(sample, Mapping) else (sample,)
    kwargs = dict(sample) if isinstance(sample, Mapping) else {}
    with untouched(model, (args, kwargs)), evaluating(model), torch.no_grad():
        try:
            with mode:
                return model(*args, **kwargs)
        except Exception as error:
            raise LayerError(
                f"The forward pass of {type(model).__name__} on `sample` failed with {type(error).__name__}: {error}. "
                "Pass a tensor, a tuple of positional arguments or a dict of keyword arguments, on the model's device."
            ) from error


@contextmanager
def requiring_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Make parameters require gradients inside, including frozen ones."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Remove `.grad` of the parameters and their hooks on the accumulation inside, and restore both on exit."""
    parameters: list[Any] = list(model.parameters())
    held = [(p, p.grad, p._post_accumulate_grad_hooks) for p in parameters]
    # Emptied and not replaced, because autograd keeps the dict it was first given.
    hung = [(hooks, dict(hooks)) for _, _, hooks in held if hooks]
    try:
        for parameter in parameters:
            parameter.grad = None
        for hooks, _ in hung:
            hooks.clear()
        yield
    finally:
        for parameter, gradient, _ in held:
            parameter.grad = gradient
        for hooks, own in hung:
            hooks.update(own)


def _refuse_open_sums(modules: list[Any]) -> None:
    """Reject FSDP2 models with unsynchronized gradients, to which another backward pass would add."""
    for state in (module._get_fsdp_state() for module in modules if hasattr(type(module), "_get_fsdp_state")):
        parts = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        if not all(part.reduce_grads for part in parts if part is not None):
            raise ConditioningError(
                "The model is sharded and does not synchronize its gradients, so they would be mixed with those of the "
                "analysis. Analyze it outside of gradient accumulation, after set_requires_gradient_sync(True)."
            )


def _keep_random_state(modules: list[nn.Module], inputs: object, stack: ExitStack) -> None:
    own = (one for m in modules for one in (*m._parameters.values(), *m._buffers.values()) if one is not None)
    devices = {tensor.device for tensor in (*own, *tensors(inputs))}
    stack.enter_context(torch.random.fork_rng(devices=[]))
    for kind in {device.type for device in devices} - {"cpu", "meta"}:
        indices = [device.index or 0 for device in devices if device.type == kind]
        stack.enter_context(torch.random.fork_rng(devices=indices, device_type=kind))


def tensors(found: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, dicts and dataclasses.

    >>> len(tensors((torch.ones(1), {"a": [torch.ones(2)]}, "b")))
    2
    """
    if isinstance(found, Tensor):
        return [found]
    inner: Sequence[Any] = ()
    if isinstance(found, tuple | list):
        inner = found
    elif isinstance(found, Mapping):
        inner = list(found.values())
    elif hasattr(found, "__dict__") and hasattr(found, "__dataclass_fields__"):
        inner = list(vars(found).values())
    return [tensor for one in inner for tensor in tensors(one)]


def bare(model: nn.Module) -> nn.Module:
    """Return the user's module, without wrappers that compile it or average its gradients."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):  # of torch.compile
            model = inner
        else:
            return model
