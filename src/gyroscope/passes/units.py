"""What is kept of the activations of a layer: which units were ever active, which always, means, and the rank.

Everything is reduced at once to small tensors on the activations' device: no activation outlives the call, and nothing
waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gyroscope.passes.sample import spread
from gyroscope.vectors.eager import accumulator

# Singular values below this share of their root mean square are taken for rounding.
_ROUNDING = {torch.bfloat16: 2.0**-4, torch.float16: 2.0**-7}
_ROUNDING_ELSE = 2.0**-16


@dataclass(frozen=True)
class Look:
    """One look at the activations of a layer.

    Attributes:
        alive: whether each unit was active for some sample, [channels, positions].
        full: whether it was for all.
        total: the sum over samples and positions, [channels].
        samples: how many numbers each of these sums has.
        rows: some of the samples, [rows, channels], to find the rank from; None where it is not wanted.
    """

    alive: Tensor
    full: Tensor
    total: Tensor
    samples: int
    rows: Tensor | None


def look(x: Tensor, axis: int, *, positions: bool, threshold: float, rank: int) -> Look:
    """Reduce the activations `x`, whose channels lie along `axis`.

    Args:
        x: the activations, not empty.
        axis: the dimension of the channels.
        positions: whether the dimensions after `axis` are positions of an image, so that a unit is a channel at a
            position and dimensions before `axis` are samples; else all dimensions but `axis` are samples.
        threshold: a unit is active where its activation is above.
        rank: channels looked at for the rank, at most, and twice as many samples; 0 for none.

    >>> x = torch.tensor([[1.0, -1.0, 2.0], [1.0, -2.0, -2.0]])
    >>> seen = look(x, 1, positions=False, threshold=0.0, rank=8)
    >>> seen.alive[:, 0].tolist(), seen.full[:, 0].tolist(), seen.total.tolist()
    ([True, False, True], [True, False, False], [2.0, -3.0, 0.0])
    """
    others = [d for d in range(x.dim()) if d != axis]
    over = others[:axis] if positions else others
    alive, full = x.amax(over) > threshold, x.amin(over) > threshold
    channels = x.shape[axis]
    total = x.sum(others, dtype=accumulator(x.device))
    rows = _rows(x, axis, rank) if rank else None
    return Look(alive.reshape(channels, -1), full.reshape(channels, -1), total, x.numel() // channels, rows)


def _rows(x: Tensor, axis: int, most: int) -> Tensor:
    """Some of the samples, and of each some of the channels: a copy of [at most 2·most, at most most]."""
    x = x.movedim(axis, -1)
    *leading, channels = x.shape
    at = spread(x.numel() // channels, 2 * most, x.device)
    index: list[Tensor] = []
    for size in reversed(leading):
        index.insert(0, at % size)
        at = at // size
    picked = x[tuple(index)] if index else x[None]
    return picked if channels <= most else picked.index_select(1, spread(channels, most, x.device))


class Tally:
    """What several looks at one layer add up to."""

    def __init__(self, first: Look) -> None:
        self.maps = {first.alive.shape[1]: (first.alive, first.full)}
        self.total, self.samples = first.total, first.samples
        self.rank = numerical_rank(first.rows) if first.rows is not None else None

    def add(self, seen: Look) -> Tally:
        """This and one more look; with another number of channels, that look alone."""
        if seen.total.shape != self.total.shape:
            return Tally(seen)
        size = seen.alive.shape[1]
        alive, full = self.maps.get(size, (seen.alive, seen.full))
        self.maps[size] = alive | seen.alive, full & seen.full
        self.total, self.samples = self.total + seen.total, self.samples + seen.samples
        if seen.rows is not None and self.rank is not None:
            self.rank = torch.maximum(self.rank, numerical_rank(seen.rows))
        return self

    def values(self) -> Tensor:
        """The numbers of `activations.COLUMNS`, in that order; NaN throughout where an activation is not finite."""
        alive = torch.cat([a for a, _ in self.maps.values()], dim=1)
        full = torch.cat([f for _, f in self.maps.values()], dim=1)
        kind = self.total.dtype
        mean = self.total / self.samples
        nan = torch.full((), torch.nan, dtype=kind, device=mean.device)
        found = torch.stack([
            1 - alive.to(kind).mean(),
            full.to(kind).mean(),
            1 - alive.any(1).to(kind).mean(),
            full.all(1).to(kind).mean(),
            mean.mean(),
            mean.square().sum() + 1,
            nan if self.rank is None else self.rank.to(kind),
        ])  # fmt: skip
        return torch.where(mean.sum().isfinite(), found, nan)


def numerical_rank(rows: Tensor) -> Tensor:
    """The rank of a matrix: how many singular values are above what rounding of its dtype may leave.

    That is σ > tol‖A‖_F/√k, k the smaller side of A, with tol = 2⁻¹⁶, or 2⁻⁷ for float16 and 2⁻⁴ for bfloat16. Their
    squares are eigenvalues of AᵀA; as many of these are above τ as AᵀA − τI has positive ones, and that many its factor
    D in LDLᵀ has by Sylvester's law of inertia. Unlike eigenvalues, this can be had without waiting for the device.

    >>> numerical_rank(torch.ones(5, 3) + torch.tensor([0.0, 0.0, 1.0]))
    tensor(1., dtype=torch.float64)
    >>> numerical_rank(torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 2.0]]))
    tensor(2., dtype=torch.float64)
    """
    tol = _ROUNDING.get(rows.dtype, _ROUNDING_ELSE)
    if accumulator(rows.device) is not torch.float64:
        return torch.full((), torch.nan, device=rows.device)
    a = rows.to(torch.float64)
    gram = a.T @ a if a.shape[0] > a.shape[1] else a @ a.T
    square = gram.diagonal().mean()
    gram = gram.nan_to_num(0.0, 0.0, 0.0)
    gram.diagonal().sub_(tol**2 * square.nan_to_num(0.0, 0.0, 0.0))
    return torch.where(square.isfinite(), positive_eigenvalues(gram), torch.nan)


def positive_eigenvalues(symmetric: Tensor) -> Tensor:
    """How many eigenvalues of a symmetric matrix are positive: as many as pivots of an elimination that keeps symmetry.

    >>> positive_eigenvalues(torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64))
    tensor(1., dtype=torch.float64)
    """
    if symmetric.device.type == "cuda":
        # LDLᵀ would choose its pivots on the host. Without any choice U = DLᵀ, and a pivot that comes out tiny makes
        # the next one large and of the other sign, so that the count stays right; only one of exactly zero does not.
        upper: Tensor = torch.linalg.lu_factor_ex(symmetric, pivot=False)[0]
        return (upper.diagonal() > 0).sum().to(symmetric.dtype)
    factor, pivots, _ = torch.linalg.ldl_factor_ex(symmetric)
    # A negative pivot marks a row of a 2×2 block of D, which has one positive and one negative eigenvalue.
    return torch.where(pivots < 0, 0.5, (factor.diagonal() > 0).to(symmetric.dtype)).sum()
