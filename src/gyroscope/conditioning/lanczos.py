"""The largest eigenvalue of symmetric matrices, many at once, by Lanczos iteration with restarts."""

from __future__ import annotations

import torch
from torch import Tensor

# Vectors held at a time, and of these kept at a restart. Projected matrices of 32 rows are what GPUs decompose fast.
_BASIS, _KEPT = 32, 8
# Restarts after which the decomposition of the whole matrix is the better way.
_RESTARTS = 8


def top(stack: Tensor, *, residual: float) -> tuple[Tensor, Tensor]:
    """λmax of positive semidefinite matrices [b, d, d], and whether it was reached, both [b].

    Lanczos: with the columns of Q orthonormal and spanning q, Aq, A²q, ..., the largest eigenvalue θ of H = QᵀAQ grows
    towards λmax, and some eigenvalue of A is within ‖Ay − θy‖ of θ, y = Qs, Hs = θs. It is reached when this is at most
    residual·θ. Once Q is full, only the space of its best y is kept, and grows again (thick restart).

    The elements should be near 1. A space that A maps to itself cannot grow: the vectors after it are zero, and so are
    the eigenvalues of H which they add; these are not above λmax as A is positive semidefinite.

    >>> value, reached = top(torch.diag(torch.linspace(0, 1, 100, dtype=torch.float64))[None], residual=1e-8)
    >>> round(value.item(), 9), reached.item()
    (1.0, True)
    """
    b, d, _ = stack.shape
    held = min(_BASIS, d)
    q = stack.new_zeros(b, held + 1, d)
    q[:, 0] = start(d).to(stack)
    h = stack.new_zeros(b, held, held)
    noise = 4 * d * torch.finfo(stack.dtype).eps
    known = 0
    for _ in range(1 + _RESTARTS):
        for k in range(known, held):
            basis, w = q[:, : k + 1], torch.bmm(stack, q[:, k, :, None])
            # Once leaves rounding errors of the size of what was taken away; twice is enough.
            first = torch.bmm(basis, w)
            w = torch.baddbmm(w, basis.mT, first, alpha=-1)
            second = torch.bmm(basis, w)
            w = torch.baddbmm(w, basis.mT, second, alpha=-1)
            h[:, : k + 1, k] = (first + second)[..., 0]
            beta = torch.linalg.vector_norm(w, dim=1)
            q[:, k + 1] = torch.where(beta > noise, w[..., 0] / beta, 0.0)
        values, vectors = torch.linalg.eigh(h, UPLO="U")
        theta = values[:, -1]
        reached = torch.where(beta > noise, beta * vectors[:, -1, -1:].abs(), 0.0)[:, 0] <= residual * theta
        if held == d or reached.all():
            break
        known = _KEPT
        q[:, :known] = torch.bmm(vectors[:, :, -known:].mT, q[:, :held])
        q[:, known] = q[:, held]
        h = torch.diag_embed(torch.nn.functional.pad(values[:, -known:], (0, held - known)))
    return theta, reached


def start(d: int) -> Tensor:
    """A direction that no layer's matrix has reason to avoid, and the same at every call: random, of a fixed seed."""
    drawn = torch.randn(d, dtype=torch.float64, generator=torch.Generator().manual_seed(0x6C7972))
    return torch.nn.functional.normalize(drawn, dim=0)
