"""The two factors of a layer, Σx and Σ∇h: sums of outer products, kept in whichever form is smaller.

For h = Wx with R samples, Σx = (1/R) Σ xxᵀ and Σ∇h = (1/R) Σ ggᵀ are of size d×d. While R < d the samples themselves
are kept, A ∈ ℝ^{d×R}: AAᵀ and AᵀA have the same eigenvalues apart from zeros. From R = d on, AAᵀ is accumulated. For
λmax alone large A are kept for longer: it takes a few products with A.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gyroscope.conditioning.eigen import Product, has_fast_double
from gyroscope.vectors.eager import accumulator

# Elements of an operand that are converted to float64 at once; on a CPU fewer cost nothing.
_AT_ONCE, _AT_ONCE_ON_CPU = 2**23, 2**20

# Rows of A from which only the upper triangle of AAᵀ is computed, in blocks; a GPU needs larger ones.
_BLOCK, _BLOCK_ON_CPU = 512, 128


def accumulated_in(device: torch.device) -> torch.dtype:
    """Return the dtype that outer products are accumulated in: float64 unless it is slow on the device.

    >>> accumulated_in(torch.device("cpu"))
    torch.float64
    """
    return torch.float64 if has_fast_double(device) else torch.float32


def add_gram_(out: Tensor, a: Tensor) -> Tensor:
    """Add at least the upper triangle of AAᵀ to `out`, for A given as [d, ...] with columns along all other dimensions.

    Columns are converted to the dtype of `out` before they are multiplied, some at a time.

    >>> upper(add_gram_(torch.zeros(2, 2, dtype=torch.float64), torch.tensor([[1.0, 2.0], [0.0, 3.0]])))
    tensor([[5., 6.],
            [6., 9.]], dtype=torch.float64)
    """
    d = a.shape[0]
    a = a.unsqueeze(1) if a.dim() == 1 else a
    if a.numel() == 0:
        return out
    at_once = max(1, _at_once(a) * a.shape[1] // a.numel())
    for start in range(0, a.shape[1], at_once):
        some = a[:, start : start + at_once]
        if _is_long(some):
            out += _long_gram(some, out.dtype)
            continue
        part = _converted(some, out.dtype).flatten(1)
        for top in range(0, d, block := _block(a.device)):
            out[top : top + block, top:].addmm_(part[top : top + block], part[top:].T)
    return out


def gram(a: Tensor) -> Tensor:
    """Return at least the upper triangle of AAᵀ, in the accumulators' dtype."""
    dtype = accumulated_in(a.device)
    if a.shape[0] <= _block(a.device) and 0 < a.numel() <= _at_once(a):
        if _is_long(a):
            return _long_gram(a, dtype)
        part = _converted(a, dtype).flatten(1)
        return part @ part.T
    return add_gram_(torch.zeros(a.shape[0], a.shape[0], dtype=dtype, device=a.device), a)


def upper(matrix: Tensor) -> Tensor:
    """Return the symmetric matrix with this upper triangle.

    >>> upper(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
    tensor([[1., 2.],
            [2., 3.]])
    """
    return matrix.triu().add_(matrix.triu(1).T)


def _block(device: torch.device) -> int:
    return _BLOCK_ON_CPU if device.type == "cpu" else _BLOCK


def _at_once(a: Tensor) -> int:
    return _AT_ONCE_ON_CPU if a.device.type == "cpu" else _AT_ONCE


def _mirror_(matrix: Tensor) -> Tensor:
    """Copy the blocks above the diagonal to those below it, which were left out."""
    block = _block(matrix.device)
    for top in range(0, len(matrix) - block, block):
        end = top + block
        matrix[end:, top:end] = matrix[top:end, end:].T
    return matrix


def _is_long(a: Tensor) -> bool:
    """Return True for [d, B, ...] on a CPU that lie in memory as B matrices of few rows and many columns."""
    if a.device.type != "cpu" or a.dim() < 3 or len(a) > _BLOCK_ON_CPU:
        return False
    return a[0, 0].numel() >= len(a) and a.movedim(1, 0).is_contiguous()


def _long_gram(a: Tensor, dtype: torch.dtype) -> Tensor:
    """Return AAᵀ as a sum over B: products of few rows and many columns use one thread only."""
    each = a.movedim(1, 0).to(dtype).flatten(2)
    found: Tensor = torch.bmm(each, each.mT).sum(0)
    return found


def _converted(a: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another dtype, laid out for products; channels that lie last stay last."""
    if a.dim() == 2:
        return a.to(dtype)
    last = a.stride(0) == 1
    return a.to(dtype, memory_format=torch.preserve_format if last else torch.contiguous_format)


@dataclass
class Factor:
    """A sum of outer products Σ aaᵀ over samples, which grows batch by batch.

    Samples belong to the open batch until `close` gives them their common weight.

    Attributes:
        dimension: d; 0 before anything was added.
        samples: R, the number of samples in closed batches.
        pending: the number of samples in the open batch.
        eps: the machine epsilon of the samples' coarsest dtype.
        diagonal: True if samples are one-hot (the input of an embedding). Then their counts are kept.
        top: True if only λmax will be asked for.

    >>> factor = Factor()
    >>> factor.add(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))      # two samples, the columns
    >>> factor.close()
    >>> factor.mean()
    tensor([[2.5000, 3.0000],
            [3.0000, 4.5000]], dtype=torch.float64)
    """

    dimension: int = 0
    samples: int = 0
    pending: int = 0
    eps: float = 0.0
    diagonal: bool = False
    top: bool = False
    _held: list[tuple[Tensor, float]] = field(default_factory=list)
    _held_open: list[Tensor] = field(default_factory=list)
    _total: Tensor | None = None
    _times: float = 1.0  # the total is still to be multiplied by this
    _open: Tensor | None = None

    def add(self, a: Tensor) -> None:
        """Add samples, the columns of A given as [d, ...]."""
        if not self._begin(a, a.shape[0], math.prod(a.shape[1:])):
            # A copy, because the tensor may be overwritten before the pass is over, such as a reused input buffer.
            flat = a.reshape(a.shape[0], -1)
            self._held_open.append(flat.clone() if flat.data_ptr() == a.data_ptr() else flat)
            return
        self._open = gram(a) if self._open is None else add_gram_(self._open, a)

    def add_gram(self, matrix: Tensor, *, samples: int, like: Tensor) -> None:
        """Add an AAᵀ that was formed elsewhere, from samples with the dtype of `like`."""
        self.pending += samples
        self.dimension = matrix.shape[0]
        self._note(like)
        self._spill()
        if self._open is None:
            self._open = matrix
        else:
            self._open += matrix

    def add_counts(self, indices: Tensor, dimension: int) -> None:
        """Add one-hot samples, given by the indices of their ones."""
        flat = indices.reshape(-1)
        self.diagonal, self.dimension = True, dimension
        self.pending += flat.numel()
        if self._open is None:
            self._open = torch.zeros(dimension, dtype=accumulator(flat.device), device=flat.device)
        self._open.index_add_(0, flat, torch.ones_like(flat, dtype=self._open.dtype))

    def close(self, weight: float = 1.0) -> None:
        """Close the open batch: its samples are multiplied by `weight`."""
        self._held += [(a, weight) for a in self._held_open]
        self._held_open = []
        if self._open is not None:
            if self._total is None:
                self._total, self._times = self._open, weight**2
            else:
                self._total = self._settled().add_(self._open, alpha=weight**2)
            self._open = None
        self.samples += self.pending
        self.pending = 0

    def rescale(self, times: float) -> None:
        """Multiply the samples of the closed batches by a number."""
        if times != 1.0:
            self._held = [(a, weight * times) for a, weight in self._held]
            if self._total is not None:
                self._times *= times**2

    def drop(self) -> None:
        """Forget the open batch."""
        self._held_open, self._open, self.pending = [], None, 0

    def mean(self) -> Tensor:
        """Return (1/R) Σ aaᵀ; while R < d the smaller (1/R) AᵀA, with the same eigenvalues apart from zeros.

        For one-hot samples, a vector with its eigenvalues.
        """
        if self._total is not None:
            total = self._settled()
            return total / self.samples if self.diagonal else upper(total).div_(self.samples)
        a = self.kept()
        return upper(gram(a if a.shape[0] <= a.shape[1] else a.T)).div_(self.samples)

    def take(self) -> tuple[Tensor | Product, float]:
        """Return `mean` as a matrix and a factor, at the least cost, and release the memory."""
        if self._total is None:
            one = len(self._held) == 1  # it may be large, so it is converted in parts and not multiplied
            a, times = (self._held[0][0], self._held[0][1] ** 2) if one else (self.kept(), 1.0)
            found: Tensor | Product = Product.of(a)
            if not self.top or not Product.suits(a.shape[0], a.shape[1], a.device):
                found = _mirror_(gram(a if a.shape[0] <= a.shape[1] else a.T))
        else:
            found, times = self._total if self.diagonal else _mirror_(self._total), self._times
        self.release()
        return found, times / self.samples

    @property
    def bytes(self) -> int:
        """Bytes of memory in use."""
        return sum(a.numel() * a.element_size() for a in self._tensors())

    @property
    def device(self) -> torch.device | None:
        """Device of that memory; None if there is none."""
        return next((a.device for a in self._tensors()), None)

    def _tensors(self) -> list[Tensor]:
        held = [self._total, self._open, *self._held_open, *(a for a, _ in self._held)]
        return [a for a in held if a is not None]

    @property
    def side(self) -> int:
        """Size of the matrix that `mean` returns."""
        return self.dimension if self._total is not None else min(self.dimension, self.samples)

    def kept(self) -> Tensor:
        """Return the samples as columns, in the accumulators' dtype; only if `holds_samples`."""
        parts = [a.to(accumulated_in(a.device)) * weight for a, weight in self._held]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    @property
    def holds_samples(self) -> bool:
        """True while the samples themselves are kept."""
        return self._total is None and bool(self._held)

    def matrix(self) -> Tensor:
        """Return Σ aaᵀ as [d, d], or the counts, and keep that from now on."""
        self._spill()
        return self._settled()

    def _settled(self) -> Tensor:
        assert self._total is not None
        if self._times != 1.0:
            self._total.mul_(self._times)
            self._times = 1.0
        return self._total

    def replace(self, total: Tensor, samples: int) -> None:
        """Replace the sum, for example by that over all ranks."""
        self._held, self._total, self._times, self.samples = [], total, 1.0, samples
        self.dimension = total.shape[0]

    def replace_samples(self, a: Tensor) -> None:
        """Replace the samples, for example by those of all ranks."""
        self._held, self._total, self.samples, self.dimension = [(a, 1.0)], None, a.shape[1], a.shape[0]

    def keeps(self, dimension: int, count: int) -> bool:
        """Return True if `count` more samples would be kept as they are: fewer samples than dimensions."""
        return self._open is None and self._total is None and self.samples + self.pending + count < dimension

    def release(self) -> None:
        """Release the memory; the numbers of samples stay."""
        self._held, self._held_open, self._total, self._open = [], [], None, None

    def _begin(self, like: Tensor, dimension: int, count: int) -> bool:
        """Count new samples; return True if there are too many to keep, so that they must be added to a matrix."""
        self.dimension = dimension
        self._note(like)
        keeps = self.keeps(dimension, count)
        self.pending += count
        if self.top and self._open is None and self._total is None:
            keeps = keeps or Product.suits(dimension, self.samples + self.pending, like.device)
        if not keeps:
            self._spill()
        return not keeps

    def _note(self, like: Tensor) -> None:
        self.eps = max(self.eps, torch.finfo(like.dtype).eps)

    def _spill(self) -> None:
        """Turn the kept samples into a sum of outer products."""
        for a, weight in self._held:
            a = a.to(accumulated_in(a.device)) * weight
            self._total = gram(a) if self._total is None else add_gram_(self._settled(), a)
        for a in self._held_open:
            self._open = gram(a) if self._open is None else add_gram_(self._open, a)
        self._held, self._held_open = [], []
