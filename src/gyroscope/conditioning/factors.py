"""The two factors of a layer, Σx and Σ∇h: sums of outer products that are kept in whichever form is smaller.

For h = Wx with R samples, Σx = (1/R) Σ xxᵀ and Σ∇h = (1/R) Σ ggᵀ are of size d×d. While R < d the samples themselves
are kept, A ∈ ℝ^{d×R}: AAᵀ and AᵀA have the same eigenvalues apart from zeros. Beyond that AAᵀ is added up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from gyroscope.vectors.eager import accumulator

# Elements of an operand that are converted to float64 at once; a CPU loses nothing by fewer.
_AT_ONCE, _AT_ONCE_ON_CPU = 2**23, 2**20

# Columns from which only the upper triangle of AAᵀ is computed, in blocks.
_BLOCK = 512

# Compute capabilities with float64 units as fast as half their float32 ones, or faster.
_FAST_DOUBLE = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}


@lru_cache(maxsize=64)
def accumulated_in(device: torch.device) -> torch.dtype:
    """The dtype that outer products are formed and added up in: float64 wherever the device does it at a fair speed.

    >>> accumulated_in(torch.device("cpu"))
    torch.float64
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) not in _FAST_DOUBLE:
        return torch.float32
    return accumulator(device)


def add_gram_(out: Tensor, a: Tensor) -> Tensor:
    """Add AAᵀ to `out`, upper triangle at least, for A given as [d, ...] with its columns along all further dimensions.

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
        part = _converted(a[:, start : start + at_once], out.dtype).flatten(1)
        if d <= _BLOCK:
            out.addmm_(part, part.T)
        else:
            for top in range(0, d, _BLOCK):
                out[top : top + _BLOCK, top:].addmm_(part[top : top + _BLOCK], part[top:].T)
    return out


def gram(a: Tensor) -> Tensor:
    """AAᵀ, upper triangle at least, in the accumulators' dtype."""
    dtype = accumulated_in(a.device)
    if a.shape[0] <= _BLOCK and 0 < a.numel() <= _at_once(a):
        part = _converted(a, dtype).flatten(1)
        return part @ part.T
    return add_gram_(torch.zeros(a.shape[0], a.shape[0], dtype=dtype, device=a.device), a)


def upper(matrix: Tensor) -> Tensor:
    """The symmetric matrix with this upper triangle.

    >>> upper(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
    tensor([[1., 2.],
            [2., 3.]])
    """
    return matrix.triu().add_(matrix.triu(1).T)


def _at_once(a: Tensor) -> int:
    return _AT_ONCE_ON_CPU if a.device.type == "cpu" else _AT_ONCE


def _mirror_(matrix: Tensor) -> Tensor:
    """The blocks below the diagonal from those above it, where they were left out."""
    for top in range(0, len(matrix) - _BLOCK, _BLOCK):
        end = top + _BLOCK
        matrix[end:, top:end] = matrix[top:end, end:].T
    return matrix


def _converted(a: Tensor, dtype: torch.dtype) -> Tensor:
    """In another dtype, as a copy that is laid out for products; channels that lie last stay last."""
    if a.dim() == 2:
        return a.to(dtype)
    last = a.stride(0) == 1
    return a.to(dtype, memory_format=torch.preserve_format if last else torch.contiguous_format)


@dataclass
class Factor:
    """A sum of outer products Σ aaᵀ over samples, that grows batch by batch.

    What is added belongs to the open batch until `close` gives its samples their common weight.

    Attributes:
        dimension: d; 0 before anything was added.
        samples: R, in the batches that are closed.
        pending: in the open batch.
        eps: the machine epsilon of the coarsest dtype that samples came in.
        diagonal: whether samples are one-hot (the input of an embedding): what is kept is how often each was hot.

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
    _held: list[tuple[Tensor, float]] = field(default_factory=list)
    _held_open: list[Tensor] = field(default_factory=list)
    _total: Tensor | None = None
    _times: float = 1.0  # what the total is still to be multiplied by
    _open: Tensor | None = None

    def add(self, a: Tensor) -> None:
        """Add samples, the columns of A given as [d, ...]."""
        if not self._begin(a, a.shape[0], a[0].numel()):
            # A copy: the tensor may be written to before the pass is over, such as an input buffer that is filled anew.
            self._held_open.append(a.reshape(a.shape[0], -1).clone())
            return
        self._open = gram(a) if self._open is None else add_gram_(self._open, a)

    def add_gram(self, matrix: Tensor, *, samples: int, like: Tensor) -> None:
        """Add AAᵀ that was formed elsewhere, from samples of the dtype of `like`."""
        self.pending += samples
        self.dimension = matrix.shape[0]
        self._note(like)
        self._spill()
        if self._open is None:
            self._open = matrix
        else:
            self._open += matrix

    def add_counts(self, indices: Tensor, dimension: int) -> None:
        """Add one-hot samples, given by where they are hot."""
        flat = indices.reshape(-1)
        self.diagonal, self.dimension = True, dimension
        self.pending += flat.numel()
        if self._open is None:
            self._open = torch.zeros(dimension, dtype=accumulator(flat.device), device=flat.device)
        self._open.index_add_(0, flat, torch.ones_like(flat, dtype=self._open.dtype))

    def close(self, weight: float = 1.0) -> None:
        """The open batch has ended: its samples count `weight` times their value."""
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
        """(1/R) Σ aaᵀ; while R < d its smaller twin (1/R) AᵀA with the same eigenvalues but for zeros.

        A vector with its eigenvalues where samples are one-hot.
        """
        if self._total is not None:
            total = self._settled()
            return total / self.samples if self.diagonal else upper(total).div_(self.samples)
        a = self.kept()
        return upper(gram(a if a.shape[0] <= a.shape[1] else a.T)).div_(self.samples)

    def take(self) -> tuple[Tensor, float]:
        """What `mean` gives, as a matrix and a number to multiply by, at the least cost; it is let go of here."""
        if self._total is None:
            one = len(self._held) == 1  # converted a part at a time, and not multiplied: it may be large
            a, times = (self._held[0][0], self._held[0][1] ** 2) if one else (self.kept(), 1.0)
            found = gram(a if a.shape[0] <= a.shape[1] else a.T)
        else:
            found, times = self._total, self._times
        self.release()
        return found if self.diagonal else _mirror_(found), times / self.samples

    @property
    def bytes(self) -> int:
        """How much memory it holds on to."""
        return sum(a.numel() * a.element_size() for a in self._tensors())

    @property
    def device(self) -> torch.device | None:
        """Where."""
        return next((a.device for a in self._tensors()), None)

    def _tensors(self) -> list[Tensor]:
        held = [self._total, self._open, *self._held_open, *(a for a, _ in self._held)]
        return [a for a in held if a is not None]

    @property
    def side(self) -> int:
        """The size of the matrix that `mean` gives."""
        return self.dimension if self._total is not None else min(self.dimension, self.samples)

    def kept(self) -> Tensor:
        """The samples as columns, in the accumulators' dtype; only where `holds_samples`."""
        parts = [a.to(accumulated_in(a.device)) * weight for a, weight in self._held]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    @property
    def holds_samples(self) -> bool:
        """Whether it still consists of samples."""
        return self._total is None and bool(self._held)

    def matrix(self) -> Tensor:
        """Σ aaᵀ itself as [d, d], or the counts; whatever was held becomes that."""
        self._spill()
        return self._settled()

    def _settled(self) -> Tensor:
        assert self._total is not None
        if self._times != 1.0:
            self._total.mul_(self._times)
            self._times = 1.0
        return self._total

    def replace(self, total: Tensor, samples: int) -> None:
        """Another sum over so many samples, such as that over all ranks."""
        self._held, self._total, self._times, self.samples = [], total, 1.0, samples
        self.dimension = total.shape[0]

    def replace_samples(self, a: Tensor) -> None:
        """Other samples, such as those of all ranks."""
        self._held, self._total, self.samples, self.dimension = [(a, 1.0)], None, a.shape[1], a.shape[0]

    def keeps(self, dimension: int, count: int) -> bool:
        """Whether `count` samples more would be kept as they are, because all are fewer than their dimension."""
        return self._open is None and self._total is None and self.samples + self.pending + count < dimension

    def release(self) -> None:
        """Let go of what was added up; the counts stay."""
        self._held, self._held_open, self._total, self._open = [], [], None, None

    def _begin(self, like: Tensor, dimension: int, count: int) -> bool:
        """Count samples that come; whether they must be added to a matrix, because there are too many to keep."""
        self.dimension = dimension
        self._note(like)
        keeps = self.keeps(dimension, count)
        self.pending += count
        if not keeps:
            self._spill()
        return not keeps

    def _note(self, like: Tensor) -> None:
        self.eps = max(self.eps, torch.finfo(like.dtype).eps)

    def _spill(self) -> None:
        """Turn samples into the matrix they make."""
        for a, weight in self._held:
            a = a.to(accumulated_in(a.device)) * weight
            self._total = gram(a) if self._total is None else add_gram_(self._settled(), a)
        for a in self._held_open:
            self._open = gram(a) if self._open is None else add_gram_(self._open, a)
        self._held, self._held_open = [], []
