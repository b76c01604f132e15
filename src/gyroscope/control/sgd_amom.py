"""SGD_AMom: SGD with Adam's momentum (supplementary material B.4 of the layer-rotation paper)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from gyroscope.base.accepted import flag, real
from gyroscope.control.torch_contract import is_rate
from gyroscope.errors import ControlError


class SGD_AMom(Optimizer):  # noqa: N801 — the paper's name
    """SGD whose step follows Adam's momentum: v ← μ v + (1 − μ) g from v = 0, then w ← w − η v.

    torch's SGD starts its buffer at the first gradient instead, and has no factor 1 − μ; the directions differ from the
    second step on. The paper uses this rule where it replays Adam's rotation rates with SGD.

    Args:
        params: parameters or groups, as for any torch optimizer.
        lr: learning rate η.
        momentum: μ.
        weight_decay: λ; λw is added to the gradient.
        maximize: whether to ascend instead of descend.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([1.0]))
        >>> optimizer = SGD_AMom([w], lr=1.0)
        >>> w.grad = torch.tensor([1.0]); optimizer.step(); w.data
        tensor([0.9000])

    Reference:
        Carbonnelle and De Vleeschouwer, Layer rotation: a surprisingly powerful indicator of generalization in
        deep networks?, supplementary material B.4.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        if not 0.0 <= real(momentum) < 1.0:
            raise ControlError(f"`momentum` must be a number ≥ 0 and below 1, got {momentum!r}. Try 0.9.")
        if not is_rate(lr):
            raise ControlError(f"`lr` must be a finite number ≥ 0, or a tensor that holds one, got {lr!r}. Try 0.1.")
        if not is_rate(weight_decay):
            raise ControlError(f"`weight_decay` must be a finite number ≥ 0, got {weight_decay!r}. Try 5e-4.")
        maximize = flag(maximize, "maximize", ControlError)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            grads: list[Tensor] = [p.grad for p in params]
            if group["maximize"]:
                grads = list(torch._foreach_neg(grads))
            if group["weight_decay"] != 0:
                grads = list(torch._foreach_add(grads, params, alpha=group["weight_decay"]))
            buffers = []
            for p in params:
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                buffers.append(state["momentum_buffer"])
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, grads, alpha=1 - group["momentum"])
            lr = group["lr"]
            if isinstance(lr, Tensor):
                torch._foreach_add_(params, torch._foreach_mul(buffers, -lr.reshape(())))
            else:
                torch._foreach_add_(params, buffers, alpha=-lr)
        return loss
