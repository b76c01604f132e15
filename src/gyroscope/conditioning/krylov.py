"""The largest eigenvalue of large symmetric matrices from a Krylov space in a basis of Chebyshev polynomials.

One product with the matrix is one kernel, and there is little between two of them: no orthogonalisation, no norm. So
it takes a fraction of the kernels of Lanczos iteration, which goes on where this has not reached the eigenvalue.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gyroscope.conditioning.lanczos import start

# Products with the matrix. What is reached with these is what a large gap gives, as covariances have one.
_DEGREE = 32
# Further products with the vector that was found: squares in PᵀP leave it half of its digits, powers give them back.
_POLISH = 8


def top(stack: Tensor, *, residual: float) -> tuple[Tensor, Tensor]:
    """λmax of positive semidefinite matrices [b, d, d], and whether it was reached, both [b].

    With C = 2A/f − 1, f = ‖A‖_F ≥ λmax, the vectors p_0 = q, p_1 = Cq, p_{k+1} = 2C p_k − p_{k−1} span the same space
    as q, Aq, A²q, ... and stay apart. With P their columns, θ is the largest eigenvalue of PᵀAP y = θ PᵀP y, where PᵀAP
    follows from PᵀP by the recurrence. It is reached when ‖Av − θv‖ ≤ residual·θ for v = Py of length 1.

    >>> value, reached = top(torch.diag(torch.tensor([3.0, 1.0, 0.5], dtype=torch.float64))[None], residual=1e-8)
    >>> round(value.item(), 9), reached.item()
    (3.0, True)
    """
    b, d, _ = stack.shape
    bound = torch.linalg.vector_norm(stack, dim=(1, 2))
    bound = torch.where(bound > 0, bound, 1.0)
    scaled = stack * (4 / bound)[:, None, None]  # 2(C + 1), so that a step is one product
    basis = stack.new_empty(_DEGREE + 1, b, d, 1)
    basis[0] = start(d).to(stack)[:, None]
    torch.baddbmm(basis[0], scaled, basis[0], beta=-1, alpha=0.5, out=basis[1])
    for k in range(1, _DEGREE):
        # 2C p_k − p_{k−1} = scaled p_k − 2 p_k − p_{k−1}
        torch.baddbmm(torch.add(basis[k - 1], basis[k], alpha=2), scaled, basis[k], beta=-1, out=basis[k + 1])
    p = basis[..., 0].transpose(0, 1)  # [b, degree + 1, d]
    gram = torch.bmm(p, p.mT)
    inner, once = gram[:, :-1, :-1], gram[:, :-1]
    # A p_k = f/4 (p_{k+1} + 2 p_k + p_{k−1}), and A p_0 = f/2 (p_1 + p_0)
    right = 2 * inner
    right[:, :, 1:] += once[:, :, 2:] + once[:, :, :-2]
    right[:, :, 0] += 2 * once[:, :, 1]
    image = (bound / 4)[:, None, None] * right
    values, vectors = torch.linalg.eigh(inner)
    kept = values > values[:, -1:] * 1e-13
    root = vectors * torch.where(kept, values.clamp(min=0) ** -0.5, 0.0)[:, None, :].nan_to_num(0.0, 0.0, 0.0)
    small = root.mT @ image @ root
    _, y = torch.linalg.eigh((small + small.mT) / 2)
    v = torch.bmm(p[:, :-1].mT, root @ y[:, :, -1:])
    for _ in range(_POLISH):
        v = torch.bmm(scaled, v)
    av = torch.bmm(stack, v)
    length = torch.linalg.vector_norm(v, dim=(1, 2))
    length = torch.where(length > 0, length, 1.0)
    # The quotient is right to the square of what the vector is off, also where rounding has its part in that.
    value = (v * av).sum((1, 2)) / length**2
    off = torch.linalg.vector_norm(av - value[:, None, None] * v, dim=(1, 2)) / length
    return value, off <= residual * value
