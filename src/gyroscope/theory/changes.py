"""What a network gives when something at one of its layers is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gyroscope.errors import DynamicsError
from gyroscope.layers.layer import Layer
from gyroscope.theory.on_loan import OnLoan


def altered(loan: OnLoan, layer: Layer, alter: Callable[[Tensor], Tensor]) -> list[Tensor] | None:
    """The network's outputs where the layer's own is altered; None where that is not seen, or no tensor of units."""
    if layer.kind not in ("linear", "conv", "conv_transpose", "embedding"):
        return None
    met = []

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return None
        met.append(True)
        return alter(output)

    handle = layer.module.register_forward_hook(hook)
    try:
        outputs = outputs_of(loan.output())
    finally:
        handle.remove()
    return outputs if met else None


def shifted(layer: Layer, draw: torch.Generator, output: Tensor) -> Tensor:
    """R + 1cᵀ: another constant for each unit, about as large as R's standard deviation."""
    dim = 1 if layer.kind.startswith("conv") else output.dim() - 1
    shape = [size if d == dim else 1 for d, size in enumerate(output.shape)]
    return output + output.std() * torch.randn(shape, generator=draw, dtype=torch.float64).to(output)


def others(layer: Layer, draw: torch.Generator, output: Tensor) -> Tensor:
    """The first example as it is, and others in place of all others."""
    noise = torch.randn(output[1:].shape, generator=draw, dtype=torch.float64).to(output)
    return torch.cat([output[:1], 2 * output[1:].flip(0) + output.std() * (1 + noise)])


def outputs_of(output: Any) -> list[Tensor]:
    """The tensors of examples in what a network gives."""
    from gyroscope.layers.untouched import tensors

    found = [one for one in tensors(output) if one.is_floating_point() and one.dim() > 0]
    if not found or not all(len(one) > 1 for one in found):
        raise DynamicsError(
            f"The module gave {[tuple(one.shape) for one in found]}; accepted are tensors with two or more examples."
        )
    return found


def first_of(outputs: list[Tensor], only: bool) -> list[Tensor]:
    """Those of the first example only, if so."""
    return [one[:1] for one in outputs] if only else outputs


def relative_change(there: list[Tensor], here: list[Tensor]) -> float:
    """‖f′ − f‖/‖f‖ over all tensors together.

    >>> relative_change([torch.tensor([3.0, 5.0])], [torch.tensor([3.0, 4.0])])
    0.2
    """
    off = sum(float((a - b).square().sum()) for a, b in zip(there, here, strict=True))
    size = sum(float(b.square().sum()) for b in here)
    return (off / size) ** 0.5 if size else (0.0 if off == 0 else float("inf"))
