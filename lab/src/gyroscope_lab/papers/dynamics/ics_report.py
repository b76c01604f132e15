"""What the outliers of the curvature were, what they cost, and what the chapter says of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope_lab.papers.dynamics.loop import LossCurve
from gyroscope_lab.papers.study import Report, Table, Verdict

# Predicted eigenvalues are right within this factor, either way; losses and eigenvalues are alike within this share.
_FACTOR, _SHARE = 2.0, 0.1
# And most of them is where it should be from here, in percent.
_WITHIN = 70.0
# The networks whose curvature is looked at.
PLAIN, FIXED, CENTRED, THROUGH = "plain", "BN, statistics fixed", "BN, fixed, inputs centred", "BN"
_COLOURS = {PLAIN: "C0", FIXED: "C2", CENTRED: "0.6", THROUGH: "C3"}
# Losses above this have diverged, and are left out of the figure.
_SHOWN = 10.0
_METHODS = {"SGD": "C0", "SGD, BN": "C3", "quasi-diagonal": "C1", "K-FAC": "C4"}


@dataclass(frozen=True)
class Curve(LossCurve):
    """The training loss of a method at the best of its rates.

    Attributes:
        method: its name.
        moved: what the inputs are moved by.
        rate: that rate.
        loss: of every epoch, the mean over seeds.
        tests: test accuracies in percent, seed by seed.
        bound: the loss that counts as learned.

    >>> Curve("SGD", 0.0, 0.1, np.array([1.0, 0.4]), [90.0], 0.5).epochs
    2
    """

    method: str
    moved: float
    rate: float
    loss: npt.NDArray[np.float64]
    tests: list[float]
    bound: float

    def numbers(self) -> dict[str, Any]:
        """What is kept of it as JSON."""
        kept = {"method": self.method, "moved": self.moved, "rate": self.rate, "area": self.area, "tests": self.tests}
        return {**kept, "epochs": self.epochs, "loss": self.loss.tolist()}


def report(moved: float, bound: float, curves: list[Curve], spectra: dict[str, dict[str, Any]]) -> Report:
    """The figure, the tables and the verdicts."""
    rows = tuple(_row(name, when, one[when]) for name, one in spectra.items() for when in ("start", "end"))
    columns = ("network", "when", "ν", "largest predicted", "largest measured", "measured / predicted, median",
               "predicted in the measured vectors, %", "largest / mean of the others")  # fmt: skip
    lines = tuple(
        (one.method, one.moved, one.rate, one.epochs, one.area, float(one.loss[-1]), float(np.mean(one.tests)))
        for one in curves
    )
    names = ("method", "inputs moved by", "best rate", f"epochs to a loss of {bound:g}", "mean loss", "last loss",
             "test %")  # fmt: skip
    return Report(
        {"figure": _figure(moved, curves, spectra)},
        (Table("Outliers of the curvature of one layer", columns, rows), Table("Training", names, lines)),
        (*_of_outliers(spectra), *_of_cost(curves)),
        {"spectra": spectra, "curves": [curve.numbers() for curve in curves]},
    )


def _row(name: str, when: str, one: dict[str, Any]) -> tuple[Any, ...]:
    predicted, measured = np.array(one["predicted"]), np.array(one["measured"])
    # Through statistics S is 0 up to rounding, and centred inputs have no m: no outliers are predicted.
    none = name == CENTRED or predicted[0] < 1e-12 * measured[0]
    ratio = None if none else float(np.median(measured / predicted))
    within = None if none else 100 * one["share"]
    return (name, when, one["nu"], 0.0 if none else float(predicted[0]), float(measured[0]), ratio, within,
            float(measured[0] / one["rest"]))  # fmt: skip


def _of_outliers(spectra: dict[str, dict[str, Any]]) -> list[Verdict]:
    plain = [spectra[PLAIN][when] for when in ("start", "end")]
    ratios = [np.array(one["measured"]) / np.array(one["predicted"]) for one in plain]
    within = [100 * one["share"] for one in plain]
    there, left, through = ([spectra[name][when]["measured"][0] for when in ("start", "end")]
                            for name in (FIXED, CENTRED, THROUGH))  # fmt: skip
    falls = [_times(one, other) for one, other in zip(there, through, strict=True)]
    by_centring = [_times(one, other) for one, other in zip(there, left, strict=True)]
    return [
        Verdict(
            "without normalization the curvature of a layer has the outliers ν λ_i(S), in directions m ⊗ v_i",
            "expected, if m is far from zero",
            f"the nine largest are {_span(ratios[0])} times what is predicted at the start and {_span(ratios[1])} at "
            f"the end; {within[0]:.0f} and {within[1]:.0f} % of the predicted lies in their vectors",
            all(bool(1 / _FACTOR <= np.median(one) <= _FACTOR) for one in ratios) and min(within) > _WITHIN,
        ),
        Verdict(
            "batch normalization of the next pre-activations removes what the means add to them",
            "expected to disappear",
            f"the largest eigenvalue is {falls[0]:.1f} and {falls[1]:.1f} times smaller through the statistics than "
            f"with these held fixed, at the start and at the end; centred inputs make it {by_centring[0]:.1f} and "
            f"{by_centring[1]:.1f} times smaller. It is then {_beside(spectra[THROUGH])} times the mean of the others, "
            f"with centred inputs {_beside(spectra[CENTRED])} times",
            # As small as without means; where centring takes nothing away, there is nothing to remove.
            max(_times(*pair) for pair in zip(through, left, strict=True)) < 1 + _SHARE
            if min(by_centring) > 1 + _SHARE
            else None,
        ),
    ]


def _of_cost(curves: Sequence[Curve]) -> list[Verdict]:
    by = {(curve.method, curve.moved > 0): curve for curve in curves}
    plain = by["SGD", False]
    costs = {method: _times(by[method, True].area, by[method, False].area) for method in _METHODS}
    rest = {method: cost for method, cost in costs.items() if method != "SGD"}
    return [
        Verdict(
            "means far from zero slow gradient descent down",
            "the convergence rate depends on the condition number",
            f"moving the inputs takes the mean loss from {plain.area:.3g} to {by['SGD', True].area:.3g} "
            f"({_epochs(plain)} and {_epochs(by['SGD', True])} epochs), at the best rate for each",
            costs["SGD"] > 1 + _SHARE,
        ),
        *(
            Verdict(
                f"{method}: the cost of the means is gone",
                "undamped, invariant" if method == "K-FAC" else "expected",
                f"the mean loss changes by {100 * (cost - 1):+.1f} %, under SGD by {100 * (costs['SGD'] - 1):+.0f} %"
                + (", with damping" if method == "K-FAC" else ""),
                cost < 1 + _SHARE if costs["SGD"] > 1 + _SHARE else None,
            )
            for method, cost in rest.items()
        ),
        *(
            Verdict(
                f"{method} learns faster than SGD without normalization",
                "expected",
                f"mean loss {by[method, False].area:.3g} against {plain.area:.3g}, {_epochs(by[method, False])} "
                f"against {_epochs(plain)} epochs",
                by[method, False].area * (1 + _SHARE) < plain.area,
            )
            for method in rest
        ),
    ]


def _times(there: float, here: float) -> float:
    """How many times `here` is `there`; inf where either diverged."""
    return there / here if np.isfinite(here) else float("inf")


def _span(ratios: npt.NDArray[np.float64]) -> str:
    return f"{ratios.min():.2f} to {ratios.max():.2f}"


def _beside(spectra: dict[str, Any]) -> str:
    largest = [spectra[when]["measured"][0] / spectra[when]["rest"] for when in ("start", "end")]
    return f"{largest[0]:.0f} and {largest[1]:.0f}"


def _epochs(curve: Curve) -> str:
    return "more than all" if curve.epochs is None else str(curve.epochs)


def _figure(moved: float, curves: Sequence[Curve], spectra: dict[str, dict[str, Any]]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name, one in spectra.items():
        # What fixed statistics predict is what centring would have to take away.
        of = spectra[FIXED] if name in (CENTRED, THROUGH) else one
        for when, marker in (("start", "o"), ("end", "^")):
            left.loglog(of[when]["predicted"], one[when]["measured"], marker, markersize=4, color=_COLOURS[name],
                        fillstyle="none" if when == "start" else "full", label=f"{name}, {when}")  # fmt: skip
    low, high = max(left.get_xlim()[0], left.get_ylim()[0]), min(left.get_xlim()[1], left.get_ylim()[1])
    left.plot([low, high], [low, high], "--", color="0.6", linewidth=1)
    left.set(
        xlabel=r"predicted, $\nu\,\lambda_i(S)$", ylabel="measured eigenvalue", title="Largest eigenvalues of one layer"
    )
    left.legend(fontsize=6.5)
    for ax, far in ((middle, False), (right, True)):
        for curve in curves:
            if (curve.moved > 0) == far:
                epochs = np.arange(1, len(curve.loss) + 1)
                label = f"{curve.method}, rate {curve.rate:.2g}"
                shown = np.where(curve.loss <= _SHOWN, curve.loss, np.nan)
                ax.semilogy(epochs, shown, color=_METHODS[curve.method], linewidth=1.4, label=label)
        ax.set(xlabel="epoch", ylabel="training loss", title=f"Inputs moved by {moved:g}" if far else "Inputs as given")
        ax.legend(fontsize=7)
    right.sharey(middle)
    for ax in (left, middle, right):
        ax.title.set_fontsize(10)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Uncentred activations: outliers of the curvature, and what they cost")
    return figure
