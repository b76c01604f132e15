"""Spectra of the factors Σx and Σ∇h of a layer: λmax, λ_p and κ_p, and the shares p they are taken at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gyroscope.base.accepted import real
from gyroscope.conditioning.products import index_at
from gyroscope.errors import ConditioningError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Shares p of the dimension at which condition numbers κ_p are taken by default.
P = (0.1, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The eigenvalues of a symmetric positive semidefinite matrix of dimension d, on the host.

    κ_p = λmax / λ_p, with λ_p the ⌈p·d⌉-th largest of all d eigenvalues.

    Attributes:
        values: the eigenvalues in descending order; those that count as zero are exactly 0. All NaN if the matrix was
            not finite.
        dimension: d; the d − len(values) eigenvalues that are not listed are zero.

    >>> s = Spectrum(np.array([4.0, 2.0, 0.0]), 4)
    >>> s.largest, s.rank, s.at(0.5), s.kappa(0.5), s.kappa(1.0)
    (4.0, 2, 2.0, 2.0, inf)
    """

    values: npt.NDArray[np.float64]
    dimension: int

    def __post_init__(self) -> None:
        if self.values.shape == (1,) and self.dimension >= 1 and 0 <= self.values[0] < np.inf:
            return  # λmax alone: there may be hundreds of these
        v = self.values
        ordered = bool(np.isfinite(v).all() and (v[1:] <= v[:-1]).all() and (v >= 0).all()) or bool(np.isnan(v).all())
        if v.ndim != 1 or len(v) > self.dimension or not ordered:
            raise ConditioningError(
                f"values of shape {v.shape} were given as the spectrum of a matrix of dimension {self.dimension}: give "
                "at most that many, in descending order, none negative and none infinite; Spectrum.of takes any order"
            )

    @classmethod
    def of(cls, eigenvalues: Tensor, dimension: int, *, tolerance: float) -> Spectrum:
        """The spectrum with those `eigenvalues`, in any order; those ≤ tolerance·λmax count as zero.

        >>> import torch
        >>> Spectrum.of(torch.tensor([1e-18, 1.0, -1e-17, 4.0]), 5, tolerance=1e-15).values
        array([4., 1., 0., 0.])
        """
        return spectra_of([eigenvalues], [dimension], [tolerance])[0]

    @property
    def largest(self) -> float:
        """λmax; 0 where the dimension is."""
        return float(self.values[0]) if len(self.values) else 0.0

    @property
    def rank(self) -> int:
        """The number of eigenvalues above zero."""
        return int((self.values > 0).sum())

    def at(self, p: float) -> float:
        """λ_p, the ⌈p·d⌉-th largest eigenvalue.

        >>> Spectrum(np.array([4.0, 2.0]), 3).at(0.1), Spectrum(np.array([4.0, 2.0]), 3).at(1.0)
        (4.0, 0.0)
        """
        index = index_at(p, self.dimension)
        if np.isnan(self.largest):
            return np.nan
        return float(self.values[index - 1]) if 0 < index <= len(self.values) else 0.0

    def kappa(self, p: float) -> float | None:
        """κ_p = λmax/λ_p: infinite where λ_p = 0 < λmax, None where λmax = 0.

        >>> Spectrum(np.zeros(2), 2).kappa(1.0) is None
        True
        """
        smaller = self.at(p)
        if self.largest == 0:
            return None
        return self.largest / smaller if smaller != 0 else np.inf

    def full(self) -> npt.NDArray[np.float64]:
        """All d eigenvalues, the zeros that are not listed as well.

        >>> Spectrum(np.array([4.0, 2.0]), 3).full()
        array([4., 2., 0.])
        """
        return np.concatenate([self.values, np.zeros(self.dimension - len(self.values))])


def spectra_of(
    values: Sequence[Tensor],
    dimensions: Sequence[int],
    tolerances: Sequence[float],
    times: Sequence[float] | None = None,
    roundings: Sequence[float] | None = None,
) -> list[Spectrum]:
    """`Spectrum.of` for many, with one copy from each device to the host; there values may be multiplied.

    With `roundings`, also those at most that share of the *mean* eigenvalue count as zero.

    >>> import torch
    >>> [s.values.tolist() for s in spectra_of([torch.tensor([1.0, 2.0]), torch.zeros(0)], [2, 2], [0.0, 0.0])]
    [[2.0, 1.0], []]
    """
    import torch  # which a spectrum that is there already does without

    held: dict[torch.device, list[int]] = defaultdict(list)
    for i, v in enumerate(values):
        held[v.device].append(i)
    host: list[npt.NDArray[np.float64]] = [np.zeros(0)] * len(values)
    for indices in held.values():
        flat = torch.cat([values[i].detach().reshape(-1) for i in indices]).cpu().to(torch.float64).numpy()
        parts = np.split(flat, np.cumsum([values[i].numel() for i in indices])[:-1])
        for i, part in zip(indices, parts, strict=True):
            host[i] = part
    each = [1.0] * len(values) if times is None else times
    noise = [0.0] * len(values) if roundings is None else roundings
    return [_cleared(v * n, d, t, r) for v, d, t, n, r in zip(host, dimensions, tolerances, each, noise, strict=True)]


def _cleared(values: npt.NDArray[np.float64], dimension: int, tolerance: float, rounding: float) -> Spectrum:
    if len(values) == 1:
        return Spectrum(values.clip(0) if np.isfinite(values[0]) else values * np.nan, dimension)
    if not np.isfinite(values).all():
        return Spectrum(np.full(len(values), np.nan), dimension)
    ordered = np.sort(values)[::-1]
    least = np.maximum(tolerance * ordered[:1], rounding * ordered.sum() / max(dimension, 1))
    return Spectrum(np.where(ordered > least, ordered, 0.0), dimension)


def check_p(p: Any) -> tuple[float, ...]:
    """Return shares p of the dimension as floats; each must lie in (0, 1].

    >>> check_p([0.5, 1])
    (0.5, 1.0)
    """
    try:
        given = list(p)
    except TypeError:
        given = [p]
    for one in given:
        if not 0 < real(one) <= 1:
            raise ConditioningError(f"p holds {one!r}; accepted are shares of the dimension in (0, 1], such as 0.5.")
    return tuple(real(one) for one in given)
