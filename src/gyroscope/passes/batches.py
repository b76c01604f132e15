"""Batches as users pass them: one, or an iterable of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gyroscope.errors import ConditioningError

_ACCEPTED = (
    "`batch` must be a pair (inputs, targets) or an iterable of such pairs like a DataLoader, with inputs a tensor, a "
    "tuple of positional arguments or a dict of keyword arguments of the model, got"
)


@dataclass(frozen=True)
class Batch:
    """The arguments of a model, and the target of its output."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any


def batches(given: Any, device: torch.device) -> Iterator[Batch]:
    """Yield the batches in the argument, on the model's device.

    >>> x, y = torch.ones(4, 2), torch.zeros(4)
    >>> len(list(batches((x, y), x.device))), len(list(batches([(x, y), (x, y)], x.device)))
    (1, 2)
    """
    if is_pair(given):
        yield _batch(given, device)
        return
    if isinstance(given, Tensor | Mapping | str) or not isinstance(given, Iterable):
        raise ConditioningError(f"{_ACCEPTED} {type(given).__name__}.")
    empty = True
    for one in _of(given):
        if not is_pair(one):
            raise ConditioningError(f"{_ACCEPTED} an iterable with a {type(one).__name__} in it.")
        empty = False
        yield _batch(one, device)
    if empty:
        raise ConditioningError(f"{_ACCEPTED} an iterable without batches.")


def _of(given: Iterable[Any]) -> Iterator[Any]:
    """Yield from an iterable, with an error of its own reported as such."""
    try:
        yield from given
    except Exception as error:
        raise ConditioningError(
            f"The iterable of batches, a {type(given).__name__}, failed with {type(error).__name__}: {error}."
        ) from error


def is_pair(given: Any) -> bool:
    """Return True for (inputs, targets), False for a list of two batches."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        return False
    inputs, targets = given
    if isinstance(inputs, Tensor | Mapping):
        return True
    # A pair of pairs is two batches, unless the second can be a target. A DataLoader turns tuples of inputs into lists.
    return isinstance(inputs, tuple | list) and not isinstance(targets, tuple | list)


def _batch(pair: Any, device: torch.device) -> Batch:
    try:
        inputs, target = _to(pair[0], device), _to(pair[1], device)
    except Exception as error:
        raise ConditioningError(
            f"The batch cannot be moved to the model's device, {device}: {type(error).__name__}: {error}."
        ) from error
    if isinstance(inputs, Mapping):
        return Batch((), dict(inputs), target)
    return Batch(tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}, target)


def _to(given: Any, device: torch.device) -> Any:
    """Return a copy on a device, even if the tensors are there already, as a model may write to its input."""
    match given:
        case Tensor():
            # A tensor made in inference mode cannot be differentiated, but its copy can.
            with torch.inference_mode(False):
                moved = given.detach().to(device, non_blocking=True)
                copied = moved.clone() if moved.device == given.device else moved
                return copied.requires_grad_(given.requires_grad)
        case tuple() if hasattr(given, "_fields"):
            return type(given)(*(_to(one, device) for one in given))
        case tuple() | list():
            return type(given)(_to(one, device) for one in given)
        case Mapping():
            return {key: _to(one, device) for key, one in given.items()}
    return given
