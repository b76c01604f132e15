"""What weight decay did to K-FAC's damping, and what the chapter says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope_lab.papers.dynamics.gain import gain, reproduced
from gyroscope_lab.papers.dynamics.loop import mean_curve
from gyroscope_lab.papers.study import Report, Table, Verdict

_COLOURS = {"no decay": "C0", "decay": "C3", "norms held": "C2"}
# A cause accounts for an effect where most of it goes with it.
_HALF = 0.5
# A norm, a damping or an angle is larger than another from this factor on.
_MORE = 1.2
# Runs can be compared where their mean losses are within this factor.
_COMPARABLE = 2.0
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Arm:
    """A kind of run over seeds; curves are means over seeds and normalized layers.

    Attributes:
        kind: its name.
        tests: test accuracies in percent, seed by seed.
        loss: of every epoch.
        grown: ‖w‖²/‖w₀‖² before the first and after every epoch, the geometric mean: what the effective damping η‖w‖²
            has grown by.
        damping: η as a multiple of the mean curvature of the layer after every epoch, the geometric mean.
        cosine: between steps and gradients in every epoch, 1 for gradient descent.
    """

    kind: str
    tests: list[float]
    loss: Floats
    grown: Floats
    damping: Floats
    cosine: Floats

    @classmethod
    def of(cls, kind: str, damping: float, runs: Sequence[dict[str, Any]]) -> Arm:
        """From what the runs of all seeds told.

        >>> run = {"test": 90.0, "loss": [1.0], "squares": [[1.0], [4.0]], "curvature": [None, [0.5]],
        ...        "cosine": [None, 0.7]}
        >>> arm = Arm.of("decay", 0.1, [run])
        >>> arm.grown.tolist(), arm.damping.round(9).tolist(), arm.cosine.tolist()
        ([1.0, 4.0], [0.2], [0.7])
        """
        squares = np.log([run["squares"] for run in runs])
        curvature = np.log([run["curvature"][1:] for run in runs])
        return cls(
            kind,
            [run["test"] for run in runs],
            mean_curve([run["loss"] for run in runs], len(runs[0]["loss"])),
            np.asarray(np.exp((squares - squares[:, :1]).mean(axis=(0, 2)))),
            np.asarray(damping / np.exp(curvature.mean(axis=(0, 2)))),
            np.asarray(np.mean([run["cosine"][1:] for run in runs], axis=0)),
        )

    @property
    def test(self) -> float:
        """The mean over seeds."""
        return float(np.mean(self.tests))

    def numbers(self) -> dict[str, Any]:
        """What is kept of it as JSON."""
        curves = {name: getattr(self, name).tolist() for name in ("loss", "grown", "damping", "cosine")}
        return {"kind": self.kind, "tests": self.tests, **curves}


def report(regimes: dict[str, list[Arm]]) -> Report:
    """The figure, the table and the verdicts, of arms by the name of their regime."""
    columns = ("steps", "run", "test %", "last loss", "‖w‖² has grown by", "damping / mean curvature, first epoch",
               "last epoch", "cosine of steps and gradients, first epoch", "last epoch")  # fmt: skip
    rows = tuple(
        (name, arm.kind, arm.test, float(arm.loss[-1]), float(arm.grown[-1]), float(arm.damping[0]),
         float(arm.damping[-1]), float(arm.cosine[0]), float(arm.cosine[-1]))
        for name, arms in regimes.items() for arm in arms
    )  # fmt: skip
    return Report(
        {"figure": _figure(regimes)},
        (Table("K-FAC with batch normalization", columns, rows),),
        tuple(verdict for name, arms in regimes.items() for verdict in verdicts(name, arms)),
        {name: [arm.numbers() for arm in arms] for name, arms in regimes.items()},
    )


def verdicts(name: str, arms: Sequence[Arm]) -> tuple[Verdict, ...]:
    """What the chapter says, held to the numbers of one regime."""
    none, decay, held = (next(arm for arm in arms if arm.kind == kind) for kind in _COLOURS)
    gains = gain(decay.tests, none.tests)
    alone = gain(held.tests, none.tests)
    # Whether steps have come nearer to the gradient.
    turned = bool(_angle(none.cosine[0]) > _MORE * _angle(none.cosine[-1]))
    return (
        Verdict(
            f"{name}: without decay weights grow, and with them the effective damping η‖w‖²; with decay it stays lower",
            "the norm increases over training",
            f"it grows {none.grown[-1]:.2f}-fold without decay, {decay.grown[-1]:.2f}-fold with it",
            bool(none.grown[-1] > _MORE and none.grown[-1] > _MORE * decay.grown[-1]),
        ),
        Verdict(
            f"{name}: the damping comes to outweigh the curvature without decay",
            "comes to dominate the preconditioner",
            f"damping over mean curvature {none.damping[-1]:.3g} in the end ({none.damping[0]:.3g} after one epoch), "
            f"with decay {decay.damping[-1]:.3g}, with norms held {held.damping[-1]:.3g}",
            # Above the curvature in the end, by more than at first and by more than with decay.
            bool(none.damping[-1] > max(1.0, _MORE * none.damping[0], _MORE * decay.damping[-1])),
        ),
        Verdict(
            f"{name}: K-FAC behaves increasingly like a first-order method without decay, and less so with it",
            "retains its second-order behaviour",
            f"the cosine of steps and gradients goes from {none.cosine[0]:.3f} to {none.cosine[-1]:.3f} without decay, "
            f"to {decay.cosine[-1]:.3f} with it, to {held.cosine[-1]:.3f} with norms held; the angles are then "
            f"{_angle(none.cosine[-1]):.0f}°, {_angle(decay.cosine[-1]):.0f}° and {_angle(held.cosine[-1]):.0f}°",
            turned and bool(_angle(decay.cosine[-1]) > _MORE * _angle(none.cosine[-1])),
        ),
        Verdict(
            f"{name}: it is the norm that does it: with norms held K-FAC stays of second order without decay",
            "due to the growing weight norm",
            f"the cosine changes by {_rise(held):+.3f} with norms held, by {_rise(none):+.3f} without decay; mean "
            f"losses are {held.loss.mean():.2g} and {none.loss.mean():.2g}",
            # A curvature that has not fallen because the loss has not tells nothing of norms.
            _rise(held) < _HALF * _rise(none) if turned and _as_low(held, none) else None,
        ),
        Verdict(
            f"{name}: weight decay raises test accuracy under K-FAC",
            "improves generalization",
            f"{gains.told} points",
            gains.above,
        ),
        Verdict(
            f"{name}: by way of the damping: norms held without decay gain as much",
            "the explanation of mechanism 2",
            f"{alone.told} of {gains.told} points",
            reproduced(gains, alone, share=_HALF),
        ),
    )


def _as_low(these: Arm, those: Arm) -> bool:
    """Whether these have learned about as well."""
    return float(these.loss.mean()) < _COMPARABLE * float(those.loss.mean())


def _rise(arm: Arm) -> float:
    """By how much steps have come nearer to the gradient."""
    return float(arm.cosine[-1] - arm.cosine[0])


def _angle(cosine: float) -> float:
    """In degrees.

    >>> round(_angle(0.5), 9)
    60.0
    """
    return float(np.degrees(np.arccos(cosine)))


def _figure(regimes: dict[str, list[Arm]]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 0.5 + 1.9 * len(regimes)), layout="constrained")
    panels = {
        "grown": (r"$\|w\|^2/\|w_0\|^2$", "effective damping"),
        "damping": (r"$\eta$ / mean of $\lambda(A \otimes S)$", "damping and curvature"),
        "cosine": ("cosine with gradient", "1: gradient descent"),
        "loss": ("training loss", "training"),
    }
    for row, (regime, arms) in zip(figure.subplots(len(regimes), 4, squeeze=False), regimes.items(), strict=True):
        for ax, (name, (label, title)) in zip(row, panels.items(), strict=True):
            for arm in arms:
                values = getattr(arm, name)
                epochs = np.arange(len(values)) + (0 if name == "grown" else 1)
                ax.plot(epochs, values, color=_COLOURS[arm.kind], linewidth=1.4, label=arm.kind)
            if name in ("damping", "loss"):
                ax.set_yscale("log")
            ax.tick_params(labelsize=7)
            ax.set_xlabel("epoch", fontsize=8)
            ax.set_ylabel(label, fontsize=8)
            ax.set_title(f"{regime}:\n{title}" if name == "grown" else title, fontsize=8.5)
            ax.spines[["top", "right"]].set_visible(False)
    handles, told = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, told, loc="outside lower center", ncols=len(told), fontsize=8, frameon=False)
    figure.suptitle("K-FAC with batch normalization: damping, with and without weight decay")
    return figure
