"""Spectra of a layer's factors Σx and Σ∇h, and of their Kronecker product: λmax, λ_p and κ_p."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gyroscope.base.accepted import real
from gyroscope.errors import ConditioningError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

#: Shares p of the dimension at which condition numbers κ_p are taken by default.
P = (0.1, 0.25, 0.5, 0.75, 1.0)
# A margin for the rounding of p to a float.
_EXACT = 1 - Fraction(1, 2**50)
# Rows of tables searched at once: few enough to stay in the processor's cache.
_ROWS = 2**16


@lru_cache(maxsize=4096)
def index_at(p: float, dimension: int) -> int:
    """Return the index ⌈p·d⌉ of λ_p among d eigenvalues in descending order, counted from 1.

    p stands for the decimal it is printed as, or the fraction it was rounded from: a tenth of 30 is 3, although the
    float 0.1 is above a tenth, and 5/6 of 6 is 5.

    >>> index_at(0.1, 30), index_at(0.1, 31), index_at(5 / 6, 6), index_at(1.0, 7)
    (3, 4, 5, 7)
    """
    try:
        share = Fraction(str(p))
    except ValueError:
        share = Fraction(0)
    if not 0 < share <= 1:
        raise ConditioningError(f"`p` must be a share of the dimension in (0, 1], got {p}. Try 0.5.")
    return math.ceil(share * dimension * _EXACT)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenvalues of a symmetric positive semidefinite matrix of dimension d, on the host.

    κ_p = λmax / λ_p, with λ_p the ⌈p·d⌉-th largest of all d eigenvalues.

    Attributes:
        values: the eigenvalues in descending order; those that count as zero are exactly 0. All NaN if the matrix is
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
            return  # λmax alone: skip the checks, there may be hundreds of these
        v = self.values
        ordered = bool(np.isfinite(v).all() and (v[1:] <= v[:-1]).all() and (v >= 0).all()) or bool(np.isnan(v).all())
        if v.ndim != 1 or len(v) > self.dimension or not ordered:
            raise ConditioningError(
                f"`values` must be at most {self.dimension} finite numbers ≥ 0 in descending order for a matrix of "
                f"dimension {self.dimension}, got an array of shape {v.shape}. Try Spectrum.of, which takes any order."
            )

    @classmethod
    def of(cls, eigenvalues: Tensor, dimension: int, *, tolerance: float) -> Spectrum:
        """Return the spectrum with these `eigenvalues`, in any order; those ≤ tolerance·λmax count as zero.

        >>> import torch
        >>> Spectrum.of(torch.tensor([1e-18, 1.0, -1e-17, 4.0]), 5, tolerance=1e-15).values
        array([4., 1., 0., 0.])
        """
        return spectra_of([eigenvalues], [dimension], [tolerance])[0]

    @property
    def largest(self) -> float:
        """λmax; 0 if the dimension is 0."""
        return float(self.values[0]) if len(self.values) else 0.0

    @property
    def rank(self) -> int:
        """Number of eigenvalues above zero."""
        return int((self.values > 0).sum())

    def at(self, p: float) -> float:
        """Return λ_p, the ⌈p·d⌉-th largest eigenvalue.

        >>> Spectrum(np.array([4.0, 2.0]), 3).at(0.1), Spectrum(np.array([4.0, 2.0]), 3).at(1.0)
        (4.0, 0.0)
        """
        index = index_at(p, self.dimension)
        if np.isnan(self.largest):
            return np.nan
        return float(self.values[index - 1]) if 0 < index <= len(self.values) else 0.0

    def kappa(self, p: float) -> float | None:
        """Return κ_p = λmax/λ_p: infinite if λ_p = 0 < λmax, None if λmax = 0.

        >>> Spectrum(np.zeros(2), 2).kappa(1.0) is None
        True
        """
        smaller = self.at(p)
        if self.largest == 0:
            return None
        return self.largest / smaller if smaller != 0 else np.inf

    def full(self) -> npt.NDArray[np.float64]:
        """Return all d eigenvalues, including the zeros that are not listed.

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
    """Return `Spectrum.of` for many matrices, with one copy from each device to the host.

    The values are multiplied by `times` there, if given. With `roundings`, eigenvalues that are at most this share of
    the *mean* eigenvalue also count as zero.

    >>> import torch
    >>> [s.values.tolist() for s in spectra_of([torch.tensor([1.0, 2.0]), torch.zeros(0)], [2, 2], [0.0, 0.0])]
    [[2.0, 1.0], []]
    """
    import torch  # here, because a spectrum on the host works without it

    held: dict[torch.device, list[int]] = defaultdict(list)
    for i, v in enumerate(values):
        held[v.device].append(i)
    host: list[npt.NDArray[np.float64]] = [np.zeros(0)] * len(values)
    for indices in held.values():
        flat = torch.cat([values[i] for i in indices]).detach().cpu().to(torch.float64).numpy()
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
            raise ConditioningError(f"`p` must be shares of the dimension in (0, 1], got {one!r}. Try (0.5, 1.0).")
    return tuple(real(one) for one in given)


def product_at(x: Sequence[Spectrum], g: Sequence[Spectrum], p: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return λ_p of F = Σx ⊗ Σ∇h for each layer and each p, [layers, len(p)].

    The eigenvalues of F are the products λ_i(Σx)·λ_j(Σ∇h), so that (Proposition 1)

        λmax(F) = λmax(Σx)·λmax(Σ∇h),    κ_{100%}(F) = κ_{100%}(Σx)·κ_{100%}(Σ∇h),

    but for other p, λ_p(F) is not a product of the factors' λ_p. It is the ⌈p·d_x·d_g⌉-th largest of the products,
    found by bisection without forming them all. The result is one of the products in float64, even if it rounds to 0
    or overflows. It is NaN if one of the spectra is.

    >>> x, g = Spectrum(np.array([3.0, 2.0]), 2), Spectrum(np.array([5.0, 1.0]), 2)
    >>> product_at([x], [g], [0.25, 0.5, 0.75, 1.0])
    array([[15., 10., 3., 2.]])
    """
    if len(x) != len(g):
        raise ConditioningError(f"`x` and `g` must have one spectrum per layer each, got {len(x)} and {len(g)}.")
    found = np.zeros((len(x), len(p)))
    tasks = []
    for layer, (a, b) in enumerate(zip(x, g, strict=True)):
        places = [index_at(share, a.dimension * b.dimension) for share in p]
        if np.isnan(a.largest) or np.isnan(b.largest):
            found[layer] = np.nan
            continue
        rows, columns = sorted((a.values[: a.rank], b.values[: b.rank]), key=len)
        many = len(rows) * len(columns)
        tasks += [_Task((layer, k), rows, columns, place) for k, place in enumerate(places) if 0 < place <= many]
    before = accumulate((len(t.rows) for t in tasks), initial=0)
    for _, batch in groupby(zip(tasks, before, strict=False), lambda pair: pair[1] // _ROWS):
        some = [t for t, _ in batch]
        with np.errstate(over="ignore", under="ignore"):
            found[tuple(np.transpose([t.at for t in some]))] = _search(some)
    return found


@dataclass(frozen=True)
class _Task:
    """A search for the `place`-th largest of rows ⊗ columns, both positive and descending, for the result `at`."""

    at: tuple[int, int]
    rows: npt.NDArray[np.float64]
    columns: npt.NDArray[np.float64]
    place: int


def _search(tasks: Sequence[_Task]) -> npt.NDArray[np.float64]:
    """Return the products that the tasks search for, all found at once.

    Rounded or not, products decrease along a row of the table a_i·b_j. So the products of row i above some t are its
    first ones, and the candidates are an interval first_i ≤ j < last_i. The value halfway between the smallest and the
    largest candidate, halfway in the order of floats, splits all the intervals of a task; the number of products on
    each side decides which part to keep. Rows whose interval is empty are dropped.
    """
    found = np.zeros(len(tasks))
    task = np.arange(len(tasks))
    place = np.array([t.place for t in tasks])
    lengths = np.array([len(t.rows) for t in tasks])
    a, b = np.concatenate([t.rows for t in tasks]), np.concatenate([t.columns for t in tasks])
    ends = np.cumsum([len(t.columns) for t in tasks])
    first, last = np.repeat(np.append(0, ends[:-1]), lengths), np.repeat(ends, lengths)
    while len(task):
        begins = np.cumsum(lengths) - lengths
        low, high = np.minimum.reduceat(a * b[last - 1], begins), np.maximum.reduceat(a * b[first], begins)
        found[task] = low
        # Nonnegative floats are ordered like the integers with the same bits.
        bits = low.view(np.int64)
        split = (bits + (high.view(np.int64) - bits + 1) // 2).view(np.float64)
        middle = _above(a, b, first, last, np.repeat(split, lengths))
        above = np.add.reduceat(middle - first, begins)
        enough, open_ = above >= place, low < high
        among = np.repeat(enough, lengths)
        first, last = np.where(among, first, middle), np.where(among, middle, last)
        place = np.where(enough, place, place - above)[open_]
        rows = (first < last) & np.repeat(open_, lengths)
        lengths = np.add.reduceat(rows, begins, dtype=np.int64)[open_]
        a, first, last, task = a[rows], first[rows], last[rows], task[open_]
    return found


def _above(
    a: npt.NDArray[np.float64],
    b: npt.NDArray[np.float64],
    first: npt.NDArray[np.int64],
    last: npt.NDArray[np.int64],
    split: npt.NDArray[np.float64],
) -> npt.NDArray[np.int64]:
    """Return the index in each row, from `first` to `last`, at which the products fall below `split`."""
    found = first
    step = 1 << int((last - first).max()).bit_length()
    while step := step >> 1:
        further = np.minimum(found + step, last)
        found = np.where(a * b[further - 1] >= split, further, found)
    return found
