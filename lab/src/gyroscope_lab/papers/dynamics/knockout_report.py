"""What covariate shift behind batch normalization did to training, and what the chapter says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope_lab.papers.dynamics.loop import LossCurve
from gyroscope_lab.papers.study import Report, Table, Verdict

# Noise "hardly matters" where it takes less than this share of what batch normalization gains.
_SHARE = 0.25
# Means move as far as without normalization within this factor.
_FACTOR = 2.0
_COLOURS = {"no BN": "C0", "BN": "C3", "BN + noise": "C1", "BN + noise, not behind the last": "C2"}


@dataclass(frozen=True)
class Arm(LossCurve):
    """A kind of network at the best of its rates.

    Attributes:
        kind: its name.
        rate: that rate.
        loss: the training loss of every epoch, the mean over seeds; with the noise, where there is one.
        drifts: how far means move from batch to batch, seed by seed.
        tests: test accuracies in percent, seed by seed.
        bound: the loss that counts as learned.

    >>> Arm("BN", 0.1, np.array([1.0, 0.4]), [0.1], [90.0], 0.5).area
    0.7
    """

    kind: str
    rate: float
    loss: npt.NDArray[np.float64]
    drifts: list[float]
    tests: list[float]
    bound: float

    @property
    def drift(self) -> float:
        """The mean over seeds."""
        return float(np.mean(self.drifts))

    @property
    def test(self) -> float:
        """The mean over seeds."""
        return float(np.mean(self.tests))

    def numbers(self) -> dict[str, Any]:
        """What is kept of it as JSON."""
        kept = {"kind": self.kind, "rate": self.rate, "area": self.area, "epochs": self.epochs}
        return {**kept, "drifts": self.drifts, "tests": self.tests, "loss": self.loss.tolist()}


def report(arms: list[Arm]) -> Report:
    """The figure, the table and the verdicts."""
    columns = ("network", "best rate", f"epochs to a loss of {arms[0].bound:g}", "mean loss", "last loss", "test %",
               "means move by")  # fmt: skip
    rows = tuple((one.kind, one.rate, one.epochs, one.area, float(one.loss[-1]), one.test, one.drift) for one in arms)
    return Report(
        {"figure": _figure(arms)},
        (Table("Training; means of pre-activations in standard deviations a step", columns, rows),),
        verdicts(arms),
        {"arms": [arm.numbers() for arm in arms]},
    )


def verdicts(arms: Sequence[Arm]) -> tuple[Verdict, ...]:
    """What the chapter says, held to these numbers."""
    plain, normal, noisy, spared = (next(arm for arm in arms if arm.kind == kind) for kind in _COLOURS)
    gain = plain.area - normal.area
    return (
        Verdict(
            "noise behind batch normalization puts covariate shift back",
            "as in training without it",
            f"means move by {noisy.drift:.2f} standard deviations from batch to batch, {normal.drift:.2f} without "
            f"noise and {plain.drift:.2f} without batch normalization",
            noisy.drift > max(plain.drift / _FACTOR, normal.drift),
        ),
        Verdict(
            "batch normalization speeds training up",
            "works amazingly well",
            f"mean loss {normal.area:.3g} against {plain.area:.3g}, at the best rate for each",
            gain > 0,
        ),
        _unhurt("with this noise behind every normalization training is hardly worse", "almost no effect", noisy,
                normal, gain),
        _unhurt("nor is it with noise where another normalization follows", "shifts are undone by the next one",
                spared, normal, gain),
        Verdict(
            "networks with noise still train better than those without batch normalization",
            "not degraded to that level",
            f"mean loss {noisy.area:.3g} against {plain.area:.3g}",
            noisy.area < plain.area,
        ),
    )  # fmt: skip


def _unhurt(says: str, told: str, noisy: Arm, normal: Arm, gain: float) -> Verdict:
    loss = noisy.area - normal.area
    share = "" if gain <= 0 else f", {100 * loss / gain:.0f} % of what batch normalization gains"
    here = (
        f"mean loss {noisy.area:.3g} against {normal.area:.3g}{share}; {_epochs(noisy)} epochs to a loss of "
        f"{noisy.bound:g} against {_epochs(normal)}; test {noisy.test - normal.test:+.1f} points"
    )
    return Verdict(says, told, here, None if gain <= 0 else loss <= _SHARE * gain)


def _epochs(arm: Arm) -> str:
    return "more than all" if arm.epochs is None else str(arm.epochs)


def _figure(arms: Sequence[Arm]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.6, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for arm in arms:
        epochs = np.arange(1, len(arm.loss) + 1)
        label = f"{arm.kind} (rate {arm.rate:g})"
        left.semilogy(epochs, arm.loss, color=_COLOURS[arm.kind], linewidth=1.4, label=label)
    left.set(xlabel="epoch", ylabel="training loss", title="Training, at the best rate for each")
    left.legend(fontsize=7.5)
    names = [arm.kind.replace(", ", ",\n") for arm in arms]
    right.barh(names, [arm.drift for arm in arms], color=[_COLOURS[arm.kind] for arm in arms], height=0.6)
    right.invert_yaxis()
    right.set(xlabel="standard deviations a step", title="How far means of units move")
    for ax in (left, right):
        ax.title.set_fontsize(10)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Knock-out: random means and scales behind batch normalization")
    return figure
