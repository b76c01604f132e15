"""Norms and effective learning rates of scale-invariant layers over a training, read from what the monitor recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope.theory import Law, effective_lr, fit_norms, norm_growth
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import recorded
from gyroscope_lab.papers.dynamics.schedules import spaced
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.trial import Trial

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Course:
    """The norms of the layers that batch normalization makes scale-invariant, all but the last.

    Attributes:
        rate: the explicit learning rate α.
        layers: their names.
        steps: k, [S], from 0.
        norms: ‖w_k‖, [S, layers].
        gradients: g̃ = ‖∇J(w)‖‖w‖ of the step that led to each k, [S, layers]; NaN at 0.
        result: what the training came to.
    """

    rate: float
    layers: tuple[str, ...]
    steps: npt.NDArray[np.int64]
    norms: Values
    gradients: Values
    result: Result

    @property
    def rates(self) -> Values:
        """The effective learning rates α/‖w_k‖², [S, layers]."""
        return effective_lr(self.rate, self.norms)

    def typical(self) -> Values:
        """√(mean g̃²) after the first step, [layers]: the constant that the chapter supposes g̃ to be."""
        return np.asarray(np.sqrt(np.square(self.gradients[2:]).mean(axis=0)))

    def laws(self) -> list[Law]:
        """1/√(1 + k/k₀) fitted to each layer, from the first step on.

        With a large α that step is most of the norm, which the law, being for small steps, does not know of.
        """
        return [fit_norms(self.steps[1:], norms[1:], lr=self.rate) for norms in self.norms.T]

    def off(self) -> float:
        """How far norms are from what equation 19 makes of the first and of the gradients, as a share, at worst.

        Between two measurements the later gradient is taken to hold; it is exact where every step was measured.
        """
        gaps, worst = np.diff(self.steps), 0.0
        for norms, gradients in zip(self.norms.T, self.gradients.T, strict=True):
            each = np.repeat(gradients[1:], gaps)
            told = norm_growth(self.rate, len(each), norm=float(norms[0]), gradient=each)[self.steps]
            worst = max(worst, float(np.abs(told / norms - 1).max()))
        return worst

    def numbers(self) -> dict[str, Any]:
        """What is kept as JSON: points of the curves, and the fits."""
        at, laws = spaced(len(self.steps), points=15), self.laws()
        return {
            "alpha": self.rate,
            "layers": list(self.layers),
            "steps": self.steps[at].tolist(),
            "norms": _short(self.norms[at]),
            "effective_rates": _short(self.rates[at]),
            "k0": _short([law.k0 for law in laws]),
            "r2": _short([law.r2 for law in laws]),
            "gradient": _short(self.typical()),
            "equation_19_off": self.off(),
            "test": 100 * self.result.test_accuracy,
            "train": 100 * self.result.train_accuracy,
        }


def course(lab: Lab, trial: Trial) -> Course:
    """Read a training, which is done now if it is not known yet; every layer but the last is followed."""
    run = recorded(lab, trial)
    [result] = lab.run([trial])
    norms = run.series("weight_norm").astype(np.float64)[:, :-1]
    gradients = run.series("gradient_norm").astype(np.float64)[:, :-1]
    before = np.concatenate([norms[:1], _before(run, norms)])
    return Course(
        trial.recipe.rate,
        tuple(run.layers[:-1]),
        np.asarray(run.steps, dtype=np.int64),
        norms,
        gradients * before,
        result,
    )


def _before(run: Any, norms: Values) -> Values:
    """‖w‖ that each measured gradient was taken at: of the step before, [S − 1, layers]."""
    if (np.diff(run.steps) == 1).all():
        return norms[:-1]
    # Where steps in between were not measured: ‖Δw‖ over ‖Δw‖/‖w‖.
    update, ratio = (run.series(name).astype(np.float64)[1:, :-1] for name in ("update_norm", "update_ratio"))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(ratio > 0, update / ratio, norms[1:]))


def spread(courses: Sequence[Course], at: int) -> Values:
    """The largest over the smallest effective learning rate among trainings, at a place of their steps, [layers]."""
    rates = np.stack([one.rates[at] for one in courses])
    return np.asarray(rates.max(axis=0) / rates.min(axis=0))


def _short(values: npt.ArrayLike) -> Any:
    array = np.asarray(values, dtype=np.float64)
    return [_short(row) for row in array] if array.ndim > 1 else [float(f"{value:.5g}") for value in array]
