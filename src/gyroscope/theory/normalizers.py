"""Measured effects of normalizers on the training of the layer before them: the comparison of section 4.4.

Three properties, each found by changing one thing at a layer and comparing the network's outputs:

    scale       W → ΓW with Γ = diag(γ_j): nothing changes under batch, weight and instance normalization;
                W → γW: nothing changes under layer normalization either
    centering   R → R + 1cᵀ for the layer's output R: nothing changes if the mean of each unit is removed, so that
                gradients do not depend on the mean of the activations, and the outlier eigenvalues it causes are gone
    stochastic  the other examples of a batch are changed: something changes for the example that was not, so that
                the noise of drawing the batch regularizes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from gyroscope.base import accepted
from gyroscope.errors import DynamicsError, LayerError
from gyroscope.layers.layer import Layer, split
from gyroscope.layers.layer import layers as find_layers
from gyroscope.theory.batch_norm import BatchCenter
from gyroscope.theory.borrowed_model import BorrowedModel, Layers, outputs_of, relative_change
from gyroscope.theory.domains import generator, positive

TOLERANCE = 0.01


def properties(
    module: nn.Module,
    x: Any,
    *,
    layers: Layers = None,
    tolerance: float = TOLERANCE,
    dtype: torch.dtype | None = torch.float64,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Measure, per layer, whether the modules after it make it scale-invariant, center it and mix examples.

    All changes are relative: ‖f′ − f‖/‖f‖ of the network's outputs f; of one example for "stochastic". They are made at
    the layer: its weights are multiplied by γ between 1 and 4; a constant as large as its output's standard deviation
    is added to each of its units; the other examples' outputs are permuted, scaled and shifted. The ε of a
    normalizer leaves a change of about ε/(2σ²), σ² the variance of its inputs; `tolerance` is above that.

    Args:
        module: a network, or a single normalizer, to which a layer is then prepended. It is left unchanged and measured
            in its mode: batch normalization in evaluation mode is an affine map.
        x: its inputs: a tensor with two or more examples, a tuple of positional or a dict of keyword arguments.
        layers: layers from `gyroscope.layers`, or glob patterns on their names.
        tolerance: the largest change that counts as none.
        dtype: type that passes run in; None for the module's own.
        seed: seed of the changes.

    Returns:
        One dict per layer: `layer`; `scale_invariant`, which is "unit", "tensor", "no" or "undecided: no effect";
        `centering` and `stochastic`, True, False, or None if the layer's output is not accessible; and the changes
        `change_unit`, `change_tensor`, `change_shift`, `change_others`.

    >>> _ = torch.manual_seed(0)
    >>> (row,) = properties(nn.LayerNorm(8), torch.randn(6, 8))
    >>> row["scale_invariant"], row["centering"], row["stochastic"]
    ('tensor', False, False)
    """
    positive("tolerance", tolerance, hint=f"{TOLERANCE}")
    if not isinstance(x, Tensor | tuple | list | Mapping):
        raise DynamicsError(
            f"`x` must be a tensor, a tuple of positional or a dict of keyword arguments, got a {type(x).__name__}."
        )
    seed = accepted.seed(seed, DynamicsError)
    borrowed = BorrowedModel(_with_layer(module, x, seed), (x, None), layers=layers, dtype=dtype)
    draw = generator(seed)
    own, plain = borrowed.weights(), outputs_of(borrowed.output())
    return [_row(borrowed, own, plain, i, draw, tolerance) for i in range(len(own))]


def comparison() -> list[dict[str, Any]]:
    """Measure the normalizers of section 4.4, and some variants, for the same three properties.

    Layer normalization and those above it act on a fully connected layer, the others on a convolution.

    >>> for row in comparison():
    ...     print(f"{row['normalizer']:28} {row['scale_invariant']:7} {row['centering']!s:6} {row['stochastic']}")
    none                         no      False  False
    batch norm                   unit    True   True
    batch centering              no      True   True
    weight norm                  unit    False  False
    weight norm, batch centering unit    True   True
    layer norm                   tensor  False  False
    RMS norm                     tensor  False  False
    group norm                   tensor  False  False
    instance norm                unit    True   False
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        matrix, images = torch.randn(12, 5) + 1, torch.randn(12, 5, 9) + 1
        rows = []
        for name, make in NORMALIZERS.items():
            module = make()
            (row,) = properties(module, images if isinstance(module[0], nn.Conv1d) else matrix)
            rows.append({"normalizer": name} | row)
    return rows


def _linear(*following: Callable[[], nn.Module], weight_norm: bool = False) -> nn.Sequential:
    layer = nn.Linear(5, 8, bias=False)
    if weight_norm:
        layer = nn.utils.parametrizations.weight_norm(layer)
    return nn.Sequential(layer, *(make() for make in following), nn.Tanh())


def _convolution(following: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Conv1d(5, 8, 3, bias=False), following(), nn.Tanh())


NORMALIZERS: dict[str, Callable[[], nn.Sequential]] = {
    "none": _linear,
    "batch norm": partial(_linear, partial(nn.BatchNorm1d, 8)),
    "batch centering": partial(_linear, partial(BatchCenter, 8)),
    "weight norm": partial(_linear, weight_norm=True),
    "weight norm, batch centering": partial(_linear, partial(BatchCenter, 8), weight_norm=True),
    "layer norm": partial(_linear, partial(nn.LayerNorm, 8)),
    "RMS norm": partial(_linear, partial(nn.RMSNorm, 8, eps=1e-6)),
    "group norm": partial(_convolution, partial(nn.GroupNorm, 4, 8)),
    "instance norm": partial(_convolution, partial(nn.InstanceNorm1d, 8)),
}


class _Mix(nn.Module):
    """A fully connected layer along one dimension, placed before a single normalizer."""

    def __init__(self, size: int, dim: int, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        # On "meta", so that no numbers are drawn from torch's generator.
        self.linear = nn.Linear(size, size, bias=False, device="meta")
        self.linear.weight = nn.Parameter(torch.randn(size, size, generator=draw) / size**0.5)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.linear(x.movedim(self.dim, -1)).movedim(-1, self.dim)
        return mixed


def _with_layer(module: nn.Module, x: Any, seed: int) -> nn.Module:
    try:
        find_layers(module)
    except LayerError as error:
        if not isinstance(module, nn.Module) or not isinstance(x, Tensor) or x.dim() < 2:
            raise DynamicsError(f"{error} A single normalizer needs a tensor [B, D, ...].") from error
        units_first = isinstance(module, _NormBase | nn.GroupNorm | BatchCenter) or x.dim() > 3
        dim = 1 if units_first else x.dim() - 1
        mix = _Mix(x.shape[dim], dim, seed).to(x.device, x.dtype)
        return nn.Sequential(mix, module)
    return module


def _row(
    borrowed: BorrowedModel, own: list[Tensor], plain: list[Tensor], i: int, draw: torch.Generator, tolerance: float
) -> dict[str, Any]:
    layer, weight = borrowed.layers[i], own[i]

    def change(other: Tensor) -> float:
        return relative_change(outputs_of(borrowed.output([*own[:i], other, *own[i + 1 :]])), plain)

    def uniform(size: int) -> Tensor:
        return (1 + 3 * torch.rand(size, generator=draw, dtype=torch.float64)).to(weight)

    tensor, unit = change(4 * weight), None
    try:
        rows = split(layer, "row")
        scales = uniform(rows.segments).view(-1, *[1] * (weight.dim() - 1))
        unit = change((rows.view(weight) * scales).movedim(0, rows.dim))
    except LayerError:
        pass  # units along two dimensions
    other = torch.randn(weight.shape, generator=draw, dtype=torch.float64).to(weight)
    matters = change(other * (weight.norm() / other.norm())) > tolerance
    seen: dict[str, float | None] = {}
    for name, alter in (("shift", _shifted), ("others", _others)):
        outputs = _altered(borrowed, layer, partial(alter, layer, draw))
        first = name == "others"
        seen[name] = None if outputs is None else relative_change(_first_of(outputs, first), _first_of(plain, first))
    flags = {name: None if change is None else change <= tolerance for name, change in seen.items()}
    if not matters:
        verdict = "undecided: no effect"
    elif unit is not None and unit <= tolerance:
        verdict = "unit"
    else:
        verdict = "tensor" if tensor <= tolerance else "no"
    return {
        "layer": layer.name,
        "scale_invariant": verdict,
        "centering": flags["shift"],
        "stochastic": None if flags["others"] is None else not flags["others"],
        "change_unit": unit,
        "change_tensor": tensor,
        "change_shift": seen["shift"],
        "change_others": seen["others"],
    }


def _altered(borrowed: BorrowedModel, layer: Layer, alter: Callable[[Tensor], Tensor]) -> list[Tensor] | None:
    """Return the network's outputs with the layer's own output altered; None if that is not accessible."""
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
        outputs = outputs_of(borrowed.output())
    finally:
        handle.remove()
    return outputs if met else None


def _shifted(layer: Layer, draw: torch.Generator, output: Tensor) -> Tensor:
    """R + 1cᵀ: another constant for each unit, about as large as R's standard deviation."""
    dim = 1 if layer.kind.startswith("conv") else output.dim() - 1
    shape = [size if d == dim else 1 for d, size in enumerate(output.shape)]
    return output + output.std() * torch.randn(shape, generator=draw, dtype=torch.float64).to(output)


def _others(layer: Layer, draw: torch.Generator, output: Tensor) -> Tensor:
    """Keep the first example and replace all others."""
    noise = torch.randn(output[1:].shape, generator=draw, dtype=torch.float64).to(output)
    return torch.cat([output[:1], 2 * output[1:].flip(0) + output.std() * (1 + noise)])


def _first_of(outputs: list[Tensor], only: bool) -> list[Tensor]:
    """Return the outputs of the first example only, if `only`."""
    return [one[:1] for one in outputs] if only else outputs
