"""One rule for "is this layer scale-invariant", from its recorded series.

A layer that is followed by a normalizer computes the same for w and for γw. Three things follow (Grosse, *Adaptive
Gradient Methods, Normalization, and Weight Decay*, sections 4.3 and 5.1). By Euler's theorem its gradient is orthogonal
to its weights, and shrinks as they grow: ⟨w, ∇⟩ = 0 and ‖∇‖ = g̃/‖w‖, with g̃ the gradient's norm at the unit vector
w/‖w‖. Its training depends on the effective learning rate η/‖w‖². And orthogonal steps make the norm grow, by
Pythagoras, until weight decay takes as much as they add.

The rule tests the first of the three. `gyroscope.diagnosis.explain` and `gyroscope.diagnosis.predict` both use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan, sqrt

import numpy as np
import numpy.typing as npt

from gyroscope.errors import MonitorError
from gyroscope.theory.effective_rate import Floats

#: Number of measured steps below which nothing is decided.
ENOUGH = 10
#: The layer is scale-invariant if √n|cos| is below this at nine in ten steps. Rounding leaves about 10⁻³ for a layer
#: before a normalizer, and a noticeable ε leaves 0.03; layers that are only nearly invariant were measured at 0.06.
INVARIANT = 0.05
#: The layer is not scale-invariant if the median of √n|cos| is above this. Unrelated directions have a median of 0.67.
RELATED = 0.4

_UNSIZED = 10_000  # elements of a layer whose size is not given


@dataclass(frozen=True)
class Orthogonality:
    """Deviation of a layer's gradients from orthogonality to its weights, over the measured steps.

    Attributes:
        found: True if the layer is scale-invariant, False if it is not, None if that is undecided.
        median, most: the median and the 90th percentile of √n|⟨w,∇⟩|/(‖w‖‖∇‖), n the number of elements.
        count: the number of steps at which it was measured.
    """

    found: bool | None
    median: float
    most: float
    count: int


def orthogonality(cosine: npt.ArrayLike, size: int) -> Orthogonality:
    """Judge Euler's theorem (equation 16 with k = 0) by the cosines ⟨w,∇⟩/(‖w‖‖∇‖) of a layer of `size` elements.

    With z = √n·cos, n the number of elements, a layer is

        scale-invariant        if the 90th percentile of |z| is below 0.05,
        not scale-invariant    if the median of |z| is above 0.4,

    and undecided otherwise, or with fewer than 10 measured steps. The theorem holds at every step or at none. So nine
    in ten steps have to be small: a layer that is not scale-invariant has a small cosine at some steps by chance, or
    while its cosine crosses zero. For a gradient unrelated to w, z is about normal, and nine of ten are below 0.05 in
    size with a probability of about 10⁻¹². A median of five below 0.1, for comparison, has a probability of 0.5 %.

    A layer is also undecided if its median is above 0.4 but its first gradient was orthogonal to its weights. Gradients
    that are not zeroed add up over steps, and are orthogonal to the weights of the first step alone.

    Args:
        cosine: one number per step; NaN where not measured.
        size: the number of elements.

    >>> orthogonality(np.full(20, 2.0**-20), 64)
    Orthogonality(found=True, median=7.62939453125e-06, most=7.62939453125e-06, count=20)
    >>> orthogonality(np.linspace(-0.3, 0.3, 20), 100).found is False
    True
    """
    cosines: Floats = np.asarray(cosine, dtype=np.float64)
    seen = sqrt(max(1, size)) * np.abs(cosines[np.isfinite(cosines)])
    if not len(seen):
        return Orthogonality(None, nan, nan, 0)
    median, most = (float(value) for value in np.quantile(seen, [0.5, 0.9]))
    found: bool | None = None
    if len(seen) >= ENOUGH:
        if most < INVARIANT:
            found = True
        elif median > RELATED and seen[0] >= INVARIANT:
            found = False
    return Orthogonality(found, median, most, len(seen))


def scale_invariant(invariance: npt.ArrayLike, sizes: Sequence[int] | None = None) -> list[bool | None]:
    """Return which layers are scale-invariant, by `orthogonality`.

    Args:
        invariance: the cosines ⟨w,∇⟩/(‖w‖‖∇‖), [steps, layers]; NaN where not measured.
        sizes: the number of elements of each layer; 10⁴ for each unless given.

    Returns:
        True, False or None (undecided) per layer.

    >>> steps = (-1.0) ** np.arange(12)[:, None]
    >>> scale_invariant(steps * [1e-7, 0.2, 2e-3])
    [True, False, None]
    >>> scale_invariant([[1e-7, np.nan]])  # fewer than 10 steps
    [None, None]
    """
    cosines = np.asarray(invariance, dtype=np.float64)
    if cosines.ndim != 2:
        raise MonitorError(f"`invariance` must have the shape [steps, layers], got {list(cosines.shape)}.")
    if sizes is not None and len(sizes) != cosines.shape[1]:
        raise MonitorError(f"`sizes` must have one size per layer, got {len(sizes)} for {cosines.shape[1]} layers.")
    elements = [_UNSIZED] * cosines.shape[1] if sizes is None else sizes
    return [orthogonality(column, n).found for column, n in zip(cosines.T, elements, strict=True)]
