"""Weight decay and L2 regularization as changes of an update rule, and when they coincide (section 5, eq. 22 and 27).

Weight decay rescales the weights at every step, w ← (1 − ηλ) w (equation 22), in addition to the optimizer's step.
An L2 penalty ½λ‖w‖² adds λw to the gradient, which then goes through the optimizer like the rest of it. For

    w ← w − η C⁻¹ ∇J        decay:  w ← (1 − ηλ) w − η C⁻¹ ∇J        L2:  w ← w − η C⁻¹ (∇J + λw)

they differ by ηλ (C⁻¹ − I) w: they coincide for gradient descent, C = I, and hardly ever elsewhere. Decay is L2
with the norm ‖w‖²_C = wᵀCw in place of ‖w‖² (equation 27).

A rule is a function (w, gradient, state) → (new w, new state), such as `sgd`, `preconditioned`, or those of
`gyroscope.theory.adaptive` with their options bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from gyroscope.errors import DynamicsError
from gyroscope.theory.domains import decay_share, nonnegative

S = TypeVar("S")
Rule = Callable[[Tensor, Tensor, S | None], tuple[Tensor, S]]
#: v → C⁻¹v, or v → Cv.
Product = Callable[[Tensor], Tensor]


def sgd(
    w: Tensor, g: Tensor, state: Tensor | None = None, *, lr: float, momentum: float = 0.0
) -> tuple[Tensor, Tensor]:
    """v ← βv + g,  w ← w − ηv: gradient descent, with the momentum of `torch.optim.SGD`.

    >>> import torch
    >>> sgd(torch.tensor([1.0]), torch.tensor([2.0]), lr=0.1)[0]
    tensor([0.8000])
    """
    v = g if state is None else momentum * state + g
    return w - lr * v, v


def preconditioned(w: Tensor, g: Tensor, state: None = None, *, lr: float, solve: Product) -> tuple[Tensor, None]:
    """w ← w − η C⁻¹g, with `solve` the function v → C⁻¹v: Newton's method, natural gradient, K-FAC.

    >>> import torch
    >>> C, w = torch.tensor([2.0, 8.0]), torch.tensor([1.0, 1.0])
    >>> preconditioned(w, torch.tensor([2.0, 8.0]), lr=0.5, solve=lambda v: v / C)[0]
    tensor([0.5000, 0.5000])
    """
    return w - lr * solve(g), None


def with_decay(rule: Rule[S], *, lr: float, decay: float, by_rate: bool = True) -> Rule[S]:
    """Return the rule with decoupled weight decay: its step also subtracts ηλw (equation 22).

    AdamW is `with_decay` of Adam. λ is multiplied by η in the chapter and in torch. The paper that introduced AdamW
    does not multiply: its λ' stands for ηλ, so that L2 with λ under gradient descent is decay with λ' = ηλ.

    Args:
        rule: any rule.
        lr: η, the learning rate that the rule is bound to.
        decay: λ.
        by_rate: whether a step removes the share ηλ of the weights, or λ itself.

    Raises:
        DynamicsError: the share is 1 or more.

    >>> import torch
    >>> from functools import partial
    >>> step = with_decay(partial(sgd, lr=0.1), lr=0.1, decay=0.5)
    >>> step(torch.tensor([1.0]), torch.tensor([2.0]), None)[0]        # 0.95 · 1 − 0.1 · 2
    tensor([0.7500])
    """
    share = decay_share(lr, decay) if by_rate else decay_share(1.0, decay)

    def decayed(w: Tensor, g: Tensor, state: S | None = None) -> tuple[Tensor, S]:
        new, after = rule(w, g, state)
        return new - share * w, after

    return decayed


def with_l2(rule: Rule[S], *, decay: float) -> Rule[S]:
    """Return the rule with an L2 penalty: its gradient is ∇(J + ½λ‖w‖²) = ∇J + λw.

    This is the `weight_decay` of `torch.optim.SGD`, `Adam`, `RMSprop` and `Adagrad`.

    >>> import torch
    >>> from functools import partial
    >>> step = with_l2(partial(sgd, lr=0.1), decay=0.5)
    >>> step(torch.tensor([1.0]), torch.tensor([2.0]), None)[0]        # 1 − 0.1 · (2 + 0.5)
    tensor([0.7500])
    """
    nonnegative("decay", decay)

    def penalized(w: Tensor, g: Tensor, state: S | None = None) -> tuple[Tensor, S]:
        return rule(w, g + decay * w, state)

    return penalized


def with_norm(rule: Rule[S], *, decay: float, product: Product) -> Rule[S]:
    """Return the rule with the penalty ½λ wᵀCw, C held fixed: its gradient is ∇J + λCw (equation 27).

    With `preconditioned` by the same C this is weight decay. `product` is the function v → Cv.

    >>> import torch
    >>> from functools import partial
    >>> C = torch.tensor([2.0, 8.0])
    >>> newton = partial(preconditioned, lr=0.1, solve=lambda v: v / C)
    >>> w, g = torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0])
    >>> with_norm(newton, decay=0.5, product=lambda v: C * v)(w, g, None)[0]
    tensor([0.9000, 0.9375])
    >>> with_decay(newton, lr=0.1, decay=0.5)(w, g, None)[0]
    tensor([0.9000, 0.9375])
    """
    nonnegative("decay", decay)

    def penalized(w: Tensor, g: Tensor, state: S | None = None) -> tuple[Tensor, S]:
        return rule(w, g + decay * product(w), state)

    return penalized


def norm_of(v: Tensor, product: Product) -> Tensor:
    """The C-norm ‖v‖_C = √(vᵀCv) (section 5.3), with `product` the function v → Cv.

    >>> import torch
    >>> norm_of(torch.tensor([3.0, 4.0]), lambda v: v)
    tensor(5.)
    """
    square = (v * product(v)).sum()
    if square < 0:
        raise DynamicsError(f"C must be positive semi-definite, got vᵀCv = {square.item():.3g}.")
    return square.sqrt()


def disagreement(w: Tensor, solve: Product, *, lr: float, decay: float) -> Tensor:
    """Difference between a step with decay and a step with L2, ηλ (C⁻¹ − I) w; zero exactly where C⁻¹ w = w.

    >>> import torch
    >>> disagreement(torch.tensor([1.0, 1.0]), lambda v: v / torch.tensor([1.0, 0.25]), lr=0.1, decay=0.5)
    tensor([0.0000, 0.1500])
    """
    return decay_share(lr, decay) * (solve(w) - w)
