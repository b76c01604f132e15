"""Eigenvalues of many symmetric matrices, those of a size together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from gyroscope.conditioning import krylov, lanczos, squaring
from gyroscope.conditioning.side_by_side import eigvalsh
from gyroscope.vectors.eager import power_of_two

# Matrices are stacked up to this many elements at a time: an eighth of a gigabyte in float64. A CPU gains nothing from
# large stacks.
_STACK, _STACK_ON_CPU = 2**24, 2**19
# Up to this size, decomposing a matrix takes no longer than Lanczos iteration for λmax alone.
_DIRECT = {"cpu": 384, "cuda": 32}
# Up to this size, squaring again and again takes a GPU less time than starting the many kernels of Lanczos iteration.
_SQUARED = 512
# And up to this size, where a Krylov space has not reached λmax.
_SQUARED_AFTER_ALL = 2048
# Before a Krylov space is tried, where products of matrices are cheap beside starting kernels.
_SQUARINGS = {"cuda": 3}
# Of the residual, relative to λmax. Eigenvalues that lie within a few times as much of λmax may be taken for it.
_RESIDUAL = 1e-8


def eigenvalues(matrices: Sequence[Tensor], *, owned: bool = False) -> list[Tensor]:
    """The eigenvalues of symmetric matrices [d, d], each as [d] in descending order, in float64.

    Matrices of one size are decomposed together, on their device; on the CPU where that has no float64. A matrix that
    is not finite has NaN for eigenvalues. Matrices that are `owned` may be overwritten, to save memory.

    >>> eigenvalues([torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([[5.0]])])
    [tensor([3., 1.], dtype=torch.float64), tensor([5.], dtype=torch.float64)]
    """
    found: dict[int, Tensor] = {}
    for indices in alike([(len(m), m.device) for m in matrices]):
        stack, scale = _scaled([matrices[i] for i in indices], owned=owned)
        found.update(zip(indices, eigvalsh(stack).flip(-1) * scale, strict=True))
    return [found[i] for i in range(len(matrices))]


def largest(matrices: Sequence[Tensor], *, owned: bool = False) -> Tensor:
    """λmax of symmetric positive semidefinite matrices [d, d], as [n] in float64 on the device of the first.

    For large matrices it is found in a Krylov space, to a relative 1e-6 or better: a small one at first, then by
    Lanczos iteration, and by decomposition where that converges slowly too. On a GPU, for those of middling size, it is
    found by squaring. Matrices that are `owned` may be overwritten, to save memory.

    >>> largest([torch.eye(3), torch.tensor([[2.0, 1.0], [1.0, 2.0]])])
    tensor([1., 3.], dtype=torch.float64)
    """
    found: dict[int, Tensor] = {}
    left = []
    for indices in alike([(len(m), m.device) for m in matrices]):
        first = matrices[indices[0]]
        if len(first) <= _DIRECT.get(first.device.type, _DIRECT["cpu"]):
            left += indices
            continue
        stack, scale = _scaled([matrices[i] for i in indices], owned=owned)
        if first.device.type == "cuda" and len(first) <= _SQUARED:
            found.update(zip(indices, squaring.top(stack) * scale[:, 0], strict=True))
            continue
        value, reached = krylov.top(stack, residual=_RESIDUAL, squarings=_SQUARINGS.get(first.device.type, 0))
        slow = torch.nonzero(~reached)[:, 0]
        if len(slow) and first.device.type == "cuda" and len(first) <= _SQUARED_AFTER_ALL:
            value[slow] = squaring.top(stack[slow])
        elif len(slow):
            value[slow], again = lanczos.top(stack[slow], residual=_RESIDUAL)
            if len(slow := slow[~again]):
                value[slow] = torch.linalg.eigvalsh(stack[slow])[:, -1]
        found.update(zip(indices, value * scale[:, 0], strict=True))
    decomposed = eigenvalues([matrices[i] for i in left], owned=owned)
    found.update((i, v[0] if len(v) else v.new_zeros(())) for i, v in zip(left, decomposed, strict=True))
    if not found:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([found[i].to(found[0].device) for i in range(len(matrices))])


def alike(keys: Sequence[tuple[int, torch.device]]) -> list[list[int]]:
    """Indices of matrices of the same size on the same device, as many together as should be stacked.

    >>> cpu = torch.device("cpu")
    >>> alike([(3, cpu), (2, cpu), (3, cpu)]), alike([(2**13, cpu)] * 2)
    ([[0, 2], [1]], [[0], [1]])
    """
    groups: dict[tuple[int, torch.device], list[int]] = defaultdict(list)
    for i, key in enumerate(keys):
        groups[key].append(i)
    batches = []
    for (size, device), indices in groups.items():
        most = max(1, (_STACK_ON_CPU if device.type == "cpu" else _STACK) // max(1, size**2))
        batches += [indices[at : at + most] for at in range(0, len(indices), most)]
    return batches


def _scaled(matrices: Sequence[Tensor], *, owned: bool = False) -> tuple[Tensor, Tensor]:
    """The matrices as a stack in float64, with elements near 1, and what they were divided by, [b, 1].

    Matrices that are not finite are zeros in the stack, and were divided by NaN. Where the device has no float64, the
    stack is on the CPU.
    """
    if owned and len(matrices) == 1:
        stack = matrices[0].detach()[None]
    else:
        stack = torch.stack([m.detach() for m in matrices])
    stack = stack.to("cpu" if stack.device.type == "mps" else stack.device, torch.float64)
    scale = power_of_two(magnitudes(stack))[:, None]
    return stack.div_(scale[..., None]).nan_to_num_(0.0, 0.0, 0.0), scale


def magnitudes(stack: Tensor) -> Tensor:
    """The largest absolute value in each matrix of a stack, [b]; 0 where there are no elements.

    >>> magnitudes(torch.tensor([[[1.0, -2.0]], [[0.0, 0.5]]])), magnitudes(torch.zeros(1, 0, 3))
    (tensor([2.0000, 0.5000]), tensor([0.]))
    """
    if not stack.numel():
        return stack.new_zeros(len(stack))
    found: Tensor = torch.linalg.vector_norm(stack, torch.inf, dim=(1, 2))
    return found
