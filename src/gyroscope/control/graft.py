"""Grafting: the length of one optimizer's step, parameter by parameter, in the direction of another's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from gyroscope.base.accepted import choice
from gyroscope.control.proposal import Proposal, Proposer
from gyroscope.control.roster import check_weight, names_of
from gyroscope.control.torch_contract import (
    Wrapper,
    add_group,
    as_group,
    check_state,
    check_whole,
    floats_in,
    load_uncast,
    with_dtypes,
)
from gyroscope.errors import ControlError
from gyroscope.vectors import combine_, dots
from gyroscope.vectors.launch import to_device
from gyroscope.vectors.layout import local


class Graft(Wrapper):
    """The update w ← w + ‖M‖ D/‖D‖, with M the step that `magnitude` proposes and D the one of `direction`.

    Both see the same gradients and keep their own state. Learning rate, weight decay and schedules of `magnitude` set
    the length (its groups are this optimizer's `param_groups`); of `direction`, only the direction counts. An optimizer
    grafted onto itself, at any other learning rate, is that optimizer.

    Args:
        magnitude: the optimizer that gives the length.
        direction: the optimizer that gives the direction, on the same parameters.
        granularity: `"tensor"` for the lengths of single parameters, `"global"` for the length of all together.

    A parameter for which `direction` proposes nothing does not move. A parameter for which either proposal is not
    finite skips the step: it stays as it is and does not count in the global lengths, what is not finite in its state
    of both optimizers becomes 0, so that the next step is an ordinary one, and `skipped` counts it.

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
            raise ControlError(f"`direction` must be a torch.optim.Optimizer, got a {type(direction).__name__}.")
        choice(granularity, "granularity", ("tensor", "global"), ControlError)
        for one in (magnitude, direction):
            if isinstance(one, LBFGS):
                raise ControlError(
                    "`magnitude` and `direction` must step from one gradient, got LBFGS, which evaluates the loss "
                    "several times per step. Try torch.optim.Adam."
                )
        if magnitude is direction:
            raise ControlError("`magnitude` and `direction` must be two optimizers, got one object twice.")
        if _parameters(magnitude) != _parameters(direction):
            raise ControlError("`magnitude` and `direction` must hold the same parameters.")
        for g, group in enumerate(magnitude.param_groups):
            _check(group["params"], names_of(group, g))
        self.direction = direction
        self._attach()  # to both
        self.granularity = granularity
        self._length = Proposer(magnitude, keep_lr=True)
        self._heading = Proposer(direction)
        # One count per parameter, in the order of the groups.
        self._skipped = torch.zeros(0, dtype=torch.int64, device="cpu")

    def _shown(self) -> tuple[list[str], list[str], list[list[str]]]:
        which = "Each parameter moves" if self.granularity == "tensor" else "All parameters together move"
        length, heading = (type(one).__name__ for one in (self.inner, self.direction))
        _, heads, rows = super()._shown()
        return [f"{which} as far as {length} proposes, in the direction that {heading} proposes."], heads, rows

    def _controlled(self) -> list[Optimizer]:
        return [self.inner, self.direction] if "direction" in self.__dict__ else [self.inner]

    def skipped(self) -> dict[str, int]:
        """Return the number of skipped steps per parameter, by name, where there are any (waits for the device)."""
        names = [name for g, group in enumerate(self.param_groups) for name in names_of(group, g)]
        # No count yet for what was added since the last step.
        return {name: n for name, n in zip(names, self._skipped.tolist(), strict=False) if n}

    def _take(self, closure: Callable[[], Any] | None) -> None:
        try:
            self._graft()
        except BaseException:
            self._length.forget()
            self._heading.forget()
            raise

    def _graft(self) -> None:
        held = [sum(len(group["params"]) for group in one.param_groups) for one in (self.inner, self.direction)]
        if held[0] != held[1]:
            raise ControlError(
                f"`magnitude` now holds {held[0]} parameters and `direction` {held[1]}; nothing was changed. Add "
                "parameters with add_param_group of the Graft, which adds them to both."
            )
        lengths, _ = self._length.propose([range(len(g["params"])) for g in self.inner.param_groups])
        m, m_along = _collect(lengths)
        # Only the lengths are kept of the first: its buffers are free again before the second steps.
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
        finite = torch.isfinite(sizes) & torch.isfinite(squares)
        if self.granularity == "global":
            sizes, squares = (torch.where(finite, x, 0.0).sum().expand_as(x) for x in (sizes, squares))
        b = (sizes / squares).sqrt()
        b = torch.where(finite & torch.isfinite(b) & (squares > 0), b, torch.zeros_like(b))
        a = 1.0 + b * _numbers(along, b)
        combine_([p.detach() for p in params], moves, a, b)
        for proposal in headings:
            self._heading.release(proposal)
        self._count(lengths, ~finite)
        _clear((self.inner, self.direction), params, ~finite)

    def _count(self, proposals: list[Proposal], bad: Tensor) -> None:
        """Count the parameters that skip the step; by position, because FSDP2 exchanges the parameters."""
        places, start = [], 0
        for group, proposal in zip(self.param_groups, proposals, strict=True):
            places += [start + j for j in proposal.positions]
            start += len(group["params"])
        if len(self._skipped) != start or self._skipped.device != bad.device:
            known = self._skipped[:start].to(bad.device)
            self._skipped = torch.cat([known, known.new_zeros(start - len(known))])
        if len(places) == start:
            self._skipped += bad
        else:
            where = to_device(np.array(places), bad.device)
            self._skipped.index_add_(0, where, bad.to(self._skipped.dtype))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to both optimizers, or to neither."""
        group = as_group(param_group)
        given = [one[1] if isinstance(one, tuple) else one for one in group["params"]]
        _check(given, [f"{j} of the group" for j in range(len(given))])
        add_group(self.inner, dict(group))  # which fills in the options it has by default
        try:
            add_group(self.direction, group)
        except BaseException:
            self.inner.param_groups.pop()
            raise

    def _save(self) -> dict[str, Any]:
        direction = with_dtypes(self.direction.state_dict(), self.direction)
        return {**with_dtypes(self.inner.state_dict(), self.inner), "direction": direction}

    def _load(self, state_dict: dict[str, Any]) -> None:
        check_whole(state_dict)
        if "direction" not in state_dict:
            raise ControlError(
                "`state_dict` must have the key 'direction'. Pass what state_dict() of a Graft returned."
            )
        check_state(self.inner, state_dict)
        check_state(self.direction, state_dict["direction"])
        before = self.inner.state, self.inner.param_groups
        load_uncast(self.inner, state_dict)
        try:
            load_uncast(self.direction, state_dict["direction"])
        except ControlError:
            self.inner.state, self.inner.param_groups = before
            raise


def _check(params: Sequence[Any], names: Sequence[str]) -> None:
    for name, p in zip(names, params, strict=True):
        if isinstance(p, Tensor):
            check_weight(f"Parameter {name}", p, "Leave it out, and step it with an optimizer of its own.")


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
    """Return ‖move + along · w‖² for each parameter."""
    if not any(along):
        return dots({"ss": (moves, moves)})[:, 0]
    w = [p.detach() for p in params]
    ww, ws, ss = dots({"ww": (w, w), "ws": (w, moves), "ss": (moves, moves)}).unbind(1)
    c = _numbers(along, ww)
    return ss + 2 * c * ws + c * c * ww


def _numbers(given: list[float], like: Tensor) -> Tensor:
    """Return numbers with the dtype and the device of `like`; a device without float64 cannot convert them."""
    return to_device(np.array(given, dtype=np.float32 if like.dtype == torch.float32 else np.float64), like.device)


def _clear(optimizers: tuple[Optimizer, ...], params: list[Tensor], bad: Tensor) -> None:
    """Set what is not finite in the state of `bad` parameters to 0, without waiting for an accelerator."""
    flags = {device: bad.to(device) for device in {p.device for p in params}}
    known = {device: flag.tolist() for device, flag in flags.items() if device.type == "cpu"}
    for k, p in enumerate(params):
        if p.device in known and not known[p.device][k]:
            continue
        for optimizer in optimizers:
            values = optimizer.state[p].values() if p in optimizer.state else ()
            for value in local([value for held in values for value in floats_in(held)]):
                if p.device in known:
                    value.nan_to_num_(0.0, 0.0, 0.0)
                elif value.device == p.device:
                    value.copy_(torch.where(flags[p.device][k], torch.nan_to_num(value, 0.0, 0.0, 0.0), value))
                # Other state on a CPU, such as Adam's count of steps, does not come from the gradient.
