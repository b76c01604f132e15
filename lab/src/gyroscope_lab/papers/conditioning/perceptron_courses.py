"""How the layers of perceptrons are conditioned while these are trained: read from what the monitor recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope.conditioning import P, percent, quantity
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.recorded import recorded
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.trial import Trial

Values = npt.NDArray[np.float64]

#: The two initializations by what models call them, as the paper calls them.
STARTS = {"uniform": "random", "he_normal": "He"}
#: The two matrices of a layer, Σx and Σ∇h.
FACTORS = {"x": "Σx", "g": "Σ∇h"}


@dataclass(frozen=True)
class Kind:
    """A network: where its weights start, and whether its layers are normalized.

    >>> Kind("uniform", normalized=False).name, Kind("he_normal", normalized=True).start
    ('Plain', 'He')
    """

    init: str
    normalized: bool

    @property
    def name(self) -> str:
        """As in the paper's legends."""
        return "BN" if self.normalized else "Plain"

    @property
    def start(self) -> str:
        """The initialization, as in the paper."""
        return STARTS[self.init]


@dataclass(frozen=True)
class Course:
    """The training that reached the lowest loss among those of a network, and what its layers were like meanwhile.

    Attributes:
        kind: the network.
        rate: the learning rate of this training.
        result: what came of it.
        tried: the last training loss of every rate.
        steps: the iterations, counted from 1, at which layers were analysed.
        lambdas: λmax of Σx ("x") and of Σ∇h ("g") at these, [steps, layers].
        kappas: κ_p of both by p, likewise; infinite where λ_p is 0, NaN where λmax is.
        looks: the iterations at which units were looked at.
        units: how many units of each layer were "dying" and how many "full", [looks, layers with a ReLU].
    """

    kind: Kind
    rate: float
    result: Result
    tried: dict[float, float]
    steps: list[int]
    lambdas: dict[str, Values]
    kappas: dict[str, dict[float, Values]]
    looks: list[int]
    units: dict[str, Values]

    @property
    def loss(self) -> float:
        """Of the last epoch."""
        return self.result.loss[-1]

    def numbers(self) -> dict[str, Any]:
        """What is kept of every course as JSON."""
        tried = {f"{rate:g}": loss for rate, loss in self.tried.items()}
        kept = {"network": self.kind.name, "initialization": self.kind.start, "rate": self.rate, "tried": tried}
        return kept | {"loss": rounded(self.result.loss), "train": 100 * self.result.train_accuracy}

    def magnitudes(self) -> dict[str, Any]:
        """λmax as JSON."""
        return {"steps": self.steps} | {f"lambda_{name}": rounded(values) for name, values in self.lambdas.items()}

    def conditions(self) -> dict[str, Any]:
        """κ_p as JSON."""
        found = {
            f"kappa_{name}": {percent(p): rounded(values) for p, values in by_p.items()}
            for name, by_p in self.kappas.items()
        }
        return {"steps": self.steps} | found

    def counts(self) -> dict[str, Any]:
        """Dying and full units as JSON."""
        return {"looks": self.looks} | {name: values.tolist() for name, values in self.units.items()}


def rounded(values: npt.ArrayLike) -> Any:
    """Lists of numbers of four digits, which is more than a figure shows.

    >>> rounded([[1 / 3, 12345.6]])
    [[0.3333, 12350.0]]
    """
    array = np.asarray(values, dtype=np.float64)
    return [rounded(row) for row in array] if array.ndim > 1 else [float(f"{value:.4g}") for value in array]


def course(lab: Lab, kind: Kind, trials: Sequence[Trial]) -> Course:
    """The best of the trainings of a network, one for each rate: that whose training loss ends lowest."""
    results = dict(zip(trials, lab.run(trials), strict=True))
    best = min(results, key=lambda trial: _ending(results[trial]))
    run = recorded(lab, best)
    steps, looks = run.where("lambda_x"), run.where("dying")

    def series(name: str, at: Any = steps) -> Values:
        return run.series(name, steps=at).astype(np.float64)

    # The last layer has no ReLU, and so nothing that could be dying.
    sizes = np.array([info.shape[0] for info in run.layer_table[:-1]])
    return Course(
        kind,
        best.recipe.rate,
        results[best],
        {trial.recipe.rate: result.loss[-1] for trial, result in results.items()},
        [int(step) for step in steps],
        {name: series(f"lambda_{name}") for name in FACTORS},
        {name: {p: series(quantity(f"kappa_{name}", p)) for p in P} for name in FACTORS},
        [int(step) for step in looks],
        {name: np.round(series(name, looks)[:, :-1] * sizes) for name in ("dying", "full")},
    )


def _ending(result: Result) -> float:
    return result.loss[-1] if isfinite(result.loss[-1]) else np.inf


def courses(lab: Lab, trials: Mapping[Kind, Sequence[Trial]]) -> dict[Kind, Course]:
    """The best training of every network; with `known` trials alone, of those that have any."""
    held = {kind: lab.held(its) for kind, its in trials.items()}
    return {kind: course(lab, kind, its) for kind, its in held.items() if its}


def a_layer(values: Values, *, forward: bool) -> float:
    """The factor q that λ changes by from a layer to the next in a pass: ln λ fitted by a line over the layers.

    In the forward pass that is over the inputs of all layers but the first, which are the images; in the backward pass
    over the output gradients of all but the last, from the last to the first.

    >>> round(a_layer(np.array([100.0, 1.0, 0.5, 0.25]), forward=True), 3)
    0.5
    >>> round(a_layer(np.array([0.25, 0.5, 1.0, 100.0]), forward=False), 3)
    0.5
    """
    inner = values[1:] if forward else values[:-1][::-1]
    known = np.isfinite(inner) & (inner > 0)
    if known.sum() < 2:
        return float("nan")
    at = np.arange(len(inner), dtype=np.float64)[known]
    logs = np.log(inner[known])
    at -= at.mean()
    return float(np.exp((at * logs).sum() / (at * at).sum()))
