"""A matrix of second moments GᵀG/N, kept by its rows G for as long as these are fewer than its dimension.

The eigenvalues of GᵀG/N above zero are those of GGᵀ/N, which is the smaller of the two then.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gyroscope.conditioning.eigen import eigenvalues
from gyroscope.conditioning.spectra import Spectrum


@dataclass(frozen=True, eq=False)
class Moments:
    """GᵀG/N, of dimension d.

    Attributes:
        held: G/√N, [rows, d], where there are fewer rows than d; else GᵀG/N, [d, d].
        dimension: d.

    >>> one = Moments(torch.tensor([[3.0, 4.0]], dtype=torch.float64), 2)
    >>> one.matrix.tolist(), one.spectrum(tolerance=0.0).full()
    ([[9.0, 12.0], [12.0, 16.0]], array([25.,  0.]))
    """

    held: Tensor
    dimension: int

    @cached_property
    def matrix(self) -> Tensor:
        """GᵀG/N itself."""
        return self.held.T @ self.held if len(self.held) < self.dimension else self.held

    def part(self, where: slice) -> Moments:
        """The block of some of the dimensions."""
        size = where.stop - where.start
        if len(self.held) == self.dimension:
            return Moments(self.held[where, where], size)
        rows = self.held[:, where]
        return Moments(rows if len(rows) < size else rows.T @ rows, size)

    def spectrum(self, *, tolerance: float) -> Spectrum:
        """The eigenvalues, from the smaller side."""
        smaller = self.held @ self.held.T if len(self.held) < self.dimension else self.held
        return Spectrum.of(eigenvalues([smaller])[0], self.dimension, tolerance=tolerance)


class Sum:
    """Σ g gᵀ over rows g as they come, in float64."""

    def __init__(self, dimension: int, device: torch.device) -> None:
        self.dimension, self.device = dimension, device
        self.rows: list[Tensor] = []
        self.count = 0
        self.total: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """Add some rows, [k, dimension]."""
        rows = rows.to(self.device, torch.float64)
        self.count += len(rows)
        if self.total is None and self.count < self.dimension:
            self.rows.append(rows)
            return
        if self.total is None:
            self.total = torch.zeros(self.dimension, self.dimension, dtype=torch.float64, device=self.device)
        for one in (*self.rows, rows):
            self.total.addmm_(one.T, one)
        self.rows = []

    def mean(self, samples: int) -> Moments:
        """What has come, divided by a number of samples."""
        if self.total is None:
            return Moments(torch.cat(self.rows) / samples**0.5, self.dimension)
        return Moments(self.total.div_(samples), self.dimension)
