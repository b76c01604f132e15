"""Layers that a model no longer has: whoever puts another module in their place goes on with that one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from gyroscope.layers.layer import Layer

_NAMED = 3


class Exchanged:
    """Finds watched layers whose module is no longer part of the model.

    A parameter that is exchanged within its module is followed, and so is a module that a wrapper has been put around.
    A weight that another module has now is still there.

    >>> from gyroscope.layers.layer import layers
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> exchanged = Exchanged(net, layers(net))
    >>> exchanged.said()
    >>> net[1] = nn.Linear(2, 3)
    >>> exchanged.said()
    '1.weight is no longer part of the model. It goes on being measured as it was; watch the changed model anew.'
    >>> exchanged.said()
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        modules = set(map(id, model.modules()))
        self._model = model
        self._there = [layer for layer in layers if id(layer.module) in modules]  # one may watch what is beside a model

    def said(self, *, ended: bool = False) -> str | None:
        """Those that are gone since this was last asked, in words; at the end it may have been after training."""
        modules = set(map(id, self._model.modules()))
        if all(id(layer.module) in modules for layer in self._there):
            return None
        kept = modules | set(map(id, self._model.parameters()))
        before = self._there
        self._there = [layer for layer in before if {id(layer.module), id(layer.parameter)} & kept]
        gone = [layer.name for layer in before if layer not in self._there]
        if not gone:
            return None
        names = ", ".join(gone[:_NAMED]) + (f" and {len(gone) - _NAMED} more" if len(gone) > _NAMED else "")
        if ended:
            return f"At the end the model is without {names}: what was measured is of the weights that it had before."
        verb, subject, was = ("is", "It goes", "it was") if len(gone) == 1 else ("are", "They go", "they were")
        follows = f"{subject} on being measured as {was}; watch the changed model anew."
        return f"{names} {verb} no longer part of the model. {follows}"
