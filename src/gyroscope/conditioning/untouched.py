"""A model on loan: whatever happens inside, it is given back as it was."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gyroscope.layer import Layer


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Buffers, random numbers, switches and weights that a forward pass rewrites are as found afterwards.

    Inside, modules have copies of their buffers, so that nothing is written to the real ones, not even for a while.

    >>> net = nn.BatchNorm1d(2)
    >>> with untouched(net):
    ...     _ = net(torch.randn(8, 2)), torch.rand(3)
    >>> net.running_mean, int(net.num_batches_tracked)
    (tensor([0., 0.]), 0)
    """
    modules = list(model.modules())
    registered = [dict(module._buffers) for module in modules]
    # A buffer that two modules share stays shared.
    copies: dict[int, Tensor] = {}
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
    renormalized = [
        m.weight for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None
    ]
    weights = [weight.detach().clone() for weight in renormalized]
    with ExitStack() as stack:
        _keep_random_state(model, stack)
        try:
            for module in modules:
                for name, buffer in module._buffers.items():
                    if buffer is not None and not buffer.is_meta:
                        module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
            yield
        finally:
            for module, buffers in zip(modules, registered, strict=True):
                module._buffers.clear()
                module._buffers.update(buffers)
            with torch.no_grad():
                for weight, value in zip(renormalized, weights, strict=True):
                    weight.copy_(value)
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002


@contextmanager
def requiring_gradients(layers: list[Layer]) -> Iterator[None]:
    """The layers' weights require gradients inside, also those that are frozen."""
    frozen = [layer.parameter for layer in layers if not layer.parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@contextmanager
def without_gradients(model: nn.Module) -> Iterator[None]:
    """Parameters have no `.grad` inside, and what they had afterwards; hooks on the accumulation do not run."""
    parameters: list[Any] = list(model.parameters())
    held = [(p, p.grad, p._post_accumulate_grad_hooks) for p in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
            parameter._post_accumulate_grad_hooks = None
        yield
    finally:
        for parameter, gradient, hooks in held:
            parameter.grad = gradient
            parameter._post_accumulate_grad_hooks = hooks


def _keep_random_state(model: nn.Module, stack: ExitStack) -> None:
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    stack.enter_context(torch.random.fork_rng(devices=[]))
    for kind in {device.type for device in devices} - {"cpu", "meta"}:
        indices = [device.index or 0 for device in devices if device.type == kind]
        stack.enter_context(torch.random.fork_rng(devices=indices, device_type=kind))
