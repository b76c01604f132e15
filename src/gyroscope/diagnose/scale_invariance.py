"""What theory says of a layer whose scale does not matter: how its norm, its effective learning rate and its angle go.

A layer that is followed by a normalizer computes the same for w and for γw. Three things follow (Grosse, *Adaptive
Gradient Methods, Normalization, and Weight Decay*, sections 4.3 and 5.1). By Euler's theorem its gradient is orthogonal
to its weights, and shrinks as they grow: ⟨w, ∇⟩ = 0 and ‖∇‖ = g̃/‖w‖, with g̃ the gradient's norm at the unit vector
w/‖w‖. What counts is the effective learning rate η/‖w‖². And steps that go off at a right angle make the norm grow, by
Pythagoras, until weight decay takes away as much as they add.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope.errors import MonitorError

_UNSIZED = 10_000  # elements of a layer whose size is not given


def require_run(run: Any) -> None:
    """Refuse what is no run, such as the path of one.

    >>> require_run("runs/first")
    Traceback (most recent call last):
    gyroscope.errors.MonitorError: A str was given for a run; accepted is what gyroscope.load gives.
    """
    if not hasattr(run, "series") or not hasattr(run, "quantities"):
        raise MonitorError(f"A {type(run).__name__} was given for a run; accepted is what gyroscope.load gives.")


def scale_invariant(
    invariance: npt.ArrayLike, sizes: Sequence[int] | None = None, *, tol: float = 0.1, steps: int = 5
) -> list[bool | None]:
    """Which layers are scale-invariant, from ⟨w,∇⟩/(‖w‖‖∇‖) at some steps: Euler's theorem, equation 16 with k = 0.

    A direction that has nothing to do with w has a cosine of about 1/√n with it, n the layer's number of elements. A
    layer counts as scale-invariant where the median of |cosine| over the measured steps stays below tol/√n. The
    median, because by chance any layer's cosine is small at one step. On trained networks, √n times the median came to
    at most 0.004 for layers that are invariant (bfloat16 autocast and the ε of normalizers included), to 0.03–0.1 for
    those that nearly are (a bias before LayerNorm or GroupNorm) and to more than 1 for all others.

    Args:
        invariance: the cosines, [steps, layers]; NaN where not measured.
        sizes: the number of elements of each layer; without them each is taken to have 10⁴.
        tol: the share of 1/√n that is still taken for zero.
        steps: how many measured steps are needed to decide.

    Returns:
        One of True, False and None (not measured, or not often enough) a layer.

    >>> scale_invariant([[1e-7, 0.2], [-3e-7, -0.1], [2e-7, 0.3]], steps=3)
    [True, False]
    >>> scale_invariant([[1e-7, np.nan]])
    [None, None]
    """
    cosines = np.abs(np.asarray(invariance, dtype=np.float64))
    if cosines.ndim != 2:
        raise MonitorError(f"invariance has shape {cosines.shape}; accepted is [steps, layers].")
    if sizes is not None and len(sizes) != cosines.shape[1]:
        raise MonitorError(f"{len(sizes)} sizes were given for {cosines.shape[1]} layers; give one a layer.")
    elements = [_UNSIZED] * cosines.shape[1] if sizes is None else sizes
    found: list[bool | None] = []
    for column, n in zip(cosines.T, elements, strict=True):
        seen = column[np.isfinite(column)]
        enough = len(seen) >= max(1, steps)
        found.append(bool(np.median(seen) < tol / sqrt(max(1, n))) if enough else None)
    return found
