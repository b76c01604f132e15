"""Outputs of a classifier on sampled steps: what the loss makes of them, and how much they say about the input.

The gradient g of the loss with respect to the outputs z [rows, classes] shows which loss it is, without its code and
without the labels. With p = softmax(z), e_y the unit vector of a row's label, and one factor for all rows, g is

    cross-entropy of z             p − e_y
    negative log likelihood of z   −e_y
    cross-entropy of softmax(z)    p ∘ (d − ⟨p, d⟩),  d = softmax(p) − e_y

The label is the class at which g is lowest, in the last case g/p: softmax(p) has values between 0 and 1 that differ by
less than 1, so −e_y decides. The last case is a mistake: the loss applies the softmax itself. A network that ends with
a softmax of its own has outputs that are probabilities, and the gradient of the first case.

How much the outputs say about the input is the mutual information of input and predicted class,

    I = H(mean of p) − mean of H(p),

in nats: 0 if the prediction is the same for all inputs.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gyroscope.base.hooks import is_capturing, listens
from gyroscope.passes.activations import Hook, first_tensor, samples
from gyroscope.store.record import QuantityInfo
from gyroscope.vectors.eager import accumulator

OUTPUTS = ("softmax_twice", "output_information")
INFO = {
    "softmax_twice": QuantityInfo(
        "softmax_twice", "1", "1 if the loss is the cross-entropy of probabilities, 0 if it is that of logits"
    ),
    "output_information": QuantityInfo(
        "output_information", "nat", "mutual information of input and predicted class: 0 if all inputs get the same"
    ),
}

# The most numbers that are looked at, and rows.
_NUMBERS, _ROWS = 1 << 20, 512
# A gradient is that of a loss if less than this share of its square is not explained: half precision leaves 4e-4.
_FITS = 1e-3
# And if another loss leaves this many times as much. At the beginning all classes have about the same probability, and
# the gradients of both cross-entropies are nearly parallel.
_CLEARLY = 100.0
# Shares of the square that are rounding.
_ROUNDING = 1e-9


class OutputProbe:
    """Looks at the outputs of a model, and at their gradient, in one step.

    Nothing is changed, and nothing waits for the device. Of several forward passes in a step, the last one whose
    gradient is computed counts.

    >>> net = nn.Linear(4, 3)
    >>> probe = OutputProbe(net)
    >>> probe.attach()
    >>> outputs = net(torch.randn(16, 4))
    >>> nn.functional.cross_entropy(outputs.softmax(1), torch.arange(16) % 3).backward()
    >>> probe.detach()
    >>> probe.take()[0].item()
    1.0
    """

    what = "Outputs"

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.error: Exception | None = None
        self._handle: RemovableHandle | None = None
        self._found: Tensor | None = None

    def attach(self) -> None:
        """Listen to the forward passes of one step."""
        self.reset()
        if self._handle is None:
            self._handle = self.model.register_forward_hook(Hook(self))

    def detach(self) -> None:
        """Stop listening. What was found stays."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def reset(self) -> None:
        """Discard what was found."""
        self._found = None

    def take(self) -> Tensor | None:
        """Return the numbers of `OUTPUTS` on the device; None without a gradient. NaN if the loss is another one."""
        found, self._found = self._found, None
        return found

    def ran(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Look at the gradient of an output when it comes."""
        z = first_tensor(_logits(output))
        if z is None or not z.requires_grad or z.dim() < 2:
            return
        probe, values = weakref.ref(self), z.detach()

        def came(gradient: Tensor) -> None:
            own = probe()
            if own is None or own._handle is None or is_capturing() or not listens(own):
                return
            with torch.no_grad():
                own._found = _found(values, gradient.detach())

        z.register_hook(came)  # type: ignore[no-untyped-call]


def _logits(output: Any) -> Any:
    """Return the outputs in what a model returns: those called logits, or the first tensor with rows."""
    if isinstance(output, Mapping):
        named = output.get("logits")
        return named if named is not None else tuple(v for v in output.values() if isinstance(v, Tensor) and v.dim())
    return getattr(output, "logits", output)


def _found(z: Tensor, gradient: Tensor) -> Tensor:
    """Return the numbers of `OUTPUTS`; classes are along the last axis, or along axis 1 where that fits better."""
    found = [_along(z, gradient, axis) for axis in sorted({z.dim() - 1, 1}, reverse=True)]
    if len(found) == 1:
        return found[0]
    return torch.where(found[0].isnan(), found[1], found[0])


def _along(z: Tensor, gradient: Tensor, axis: int) -> Tensor:
    classes = z.shape[axis]
    if classes < 2:
        return torch.full((len(OUTPUTS),), torch.nan, device=z.device)
    kind, count = accumulator(z.device), max(2, min(_ROWS, _NUMBERS // classes))
    return measured(*(samples(x, axis, count).to(kind) for x in (z, gradient)))


def measured(z: Tensor, g: Tensor) -> Tensor:
    """Return the numbers of `OUTPUTS` for outputs [rows, classes] and their gradient.

    >>> z = torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    >>> measured(z, z.softmax(1) - torch.eye(2))  # the gradient of the cross-entropy
    tensor([0.0000, 0.2081], dtype=torch.float64)
    """
    p = z.softmax(1)
    counts = (g != 0).any(1, keepdim=True).to(z.dtype)  # rows that the loss ignores have no gradient
    lowest = _unit(g.argmin(1), g)
    lowest_relative = _unit(torch.where(p > 0, g / p, torch.inf).argmin(1), g)
    d = p.softmax(1) - lowest_relative
    once = _unexplained(g, counts * (p - lowest))
    likelihood = _unexplained(g, -counts * lowest)
    twice = _unexplained(g, counts * p * (d - (p * d).sum(1, keepdim=True)))
    probabilities = (z >= 0).all() & ((z.sum(1) - 1).abs() < _FITS).all()
    again = (twice < _FITS) & (once > _CLEARLY * twice.clamp(min=_ROUNDING))
    again = again | (probabilities & (once < _FITS))
    fits = (torch.stack([once, likelihood]).amin(0) < _FITS) | again
    rows = counts.sum()
    mean = (counts * p).sum(0) / rows
    information = torch.special.entr(mean).sum() - (counts * torch.special.entr(p)).sum() / rows
    found = torch.stack([again.to(z.dtype), information])
    return torch.where(fits & (rows > 1), found, torch.nan)


def _unit(index: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter_(1, index[:, None], 1.0)


def _unexplained(g: Tensor, f: Tensor) -> Tensor:
    """Return the share of ‖g‖² that no positive multiple of f explains."""
    square = (g * g).sum()
    factor = ((g * f).sum() / (f * f).sum()).nan_to_num(0.0, 0.0, 0.0).clamp(min=0.0)
    return (((g - factor * f) ** 2).sum() / square).nan_to_num(torch.inf)
