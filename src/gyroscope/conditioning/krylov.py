"""The largest eigenvalue of large symmetric matrices: a few squarings, then a Krylov space in a Chebyshev basis.

Squaring is what a GPU does best, and a product with the squared matrix is worth several with the matrix itself. In a
basis of Chebyshev polynomials such a product is nearly all there is to a step: no orthogonalisation, no norm. So this
takes a fraction of the kernels of Lanczos iteration, which goes on where it has not reached the eigenvalue.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gyroscope.conditioning.lanczos import start

# Products with the squared matrix.
_DEGREE = 32
# Further products with the vector that was found: squares in PᵀP leave it half of its digits, powers give them back.
_POLISH = 4


def top(stack: Tensor, *, residual: float, squarings: int = 0) -> tuple[Tensor, Tensor]:
    """λmax of positive semidefinite matrices [b, d, d], and whether it was reached, both [b].

    With B a multiple of A^n, n = 2^squarings, and C = 2B/f − 1, f = ‖B‖_F ≥ λmax(B), the vectors p_0 = q, p_1 = Cq,
    p_{k+1} = 2C p_k − p_{k−1} span the same space as q, Bq, B²q, ... and stay apart. With P their columns, the largest
    eigenvalue of PᵀBP y = θ PᵀP y belongs to v = Py, where PᵀBP follows from PᵀP by the recurrence. Then λ = vᵀAv/vᵀv
    is reached when ‖Av − λv‖ ≤ residual·λ‖v‖.

    >>> value, reached = top(torch.diag(torch.tensor([3.0, 1.0, 0.5], dtype=torch.float64))[None], residual=1e-8)
    >>> round(value.item(), 9), reached.item()
    (3.0, True)
    """
    b, d, _ = stack.shape
    power = stack
    for _ in range(squarings):
        # Divided by the trace, so that powers neither vanish nor grow.
        trace = power.diagonal(dim1=1, dim2=2).sum(1)
        half = power / torch.where(trace > 0, trace, 1.0)[:, None, None]
        power = torch.bmm(half, half)
    bound = torch.linalg.vector_norm(power, dim=(1, 2))
    bound = torch.where(bound > 0, bound, 1.0)
    # 2C, so that a step is one product.
    twice = power * (4 / bound)[:, None, None]
    twice.diagonal(dim1=1, dim2=2).sub_(2)
    del power
    basis = stack.new_empty(_DEGREE + 1, b, d, 1)
    basis[0] = start(d).to(stack)[:, None]
    torch.baddbmm(basis[0], twice, basis[0], beta=0, alpha=0.5, out=basis[1])
    for k in range(1, _DEGREE):
        torch.baddbmm(basis[k - 1], twice, basis[k], beta=-1, out=basis[k + 1])
    p = basis[..., 0].transpose(0, 1)  # [b, degree + 1, d]
    v = torch.bmm(p[:, :-1].mT, _best(torch.bmm(p, p.mT)))
    for _ in range(_POLISH):
        v = torch.baddbmm(v, twice, v, beta=2)  # 4B/f
    v = torch.nn.functional.normalize(v, dim=1)
    av = torch.bmm(stack, v)
    # The quotient is right to the square of what the vector is off, also where rounding has its part in that.
    value = (v * av).sum((1, 2))
    off = torch.linalg.vector_norm(av - value[:, None, None] * v, dim=(1, 2))
    return value, off <= residual * value


def _best(gram: Tensor) -> Tensor:
    """The coefficients y of the largest eigenvalue, [b, degree, 1], from PᵀP with one vector more than is used."""
    inner, once = gram[:, :-1, :-1], gram[:, :-1]
    # 4B p_k/f = p_{k+1} + 2 p_k + p_{k−1}, and 4B p_0/f = 2 p_1 + 2 p_0
    image = 2 * inner
    image[:, :, 1:] += once[:, :, 2:] + once[:, :, :-2]
    image[:, :, 0] += 2 * once[:, :, 1]
    values, vectors = torch.linalg.eigh(inner)
    kept = values > values[:, -1:] * 1e-13
    root = vectors * torch.where(kept, values.abs().rsqrt(), 0.0)[:, None, :]
    small = root.mT @ image @ root
    _, y = torch.linalg.eigh((small + small.mT) / 2)
    found: Tensor = root @ y[:, :, -1:]
    return found
