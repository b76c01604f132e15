"""What an optimizer would do, without doing it: the displacement it proposes for each parameter.

It is never recovered as p_new − p_old in low precision (in bfloat16 at a small learning rate that is noise).
While the optimizer steps, its parameters point elsewhere:

- at a buffer of zeros, where the rule does not read the weights: the buffer then *is* the displacement. Weight
  decay is taken out of the group and added by hand: coupled, to the gradient; decoupled, as the multiple `along`
  of the weights;
- at a copy of the weights in float32 or better, where it does (or might: unknown optimizers), and the copy's
  change is the displacement.

Gradients and weights are back in their place, bit for bit, before this returns, also when the optimizer raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gyroscope.control.rules import Rule, decay_of, rule_of
from gyroscope.errors import ControlError
from gyroscope.vectors.sharded import as_sharded, is_sharded

_LOW = (torch.bfloat16, torch.float16)


@dataclass
class Proposal:
    """The displacements s = `displacements` + `along` · w of the parameters of one group."""

    params: list[Tensor] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    displacements: list[Tensor] = field(default_factory=list)
    along: float = 0.0


class Proposer:
    """Asks one optimizer for its displacements, step after step.

    Args:
        optimizer: any torch optimizer.
        reads_weights: whether its rule depends on the weights' values beyond weight decay. Known for torch's own
            classes; for others assumed, unless said otherwise here.
        keep_lr: step at the groups' own learning rates. Otherwise at 1 where the rule is linear in the rate, so
            that a small rate does not push a half-precision displacement below what its dtype can hold.
    """

    def __init__(self, optimizer: Optimizer, reads_weights: bool | None = None, *, keep_lr: bool = False) -> None:
        self.optimizer = optimizer
        known = rule_of(optimizer)
        self.rule: Rule = known
        self.reads_weights = known.reads_weights if reads_weights is None else reads_weights
        self.keep_lr = keep_lr or self.reads_weights or isinstance(optimizer, torch.optim.Rprop)
        self._buffers: dict[int, Tensor] = {}
        self._redirected: dict[Tensor, tuple[Tensor, Tensor | None]] = {}

    def propose(
        self,
        positions: Sequence[Sequence[int]],
        *,
        hidden: Sequence[int] = (),
        frozen: Sequence[int] = (),
        closure: Callable[[], Any] | None = None,
    ) -> tuple[list[Proposal], Any]:
        """Let the optimizer step, and catch what it does to the parameters at `positions` of each group.

        Args:
            positions: for each group, which of its parameters are caught; the others are really stepped.
            hidden: groups the optimizer does not see at all.
            frozen: groups of `positions` whose other parameters are put back.
            closure: passed on to an optimizer that reads the weights (it may call it several times); otherwise
                the caller has evaluated it.
        """
        groups = self.optimizer.param_groups
        proposals = [Proposal() for _ in groups]
        late = closure is not None
        for i, group in enumerate(groups):
            if i in hidden:
                continue
            for j in positions[i]:
                p = group["params"][j]
                if p.grad is not None or (late and p.requires_grad):
                    proposals[i].params.append(p)
                    proposals[i].positions.append(j)
        with self._hide(hidden), self._hold(groups, positions, frozen):
            loss = self._catch(groups, proposals, closure)
        return proposals, loss

    def _catch(
        self, groups: list[dict[str, Any]], proposals: list[Proposal], closure: Callable[[], Any] | None
    ) -> Any:
        undo: list[Callable[[], None]] = []
        loss = None
        try:
            for group, proposal in zip(groups, proposals, strict=True):
                if proposal.params:
                    self._redirect(group, proposal, undo, late=closure is not None)
            loss = self.optimizer.step(closure) if closure is not None else self.optimizer.step()
            for proposal in proposals:
                proposal.displacements = [self._displacement(p) for p in proposal.params]
        except BaseException:
            for p in self._redirected:
                self._displacement(p).zero_()
            raise
        finally:
            for action in reversed(undo):
                action()
            self._redirected = {}
        return loss

    def _redirect(
        self, group: dict[str, Any], proposal: Proposal, undo: list[Callable[[], None]], *, late: bool
    ) -> None:
        how, decay = decay_of(self.rule, group)
        if not self.reads_weights:
            if how == "coupled":
                sign = -decay if group.get("maximize", False) else decay
                for p, g in zip(
                    proposal.params,
                    torch._foreach_add([p.grad for p in proposal.params], proposal.params, alpha=sign),
                    strict=True,
                ):
                    undo.append(_restore_grad(p))
                    p.grad = g
            if how != "none":
                undo.append(_restore_key(group, "weight_decay"))
                group["weight_decay"] = 0.0
            if not self.keep_lr:
                undo.append(_restore_key(group, "lr"))
                group["lr"] = 1.0
            if how == "decoupled":
                proposal.along = -decay * float(group["lr"])
        for p in proposal.params:
            if p.grad is not None and p.grad.is_sparse:
                raise ControlError(
                    "A controlled layer has a sparse gradient; use sparse=False on the embedding, or exclude it."
                )
            if is_sharded(p):
                self._redirect_shard(p, undo)
            else:
                self._redirect_tensor(p, undo, late=late)

    def _redirect_tensor(self, p: Tensor, undo: list[Callable[[], None]], *, late: bool) -> None:
        weights = p.data
        if not self.reads_weights:
            buffer = self._zeros(p)
            self._redirected[p] = (buffer, None)
        else:
            if p.dtype in _LOW:
                if late:
                    raise ControlError(
                        f"{type(self.optimizer).__name__} evaluates a closure, which a model in {p.dtype} cannot do "
                        "while its weights are held in float32; keep the parameters in float32 and use autocast."
                    )
                undo.append(_restore_grad(p))
            buffer = weights.to(torch.float32 if p.dtype in _LOW else p.dtype, copy=True)
            self._redirected[p] = (buffer, weights)
        undo.append(_restore_data(p, weights))
        grad = p.grad
        if buffer.dtype != p.dtype:
            p.grad = None
            p.data = buffer
            p.grad = None if grad is None else grad.to(buffer.dtype)
        else:
            p.data = buffer

    def _redirect_shard(self, p: Any, undo: list[Callable[[], None]]) -> None:
        """A DTensor's storage cannot be exchanged; its weights are put aside and back instead."""
        local = p.detach().to_local()
        if self.reads_weights and p.dtype in _LOW:
            raise ControlError(
                f"{type(self.optimizer).__name__} may read the weights, and these are sharded in {p.dtype}: its "
                "displacements would be rounding noise. Keep the sharded parameters in float32 (FSDP2's mixed "
                "precision does), or pass reads_weights=False if it reads gradients alone."
            )
        aside = local.clone()
        if not self.reads_weights:
            local.zero_()
        self._redirected[p] = (local, aside if self.reads_weights else None)
        undo.append(lambda: local.copy_(aside) and None)

    def _displacement(self, p: Tensor) -> Tensor:
        buffer, weights = self._redirected[p]
        if not is_sharded(p):
            return buffer if weights is None else buffer.sub_(weights.to(buffer.dtype))
        moved = buffer.clone() if weights is None else buffer - weights
        return as_sharded(moved, p)

    def _zeros(self, p: Tensor) -> Tensor:
        known = self._buffers.get(id(p))
        if (
            known is None
            or known.shape != p.shape
            or known.dtype != p.dtype
            or known.device != p.device
            or known.stride() != p.stride()
        ):
            known = torch.zeros_like(p.data, memory_format=torch.preserve_format)
            self._buffers[id(p)] = known
        return known

    def release(self, proposal: Proposal) -> None:
        """Make the buffers zero again, once their displacements have been used."""
        if not self.reads_weights and proposal.displacements:
            torch._foreach_zero_(proposal.displacements)

    @contextmanager
    def _hide(self, hidden: Sequence[int]) -> Iterator[None]:
        groups = self.optimizer.param_groups
        kept = {i: groups[i]["params"] for i in hidden}
        try:
            for i in hidden:
                groups[i]["params"] = []
            yield
        finally:
            for i, params in kept.items():
                groups[i]["params"] = params

    @contextmanager
    def _hold(
        self, groups: list[dict[str, Any]], positions: Sequence[Sequence[int]], frozen: Sequence[int]
    ) -> Iterator[None]:
        others = [
            p for i in frozen for j, p in enumerate(groups[i]["params"]) if j not in set(positions[i])
        ]
        aside = [p.detach().clone() for p in others]
        try:
            yield
        finally:
            for p, value in zip(others, aside, strict=True):
                p.detach().copy_(value)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_buffers": {}}


def _restore_key(group: dict[str, Any], key: str) -> Callable[[], None]:
    value = group[key]
    return lambda: group.__setitem__(key, value)


def _restore_data(p: Tensor, value: Tensor) -> Callable[[], None]:
    def undo() -> None:
        if p.dtype != value.dtype:
            p.grad = None
        p.data = value

    return undo


def _restore_grad(p: Tensor) -> Callable[[], None]:
    grad = p.grad

    def undo() -> None:
        p.grad = grad

    return undo
