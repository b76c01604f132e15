"""Gradient rows J_iᵀ b of every sample i and every row b of its scores, a piece at a time.

Where the output of a sample depends on that sample alone, gradients are taken for many samples side by side, each with
a forward pass of its own (`vmap`). Under batch statistics it depends on the whole batch through mean and variance:
∇ℓ_i then is row i of the Jacobian of all losses with respect to θ, and each row is a backward pass through the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.func import vjp, vmap

from gyroscope.conditioning.fisher_scores import Scores
from gyroscope.errors import GyroscopeError
from gyroscope.passes.network import Network, batched, independent

# Elements held at a time: of gradient rows, and of the activations they go back through.
_ROWS = 1 << 23
_ACTIVATIONS = 1 << 25

Rows = dict[str, Tensor]


def gradient_rows(f: Network, output: Tensor, scores: Scores) -> Iterator[Rows]:
    """By parameter, pieces [rows, size] of the gradients of all samples; rows that are zero may be among them.

    Args:
        f: the network on its batch.
        output: f(θ) for the whole batch.
        scores: rows b of each sample.
    """
    n = len(output)
    if not independent(f, output):
        yield from _together(f, scores, _most(f))
        return
    most = _most(f.part(n, slice(0, 1)))
    pulled = _puller(f, n)
    try:
        pulled(slice(0, 1), scores.factor(slice(0, 1)))
    except GyroscopeError:
        raise
    except (RuntimeError, ValueError):
        # Some operation is unknown to vmap. One sample after another is slower, and always works.
        for i in range(n):
            yield from _together(f.part(n, slice(i, i + 1)), scores, most, start=i)
        return
    for some, rows in _pieces(n, scores, most):
        yield {name: row.reshape(rows.shape[:2].numel(), -1) for name, row in pulled(some, rows).items()}


def _puller(f: Network, n: int) -> Callable[[slice, Tensor], Rows]:
    """The function that pulls rows [samples, r, ...] at the outputs of some samples back to the parameters."""
    leaves, rebuild = batched(f.batch, n)

    def one(sample: list[Tensor], rows: Tensor) -> Rows:
        batch = rebuild([leaf[None] for leaf in sample])
        pull: Callable[[Tensor], tuple[Rows]] = vjp(lambda theta: f(theta, batch)[0], f.theta)[1]
        found: Rows = vmap(lambda row: pull(row)[0])(rows)
        return found

    def pulled(some: slice, rows: Tensor) -> Rows:
        found: Rows = vmap(one)([leaf[some] for leaf in leaves], rows)
        return found

    return pulled


def _together(f: Network, scores: Scores, most: int, *, start: int = 0) -> Iterator[Rows]:
    """Gradients of the samples of one forward pass, the first of which is sample `start` of the scores."""
    theta = {name: p.detach().requires_grad_() for name, p in f.theta.items()}
    output = f(theta)
    for some, rows in _pieces(len(output), scores, most, start=start):
        k, r = rows.shape[:2]
        cotangents = output.new_zeros(k, r, *output.shape)
        index = torch.arange(k, device=output.device)
        cotangents[index, :, index + some.start - start] = rows
        pulled = _pull(output, list(theta.values()), cotangents.flatten(0, 1))
        yield {name: row.reshape(k * r, -1) for name, row in zip(theta, pulled, strict=True)}


def _pull(output: Tensor, theta: list[Tensor], cotangents: Tensor) -> list[Tensor]:
    """Jᵀ of many cotangents at once, or one after another where that is not known."""
    found: Sequence[Tensor | None]
    try:
        found = torch.autograd.grad(
            output, theta, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
    except (RuntimeError, ValueError):
        each = [torch.autograd.grad(output, theta, c, retain_graph=True, allow_unused=True) for c in cotangents]
        found = [None if row[0] is None else torch.stack(row) for row in zip(*each, strict=True)]
    zero = (len(cotangents),)
    return [p.new_zeros(zero + p.shape) if row is None else row for p, row in zip(theta, found, strict=True)]


def _pieces(n: int, scores: Scores, most: int, *, start: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """Some samples at a time with some of their rows: `most` rows in all, or one sample's."""
    each = scores.factor(slice(start, start + 1)).shape[1]
    samples = max(1, most // each)
    for first in range(start, start + n, samples):
        some = slice(first, min(first + samples, start + n))
        for rows in torch.split(scores.factor(some), min(each, most), dim=1):
            yield some, rows


def _most(f: Network) -> int:
    """How many rows to take at a time, so that neither they nor what they go back through fill the memory."""
    held = [1]

    def count(tensor: Tensor) -> Tensor:
        held.append(tensor.numel())
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        f({name: p.detach().requires_grad_() for name, p in f.theta.items()})
    size = sum(math.prod(p.shape) for p in f.theta.values())
    return max(1, min(_ROWS // size, _ACTIVATIONS // sum(held)))
