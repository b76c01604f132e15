"""Rotation rates of every layer at every step: a table on the device, recorded during training or replayed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gyroscope.control import Layca
from gyroscope.control.rates import Rates, tangent
from gyroscope.layers import layers
from gyroscope.vectors import dots, local
from gyroscope_lab.errors import LabError


class Tangents:
    """tan θ of every layer at every step, [steps, layers]: recorded, or replayed by Layca.

    The step is counted on the device, so that a CUDA graph can capture a recorded or replayed step.
    `gyroscope.control.rates.record` and `replay` do the same in a loop of single steps.
    """

    def __init__(self, names: tuple[str, ...], table: Tensor, weights: list[Tensor], replays: bool) -> None:
        self._names, self._table, self._weights, self._replays = names, table, weights, replays
        # The addresses never change: the kernels of a graph store them in tables.
        self._before = [weight.detach().clone() for weight in weights]
        self._moved = [torch.zeros_like(weight) for weight in self._before]
        self._at = torch.zeros(1, dtype=torch.int64, device=table.device)

    @classmethod
    def blank(cls, model: nn.Module, steps: int, device: torch.device) -> Tangents:
        """An empty table for `steps` steps."""
        its = layers(model)
        table = torch.zeros(steps, len(its), dtype=torch.float64, device=device)
        return cls(tuple(layer.name for layer in its), table, [layer.parameter for layer in its], replays=False)

    @classmethod
    def replay(cls, optimizer: Layca, rates: Rates, device: torch.device, *, steps: int = 1) -> Tangents:
        """A table for `optimizer`, whose rates are 1, to replay in epochs of `steps` steps."""
        if not len(rates.tangents) or len(rates.tangents) % steps:
            raise LabError(f"`rates` must be those of whole epochs of {steps} steps, got {len(rates.tangents)} steps.")
        if tuple(rates.layers) != optimizer.layers:
            raise LabError(f"`rates` must be those of the layers {list(optimizer.layers)}, got {list(rates.layers)}.")
        if not bool(torch.isfinite(rates.tangents).all()):
            raise LabError("`rates` must be finite: the training in which they were recorded diverged.")
        return cls(tuple(rates.layers), rates.tangents.to(device), [], replays=True)

    def step(self, optimizer: Optimizer) -> None:
        """Take the optimizer's step, recorded or with the rates of the table."""
        if self._replays:
            assert isinstance(optimizer, Layca)
            optimizer.multipliers = self._table.index_select(0, self._at).squeeze(0)
            optimizer.step()
        else:
            torch._foreach_copy_(local(self._before), self._now())
            optimizer.step()
            self._note()
        self._at += 1

    def _now(self) -> list[Tensor]:
        return local([weight.detach() for weight in self._weights])

    @torch.no_grad()
    def _note(self) -> None:
        # Computed from the displacement: differences of nearby numbers are exact, but 1 − cos θ of a small angle is
        # not.
        before, moved = self._before, self._moved
        torch._foreach_copy_(local(moved), self._now())
        torch._foreach_sub_(local(moved), local(before))
        products = dots({"ww": (before, before), "wd": (before, moved), "dd": (moved, moved)})
        self._table.index_copy_(0, self._at, tangent(products)[None])

    @property
    def rates(self) -> Rates:
        """The rates recorded so far (waits for the device)."""
        return Rates(self._names, self._so_far())

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"at": int(self._at), "table": None if self._replays else self._so_far()}

    def _so_far(self) -> Tensor:
        # A copy: saving a view of a tensor would write the whole tensor.
        return self._table[: int(self._at)].clone().cpu()

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint."""
        self._at.fill_(state["at"])
        if state["table"] is not None:
            self._table[: state["at"]] = state["table"].to(self._table.device)
