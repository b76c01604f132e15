"""Spectra of the factors Σx and Σ∇h of a layer: λmax, λ_p and κ_p."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gyroscope.conditioning.products import index_at, product_at
from gyroscope.errors import ConditioningError

__all__ = ["Spectrum", "eigenvalues", "index_at", "largest", "product_at", "spectra_of"]

# Matrices are stacked up to this many elements at a time: half a gigabyte in float64.
_STACK = 2**26


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
        v = self.values
        if v.ndim != 1 or len(v) > self.dimension or (np.diff(v) > 0).any() or (v < 0).any():
            raise ConditioningError(
                f"{v.shape} values were given as the spectrum of a matrix of dimension {self.dimension}: give at most "
                "that many, in descending order and not negative; Spectrum.of puts eigenvalues in order"
            )

    @classmethod
    def of(cls, eigenvalues: Tensor, dimension: int, *, tolerance: float) -> Spectrum:
        """The spectrum with those `eigenvalues`, in any order; those ≤ tolerance·λmax count as zero.

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


def spectra_of(values: Sequence[Tensor], dimensions: Sequence[int], tolerances: Sequence[float]) -> list[Spectrum]:
    """`Spectrum.of` for many, with one copy from each device to the host.

    >>> [s.values.tolist() for s in spectra_of([torch.tensor([1.0, 2.0]), torch.zeros(0)], [2, 2], [0.0, 0.0])]
    [[2.0, 1.0], []]
    """
    held: dict[torch.device, list[int]] = defaultdict(list)
    for i, v in enumerate(values):
        held[v.device].append(i)
    host: list[npt.NDArray[np.float64]] = [np.zeros(0)] * len(values)
    for indices in held.values():
        flat = torch.cat([values[i].detach().reshape(-1) for i in indices]).cpu().to(torch.float64).numpy()
        parts = np.split(flat, np.cumsum([values[i].numel() for i in indices])[:-1])
        for i, part in zip(indices, parts, strict=True):
            host[i] = part
    return [_cleared(v, d, t) for v, d, t in zip(host, dimensions, tolerances, strict=True)]


def _cleared(values: npt.NDArray[np.float64], dimension: int, tolerance: float) -> Spectrum:
    if not np.isfinite(values).all():
        return Spectrum(np.full(len(values), np.nan), dimension)
    ordered = np.sort(values)[::-1].clip(0.0)
    return Spectrum(np.where(ordered > tolerance * ordered[:1], ordered, 0.0), dimension)


def eigenvalues(matrices: Sequence[Tensor]) -> list[Tensor]:
    """The eigenvalues of symmetric matrices [d, d], each as [d] in descending order, in float64.

    Matrices of one size are decomposed together, on their device; on the CPU where that has no float64. A matrix that
    is not finite has NaN for eigenvalues.

    >>> eigenvalues([torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([[5.0]])])
    [tensor([3., 1.], dtype=torch.float64), tensor([5.], dtype=torch.float64)]
    """
    found: dict[int, Tensor] = {}
    for indices in _alike(matrices):
        stack = torch.stack([_double(matrices[i]) for i in indices])
        scale = _scale(stack)
        decomposed = torch.linalg.eigvalsh(stack.div_(scale).nan_to_num_(0.0, 0.0, 0.0)).flip(-1) * scale[:, 0]
        found.update(zip(indices, decomposed, strict=True))
    return [found[i] for i in range(len(matrices))]


def _alike(matrices: Sequence[Tensor]) -> list[list[int]]:
    """Indices of matrices of the same size on the same device, at most `_STACK` elements a list where that is more."""
    groups: dict[tuple[int, torch.device], list[int]] = defaultdict(list)
    for i, m in enumerate(matrices):
        groups[m.shape[-1], m.device].append(i)
    batches = []
    for (size, _), indices in groups.items():
        most = max(1, _STACK // max(1, size**2))
        batches += [indices[at : at + most] for at in range(0, len(indices), most)]
    return batches


def _double(matrix: Tensor) -> Tensor:
    """In float64, on the CPU where the device has none."""
    matrix = matrix.detach()
    return matrix.to("cpu" if matrix.device.type == "mps" else matrix.device, torch.float64)


def _scale(stack: Tensor) -> Tensor:
    """A power of two near the largest element of each matrix, [b, 1, 1]: 1 for zeros, NaN where not all is finite."""
    if not stack.shape[-1]:
        return stack.new_ones(len(stack), 1, 1)
    most = stack.abs().amax((1, 2), keepdim=True)
    scale = most / (2 * torch.frexp(most).mantissa)
    return torch.where(most == 0, 1.0, torch.where(most.isfinite(), scale, torch.nan))


def largest(matrices: Sequence[Tensor]) -> Tensor:
    """λmax of symmetric positive semidefinite matrices [d, d], as [n] in float64.

    >>> largest([torch.eye(3), torch.tensor([[2.0, 1.0], [1.0, 2.0]])])
    tensor([1., 3.], dtype=torch.float64)
    """
    found = [v[0] if len(v) else v.new_zeros(()) for v in eigenvalues(matrices)]
    return torch.stack(found) if found else torch.zeros(0, dtype=torch.float64)
