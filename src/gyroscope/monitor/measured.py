"""One measurement on its way from the device, and what it says once it has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gyroscope.base.transfer import to_host
from gyroscope.monitor.products import COLUMNS, Products


@dataclass(frozen=True)
class Measured:
    """One measurement, on its way from the device.

    Attributes:
        step: how often the optimizer was called so far.
        matrix: the inner products [layers, columns], in host memory once waited for.
        there: which columns mean something.
        gradients: which layers have a gradient.
        rr, exact: of the reference it was measured against.
        lr, eta, decay: one number a layer, or a tensor that still has to arrive.
        amp: where an optimizer does a GradScaler's work by itself: whether it skipped this step because the gradients
            were not finite, and how many it has skipped in all. (Otherwise it has unscaled them in place.)
        done: an event on the device after which everything is in host memory; None on a CPU.
        spans: now and then, events before and after each piece of work on the device.
    """

    step: int
    matrix: Tensor
    there: npt.NDArray[np.bool_]
    gradients: npt.NDArray[np.bool_]
    rr: npt.NDArray[np.float64]
    exact: npt.NDArray[np.float64]
    lr: list[Any]
    eta: npt.NDArray[np.bool_]
    decay: list[Any]
    amp: tuple[Any, Any]
    done: Any
    spans: tuple[Any, ...]

    def wait(self) -> float | None:
        """Wait until everything is in host memory; returns the seconds the device spent on it, where that is known."""
        if self.done is None:
            return None
        self.done.synchronize()
        if not self.spans:
            return None
        spans = zip(self.spans[::2], self.spans[1::2], strict=True)
        return float(sum(start.elapsed_time(end) for start, end in spans)) / 1e3

    @property
    def skipped(self) -> bool:
        """Whether the optimizer found a gradient that was not finite and did nothing."""
        return self.amp[0] is not None and bool(self.amp[0].item())

    @property
    def true_step(self) -> int:
        """The optimizer's steps so far; skipped ones are none."""
        return self.step - (0 if self.amp[1] is None else int(self.amp[1].item()))


def products_of(measured: Sequence[Measured]) -> Products:
    """What measurements say whose numbers have arrived: [measurements, layers]; as if each were of one step."""
    raw = np.stack([m.matrix.numpy() for m in measured]).astype(np.float64)
    for column, name in enumerate(COLUMNS):
        values = raw[:, :, column]
        for row, m in enumerate(measured):
            if not m.there[column] or (m.skipped and {"u", "g"} & set(name)):
                values[row] = np.nan
            elif "g" in name:
                values[row, ~m.gradients] = np.nan
    lr = np.array([[float(v) for v in m.lr] for m in measured])
    decay = np.array([[float(v) for v in m.decay] for m in measured])
    return Products(
        **{name: raw[:, :, column] for column, name in enumerate(COLUMNS)},
        rr=np.stack([m.rr for m in measured]),
        exact=np.stack([m.exact for m in measured]),
        lr=lr,
        eta=np.where(np.stack([m.eta for m in measured]), lr, np.nan),
        decay=decay,
        steps=np.ones_like(lr),
    )


def arriving(value: Any) -> Any:
    """A number as it is; a tensor on its way to host memory, and a copy in any case.

    >>> arriving(0.5)
    0.5
    """
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    return value.clone() if value.device.type == "cpu" else to_host(value)
