"""Weight decay as a schedule of effective learning rates (section 5.1, mechanism 1; Zhang et al. 2019).

With batch normalization the size of a layer's weights does not matter, and weight decay cannot regularize. It keeps
norms from growing, and with them the effective learning rate from falling. If that is all it does, a run without decay
must gain as much when its learning rates are raised, layer by layer and step by step, to the effective ones of a run
with decay:

    η'_k = η_k (‖w'_k‖/‖w_k‖)² / (1 − η_k λ)    for SGD, whose steps are proportional to the gradient, and so to 1/‖w‖
    η'_k = η_k ‖w'_k‖/‖w_k‖ / (1 − η_k λ)       for Adam, whose steps are not

where w' are the weights of the run that copies and w those of the run that is copied. For SGD without momentum this is
exact: the networks compute the same function at every step. With momentum, and for Adam, it holds if norms change
slowly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from gyroscope.layers import layers
from gyroscope_lab.data.augment import Augmentation
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.chance import all_exceed, estimate, gain, reproduced
from gyroscope_lab.papers.dynamics.measurements import Arm, followed, kept, training_of
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, no_trials
from gyroscope_lab.training.recipe import Recipe, register
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task

_NAMES = {
    "none": "no decay",
    "all": "decay of all layers",
    "normalized": "decay of normalized layers",
    "last": "decay of the last layer",
    "copied": "no decay, copied effective rates",
}
_COLORS = {"none": "C0", "all": "C3", "normalized": "C1", "last": "C2", "copied": "C4"}
# Copied rates reproduce the gain of decay from this share of it on; an effective rate is raised from this factor on.
_MOST, _RAISED = 0.5, 1.1


#: The arms of each rule by the layers with decay; runs have the "effective" learning rates of the normalized layers.
Arms = dict[str, dict[str, Arm]]


def effective(arm: Arm) -> npt.NDArray[np.float64]:
    """Effective learning rates before the first and after every epoch: geometric means over layers and seeds.

    >>> effective(Arm("none", 0.1, [{"effective": [[0.1, 0.4], [0.2, 0.2]]}])).round(3).tolist()
    [0.2, 0.2]
    """
    return np.asarray(np.exp(np.mean(np.log([run["effective"] for run in arm.runs]), axis=(0, 2))))


def report(arms: Arms, schedule: Schedule) -> Report:
    """The figure, the table and the verdicts of arms that were all trained with one schedule."""
    cut = first_cut(schedule)
    columns = ("optimizer", "", "test %", "gain over no decay", "last loss", "effective rate before the first cut",
               "relative to no decay")  # fmt: skip
    rows, verdicts = [], []
    for rule, by in arms.items():
        without, start = by["none"].all("test"), float(effective(by["none"])[cut])
        for decayed, arm in by.items():
            at = float(effective(arm)[cut])
            rows.append((rule, _NAMES[decayed], arm.mean("test"), gain(arm.all("test"), without).told,
                         float(arm.loss[-1]), f"{at:.3g}", at / start))  # fmt: skip
        verdicts += _verdicts(rule, by, cut)
    table = Table("Test accuracy by the decayed layers", columns, tuple(rows))
    numbers = [
        {"rule": rule, "decayed": decayed, "tests": arm.all("test"), "loss": arm.loss.tolist(),
         "effective": effective(arm).tolist()}
        for rule, by in arms.items()
        for decayed, arm in by.items()
    ]  # fmt: skip
    return Report({"figure": _figure(arms)}, (table,), tuple(verdicts), {"arms": numbers})


def first_cut(schedule: Schedule) -> int:
    """Return the number of epochs with the first learning rate: all, if it is not cut.

    >>> first_cut(Schedule(epochs=200, cuts=(0.3, 0.6))), first_cut(Schedule(epochs=20, cuts=()))
    (60, 20)
    """
    return min([*schedule.milestones, schedule.epochs])


def _verdicts(rule: str, by: dict[str, Arm], cut: int) -> list[Verdict]:
    none, normalized, copied = by["none"], by["normalized"], by["copied"]
    decay, last, whole, again = (
        np.subtract(by[kind].all("test"), none.all("test")) for kind in ("normalized", "last", "all", "copied")
    )
    # Most of a gain, and more than that of the last layer; nothing can be said of a gain that may be chance.
    theirs = all_exceed((gain(decay, _MOST * whole), gain(decay, last))) if estimate(whole).above else None
    times = float(effective(normalized)[cut] / effective(none)[cut])
    apart = [float(np.abs(np.log(arm.loss / normalized.loss)).mean()) for arm in (copied, none)]
    off = float(np.abs(np.log(effective(copied)[1:] / effective(normalized)[1:])).max())
    return [
        Verdict(
            f"{rule}: decay of normalized layers raises their effective learning rate",
            "a larger λ leads to a higher one",
            f"{times:.1f} times that without decay before the first cut, after {cut} epochs",
            times > _RAISED,
        ),
        Verdict(
            f"{rule}: weight decay raises test accuracy",
            "improves generalization",
            f"{estimate(whole).told} points with decay of all layers",
            estimate(whole).above,
        ),
        Verdict(
            f"{rule}: the gain comes from normalized layers, whose size does not matter",
            "most of the gain is theirs",
            f"{estimate(decay).told} points with decay of these only, {estimate(last).told} of the last, "
            f"{estimate(whole).told} of all",
            theirs,
        ),
        Verdict(
            f"{rule}: with the effective learning rates of decay, a run without decay trains alike",
            "nothing to do with capacity",
            f"losses differ by a factor of {np.exp(apart[0]):.2f} on average, without the copy by "
            f"{np.exp(apart[1]):.2f}; effective rates agree within {np.exp(off):.2f}",
            apart[0] < _MOST * apart[1],
        ),
        Verdict(
            f"{rule}: with the effective learning rates of decay, a run without decay has the same gain",
            "all that it does",
            f"{estimate(again).told} of {estimate(decay).told} points",
            reproduced(decay, again, share=_MOST),
        ),
    ]


def _figure(arms: Arms) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.4 * len(arms)), layout="constrained")
    for (left, right), (rule, by) in zip(figure.subplots(len(arms), 2, squeeze=False), arms.items(), strict=True):
        for decayed, arm in by.items():
            color, label = _COLORS[decayed], _NAMES[decayed]
            # Curves coincide in pairs: one of each pair is wide, and that of the copy is dashed.
            if decayed == "copied":
                left.semilogy(effective(arm), linestyle=(0, (2, 2)), color=color, linewidth=2, zorder=3, label=label)
            else:
                wide = decayed in ("none", "all")
                left.semilogy(effective(arm), color=color, linewidth=4 if wide else 1.4, label=label,
                              alpha=0.5 if wide else 1.0)  # fmt: skip
        power = "^2" if rule == "SGD" else ""
        left.set(xlabel="epoch", ylabel=rf"$\alpha/\|w\|{power}$, mean over layers", title=f"{rule}: effective rates")
        left.legend(fontsize=7)
        names = [_NAMES[decayed].replace(" of ", " of\n").replace(", ", ",\n") for decayed in by]
        tests = [arm.all("test") for arm in by.values()]
        right.barh(names, [arm.mean("test") for arm in by.values()], color=[_COLORS[one] for one in by], height=0.6)
        for place, its in enumerate(tests):
            right.plot(its, [place] * len(its), "k|", markersize=7)
        lowest, highest = min(map(min, tests)), max(map(max, tests))
        around = max(0.3 * (highest - lowest), 0.5)
        right.set(xlabel="test accuracy (%)", xlim=(lowest - around, min(100, highest + around)), title=rule)
        right.tick_params(axis="y", labelsize=8)
        right.invert_yaxis()
        for ax in (left, right):
            ax.title.set_fontsize(10)
            ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Weight decay with batch normalization: the schedule of effective learning rates, copied")
    return figure


Rule = Literal["SGD", "Adam"]
Decayed = Literal["none", "all", "normalized", "last", "copied"]
ARMS: tuple[Decayed, ...] = ("none", "all", "normalized", "last", "copied")


@dataclass(frozen=True)
class Method:
    """An optimizer, and its rate and decay."""

    rule: Rule
    rate: float
    decay: float
    momentum: float = 0.0


@dataclass(frozen=True)
class Plan:
    """The trainings of a scale, of networks with batch normalization after every layer except the last."""

    source: Source
    model: str
    options: tuple[tuple[str, Any], ...]
    schedule: Schedule
    augmentation: Augmentation | None
    methods: tuple[Method, ...]
    seeds: int


_MLP = (("batch_norm", True), ("inputs", 64), ("init", "glorot_uniform"))
_DIGITS = Schedule(epochs=40, batch=20, cuts=(0.6, 0.85), factor=10.0)
PLANS = {
    "smoke": Plan(
        Source("digits"), "mlp-3x16", _MLP, Schedule(epochs=6, batch=50, cuts=(0.7,), factor=10.0), None,
        (Method("SGD", 0.3, 3e-2), Method("Adam", 3e-3, 3.0)), 1,
    ),
    "small": Plan(
        Source("digits"), "digits-cnn", (), _DIGITS, None,
        (Method("SGD", 0.01, 3e-2, momentum=0.9), Method("Adam", 1e-3, 3.0)), 10,
    ),
    # The authors' rates and decays for VGG16; this network has one more linear layer, normalized as the others.
    "full": Plan(
        Source("cifar-10", normalization="channel"), "c10-cnn2", (),
        Schedule(epochs=200, batch=128, cuts=(0.3, 0.6, 0.9), factor=10.0), Augmentation(),
        (Method("SGD", 0.1, 1e-3, momentum=0.9), Method("Adam", 3e-4, 1.0)), 1,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Everything that one training depends on."""

    source: Source
    model: str
    options: tuple[tuple[str, Any], ...]
    schedule: Schedule
    augmentation: Augmentation | None
    method: Method
    decayed: Decayed
    seed: int


def recipe_of(method: Method, decayed: Decayed) -> Recipe:
    """Return the recipe of a method: each layer is a separate group, and some of them have weight decay.

    All layers except the last are followed by a normalization.

    >>> from gyroscope_lab import models
    >>> model = models.make("mlp-3x16", seed=0, batch_norm=True)
    >>> groups = recipe_of(Method("SGD", 0.1, 0.5), "normalized").make(model).param_groups
    >>> [group["weight_decay"] for group in groups]
    [0.5, 0.5, 0.0]
    """
    name = f"{method.rule}, {_NAMES[decayed]}"
    options = (("rule", method.rule), ("decayed", decayed))
    return Recipe(
        name, method.rate, "by-layer", weight_decay=method.decay, momentum=method.momentum, options=options
    )  # fmt: skip


def _by_layer(recipe: Recipe, model: nn.Module) -> Optimizer:
    told = dict(recipe.options)
    its = layers(model)
    chosen = {"none": (), "copied": (), "all": its, "normalized": its[:-1], "last": its[-1:]}[told["decayed"]]
    names = {layer.name for layer in chosen}
    groups = [
        {"params": [layer.parameter], "weight_decay": recipe.weight_decay if layer.name in names else 0.0}
        for layer in its
    ]
    mine = {id(layer.parameter) for layer in its}
    others = [p for p in model.parameters() if id(p) not in mine]
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    if told["rule"] == "SGD":
        return SGD(groups, lr=recipe.rate, momentum=recipe.momentum)
    return AdamW(groups, lr=recipe.rate)


register("by-layer", _by_layer)


def copied_rate(method: Method, rate: float, norm: float, copied: float) -> float:
    """α' that gives a layer of norm `norm` the effective rate of a layer of norm `copied` at the rate α.

    >>> copied_rate(Method("SGD", 0.1, 0.0), 0.1, 2.0, 1.0), copied_rate(Method("Adam", 0.1, 0.0), 0.1, 2.0, 1.0)
    (0.4, 0.2)
    """
    grown: float = (norm / copied) ** (2 if method.rule == "SGD" else 1)
    return rate * grown / (1 - rate * method.decay)


def trained(lab: Lab, setting: Setting) -> dict[str, Any]:
    """Loss, test accuracy, effective rates over epochs; and the norms at every step, if others copy them."""

    def measure() -> dict[str, Any]:
        table: list[list[float]] | None = None
        if setting.decayed == "copied":
            table = trained(lab, replace(setting, decayed="normalized"))["norms"]
        return _run(lab, setting, table)

    return kept(lab, "wd-mechanism-1", setting, measure)


def _run(lab: Lab, setting: Setting, table: list[list[float]] | None) -> dict[str, Any]:
    method, schedule = setting.method, setting.schedule
    task = Task("wd-mechanism-1", setting.source, setting.model, setting.options, schedule, setting.augmentation)
    its = training_of(lab, task, recipe_of(method, setting.decayed), seed=setting.seed)
    weights = [layer.parameter for layer in layers(its.model)][:-1]
    groups = its.optimizer.param_groups[: len(weights)]
    to_copy, recorded = iter(table or ()), list[list[float]]()

    def norms() -> list[float]:
        found: list[float] = torch.stack([weight.detach().norm() for weight in weights]).tolist()
        return found

    def before(*_: Any) -> None:
        if table is not None:
            rate = method.rate * schedule.multiplier(its.epoch)
            for group, norm, copied in zip(groups, norms(), next(to_copy), strict=True):
                group["lr"] = copied_rate(method, rate, norm, copied)
        elif setting.decayed == "normalized":
            recorded.append(norms())

    def look() -> dict[str, Any]:
        power = 2 if method.rule == "SGD" else 1
        return {"effective": [group["lr"] / norm**power for group, norm in zip(groups, norms(), strict=True)]}

    its.optimizer.register_step_pre_hook(before)
    found = followed(its, look)
    return {**found, "norms": recorded, "test": 100 * its.finish().test_accuracy}


def arms(lab: Lab) -> Arms:
    """Every method with every kind of decay."""
    plan = PLANS[lab.scale]
    told = (plan.source, plan.model, plan.options, plan.schedule, plan.augmentation)

    def at(method: Method, decayed: Decayed) -> Arm:
        runs = [trained(lab, Setting(*told, method, decayed, seed)) for seed in range(plan.seeds)]
        return Arm(decayed, method.rate, runs)

    return {method.rule: {decayed: at(method, decayed) for decayed in ARMS} for method in plan.methods}


def conclude(lab: Lab) -> Report:
    """Report test accuracies and effective rates of all arms."""
    return report(arms(lab), PLANS[lab.scale].schedule)


STUDIES = (
    Study("dynamics/wd-mechanism-1", "Section 5.1: weight decay as a schedule of effective learning rates", no_trials,
          conclude, seeds={scale: plan.seeds for scale, plan in PLANS.items()}),
)  # fmt: skip
