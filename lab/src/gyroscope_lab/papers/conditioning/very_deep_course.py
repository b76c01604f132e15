"""The course of a last layer in a training, and what can be said of it in numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from math import log
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope.diagnose import Stall, stall
from gyroscope_lab.papers.conditioning.by_depth import Network
from gyroscope_lab.training.last_layer import Followed
from gyroscope_lab.training.result import Result

#: What figures 6, 7 and 9 show, panel by panel: a quantity, and its name.
PANELS = {
    "loss": "training loss",
    "lambda_x": r"$\lambda_{\max}(\Sigma_x)$",
    "lambda_m": r"$\lambda_{\max}(\Sigma_{\partial L/\partial W})$",
    "weight_norm": r"$\|W\|$",
}
#: A loss within this share of ln C is that of a guess, if it stays there for so many steps.
NEAR, LEAST = 0.02, 25
# So many steps are kept of each curve, evenly spread over a logarithmic axis.
_KEPT = 300


@dataclass(frozen=True)
class Course:
    """A network, and the last layer of its training at every step.

    Attributes:
        network: the architecture and the depth.
        followed: what was followed.
        result: of the training.
        classes: how many there are to guess from.
        near: the share of ln C that the loss of a guess may be off by; small batches of few examples need more.
        least: for how many steps it must be so near, which are also those that losses are medians over.
    """

    network: Network
    followed: Followed
    result: Result
    classes: int = 10
    near: float = NEAR
    least: int = LEAST

    @property
    def chance(self) -> float:
        """The loss of a guess, ln C."""
        return log(self.classes)

    @cached_property
    def loss(self) -> npt.NDArray[np.float64]:
        """The loss over steps, the median of `least` batches around each, for those of single batches jump."""
        return smoothed(self.followed.loss, self.least)

    @cached_property
    def stall(self) -> Stall | None:
        """The time it could but guess in, with a small input and a large weight in the last layer; None without one."""
        its = self.followed
        return stall(
            self.loss, its.lambda_x, its.weight_norm, classes=self.classes, margin=self.near, patience=self.least,
            steps=np.arange(1, len(its) + 1),
        )  # fmt: skip

    @property
    def stuck(self) -> int:
        """How many steps that took."""
        if self.stall is None:
            return 0
        return (len(self.followed) + 1 if self.stall.until is None else self.stall.until) - self.stall.since

    @cached_property
    def off(self) -> npt.NDArray[np.bool_]:
        """The steps in whose batch x = 0 and ∂L/∂W = 0, exactly: the ReLUs before the layer are off, and as they let no
        gradient through either, none reaches any weight."""
        return np.asarray((self.followed.lambda_x == 0) & (self.followed.gradient_norm == 0))

    @cached_property
    def dead(self) -> int | None:
        """The step since which, to the end, most of the `least` batches around each are `off`; None without one.

        A dominated network has small gradients and may yet escape; a dead one has none to escape by.
        """
        count = len(self.off)
        alive = np.flatnonzero(smoothed(self.off.astype(np.float64), self.least) < 1)
        since = int(alive[-1]) + 1 if len(alive) else 0
        return None if count - since < self.least else since + int(self.off[since:].argmax()) + 1

    @property
    def dominated(self) -> slice:
        """Of the time it could but guess in, the steps before it was dead, counted from 0; none without a stall."""
        if self.stall is None:
            return slice(0, 0)
        ends = (len(self.followed) + 1, self.stall.until, self.dead)
        return slice(self.stall.since - 1, max(self.stall.since, min(end for end in ends if end is not None)) - 1)

    @property
    def before(self) -> tuple[float, float]:
        """The least loss before it, and the largest of a batch: below ln C, the network had learned and unlearned."""
        end = len(self.followed) if self.stall is None else self.stall.since - 1
        return float(np.nanmin(self.loss[:end])), float(np.nanmax(self.followed.loss[:end]))

    @property
    def rise(self) -> float:
        """The largest loss of a step, as a multiple of the first: above 1 the loss rose."""
        return float(np.nanmax(self.followed.loss) / self.followed.loss[0])

    @property
    def last_loss(self) -> float:
        """The loss in the end."""
        return float(self.loss[-1])

    def largest(self, quantity: str) -> float:
        """The largest value of a quantity."""
        return float(np.nanmax(getattr(self.followed, quantity)))

    def numbers(self) -> dict[str, Any]:
        """What is kept of it as JSON: every curve at some of its steps, counted from 1."""
        chosen = np.unique(np.geomspace(1, len(self.followed), _KEPT).round().astype(int))
        curves = {name: getattr(self.followed, name)[chosen - 1] for name in asdict(self.followed)}
        return {
            "network": self.network.model,
            "steps": len(self.followed),
            "stuck": self.stuck,
            "stall": None if self.stall is None else asdict(self.stall),
            "off": int(self.off.sum()),
            "dead": self.dead,
            "before": list(self.before),
            "at": chosen.tolist(),
            **{name: [float(f"{value:.5g}") for value in values] for name, values in curves.items()},
            "test": 100 * self.result.test_accuracy,
            "seconds": round(self.result.seconds, 1),
        }


def smoothed(values: npt.NDArray[np.float64], window: int) -> npt.NDArray[np.float64]:
    """The median of `window` values around each; at the ends, of those there are. What is no number stays none.

    >>> smoothed(np.array([1.0, 9.0, 2.0, 3.0]), 3).tolist()
    [5.0, 2.0, 3.0, 2.5]
    """
    side = window // 2
    around = np.lib.stride_tricks.sliding_window_view(np.pad(values, side, constant_values=np.nan), window)
    found = np.full(len(values), np.nan)
    known = np.isfinite(values)
    found[known] = np.nanmedian(around[known], axis=1)
    return found
