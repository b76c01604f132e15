"""Models as functions of their weights and of single samples, with checks of what they must not do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gyroscope.base.hooks import alone
from gyroscope.errors import DynamicsError, GyroscopeError
from gyroscope.theory.batch_norm import BatchCenter


def parts(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the parameters that require gradients, and the other parameters, by name.

    >>> net = nn.Linear(2, 1)
    >>> _ = net.bias.requires_grad_(False)
    >>> [list(one) for one in parts(net)]
    [['weight'], ['bias']]
    """
    refuse_valueless(model)
    named = dict(model.named_parameters())
    weights = {name: outside(p) for name, p in named.items() if p.requires_grad}
    return weights, {name: outside(p) for name, p in named.items() if not p.requires_grad}


def refuse_valueless(model: Any) -> None:
    """Reject anything that is not a model, and a model with uninitialized parameters.

    >>> refuse_valueless(nn.Linear(2, 1))
    """
    if not isinstance(model, nn.Module):
        raise DynamicsError(f"`model` must be a torch.nn.Module, got a {type(model).__name__}.")
    for name, p in model.named_parameters():
        if is_lazy(p) or p.is_meta:
            raise DynamicsError(f"Parameter {name!r} has no values yet. Initialize the model first.")


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of a model's buffers for one pass, which may change them.

    >>> float(buffers(nn.BatchNorm1d(1))["running_var"])
    1.0
    """
    return {name: b.detach().clone() for name, b in model.named_buffers()}


def check_inputs(inputs: Any, *, real: bool = False) -> None:
    """Reject anything but samples [N, ...].

    >>> check_inputs(torch.zeros(2, 3))
    """
    given = f"{inputs.dtype} {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else f"a {type(inputs).__name__}"
    if not isinstance(inputs, Tensor) or inputs.dim() < 1 or (real and not inputs.is_floating_point()):
        kind = "a floating-point tensor" if real else "a tensor"
        raise DynamicsError(f"`inputs` must be {kind} [N, ...] with one sample per row, got {given}.")
    if not len(inputs):
        raise DynamicsError(f"`inputs` must hold at least one sample, got {given}.")


def refuse_mixing(model: nn.Module, what: str) -> None:
    """Reject a model whose output for a sample depends on other samples, or on random numbers.

    >>> refuse_mixing(nn.BatchNorm1d(2).eval(), "Per-example gradients")
    """
    for name, module in model.named_modules():
        batch = isinstance(module, nn.modules.batchnorm._BatchNorm | BatchCenter)
        if batch and (module.training or module.running_mean is None):
            raise DynamicsError(
                f"{what} are undefined because {name or 'the model'} ({type(module).__name__}) mixes the samples of a "
                "batch. Put the model into eval mode."
            )
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            raise DynamicsError(f"{name or 'The model'} drops units at random. Put the model into eval mode.")


@contextmanager
def passing(*, undrawn: torch.device | None = None) -> Iterator[None]:
    """Run passes of a model without any hooks listening; failures are raised as DynamicsError.

    Args:
        undrawn: a device on which, as on the host, no random numbers may be drawn.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(alone())
        before = None if undrawn is None else _random_states(undrawn)
        try:
            yield
        except (GyroscopeError, torch.OutOfMemoryError):
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise DynamicsError(
                f"A pass through the model or its loss failed with {type(error).__name__}: {error} The model is "
                "unchanged. It is called with the inputs only, and derivatives are taken per sample."
            ) from error
        if undrawn is not None and before is not None and not all(map(torch.equal, before, _random_states(undrawn))):
            _set_random_states(undrawn, before)
            raise DynamicsError("The model draws random numbers. Put it into eval mode.")


def _random_states(device: torch.device) -> list[Tensor]:
    elsewhere = [] if device.type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *elsewhere]


def _set_random_states(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.get_device_module(device).set_rng_state(states[1], device)


def outside(tensor: Tensor) -> Tensor:
    """Return the tensor detached; a copy if it was made in inference mode, whose tensors have no derivatives.

    >>> with torch.inference_mode():
    ...     outside(torch.ones(1)).is_inference()
    False
    """
    if not tensor.is_inference():
        return tensor.detach()
    with torch.inference_mode(False):
        return tensor.clone()
