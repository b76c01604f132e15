"""Outliers of the curvature from uncentered activations, and their cost (section 3 of Grosse's chapter).

If a layer's activations have the mean m, its curvature is said to have the outliers ν λ_i(S), ν = ‖m‖² + 1, along
m ⊗ v_i (the ICS conditioning hypothesis). They are predicted and measured in a perceptron without batch normalization;
in one with it, with its statistics held fixed; and in the same one in training mode, through its statistics. In
training mode, a common shift of all pre-activations is removed again, and the outliers with it (section 4.2). The
curvature without the mean is measured after m is moved from the layer's inputs into its bias, which keeps the function
and S.

Their cost: the inputs are shifted by a constant, and the first bias is changed so that the network computes the same
function. Only m changes. Gradient descent suffers from it; batch normalization, the quasi-diagonal preconditioner and
K-FAC are said not to. Of K-FAC this holds without damping, with which it does not learn here. So the invariance of the
undamped steps is measured on its own, on all examples at once, and the cost of the means with damping.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from math import log
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from gyroscope.conditioning import Outliers, outliers
from gyroscope.theory import Affine
from gyroscope.theory.reparameterize import between
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.at_hand import examples
from gyroscope_lab.papers.chance import gain, opposite
from gyroscope_lab.papers.dynamics.measurements import (
    Arm,
    Perceptron,
    best,
    device_of,
    dtype_of,
    followed,
    kept,
    split_of,
    training_of,
)
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, no_trials
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.training import Training

# Predicted eigenvalues are right within this factor; losses and eigenvalues are alike within this share.
_FACTOR, _SHARE = 2.0, 0.1
# The least difference of ln of mean losses that counts.
_MARGIN = log(1 + _SHARE)
# The predicted vectors count as found from this share within the measured ones, in percent.
_WITHIN = 70.0
# The networks whose curvature is measured.
PLAIN, FIXED, CENTERED, THROUGH = "plain", "BN, statistics fixed", "BN, fixed, inputs centered", "BN"
_COLORS = {PLAIN: "C0", FIXED: "C2", CENTERED: "0.6", THROUGH: "C3"}
# Losses above this have diverged, and are left out of the figure.
_SHOWN = 10.0
_METHODS = {"SGD": "C0", "SGD, BN": "C3", "quasi-diagonal": "C1", "K-FAC": "C4"}


#: The best arm of each method, by the shift of the inputs.
Arms = dict[tuple[str, float], Arm]


def report(
    moved: float, bound: float, arms: Arms, spectra: dict[str, dict[str, Any]], steps: dict[float, float]
) -> Report:
    """The figure, the tables and the verdicts."""
    rows = tuple(_row(name, when, one[when]) for name, one in spectra.items() for when in ("start", "end"))
    columns = ("network", "when", "ν", "largest predicted", "largest measured", "measured / predicted, median",
               "predicted in the measured vectors, %", "largest / mean of the others")  # fmt: skip
    lines = tuple(
        (method, far, one.rate, one.epochs(bound), one.area, float(one.loss[-1]), one.mean("test"))
        for (method, far), one in arms.items()
    )
    numbers = [
        {"method": method, "moved": far, "rate": one.rate, "area": one.area, "tests": one.all("test"),
         "epochs": one.epochs(bound), "loss": one.loss.tolist()}
        for (method, far), one in arms.items()
    ]  # fmt: skip
    names = ("method", "inputs moved by", "best rate", f"epochs to a loss of {bound:g}", "mean loss", "last loss",
             "test %")  # fmt: skip
    return Report(
        {"figure": _figure(moved, arms, spectra)},
        (Table("Outliers of the curvature of one layer", columns, rows), Table("Training", names, lines)),
        (*_of_outliers(spectra), *_of_cost(arms, bound), _of_steps(steps)),
        {"spectra": spectra, "curves": numbers, "kfac_apart": steps},
    )


def _row(name: str, when: str, one: dict[str, Any]) -> tuple[Any, ...]:
    predicted, measured = np.array(one["predicted"]), np.array(one["measured"])
    # Through the statistics, S is 0 up to rounding, and centered inputs have no m: no outliers are predicted.
    none = name == CENTERED or predicted[0] < 1e-12 * measured[0]
    ratio = None if none else float(np.median(measured / predicted))
    within = None if none else 100 * one["share"]
    return (name, when, one["nu"], 0.0 if none else float(predicted[0]), float(measured[0]), ratio, within,
            float(measured[0] / one["rest"]))  # fmt: skip


def _of_outliers(spectra: dict[str, dict[str, Any]]) -> list[Verdict]:
    plain = [spectra[PLAIN][when] for when in ("start", "end")]
    ratios = [np.array(one["measured"]) / np.array(one["predicted"]) for one in plain]
    within = [100 * one["share"] for one in plain]
    there, left, through = (np.array([spectra[name][when]["measured"][0] for when in ("start", "end")])
                            for name in (FIXED, CENTERED, THROUGH))  # fmt: skip
    falls, by_centering = there / through, there / left
    return [
        Verdict(
            "without normalization, the curvature of a layer has the outliers ν λ_i(S) in the directions m ⊗ v_i",
            "expected, if m is far from zero",
            f"the nine largest are {_span(ratios[0])} times the prediction at the start and {_span(ratios[1])} at "
            f"the end; their vectors contain {within[0]:.0f} and {within[1]:.0f} % of the predicted vectors",
            all(bool(1 / _FACTOR <= np.median(one) <= _FACTOR) for one in ratios) and min(within) > _WITHIN,
        ),
        Verdict(
            "batch normalization of the next pre-activations removes the effect of the means on them",
            "expected to disappear",
            f"the largest eigenvalue is {falls[0]:.1f} and {falls[1]:.1f} times smaller through the statistics than "
            f"with fixed statistics, at the start and at the end; centered inputs make it {by_centering[0]:.1f} and "
            f"{by_centering[1]:.1f} times smaller. It is then {_beside(spectra[THROUGH])} times the mean of the "
            f"others, with centered inputs {_beside(spectra[CENTERED])} times",
            # As small as without means; if centering changes nothing, there is nothing to remove.
            bool(max(through / left) < 1 + _SHARE) if min(by_centering) > 1 + _SHARE else None,
        ),
    ]


def _of_cost(arms: Arms, bound: float) -> list[Verdict]:
    by = {(method, moved > 0): arm for (method, moved), arm in arms.items()}
    plain = by["SGD", False]
    costs = {method: gain(by[method, True].logs, by[method, False].logs) for method in _METHODS}
    ahead = {method: gain(plain.logs, by[method, False].logs) for method in _METHODS if method != "SGD"}
    slower = costs["SGD"].exceeds(_MARGIN)
    return [
        Verdict(
            "means far from zero slow down gradient descent",
            "the convergence rate depends on the condition number",
            f"moving the inputs takes the mean loss from {plain.area:.3g} to {by['SGD', True].area:.3g} "
            f"({plain.learned_in(bound)} and {by['SGD', True].learned_in(bound)} epochs), {costs['SGD'].as_ratio}, at "
            "the best rate for each",
            slower,
        ),
        *(
            Verdict(
                f"{method}{', damped,' if method == 'K-FAC' else ''} removes the cost of the means",
                "said of undamped steps" if method == "K-FAC" else "expected",
                f"moving the inputs makes the mean loss {costs[method].as_ratio}, under SGD {costs['SGD'].as_ratio}",
                opposite(costs[method].exceeds(_MARGIN)) if slower else None,
            )
            for method in ahead
        ),
        *(
            Verdict(
                f"{method} learns faster than SGD without normalization",
                "expected",
                f"mean loss {by[method, False].area:.3g}, under SGD {plain.area:.3g}, {first.as_ratio}; "
                f"{by[method, False].learned_in(bound)} against {plain.learned_in(bound)} epochs",
                first.exceeds(_MARGIN),
            )
            for method, first in ahead.items()
        ),
    ]


def _of_steps(steps: dict[float, float]) -> Verdict:
    """The verdict on undamped steps, from the relative distance of losses by damping."""
    damped = ", ".join(f"with a damping of {one:g} by {100 * far:.2g} %" for one, far in steps.items() if one)
    return Verdict(
        "undamped K-FAC takes the same steps wherever the inputs are",
        "exactly invariant",
        f"moving the inputs changes the loss by {100 * steps[0.0]:.2g} % at most over {_STEPS} steps; {damped}",
        steps[0.0] < _SAME,
    )


def _span(ratios: npt.NDArray[np.float64]) -> str:
    return f"{ratios.min():.2f} to {ratios.max():.2f}"


def _beside(spectra: dict[str, Any]) -> str:
    largest = [spectra[when]["measured"][0] / spectra[when]["rest"] for when in ("start", "end")]
    return f"{largest[0]:.0f} and {largest[1]:.0f}"


def _figure(moved: float, arms: Arms, spectra: dict[str, dict[str, Any]]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for name, one in spectra.items():
        # The prediction with fixed statistics is the part that centering has to remove.
        of = spectra[FIXED] if name in (CENTERED, THROUGH) else one
        for when, marker in (("start", "o"), ("end", "^")):
            left.loglog(of[when]["predicted"], one[when]["measured"], marker, markersize=4, color=_COLORS[name],
                        fillstyle="none" if when == "start" else "full", label=f"{name}, {when}")  # fmt: skip
    low, high = max(left.get_xlim()[0], left.get_ylim()[0]), min(left.get_xlim()[1], left.get_ylim()[1])
    left.plot([low, high], [low, high], "--", color="0.6", linewidth=1)
    left.set(
        xlabel=r"predicted, $\nu\,\lambda_i(S)$", ylabel="measured eigenvalue", title="Largest eigenvalues of one layer"
    )
    left.legend(fontsize=6.5)
    for ax, far in ((middle, False), (right, True)):
        for (method, shift), arm in arms.items():
            if (shift > 0) == far:
                epochs, label = np.arange(1, len(arm.loss) + 1), f"{method}, rate {arm.rate:.2g}"
                shown = np.where(arm.loss <= _SHOWN, arm.loss, np.nan)
                ax.semilogy(epochs, shown, color=_METHODS[method], linewidth=1.4, label=label)
        ax.set(xlabel="epoch", ylabel="training loss", title=f"Inputs moved by {moved:g}" if far else "Inputs as given")
        ax.legend(fontsize=7)
    right.sharey(middle)
    for ax in (left, middle, right):
        ax.title.set_fontsize(10)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Uncentered activations: outliers of the curvature, and their cost")
    return figure


Method = Literal["SGD", "SGD, BN", "quasi-diagonal", "K-FAC"]
_CLASSES = 10
# Softmax leaves this many directions of the outputs, and so this many outliers of S.
_OUTLIERS = _CLASSES - 1
# K-FAC's damping, and the largest divergence of a step. Without this bound the first steps diverge.
_DAMPING, _CLIP = 0.03, 0.1
# The steps in which undamped K-FAC is compared, the largest divergence of one, and the share up to which losses are the
# same.
_STEPS, _SHORT, _SAME = 20, 1e-3, 1e-3
# The methods of the trainings whose curvature is measured: without normalization it is plain gradient descent.
_LOOKED_AT: dict[Method, tuple[str, ...]] = {"SGD": (PLAIN,), "SGD, BN": (FIXED, CENTERED, THROUGH)}


@dataclass(frozen=True)
class Plan(Perceptron):
    """The trainings and measurements of a scale.

    Attributes:
        layer: the layer whose curvature is measured.
        examples: the number of examples for this measurement.
        schedule: the schedule of the trainings.
        moved: the shift of every input.
        rates: the rates to try for each method; the best is shown.
        seeds: the seeds of the weights and of the order of examples.
        bound: the loss that counts as learned.
    """

    layer: str
    examples: int
    schedule: Schedule
    moved: float
    rates: dict[str, tuple[float, ...]]
    seeds: int
    bound: float


def _rates(*powers: float) -> tuple[float, ...]:
    return tuple(3.0**power for power in powers)


PLANS = {
    "smoke": Plan(
        Source("digits"), 3, 16, "linear2", 100, Schedule(epochs=10, batch=50, cuts=()), 2.0,
        {"SGD": _rates(-3, -1), "SGD, BN": _rates(0), "quasi-diagonal": _rates(-1), "K-FAC": _rates(-1)}, 1, 0.5,
    ),
    "small": Plan(
        Source("digits"), 4, 24, "linear2", 200, Schedule(epochs=40, batch=50, cuts=()), 2.0,
        {"SGD": _rates(-4, -3, -2, -1, 0), "SGD, BN": _rates(-1, 0, 1), "quasi-diagonal": _rates(-3, -2, -1, 0),
         "K-FAC": _rates(-3, -2, -1, 0)}, 10, 0.1,
    ),
    "full": Plan(
        Source("mnist"), 5, 50, "linear3", 1000, Schedule(epochs=20, batch=128, cuts=(), drop_last=True), 2.0,
        {"SGD": _rates(-5, -4, -3, -2, -1, 0), "SGD, BN": _rates(-2, -1, 0, 1),
         "quasi-diagonal": _rates(-5, -4, -3, -2, -1, 0), "K-FAC": _rates(-4, -3, -2, -1, 0)}, 3, 0.05,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setting(Perceptron):
    """Everything that one training depends on."""

    schedule: Schedule
    method: Method
    rate: float
    moved: float
    seed: int
    damping: float = _DAMPING
    clip: float = _CLIP


def network(lab: Lab, setting: Setting) -> nn.Sequential:
    """The network; for any shift of the inputs, it computes the same function of the images.

    >>> from gyroscope_lab.training.archive import Archive
    >>> lab, plan = Lab(Archive("runs")), PLANS["smoke"]
    >>> x = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    >>> settings = [Setting(plan.source, 3, 16, plan.schedule, "SGD", 0.1, moved, 0) for moved in (0.0, 2.0)]
    >>> here, there = (network(lab, one)(x + one.moved) for one in settings)
    >>> torch.allclose(here, there)
    True
    """
    model = setting.network(setting.seed, batch_norm=setting.method == "SGD, BN").to(device_of(lab), dtype_of(lab))
    first = next(module for module in model if isinstance(module, nn.Linear))
    with torch.no_grad():
        first.bias.sub_(setting.moved * first.weight.sum(1))
    return model


def training(lab: Lab, setting: Setting) -> Training:
    """Return the training of a setting; K-FAC's steps are damped as in equation 26, and long ones shortened."""
    recipe = Recipe(setting.method, setting.rate)
    if setting.method == "quasi-diagonal":
        recipe = replace(recipe, optimizer="quasi-diagonal")
    elif setting.method == "K-FAC":
        told = {"damping": setting.damping, "tikhonov": "exact", "clip": setting.clip, "seed": setting.seed}
        recipe = replace(recipe, optimizer="kfac", options=tuple(told.items()))
    task = setting.task("ics", setting.schedule)
    return training_of(lab, task, recipe, seed=setting.seed, network=network(lab, setting), moved=setting.moved)


def trained(lab: Lab, setting: Setting) -> dict[str, Any]:
    """The loss of every epoch, and the final test accuracy."""

    def measure() -> dict[str, Any]:
        its = training(lab, setting)
        return {**followed(its), "test": 100 * its.finish().test_accuracy}

    return kept(lab, "ics", setting, measure)


def arms(lab: Lab) -> Arms:
    """Every method with original and with shifted inputs, at the best of its rates for each."""
    plan = PLANS[lab.scale]

    def at(method: Any, moved: float, rate: float) -> Arm:
        told = (plan.source, plan.depth, plan.width, plan.schedule, method, rate, moved)
        return Arm(method, rate, [trained(lab, Setting(*told, seed)) for seed in range(plan.seeds)])

    return {
        (method, moved): best(at(method, moved, rate) for rate in rates)
        for method, rates in plan.rates.items()
        for moved in (0.0, plan.moved)
    }


def steps_apart(lab: Lab) -> dict[float, float]:
    """Return the largest relative difference of losses with original and with shifted inputs, by K-FAC's damping.

    A step takes all examples. From a part of them the second moments of the inputs are singular, and steps are
    undetermined where others lie.
    """
    plan = PLANS[lab.scale]
    schedule = Schedule(epochs=_STEPS, batch=examples(plan.source), cuts=())
    found = {}
    for damping in (0.0, _DAMPING):
        here, there = (
            np.array(trained(lab, Setting(plan.source, plan.depth, plan.width, schedule, "K-FAC", 1.0, moved, 0,
                                          damping=damping, clip=_SHORT))["loss"])
            for moved in (0.0, plan.moved)
        )  # fmt: skip
        found[damping] = float(np.abs(there / here - 1).max())
    return found


@dataclass(frozen=True)
class _Measurement:
    """Everything that a measurement of the curvature depends on."""

    trained: Setting
    layer: str
    examples: int
    networks: tuple[str, ...]


def spectra(lab: Lab, found: Arms) -> dict[str, dict[str, Any]]:
    """The outliers before and after training, without normalization, with fixed statistics, and through them.

    Args:
        lab: the laboratory.
        found: the arms, for the rates to train at.

    Returns:
        By the names "plain", "BN, statistics fixed", "BN, fixed, inputs centered" and "BN": "start" and "end", each
        with `nu`, `predicted`, `measured`, `within` and the `share` of the predicted vectors within the measured ones,
        None if there is no mean.
    """
    plan = PLANS[lab.scale]
    spectra: dict[str, dict[str, Any]] = {}
    for method, networks in _LOOKED_AT.items():
        rate = found[method, 0.0].rate
        setting = Setting(plan.source, plan.depth, plan.width, plan.schedule, method, rate, 0.0, 0)
        told = _Measurement(setting, plan.layer, plan.examples, networks)
        spectra |= kept(lab, "ics-spectra", told, partial(_measured, lab, told))
    return spectra


def _measured(lab: Lab, told: _Measurement) -> dict[str, Any]:
    split = split_of(lab, told.trained.source)
    x, y = split.inputs(split.x_train[: told.examples]).to(dtype_of(lab)), split.y_train[: told.examples]
    its = training(lab, told.trained)
    start = _outliers(its.model, x, y, told.layer)
    followed(its)
    end = _outliers(its.model, x, y, told.layer)
    return {name: {"start": start[name], "end": end[name]} for name in start}


def _outliers(model: nn.Module, x: torch.Tensor, y: torch.Tensor, layer: str) -> dict[str, Any]:
    own = deepcopy(model)
    norms = [module for module in own.modules() if isinstance(module, nn.BatchNorm1d)]
    if not norms:
        return {PLAIN: _told(outliers(own, F.cross_entropy, (x, y), layer, count=_OUTLIERS))}
    through = outliers(own.train(), F.cross_entropy, (x, y), layer, count=_OUTLIERS)
    for norm in norms:
        norm.momentum = 1.0  # the statistics of exactly these examples
    own(x)
    fixed = outliers(own.eval(), F.cross_entropy, (x, y), layer, count=_OUTLIERS)
    centered = _without_mean(own, x, y, layer, fixed.mean)
    return {FIXED: _told(fixed), CENTERED: _told(centered), THROUGH: _told(through)}


def _without_mean(model: nn.Module, x: torch.Tensor, y: torch.Tensor, layer: str, mean: torch.Tensor) -> Outliers:
    other, name = centered_at(model, layer, mean)
    return outliers(other, F.cross_entropy, (x, y), name, count=_OUTLIERS)


def centered_at(model: nn.Module, layer: str, mean: torch.Tensor) -> tuple[nn.Module, str]:
    """An equivalent network in which the inputs of a layer are centered, and the name of that layer in it.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    >>> x = torch.randn(9, 2)
    >>> other, name = centered_at(net, "1", net[0](x).mean(0))
    >>> name, torch.allclose(other(x), net(x), atol=1e-6), other[1][0](net[0](x)).mean(0).abs().max() < 1e-6
    ('1.1', True, tensor(True))
    """
    own = deepcopy(model)
    module = own.get_submodule(layer)
    assert isinstance(module, nn.Linear)
    own.set_submodule(layer, between(module, activations=Affine(torch.ones_like(mean), -mean)))
    return own, f"{layer}.1"


def _told(found: Outliers) -> dict[str, Any]:
    kept = {name: getattr(found, name).tolist() for name in ("predicted", "measured", "within")}
    # The part of the predicted vectors that lies in the span of the measured ones.
    share = float(found.predicted @ found.within.square() / found.predicted.sum())
    return {"nu": found.nu, "share": share, "rest": float(found.spectrum[_OUTLIERS:].mean()), **kept}


def conclude(lab: Lab) -> Report:
    """Report predicted and measured outliers, and the loss of every method."""
    found, plan = arms(lab), PLANS[lab.scale]
    return report(plan.moved, plan.bound, found, spectra(lab, found), steps_apart(lab))


STUDIES = (
    Study("dynamics/ics", "Section 3: uncentered activations, the outliers of the curvature, and their cost", no_trials,
          conclude, seeds={scale: plan.seeds for scale, plan in PLANS.items()}),
)  # fmt: skip
