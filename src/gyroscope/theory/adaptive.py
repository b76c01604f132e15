"""RMSprop, Adagrad and Adam as pure functions of weights, gradient and state (section 2 of Grosse's chapter).

Each rule divides every element of a step by the root of a mean, or a sum, of that element's squared gradients, so
that elements move by about η whatever the size of their gradients. A rule takes (w, g, state) and returns the new
weights and the new state. Nothing is changed in place, and everything is computed in the dtype of w.

The chapter adds ε under the root for RMSprop and Adagrad and outside it for Adam; torch.optim always adds it
outside. The two differ in scale: √(s + ε) and √s + ε' agree at s = 0 if ε' = √ε. `inside` chooses.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from gyroscope.errors import DynamicsError
from gyroscope.theory.domains import fraction, integral, nonnegative


class Sum(NamedTuple):
    """State of RMSprop and Adagrad: the steps taken and the mean, or the sum, of squared gradients.

    >>> _, state = adagrad(torch.tensor([1.0]), torch.tensor([5.0]), lr=1.0)
    >>> state
    Sum(step=1, square=tensor([25.]))
    """

    step: int
    square: Tensor


class Moments(NamedTuple):
    """State of Adam: the steps taken, the mean gradient m and the mean squared gradient s, before bias correction.

    >>> _, state = adam(torch.tensor([1.0]), torch.tensor([10.0]), lr=0.1)
    >>> state.step, round(state.mean.item(), 3), round(state.square.item(), 3)
    (1, 1.0, 0.1)
    """

    step: int
    mean: Tensor
    square: Tensor


class Pace(NamedTuple):
    """Learning rate η, decay constant β and ε of RMSprop at one step.

    >>> adagrad_as_rmsprop(4, lr=1.0, eps=0.0)
    Pace(lr=0.5, beta=0.75, eps=0.0)
    """

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
    """s ← β s + (1 − β) g²,  w ← w − η g / √(s + ε).

    Squared gradients are averaged over about the last 1/(1 − β) steps, starting from s = 0.

    Args:
        w: weights.
        g: gradient of the weights.
        state: the state that the last call returned; None for the first step.
        lr: η.
        beta: β.
        eps: ε.
        inside: whether ε is under the root, as in the chapter, or outside it, as in `torch.optim.RMSprop`.

    >>> w, state = rmsprop(torch.tensor([1.0, 1.0]), torch.tensor([0.01, 100.0]), lr=0.1, beta=0.75, eps=0.0)
    >>> w                                          # both elements move by η/√(1 − β)
    tensor([0.8000, 0.8000])
    """
    _check(lr, eps, beta=beta)
    step, square = state if state is not None else Sum(0, torch.zeros_like(w))
    square = beta * square + (1 - beta) * g * g
    return w - lr * g / _root(square, eps, inside), Sum(step + 1, square)


def adagrad(
    w: Tensor, g: Tensor, state: Sum | None = None, *, lr: float, eps: float = 1e-10, inside: bool = True
) -> tuple[Tensor, Sum]:
    """f ← f + g²,  w ← w − η g / √(f + ε).

    Args:
        w: weights.
        g: gradient of the weights.
        state: the state that the last call returned; None for the first step.
        lr: η.
        eps: ε.
        inside: whether ε is under the root, as in the chapter, or outside it, as in `torch.optim.Adagrad`.

    >>> w, state = torch.tensor([1.0]), None
    >>> for _ in range(4):
    ...     before, (w, state) = w, adagrad(w, torch.tensor([5.0]), state, lr=1.0, eps=0.0)
    >>> before - w                                 # the fourth step: η/√4
    tensor([0.5000])
    """
    _check(lr, eps)
    step, square = state if state is not None else Sum(0, torch.zeros_like(w))
    square = square + g * g
    return w - lr * g / _root(square, eps, inside), Sum(step + 1, square)


def adagrad_as_rmsprop(k: int, *, lr: float, eps: float = 1e-10, inside: bool = True) -> Pace:
    """Return the learning rate, β and ε with which RMSprop's step k (from 1) equals Adagrad's: η/√k, 1 − 1/k and ε/k.

    A sum is a mean times the number of its terms, f_k = k s_k, and s_k is the plain mean of all squared gradients if β
    is 1 − 1/k at step k. So √(f_k + ε) = √k √(s_k + ε/k): Adagrad is RMSprop that never forgets, with a learning rate
    that falls as 1/√k. (With ε outside the root, ε is divided by √k instead.)

    >>> adagrad_as_rmsprop(4, lr=1.0, eps=0.0)
    Pace(lr=0.5, beta=0.75, eps=0.0)
    """
    step = integral(k, least=1)
    if step is None:
        raise DynamicsError(f"`k` must be a whole number ≥ 1, got {k!r:.80}. Try 1, the first step.")
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
    """m ← β₁ m + (1 − β₁) g,  s ← β₂ s + (1 − β₂) g²,  w ← w − η m̂ / (√ŝ + ε).

    m̂ = m/(1 − β₁^k) and ŝ = s/(1 − β₂^k) correct for averages that start from 0: both are exact if the gradient is
    the same at every step. With β₁ = 0 this is RMSprop with bias correction.

    Args:
        w: weights.
        g: gradient of the weights.
        state: the state that the last call returned; None for the first step.
        lr: η.
        betas: β₁ and β₂.
        eps: ε.
        inside: whether ε is under the root, or outside it, as in the chapter and in `torch.optim.Adam`.

    >>> w, state = adam(torch.tensor([1.0, 1.0]), torch.tensor([0.01, -100.0]), lr=0.1, eps=0.0)
    >>> w                                          # the first step is η, whatever the gradient
    tensor([0.9000, 1.1000])
    """
    try:
        beta1, beta2 = betas
    except (TypeError, ValueError):
        raise DynamicsError(f"`betas` must be two numbers, got {betas!r:.80}. Try (0.9, 0.999).") from None
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
    nonnegative("lr", lr)
    nonnegative("eps", eps, hint="1e-8")
    for name, value in betas.items():
        fraction(name, value)
