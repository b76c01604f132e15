"""Grafting: the length of one optimizer's step, layer by layer, in the direction of another's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from gyroscope.control.proposal import Proposal, Proposer
from gyroscope.control.torch_contract import Wrapper, check_state, load_uncast
from gyroscope.errors import ControlError
from gyroscope.vectors import combine_, dots


class Graft(Wrapper):
    """w ← w + ‖M‖ D/‖D‖, with M the step `magnitude` proposes and D the one `direction` proposes.

    Both see the same gradients and keep their own state. Learning rate, weight decay and schedules of `magnitude`
    set the length (its groups are this optimizer's `param_groups`); of `direction`, only the direction counts.
    Grafting an optimizer onto itself, at whatever other learning rate, is that optimizer.

    Args:
        magnitude: the optimizer that gives the length.
        direction: the optimizer that gives the direction, on the same parameters.
        granularity: `"tensor"` compares lengths parameter by parameter, `"global"` over all of them together.

    A parameter for which `direction` proposes nothing does not move, and neither does one whose proposal is not
    finite.

    Example:
        >>> w = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        >>> optimizer = Graft(torch.optim.SGD([w], lr=0.1), torch.optim.Adam([w], lr=123.0))
        >>> w.grad = torch.tensor([6.0, 8.0]); optimizer.step()      # SGD's length 1, Adam's direction (1, 1)/√2
        >>> w.data
        tensor([2.2929, 3.2929])

    Reference:
        Agarwal et al., Disentangling adaptive gradient methods from learning rates.
    """

    def __init__(
        self,
        magnitude: Optimizer,
        direction: Optimizer,
        *,
        granularity: Literal["tensor", "global"] = "tensor",
    ) -> None:
        super().__init__(magnitude)
        if not isinstance(direction, Optimizer):
            raise ControlError(f"direction is a {type(direction).__name__}; accepted is a torch.optim.Optimizer.")
        if granularity not in ("tensor", "global"):
            raise ControlError(f"granularity is {granularity!r}; accepted are 'tensor' and 'global'.")
        for one in (magnitude, direction):
            if isinstance(one, LBFGS):
                raise ControlError(
                    "LBFGS evaluates the loss several times a step, so it has no one gradient to share; graft "
                    "optimizers that step from the gradients alone."
                )
        if magnitude is direction:
            raise ControlError("magnitude and direction are the same object; give each its own optimizer.")
        if _parameters(magnitude) != _parameters(direction):
            raise ControlError("magnitude and direction hold different parameters; build both on the same ones.")
        self.direction = direction
        self.granularity = granularity
        self._length = Proposer(magnitude, keep_lr=True)
        self._heading = Proposer(direction)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # parameters are redirected here
    def _step(self) -> None:
        lengths, _ = self._length.propose([range(len(g["params"])) for g in self.inner.param_groups])
        m, m_along = _collect(lengths)
        # Only the length is kept of the first: its buffers are free again before the second is asked.
        params = list(m)
        if not params:
            return
        sizes = _square_lengths(params, [m[p] for p in params], [m_along[p] for p in params])
        for proposal in lengths:
            self._length.release(proposal)
        headings, _ = self._heading.propose([range(len(g["params"])) for g in self.direction.param_groups])
        d, d_along = _collect(headings)
        moves = [d[p] for p in params]
        along = [d_along[p] for p in params]
        squares = _square_lengths(params, moves, along)
        if self.granularity == "global":
            sizes, squares = sizes.sum().expand_as(sizes), squares.sum().expand_as(squares)
        b = (sizes / squares).sqrt()
        b = torch.where(torch.isfinite(b) & (squares > 0), b, torch.zeros_like(b))
        a = 1.0 + b * torch.tensor(along, dtype=b.dtype, device=b.device)
        combine_([p.detach() for p in params], moves, a, b)
        for proposal in headings:
            self._heading.release(proposal)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to both optimizers."""
        self.inner.add_param_group(dict(param_group))
        self.direction.add_param_group(dict(param_group))

    def _save(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "direction": self.direction.state_dict()}

    def _load(self, state_dict: dict[str, Any]) -> None:
        if "direction" not in state_dict:
            raise ControlError("The state has no 'direction'; pass what the state_dict() of a Graft returned.")
        check_state(self.inner, state_dict)
        check_state(self.direction, state_dict["direction"])
        load_uncast(self.inner, state_dict)
        load_uncast(self.direction, state_dict["direction"])


def _parameters(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _collect(proposals: list[Proposal]) -> tuple[dict[Tensor, Tensor], dict[Tensor, float]]:
    moves, along = {}, {}
    for proposal in proposals:
        for p, d in zip(proposal.params, proposal.displacements, strict=True):
            moves[p] = d
            along[p] = proposal.along
    return moves, along


def _square_lengths(params: list[Tensor], moves: list[Tensor], along: list[float]) -> Tensor:
    """‖move + along · w‖² for each parameter."""
    if not any(along):
        return dots({"ss": (moves, moves)})[:, 0]
    w = [p.detach() for p in params]
    ww, ws, ss = dots({"ww": (w, w), "ws": (w, moves), "ss": (moves, moves)}).unbind(1)
    c = torch.tensor(along, dtype=ww.dtype, device=ww.device)
    return ss + 2 * c * ws + c * c * ww
