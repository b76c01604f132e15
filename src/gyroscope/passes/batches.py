"""Batches as they are given: one, or a stream of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gyroscope.errors import ConditioningError

_ACCEPTED = (
    "accepted is a pair (inputs, targets), or an iterable of such pairs like a DataLoader; the inputs are a tensor, a "
    "tuple of positional arguments or a dict of keyword arguments of the model"
)


@dataclass(frozen=True)
class Batch:
    """What a model is called with, and what its output is compared with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any


def batches(given: Any, device: torch.device) -> Iterator[Batch]:
    """The batches in what was given, on the model's device.

    >>> x, y = torch.ones(4, 2), torch.zeros(4)
    >>> len(list(batches((x, y), x.device))), len(list(batches([(x, y), (x, y)], x.device)))
    (1, 2)
    """
    if is_pair(given):
        yield _batch(given, device)
        return
    if isinstance(given, Tensor | Mapping | str) or not isinstance(given, Iterable):
        raise ConditioningError(f"The batch is a {type(given).__name__}; {_ACCEPTED}.")
    empty = True
    for one in _of(given):
        if not is_pair(one):
            raise ConditioningError(f"A batch is a {type(one).__name__}; {_ACCEPTED}.")
        empty = False
        yield _batch(one, device)
    if empty:
        raise ConditioningError(f"There are no batches; {_ACCEPTED}.")


def _of(given: Iterable[Any]) -> Iterator[Any]:
    """What is in an iterable; what goes wrong in it is said to be its own."""
    try:
        yield from given
    except Exception as error:
        raise ConditioningError(
            f"The iterable of batches, a {type(given).__name__}, failed with {type(error).__name__}: {error}."
        ) from error


def is_pair(given: Any) -> bool:
    """Whether this is (inputs, targets) and not a list of two batches."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        return False
    inputs, targets = given
    if isinstance(inputs, Tensor | Mapping):
        return True
    # A pair of pairs is two batches, unless the second is what a model could be compared with. Tuples of inputs come
    # out of a DataLoader as lists.
    return isinstance(inputs, tuple | list) and not isinstance(targets, tuple | list)


def _batch(pair: Any, device: torch.device) -> Batch:
    try:
        inputs, target = _to(pair[0], device), _to(pair[1], device)
    except Exception as error:
        raise ConditioningError(
            f"The batch cannot be brought to the model's device, {device}: {type(error).__name__}: {error}."
        ) from error
    if isinstance(inputs, Mapping):
        return Batch((), dict(inputs), target)
    return Batch(tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {}, target)


def _to(given: Any, device: torch.device) -> Any:
    """The same on a device; tensors are copied even if they are there, as a model may write to its input."""
    match given:
        case Tensor():
            # A tensor made in inference mode could not be differentiated, its copy can.
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
