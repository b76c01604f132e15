"""Forward order: the order in which a model first uses its parameters, from one forward pass that leaves no trace.

The pass runs under a torch-function mode, so a parameter counts as used at the first torch call that takes it
as an argument, wherever the call is made: in a module, `torch.nn.functional`, an LSTM's fused kernel or a
parametrization. Module hooks would see only calls of modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gyroscope.errors import LayerError
from gyroscope.layers.untouched import output_of, tensors


def forward_order(model: nn.Module, parameters: Sequence[Tensor], sample: object) -> list[int]:
    """Sort the positions of `parameters` (given in registration order) by first use in `model(sample)`.

    Parameters that one call takes together (the matrices of an LSTM) keep their registration order, and one
    that is never used follows the parameter registered before it.

    >>> net = nn.ModuleDict({"last": nn.Linear(2, 1), "first": nn.Linear(3, 2)})
    >>> net.forward = lambda x: net["last"](net["first"](x))
    >>> forward_order(net, [net["last"].weight, net["first"].weight], torch.zeros(1, 3))
    [1, 0]
    """
    used = _first_calls(model, parameters, sample)
    if not used:
        raise LayerError(
            f"{type(model).__name__} used none of its {len(parameters)} layers on `sample`, so their order of use is "
            "unknown. Check the sample, or leave it out for registration order."
        )
    keys = []
    anchor = (-1, -1)
    for position in range(len(parameters)):
        if position in used:
            anchor = (used[position], position)
        keys.append((*anchor, position))
    return sorted(range(len(parameters)), key=keys.__getitem__)


def _first_calls(model: nn.Module, parameters: Sequence[Tensor], sample: object) -> dict[int, int]:
    record = _FirstUse(parameters)
    with _restored(model):
        try:
            output_of(model, sample, record)
        except LayerError as error:
            raise LayerError(f"{error} Without `sample`, layers are in registration order.") from error.__cause__
    return record.first


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Restore buffers that a model also holds elsewhere, such as in a list, where `untouched` cannot replace them."""
    held = [(b, b._version, b.detach().clone()) for b in model.buffers() if not (b.is_meta or b.is_inference())]
    try:
        yield
    finally:
        for buffer, version, value in held:
            if buffer._version != version:
                buffer.detach().copy_(value)


class _FirstUse(TorchFunctionMode):
    """Numbers the torch calls and records the first one that takes each parameter."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        super().__init__()
        self.position = {id(parameter): i for i, parameter in enumerate(parameters)}
        self.first: dict[int, int] = {}
        self.calls = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls += 1
        # A call that returns no tensor only read metadata: `weight.dtype` does not use the weight.
        if func is torch.Tensor.__setitem__ or tensors(result):
            for tensor in tensors((args, kwargs)):
                position = self.position.get(id(tensor))
                if position is not None:
                    self.first.setdefault(position, self.calls)
        return result
