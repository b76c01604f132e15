"""Detection of scale-invariant layers with Euler's theorem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gyroscope.errors import DynamicsError, LayerError
from gyroscope.layers.layer import Layer, split
from gyroscope.theory.borrowed_model import BorrowedModel, Layers, Loss, outputs_of, relative_change
from gyroscope.theory.domains import count, generator, positive
from gyroscope.theory.invariance_result import Invariance, LayerInvariance, ScaleInvariant

TOLERANCE = 0.05
_NOISE = 0.3  # noise at the other points, relative to the root mean square of a layer's weights
_ROUNDING = 64  # times the type's precision: a smaller relative gradient or change counts as zero
_COARSE = 0.125  # times the root of the precision, which is smaller for 16-bit types: sums are taken in float32
_NEAR = 8  # times the tolerance: cosines of layers that are not invariant are seldom below this
_STRICTER = 0.2  # times the tolerance, for changes by rescaling that do not look like those of an ε
_TINY = 1e-3  # of the largest ‖w‖‖∇‖: such a gradient may be due to an ε alone


def invariance(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    layers: Layers = None,
    tolerance: float = TOLERANCE,
    points: int = 4,
    dtype: torch.dtype | None = torch.float64,
    seed: int = 0,
) -> Invariance:
    """Find which layers are scale-invariant, and whether per unit or only as a whole.

    If J(γw) = J(w) for every γ > 0, Euler's theorem (equation 16 of Grosse's chapter with k = 0) makes the gradient
    orthogonal to the weights:

        ⟨w, ∇J(w)⟩ / (‖w‖ ‖∇J(w)‖) = 0,

    with w the vector w_j of weights into one unit (batch, weight and instance normalization), or the whole tensor
    (layer normalization). The effective learning rate of such a layer is η/‖w‖², and weight decay acts on it only
    through that.

    **What counts as zero.** Unrelated directions have a cosine of about 1/√n, n the number of elements. So the verdict
    is based on the deviation √n |cosine|, which is about 1 or more for a layer that is not invariant. The ε of
    normalizers leaves a share of about ε/(σ² + ε) of that, σ² the variance of the pre-activations. On residual,
    convolutional and fully connected networks, fresh and trained, deviations were at most 0.002 with ε = 1e-5 and 0.03
    with ε = 1e-3; 0.07 or more after a bias that breaks the invariance of layer or group normalization slightly; and
    0.4 or more for all other layers. `tolerance` lies in between. The measured values are reported in any case.

    A layer that is not invariant may pass by chance at one point, or because its scale has been trained to its optimum.
    So the deviation is the largest over several points: the model's own weights, and others nearby, at which every
    layer has noise of 0.3 times the root mean square of its weights. Cosines are reported at the model's own weights.

    **A second look.** A normalizer may leave hardly any gradient (over two examples, or with one weight per unit). The
    rest is then due to ε, and its direction is meaningless. If the gradient is tiny compared with that of other layers,
    if units have one weight or none has a gradient, or if a cosine is close to what counts as zero, weights are
    actually rescaled, by up to 4. The layer is invariant if that changes the outputs by at most `tolerance` times the
    change from turning the weights, and is not if it changes the loss. Over 30 networks of each kind, shares were 0.001
    in the median after batch normalization over two examples and with one weight per unit, up to 0.1 where ε does
    matter, and 0.2 or more for units that are not invariant.

    The model runs in its current mode: in evaluation mode, batch normalization makes no layer invariant.

    Args:
        model: any module that is not sharded; weights, gradients, buffers, modes and random numbers are left unchanged.
        loss: `loss(output, target)`: one number, or one per sample.
        batch: (inputs, targets); inputs are a tensor, a tuple of positional or a dict of keyword arguments.
        layers: layers from `gyroscope.layers`, or glob patterns on their names. Frozen layers are measured too.
        tolerance: the largest √n |cosine| that counts as zero.
        points: number of weights to measure at, the model's own included.
        dtype: type that passes run in, whatever the model's type; None for its own.
        seed: seed of the noise.

    Returns:
        One row per layer: print it, or call `rows()`.

    Raises:
        DynamicsError: an argument is not supported, or a pass failed; the model is unchanged.

    >>> _ = torch.manual_seed(0)
    >>> net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    >>> found = invariance(net, nn.functional.cross_entropy, (torch.randn(32, 5), torch.arange(32) % 3))
    >>> [(row["layer"], row["scale_invariant"]) for row in found.rows()]
    [('0.weight', 'unit'), ('3.weight', 'no')]
    >>> found["0.weight"].cosine_unit < 1e-3
    True
    """
    positive("tolerance", tolerance, hint=f"{TOLERANCE}")
    points = count("points", points, least=1)
    if not callable(loss):
        raise DynamicsError(f"`loss` must be a function of (output, target), got a {type(loss).__name__}.")
    draw = generator(seed)
    borrowed = BorrowedModel(model, batch, loss, layers=layers, dtype=dtype)
    own = borrowed.weights()
    value, gradients = borrowed.gradients(own)
    seen = [_aligned(borrowed.layers, own, gradients)]
    for _ in range(points - 1):
        near = [_near(w, draw) for w in own]
        seen.append(_aligned(borrowed.layers, near, borrowed.gradients(near)[1]))
    entries = [
        _judge(layer, own[i], gradients[i], [at[i] for at in seen], tolerance=tolerance)
        for i, layer in enumerate(borrowed.layers)
    ]
    largest = max(entry.weight_norm * entry.gradient_norm for entry in entries)
    for i, entry in enumerate(entries):
        if _doubtful(entry, seen[0][i], largest, tolerance):
            entries[i] = _looked_at_again(borrowed, own, i, entry, draw, tolerance)
    return Invariance(tuple(entries), float(tolerance), points, value)


def _near(weight: Tensor, draw: torch.Generator) -> Tensor:
    noise = torch.randn(weight.shape, generator=draw, dtype=torch.float64).to(weight)
    return weight + _NOISE * _norm(weight) / sqrt(weight.numel()) * noise


def _aligned(layers: Sequence[Layer], weights: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Alignment]:
    pulls = [_norm(w) * _norm(g) for w, g in zip(weights, gradients, strict=True) if g is not None]
    eps = torch.finfo(weights[0].dtype).eps
    nothing = min(_ROUNDING * eps, _COARSE * sqrt(eps)) * max(pulls, default=0.0)
    return [alignment(*one, nothing=nothing) for one in zip(layers, weights, gradients, strict=True)]


def _judge(
    layer: Layer, weight: Tensor, gradient: Tensor | None, seen: Sequence[Alignment], *, tolerance: float
) -> LayerInvariance:
    here = seen[0]
    tensor = max((at.tensor for at in seen if at.tensor is not None), key=abs, default=None)
    unit = max((at.largest for at in seen if at.largest is not None), default=None)
    off_tensor = None if tensor is None else sqrt(here.size) * abs(tensor)
    off_unit = None if unit is None else sqrt(here.fan_in) * unit
    verdict: ScaleInvariant
    if _norm(weight) == 0:
        verdict = "undecided: the weight is zero"
    elif here.tensor is None or off_tensor is None or (here.units and off_unit is None):
        verdict = "undecided: no gradient"
    elif here.fan_in == 1:
        verdict = "undecided: one weight per unit"
    elif off_unit is not None and off_unit <= tolerance:
        verdict = "unit"
    else:
        verdict = "tensor" if off_tensor <= tolerance else "no"
    return LayerInvariance(
        layer=layer.name,
        kind=layer.kind,
        scale_invariant=verdict,
        cosine_unit=here.largest,
        cosine_tensor=here.tensor,
        deviation_unit=off_unit,
        deviation_tensor=off_tensor,
        units=here.units,
        silent_units=here.silent,
        weight_norm=_norm(weight),
        gradient_norm=0.0 if gradient is None else _norm(gradient),
    )


def _doubtful(entry: LayerInvariance, here: Alignment, largest: float, tolerance: float) -> bool:
    """Return whether cosines may hide an invariance. What they do find, at several points, is not found by chance."""
    if entry.scale_invariant == "unit" or entry.weight_norm == 0 or entry.gradient_norm == 0:
        return False
    off = [entry.deviation_tensor if entry.scale_invariant != "tensor" else None]
    off.append(None if here.typical is None else sqrt(here.fan_in) * here.typical)
    near = any(one is not None and one <= _NEAR * tolerance for one in off)
    tiny = entry.weight_norm * entry.gradient_norm <= _TINY * largest
    return near or tiny or entry.scale_invariant.startswith("undecided")


def _looked_at_again(
    borrowed: BorrowedModel,
    own: Sequence[Tensor],
    i: int,
    entry: LayerInvariance,
    draw: torch.Generator,
    tolerance: float,
) -> LayerInvariance:
    """Judge by rescaling a layer that may be more invariant than cosines say, or that passed by chance."""

    def seen(see: Callable[[Sequence[Tensor]], list[Tensor]]) -> Rescaled | None:
        try:
            return rescaled(see, borrowed.layers[i], own, i, draw)
        except DynamicsError:  # outputs that cannot be compared, or a loss that is not finite
            return None

    outputs = seen(lambda weights: outputs_of(borrowed.output(weights)))
    if outputs is None:
        return entry
    verdict, decided = entry.scale_invariant, True
    # Saturated units change little as well, but more than invariant ones do because of a normalizer's ε.
    most = tolerance if outputs.fades else tolerance * _STRICTER
    if outputs.unit is not None and outputs.unit <= most and (outputs.tensor <= most or outputs.fades):
        verdict = "unit"
    elif outputs.tensor <= most:
        verdict = "tensor"
    elif verdict != "no" and not outputs.fades:
        # The loss may still not depend on the scale of the outputs.
        loss = seen(lambda weights: [torch.tensor([borrowed.gradients(weights)[0]])])
        decided = loss is not None and loss.tensor > tolerance and not loss.fades
        verdict = "no" if decided else verdict
    else:
        decided = False
    return replace(
        entry, scale_invariant=verdict, change_unit=outputs.unit, change_tensor=outputs.tensor, by_rescaling=decided
    )


@dataclass(frozen=True)
class Alignment:
    """⟨w, ∇⟩/(‖w‖‖∇‖) of a layer.

    Attributes:
        tensor: cosine of the whole tensor; None if weight or gradient is zero.
        largest: the largest |cosine| over its units; None if no unit has one.
        typical: mean |cosine| over units, weighted by ‖w_j‖‖∇_j‖, so that units with hardly any gradient count for as
            little; None if no unit has one.
        size: number of elements.
        fan_in: number of elements per unit.
        units: number of units; 0 if the layer cannot be split into units.
        silent: number of units without a cosine: their weight or their gradient is zero.
    """

    tensor: float | None
    largest: float | None
    typical: float | None
    size: int
    fan_in: int
    units: int
    silent: int


def alignment(layer: Layer, weight: Tensor, gradient: Tensor | None, *, nothing: float = 0.0) -> Alignment:
    """Return the cosines between a layer's weight and its gradient.

    Args:
        layer: defines the units: rows of a linear layer, filters of a convolution, tokens of an embedding.
        weight: weight, of the layer's shape.
        gradient: gradient, of the same shape; None for zero.
        nothing: the gradient counts as zero if ‖w‖‖∇‖ is at most this; that of a unit, at most its share of this.

    >>> from gyroscope.layers.layer import layers
    >>> w, g = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    >>> found = alignment(layers(torch.nn.Linear(2, 2))[0], w, g)
    >>> round(found.tensor, 6), found.largest
    (0.5, 1.0)
    """
    given = _real(weight)
    slope = torch.zeros_like(given) if gradient is None else _real(gradient)
    (whole,) = _cosines(given.reshape(1, -1), slope.reshape(1, -1), nothing).tolist()
    tensor = None if whole != whole else whole  # NaN: undefined
    try:
        rows = split(layer, "row")
    except LayerError:  # a grouped transposed convolution has its units along two dimensions
        return Alignment(tensor, None, None, given.numel(), 0, 0, 0)
    w, g = (rows.view(one).reshape(rows.segments, -1) for one in (given, slope))
    cosines = _cosines(w, g, nothing / len(w))
    heard = ~cosines.isnan()
    sizes, pulls = cosines[heard].abs(), (w.norm(dim=1) * g.norm(dim=1))[heard]
    largest = float(sizes.max()) if len(sizes) else None
    typical = float((sizes * pulls).sum() / pulls.sum()) if len(sizes) else None
    return Alignment(tensor, largest, typical, given.numel(), w.shape[1], len(w), len(w) - len(sizes))


def _norm(tensor: Tensor) -> float:
    """Return ‖tensor‖ as a number.

    >>> _norm(torch.tensor([3.0, 4.0]))
    5.0
    """
    return float(torch.linalg.vector_norm(tensor))


def _cosines(w: Tensor, g: Tensor, nothing: float) -> Tensor:
    """Return the cosines of the rows; NaN if undefined. Normalized first: the square of a tiny gradient may be zero."""
    sizes, slopes = (torch.linalg.vector_norm(one, dim=1, keepdim=True) for one in (w, g))
    cosines = ((w / sizes) * (g / slopes)).sum(1)
    return torch.where((sizes * slopes > nothing).squeeze(1), cosines, torch.nan)


def _real(tensor: Tensor) -> Tensor:
    """Return real numbers of float32 or better: sums in lower precision would be as coarse as the deviations."""
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.to(torch.promote_types(real.dtype, torch.float32))


Seen = Callable[[Sequence[Tensor]], list[Tensor]]

_DRAWS = 3  # draws of each change: a single one may change nothing by chance
_MOST = 4.0  # the largest γ
# The effect of ε falls to 1/16 for weights four times as large; for small weights it grows by less than 16.
_FADES, _GROWS = (1 / 40, 1 / 10), (4.0, 20.0)


class Rescaled(NamedTuple):
    """The largest changes when a layer is rescaled, relative to the largest change when it is turned.

    Attributes:
        unit: with another γ from 1 to 4 for each unit; None if the layer cannot be split into units.
        tensor: with one γ for all, 1/4 and 4.
        fades: whether the effect of rescaling falls as 1/γ², as it does if it is due to the ε of a normalizer.
            Saturated units also change little with a large γ, but not in this way.
    """

    unit: float | None
    tensor: float
    fades: bool


def rescaled(see: Seen, layer: Layer, weights: Sequence[Tensor], i: int, draw: torch.Generator) -> Rescaled | None:
    """Return the effect of rescaling a layer relative to that of turning it:

        max ‖f(Γw) − f(w)‖ / max ‖f(w′) − f(w)‖,        ‖w′‖ = ‖w‖ in any direction

    Args:
        see: f, the outputs or the loss as a function of the weights of all layers.
        layer: defines the units.
        weights: weights of all layers.
        i: position of the layer's weights in `weights`.
        draw: random generator of γ and of directions.

    Returns:
        None if turning the weights does not change anything either.

    >>> from gyroscope.layers.layer import layers
    >>> [linear], w = layers(torch.nn.Linear(2, 3)), torch.tensor([[3.0, 4.0], [0.0, 1.0], [1.0, 1.0]])
    >>> draw = torch.Generator().manual_seed(0)
    >>> found = rescaled(lambda weights: [weights[0] / weights[0].norm()], linear, [w], 0, draw)
    >>> found.tensor < 1e-6, found.unit > 0.1
    (True, True)
    """
    weight, here = weights[i], see(weights)

    def there(other: Tensor) -> list[Tensor]:
        return see([*weights[:i], other, *weights[i + 1 :]])

    def change(*others: Tensor) -> float:
        return max(relative_change(there(other), here) for other in others)

    def turned() -> Tensor:
        other = torch.randn(weight.shape, generator=draw, dtype=torch.float64).to(weight)
        return other * (_norm(weight) / _norm(other))

    def scales(count: int) -> Tensor:
        # Larger scales only: with smaller ones the ε of a normalizer would matter.
        return (1 + (_MOST - 1) * torch.rand(count, generator=draw, dtype=torch.float64)).to(weight)

    matters = change(*(turned() for _ in range(_DRAWS)))
    if not matters > _ROUNDING * torch.finfo(weight.dtype).eps:
        return None
    larger = there(weight * _MOST)
    up, down = relative_change(larger, here), change(weight / _MOST)
    further = relative_change(there(weight * _MOST**2), larger)
    fades = _FADES[0] * up <= further <= _FADES[1] * up and _GROWS[0] * up <= down <= _GROWS[1] * up
    tensor = max(down, up) / matters
    try:
        rows = split(layer, "row")
    except LayerError:  # units along two dimensions
        return Rescaled(None, tensor, fades)
    shape = (-1, *[1] * (weight.dim() - 1))
    units = [rows.view(weight) * scales(rows.segments).view(shape) for _ in range(_DRAWS)]
    return Rescaled(change(*(one.movedim(0, rows.dim) for one in units)) / matters, tensor, fades)
