"""What a controller refuses of what users give it, and how its messages name what is many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from gyroscope.base.accepted import real
from gyroscope.errors import ControlError


def is_rate(given: Any) -> bool:
    """Whether this can be a rate: a finite number from 0.

    Of a tensor on an accelerator only the shape is looked at, for its value would be waited for.

    >>> import torch
    >>> is_rate(0.1), is_rate(torch.tensor([0.1])), is_rate(torch.tensor(-0.1)), is_rate("0.1")
    (True, True, False, False)
    """
    if isinstance(given, Tensor) and given.device.type != "cpu":
        return given.numel() == 1
    return 0.0 <= real(given) < math.inf


def check_rate(group: dict[str, Any], i: int) -> None:
    """Refuse a rate that is no angle. Where a tensor on an accelerator holds one, layers are left as they are."""
    lr = group.get("lr")
    if lr is None:
        raise ControlError(f"Group {i} has no 'lr', which Layca takes for the rate; give the inner optimizer one.")
    if not is_rate(lr):
        raise ControlError(
            f"Group {i} has lr {lr!r}; Layca's rate is tan θ of a step, a finite value from 0 (try 3**-3)."
        )


def as_group(given: Any) -> dict[str, Any]:
    """Return a copy of a group that is to be added, with its parameters as a list; refuse what is no group.

    The parameters are tensors, or pairs of names and tensors. Entries that are neither are left for the optimizer to
    refuse (`add_group`). An iterator is used up by this.

    >>> import torch
    >>> len(as_group({"params": torch.nn.Linear(3, 2).parameters()})["params"])
    2
    """
    if not isinstance(given, Mapping) or "params" not in given:
        what = f"a dict with the keys {sorted(map(str, given))}" if isinstance(given, Mapping) else repr(given)
        raise ControlError(f"A group must be a dict with 'params', got {what}. Try {{'params': layer.parameters()}}.")
    params = given["params"]
    if isinstance(params, Set):
        raise ControlError("The group's parameters are a set, which has no order; give a list.")
    if isinstance(params, Tensor):
        params = [params]
    if not isinstance(params, Iterable) or isinstance(params, str | bytes):
        raise ControlError(
            f"A group's 'params' must be a tensor or a list of tensors, got {params!r}. Try layer.parameters()."
        )
    return {**given, "params": list(params)}


def check_group(params: Sequence[Any], lr: Any) -> None:
    """Refuse a group that is to be added, before it is, if its matrices cannot be layers or its rate is no angle.

    Args:
        params: what `as_group` has under "params".
        lr: the group's rate; the value of a tensor on an accelerator is not looked at, which would wait.

    >>> import torch
    >>> check_group(list(torch.nn.Linear(3, 2).parameters()), 0.1)
    """
    for j, one in enumerate(params):
        named = isinstance(one, tuple) and len(one) == 2
        p = one[1] if named else one
        if isinstance(p, Tensor) and p.dim() >= 2:
            name = f"Parameter {one[0] if named else j} of the group"
            check_weight(name, p, "Leave it out, and step it with an optimizer of its own.")
    if not is_rate(lr):
        raise ControlError(
            f"The group has lr {lr!r}; Layca's rate is tan θ of a step, a finite value from 0 (try 3**-3)."
        )


def check_weight(what: str, weight: Tensor, remedy: str) -> None:
    """Refuse a weight that cannot be turned: complex numbers and integers, and weights that have no values yet."""
    if not weight.dtype.is_floating_point:
        raise ControlError(f"{what} is {weight.dtype}; accepted are float32, float64, bfloat16 and float16. {remedy}")
    if weight.is_meta:
        raise ControlError(
            f"{what} is on the meta device and has no values to turn. Give the model values, such as with "
            "model.to_empty(device='cpu') and its initialization, and build the optimizer after that."
        )


def check_optimizer(given: Any) -> None:
    """Refuse what is no torch optimizer."""
    if not isinstance(given, Optimizer):
        raise ControlError(
            f"The optimizer is a {type(given).__name__}; accepted is a torch.optim.Optimizer, the one that is stepped."
        )


def check_weights_are_its(optimizer: Optimizer) -> None:
    """Refuse an optimizer that keeps weights of its own and exchanges the model's for them.

    Schedule-free optimizers do with `train()` and `eval()`, Lookahead every few steps, TRAC in every step. Layca turns
    the weights it finds in the model, and what the optimizer then puts there is another point.
    """
    inside: Any = optimizer
    while isinstance(inside, Optimizer):
        names = {kind.__name__ for kind in type(inside).__mro__}
        switches = all(callable(getattr(inside, name, None)) for name in ("train", "eval"))
        if names & {"Lookahead", "TRAC"} or (switches and "AcceleratedOptimizer" not in names):  # which passes them on
            raise ControlError(
                f"The inner optimizer is a {type(inside).__name__}, which keeps weights of its own and puts them into "
                "the model, so that a layer would not stay where it was turned to. Use an optimizer that steps the "
                "model's weights alone, such as torch.optim.AdamW."
            )
        its = (getattr(inside, name, None) for name in ("optimizer", "inner", "base_optimizer"))
        inside = next((one for one in its if isinstance(one, Optimizer) and one is not inside), None)


def check_choice(name: str, given: str, accepted: Sequence[str]) -> None:
    """Refuse an option that is none of those there are."""
    if not isinstance(given, str) or given not in accepted:
        raise ControlError(f"{name} is {given!r}; accepted are {', '.join(map(repr, accepted))}.")


def check_closure(given: Any) -> None:
    """Refuse a closure that cannot be called."""
    if given is not None and not callable(given):
        raise ControlError(
            f"The closure must be a function without arguments that returns the loss, got a {type(given).__name__}. "
            "Call step() alone where the loss has been computed before."
        )


def few(names: Sequence[object], most: int = 5) -> str:
    """The first of many names, and how many more there are.

    >>> few(["a", "b"]), few(["a", "b", "c", "d"], most=2)
    ('a, b', 'a, b and 2 more')
    """
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")


def unlike(theirs: Sequence[Any], mine: Sequence[Any]) -> str:
    """Where two lists begin to differ.

    >>> unlike(["a", "b"], ["a", "c"]), unlike(["a"], ["a", "b"])
    ("2 and 2; number 1 is 'b' there and 'c' here", "1 and 2; number 1 is missing there and 'b' here")
    """
    k = next((k for k, (one, other) in enumerate(zip(theirs, mine, strict=False)) if one != other), None)
    k = min(len(theirs), len(mine)) if k is None else k
    there, here = (repr(one[k]) if k < len(one) else "missing" for one in (theirs, mine))
    return f"{len(theirs)} and {len(mine)}; number {k} is {there} there and {here} here"
