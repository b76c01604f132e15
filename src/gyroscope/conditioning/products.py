"""Eigenvalues of a Kronecker product, from those of its factors, without forming it (Proposition 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gyroscope.errors import ConditioningError

if TYPE_CHECKING:
    from gyroscope.conditioning.spectra import Spectrum

# What p may have lost when it was rounded to a float, and a little more.
_EXACT = 1 - Fraction(1, 2**50)


def index_at(p: float, dimension: int) -> int:
    """The place ⌈p·d⌉ of λ_p among d eigenvalues in descending order, counted from 1.

    p stands for the decimal it is printed as, or the fraction it was rounded from: a tenth of 30 is 3, though the
    float 0.1 is above a tenth, and 5/6 of 6 is 5.

    >>> index_at(0.1, 30), index_at(0.1, 31), index_at(5 / 6, 6), index_at(1.0, 7)
    (3, 4, 5, 7)
    """
    try:
        share = Fraction(str(p))
    except ValueError:
        share = Fraction(0)
    if not 0 < share <= 1:
        raise ConditioningError(f"p is {p}; λ_p is the eigenvalue at a share p of all: give numbers above 0, at most 1")
    return math.ceil(share * dimension * _EXACT)


def product_at(x: Sequence[Spectrum], g: Sequence[Spectrum], p: Sequence[float]) -> npt.NDArray[np.float64]:
    """λ_p of Σx ⊗ Σ∇h for all layers, [layers, len(p)].

    >>> import torch
    >>> from gyroscope.conditioning.spectra import Spectrum
    >>> x = Spectrum.of(torch.tensor([3.0, 2.0]), 2, tolerance=0.0)
    >>> g = Spectrum.of(torch.tensor([5.0, 1.0]), 2, tolerance=0.0)
    >>> product_at([x], [g], [0.25, 0.5, 1.0])
    array([[15., 10., 2.]])
    """
    found = np.zeros((len(x), len(p)))
    for row, a, b in zip(found, x, g, strict=True):
        every = np.sort(np.multiply.outer(a.full(), b.full()), axis=None)[::-1]
        for k, share in enumerate(p):
            at = index_at(share, every.size)
            row[k] = np.nan if np.isnan(every).any() else every[at - 1] if at else 0.0
    return found
