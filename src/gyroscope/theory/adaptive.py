"""RMSprop, Adagrad and Adam as pure functions of weights, gradient and state (section 2 of Grosse's chapter).

Each divides every element of a step by the root of a mean, or a sum, of that element's squared gradients, so that
elements move by about α whatever the size of their gradients. A rule takes (w, g, state) and returns the new weights
and the new state; nothing is changed in place, and everything is computed in the dtype of w.

The chapter adds ε under the root for RMSprop and Adagrad and beside it for Adam; torch.optim always adds it beside. The
two differ in scale: √(s + ε) and √s + ε' are alike at s = 0 if ε' = √ε. `inside` chooses.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from gyroscope.base.accepted import real
from gyroscope.errors import DynamicsError
from gyroscope.theory.domains import integral


class Sum(NamedTuple):
    """What RMSprop and Adagrad remember: the steps taken and the mean, or the sum, of squared gradients."""

    step: int
    square: Tensor


class Moments(NamedTuple):
    """What Adam remembers: the steps taken, the mean gradient m and the mean squared gradient s, not yet corrected."""

    step: int
    mean: Tensor
    square: Tensor


class Pace(NamedTuple):
    """The rate α, the memory β and the ε of RMSprop at one step."""

    lr: float
    beta: float
    eps: float


def rmsprop(
    w: Tensor,
    g: Tensor,
    state: Sum | None = None,
    *,
    lr: float,
    beta: float = 0.99,
    eps: float = 1e-8,
    inside: bool = True,
) -> tuple[Tensor, Sum]:
    """s ← β s + (1 − β) g²,  w ← w − α g / √(s + ε).

    Squared gradients are averaged over about the last 1/(1 − β) steps, from s = 0.

    Args:
        w: the weights.
        g: their gradient.
        state: what the last call returned; None at the first step.
        lr: α.
        beta: β.
        eps: ε.
        inside: whether ε is under the root, as in the chapter, or beside it, as in `torch.optim.RMSprop`.

    >>> w, state = rmsprop(torch.tensor([1.0, 1.0]), torch.tensor([0.01, 100.0]), lr=0.1, beta=0.75, eps=0.0)
    >>> w                                          # both elements move by α/√(1 − β)
    tensor([0.8000, 0.8000])
    """
    _check(lr, eps, beta=beta)
    step, square = state if state is not None else Sum(0, torch.zeros_like(w))
    square = beta * square + (1 - beta) * g * g
    return w - lr * g / _root(square, eps, inside), Sum(step + 1, square)


def adagrad(
    w: Tensor, g: Tensor, state: Sum | None = None, *, lr: float, eps: float = 1e-10, inside: bool = True
) -> tuple[Tensor, Sum]:
    """f ← f + g²,  w ← w − α g / √(f + ε).

    Args:
        w: the weights.
        g: their gradient.
        state: what the last call returned; None at the first step.
        lr: α.
        eps: ε.
        inside: whether ε is under the root, as in the chapter, or beside it, as in `torch.optim.Adagrad`.

    >>> w, state = torch.tensor([1.0]), None
    >>> for _ in range(4):
    ...     before, (w, state) = w, adagrad(w, torch.tensor([5.0]), state, lr=1.0, eps=0.0)
    >>> before - w                                 # the fourth step: α/√4
    tensor([0.5000])
    """
    _check(lr, eps)
    step, square = state if state is not None else Sum(0, torch.zeros_like(w))
    square = square + g * g
    return w - lr * g / _root(square, eps, inside), Sum(step + 1, square)


def adagrad_as_rmsprop(k: int, *, lr: float, eps: float = 1e-10, inside: bool = True) -> Pace:
    """The rate, the memory and the ε with which RMSprop's step k (from 1) is Adagrad's: α/√k, 1 − 1/k and ε/k.

    A sum is a mean times the number of its terms, f_k = k s_k, and s_k is the plain mean of all squared gradients if β
    is 1 − 1/k at step k. So √(f_k + ε) = √k √(s_k + ε/k): Adagrad is RMSprop with a memory of everything and a learning
    rate that falls as 1/√k. (With ε beside the root it is divided by √k instead.)

    >>> adagrad_as_rmsprop(4, lr=1.0, eps=0.0)
    Pace(lr=0.5, beta=0.75, eps=0.0)
    """
    step = integral(k, least=1)
    if step is None:
        raise DynamicsError(f"k is {k!r}; steps are counted from 1.")
    _check(lr, eps)
    return Pace(lr / sqrt(step), 1 - 1 / step, eps / step if inside else eps / sqrt(step))


def adam(
    w: Tensor,
    g: Tensor,
    state: Moments | None = None,
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    inside: bool = False,
) -> tuple[Tensor, Moments]:
    """m ← β₁ m + (1 − β₁) g,  s ← β₂ s + (1 − β₂) g²,  w ← w − α m̂ / (√ŝ + ε).

    m̂ = m/(1 − β₁^k) and ŝ = s/(1 − β₂^k) make up for averages that start from 0: both are exact where the gradient is
    the same at every step. With β₁ = 0 this is RMSprop, but for that correction.

    Args:
        w: the weights.
        g: their gradient.
        state: what the last call returned; None at the first step.
        lr: α.
        betas: β₁ and β₂.
        eps: ε.
        inside: whether ε is under the root, or beside it, as in the chapter and in `torch.optim.Adam`.

    >>> w, state = adam(torch.tensor([1.0, 1.0]), torch.tensor([0.01, -100.0]), lr=0.1, eps=0.0)
    >>> w                                          # the first step is α, whatever the gradient
    tensor([0.9000, 1.1000])
    """
    try:
        beta1, beta2 = betas
    except (TypeError, ValueError):
        raise DynamicsError(f"betas is {betas!r}; accepted are two numbers.") from None
    _check(lr, eps, beta1=beta1, beta2=beta2)
    step, mean, square = state if state is not None else Moments(0, torch.zeros_like(w), torch.zeros_like(w))
    step += 1
    mean = beta1 * mean + (1 - beta1) * g
    square = beta2 * square + (1 - beta2) * g * g
    root = _root(square / (1 - beta2**step), eps, inside)
    return w - lr * (mean / (1 - beta1**step)) / root, Moments(step, mean, square)


def _root(square: Tensor, eps: float, inside: bool) -> Tensor:
    return (square + eps).sqrt() if inside else square.sqrt() + eps


def _check(lr: float, eps: float, **betas: float) -> None:
    for name, value in (("lr", lr), ("eps", eps)):
        if not 0 <= real(value) < inf:
            raise DynamicsError(f"{name} is {value!r}; accepted are finite numbers from 0.")
    for name, value in betas.items():
        if not 0 <= real(value) < 1:
            raise DynamicsError(f"{name} is {value!r}; accepted are values from 0 to below 1.")
