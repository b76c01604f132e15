"""Factors in, spectra out: matrices of a size are decomposed together, and no more are held than need be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from gyroscope.conditioning.eigen import eigenvalues, largest
from gyroscope.conditioning.factors import Factor
from gyroscope.conditioning.spectra import Spectrum, spectra_of

# Factors that wait to be decomposed hold at most so many bytes more than what a GPU had in use when the first one came:
# small ones wait for each other, and large ones as long as the backward pass frees more than they take.
_WAITING = 2**25
# On other devices, so many in all.
_WAITING_ELSE = 2**25


class Spectrometer:
    """Finds the spectra of factors, or λmax of each alone, some of them before the rest is there.

    >>> factor = Factor()
    >>> factor.add(torch.tensor([[3.0, 0.0], [0.0, 1.0]])); factor.close()
    >>> spectrometer = Spectrometer(full=True)
    >>> spectrometer.take(factor)
    >>> _ = spectrometer.finish()
    >>> spectrometer[factor].values
    array([4.5, 0.5])
    """

    def __init__(self, *, full: bool) -> None:
        self.full = full
        self._waiting: list[Factor] = []
        self._bytes = 0
        self._at_first: int | None = None
        self._found: list[tuple[Factor, Tensor, float, float]] = []
        self._spectra: dict[int, Spectrum] = {}

    def take(self, factor: Factor) -> None:
        """A factor is complete: what it holds may be let go of."""
        self._waiting.append(factor)
        self._bytes += factor.bytes
        if self._is_too_much(factor.device):
            self._decompose([])

    def _is_too_much(self, device: torch.device | None) -> bool:
        if device is None or device.type != "cuda":
            return self._bytes > _WAITING_ELSE
        in_use = torch.cuda.memory_allocated(device)
        self._at_first = in_use if self._at_first is None else self._at_first
        return in_use > self._at_first + _WAITING

    def finish(self, others: Sequence[Tensor] = ()) -> Tensor:
        """Bring the spectra of all factors to the host; also λmax of other matrices."""
        tops = self._decompose(others)
        factors, values, times, zeros = zip(*self._found, strict=True) if self._found else ((), (), (), ())
        roundings = [rounding(factor) for factor in factors]
        spectra = spectra_of(values, [factor.dimension for factor in factors], zeros, times, roundings)
        self._spectra |= {id(factor): spectrum for factor, spectrum in zip(factors, spectra, strict=True)}
        return tops

    def __getitem__(self, factor: Factor) -> Spectrum:
        return self._spectra[id(factor)]

    def _decompose(self, others: Sequence[Tensor]) -> Tensor:
        """Decompose what is waiting, size by size, with λmax of other matrices along the way."""
        sizes: defaultdict[int, tuple[list[Factor], list[int]]] = defaultdict(lambda: ([], []))
        for factor in self._waiting:
            sizes[0 if factor.diagonal else factor.side][0].append(factor)
        for i, matrix in enumerate(others):
            sizes[len(matrix)][1].append(i)
        self._waiting, self._bytes = [], 0
        tops: dict[int, Tensor] = {}
        for size, (factors, beside) in sizes.items():
            taken = [factor.take() for factor in factors]
            matrices = [matrix for matrix, _ in taken]
            values: Sequence[Tensor]
            if size == 0 and factors:  # one-hot samples: the eigenvalues themselves
                values = [matrix if self.full else matrix.amax()[None] for matrix in matrices]
            elif self.full:
                values = eigenvalues(matrices, owned=True)
                tops |= zip(beside, largest([others[i] for i in beside]), strict=True)
            else:
                both = largest([*matrices, *(others[i] for i in beside)], owned=True)
                values = list(both[: len(matrices), None])
                tops |= zip(beside, both[len(matrices) :], strict=True)
            for factor, (matrix, times), found in zip(factors, taken, values, strict=True):
                self._found.append((factor, found, times, zero_below(factor, matrix.dtype)))
        if not tops:
            return torch.zeros(0, dtype=torch.float64)
        return torch.stack([tops[i].to(tops[0].device) for i in range(len(others))])


def zero_below(factor: Factor, dtype: torch.dtype) -> float:
    """Below which share of λmax an eigenvalue counts as zero, because sums were rounded.

    Adding up R outer products of dimension d moves eigenvalues by the accumulators' epsilon, times d or a fraction of
    R, whichever is more.

    >>> zero_below(Factor(dimension=4, samples=80), torch.float64) == 10 * 2.0**-52
    True
    """
    return max(factor.dimension, factor.samples / 8) * torch.finfo(dtype).eps


def rounding(factor: Factor) -> float:
    """Below which share of the mean eigenvalue one counts as zero, because samples were rounded.

    Rounding to a dtype of epsilon ε is noise of deviation ε/√12 of each element, and adds about ε²/12 of the mean
    eigenvalue to all of them. What samples were computed from was rounded as well: so 4ε².

    >>> rounding(Factor(eps=0.5))
    1.0
    """
    return 4 * factor.eps**2
