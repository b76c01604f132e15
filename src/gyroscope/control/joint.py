"""Two torch optimizers as one: the first steps the groups that turn, the second those that are stepped plainly.

Every group says in `rule` how it is stepped. The `lr` of every group is the rate ρ; the learning rate of one that is
stepped plainly is ρ times its `relative_lr`, which is η/ρ. So all rates move in proportion whatever a scheduler writes
into `lr`: a floor (`eta_min`), a peak (`max_lr`), or one number for all groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from gyroscope.errors import ControlError

Group = dict[str, Any]
Rule = Literal["turn", "plain", "frozen"]


class Joint(Optimizer):
    """One optimizer made of two, which share its groups (the same dictionaries) and its state.

    Args:
        inner: steps the groups whose `rule` is "turn".
        others: steps the groups whose `rule` is "plain", at `lr` times `relative_lr`. Groups of any other rule are left
            as they are.
        groups: the groups of both, in the order in which they are shown.

    >>> w, b = torch.ones(2, 2), torch.ones(2)
    >>> turn, plain = {"params": [w], "lr": 0.1, "rule": "turn"}, {"params": [b], "lr": 0.1, "rule": "plain"}
    >>> inner, others = torch.optim.SGD([turn]), torch.optim.AdamW([{**plain, "relative_lr": 0.5}], weight_decay=0.0)
    >>> joint = Joint(inner, others, [*inner.param_groups, *others.param_groups])
    >>> w.grad, b.grad = torch.ones(2, 2), torch.ones(2)
    >>> joint.step(); w[0], b                         # 1 − 0.1, and 1 − 0.1 · 0.5
    (tensor([0.9000, 0.9000]), tensor([0.9500, 0.9500]))
    """

    def __init__(self, inner: Optimizer, others: Optimizer, groups: Sequence[Group]) -> None:
        super().__init__(list(groups), {})
        self.inner, self.others = inner, others
        self.defaults = inner.defaults
        for group in self.param_groups:
            if group["rule"] not in ("turn", "plain"):  # frozen: schedulers look for the same options in every group
                group.update({**inner.defaults, **group})
        self.share()

    def share(self) -> None:
        """Give both optimizers their groups and the state, which a load or a trainer may have replaced."""
        for one, rule in ((self.inner, "turn"), (self.others, "plain")):
            one.param_groups = [group for group in self.param_groups if group["rule"] == rule]
            one.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of both.

        Args:
            closure: evaluates the model again and returns the loss; for the first alone.
        """
        self.share()
        loss = self.inner.step() if closure is None else self.inner.step(closure)
        if self.others.param_groups:
            with _own_rates(self.others.param_groups):
                self.others.step()
        return loss

    def add_param_group(self, param_group: Group) -> None:
        """Add a group to the optimizer of its `rule`, which fills in its own options."""
        parts = {"turn": "inner", "plain": "others"}
        part: Optimizer | None = self.__dict__.get(parts.get(param_group.get("rule", ""), ""))
        if part is None:  # while the first groups are taken over, and for frozen ones
            super().add_param_group(param_group)
            return
        held = {id(p) for group in self.param_groups for p in group["params"]}
        part.add_param_group(param_group)
        if any(id(p) in held for p in part.param_groups[-1]["params"]):
            raise ControlError("The group has parameters that another group has already. Give every parameter once.")
        self.param_groups.append(part.param_groups[-1])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "inner": self.inner, "others": self.others}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.share()
        for one in (self.inner, self.others):  # torch's fill in options that older states lack
            one.__setstate__({"state": self.state, "param_groups": one.param_groups})


@contextmanager
def _own_rates(groups: Sequence[Group]) -> Iterator[None]:
    """Put the learning rate η into groups whose `lr` is ρ, and take it out again."""
    rates = [group["lr"] for group in groups]
    try:
        for group in groups:
            group["lr"] = group["lr"] * group["relative_lr"]
        yield
    finally:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate


def main(optimizer: Optimizer, group: Group | None = None) -> Optimizer:
    """Return the optimizer that steps a group, by default one that turns: a part of a `Joint`, or `optimizer` itself.

    >>> sgd = torch.optim.SGD([torch.ones(2)])
    >>> main(sgd) is sgd
    True
    """
    if not isinstance(optimizer, Joint):
        return optimizer
    return optimizer.inner if group is None or group["rule"] == "turn" else optimizer.others
