"""Lengths of one optimizer with directions of another (section 2.2 of Grosse's chapter, after Agarwal et al.).

Diagonal preconditioners rescale every element; perhaps only the rescaling of every layer matters. To find out, the step
D of one optimizer is given, layer by layer, the length of the step M of another, ‖M‖ D/‖D‖, with the same gradients for
both (`gyroscope.Graft`). If only lengths matter, SGD's directions with Adam's lengths train like Adam, and Adam's
directions with SGD's lengths train like SGD. If one of the two trains better, its lengths close the gap.

Lengths are compared per tensor, weights and biases of a layer separately; "global" is one length for all. SGD has the
momentum of Adam, 0.9, so that the two differ only in the diagonal. Losses are compared on a log scale: the distance of
two curves is mean_k |ln a_k − ln b_k|, and the gap between two optimizers is ln(a/b) of their final losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)
from torch.optim import Optimizer

from gyroscope.control import Graft
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.chance import Estimate, estimate, gain, reproduced
from gyroscope_lab.papers.dynamics.measurements import kept, training_of
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.recipe import Recipe, register
from gyroscope_lab.training.schedule import Schedule
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_GLOROT = (("biases", True), ("init", "glorot_uniform"))
#: The networks by name: one that is easy for both optimizers, one with batch normalization, and one whose signals
#: shrink from layer to layer, which SGD hardly trains.
NETWORKS: dict[str, tuple[str, tuple[tuple[str, Any], ...]]] = {
    "3 layers": ("mlp-3x64", _GLOROT),
    "4 layers, batch norm": ("mlp-4x64", (*_GLOROT, ("batch_norm", True), ("affine", True))),
    "8 layers": ("mlp-8x64", (("biases", True), ("init", "uniform"))),
}
#: The methods: the optimizer of the lengths, the optimizer of the directions, and the granularity of the lengths.
METHODS: dict[str, tuple[str, str, str]] = {
    "SGD": ("SGD", "SGD", "tensor"),
    "Adam": ("Adam", "Adam", "tensor"),
    "Adam's lengths, SGD's directions": ("Adam", "SGD", "tensor"),
    "SGD's lengths, Adam's directions": ("SGD", "Adam", "tensor"),
    "Adam's length, SGD's direction, global": ("Adam", "SGD", "global"),
    "SGD's length, Adam's direction, global": ("SGD", "Adam", "global"),
}


@dataclass(frozen=True)
class Plan:
    """The trainings of a scale: networks, rates of the optimizer that gives the lengths, steps, measurements, seeds."""

    networks: tuple[str, ...]
    rates: Mapping[str, tuple[float, ...]]
    steps: int
    every: int
    seeds: int
    batch: int
    source: Source
    inputs: int


_RATES = {"SGD": (0.003, 0.01, 0.03, 0.1, 0.3), "Adam": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)}
_ONE = {"SGD": (0.1,), "Adam": (3e-3,)}
_DIGITS = Source("digits", per_class=100)
PLANS = {
    "smoke": Plan(("8 layers",), _ONE, 80, 10, seeds=1, batch=64, source=_DIGITS, inputs=64),
    "small": Plan(tuple(NETWORKS), _RATES, 250, 10, seeds=10, batch=64, source=_DIGITS, inputs=64),
    "full": Plan(
        tuple(NETWORKS), _RATES, 2000, 50, seeds=5, batch=128, source=Source("mnist", per_class=1000), inputs=784
    ),
}


@dataclass(frozen=True)
class Setting:
    """One training: a network, a method, the rate of the optimizer that gives the lengths, a seed, and the plan."""

    model: str
    options: tuple[tuple[str, Any], ...]
    lengths: str
    directions: str
    over: str
    rate: float
    seed: int
    steps: int
    every: int
    batch: int
    source: Source


@dataclass(frozen=True, eq=False)
class Curves:
    """Losses on one network: {method: [rates, seeds, measurements]}; inf after divergence."""

    rates: dict[str, tuple[float, ...]]
    losses: dict[str, npt.NDArray[np.float64]]
    every: int

    def end(self, method: str) -> npt.NDArray[np.float64]:
        """The loss at the end for each rate, the geometric mean over seeds."""
        return np.asarray(np.exp(np.log(self.losses[method][:, :, -1]).mean(axis=1)))

    def best(self, method: str) -> int:
        """Return the index of the rate with the lowest final loss."""
        return int(np.argmin(self.end(method)))

    def logs(self, method: str, rate: int | None = None) -> npt.NDArray[np.float64]:
        """ln of the losses [seeds, measurements] at a rate; by default the best rate of the lengths' optimizer."""
        place = self.best(METHODS[method][0]) if rate is None else rate
        return np.asarray(np.log(self.losses[method][place]))

    def distance(self, one: str, other: str) -> float:
        """The mean of |ln a − ln b| over measurements and seeds, each at the best rate of its lengths' optimizer."""
        return float(np.abs(self.logs(one) - self.logs(other)).mean())

    def last(self, method: str) -> npt.NDArray[np.float64]:
        """ln of the final losses at the method's own best rate, seed by seed."""
        return self.logs(method, self.best(method))[:, -1]


def make(lengths: str, directions: str, over: str, model: nn.Module, rate: float) -> Optimizer:
    """Return the optimizer: SGD, Adam, or a graft of the two.

    The rate of the optimizer that gives directions has no effect.

    >>> make("SGD", "SGD", "tensor", nn.Linear(2, 2), 0.1).param_groups[0]["momentum"]
    0.9
    >>> make("Adam", "SGD", "global", nn.Linear(2, 2), 0.1).granularity
    'global'
    """

    def one(name: str) -> Optimizer:
        parameters = list(model.parameters())
        if name == "SGD":
            return torch.optim.SGD(parameters, lr=rate, momentum=0.9)
        return torch.optim.Adam(parameters, lr=rate)

    if lengths == directions:
        return one(lengths)
    return Graft(one(lengths), one(directions), granularity="global" if over == "global" else "tensor")


register("graft", lambda recipe, model: make(model=model, rate=recipe.rate, **dict(recipe.options)))


def course(lab: Lab, setting: Setting) -> list[float]:
    """The loss over steps, on all training examples; inf from the first that is not finite."""

    def measured() -> dict[str, Any]:
        schedule = Schedule(epochs=1, batch=setting.batch, cuts=(), drawn=setting.steps)
        task = Task("grafting", setting.source, setting.model, setting.options, schedule)
        told = (("lengths", setting.lengths), ("directions", setting.directions), ("over", setting.over))
        its = training_of(lab, task, Recipe("graft", setting.rate, "graft", options=told), seed=setting.seed)
        x, y = its.split.inputs(its.split.x_train), its.split.y_train

        @torch.no_grad()
        def loss() -> float:
            return float(F.cross_entropy(its.model(x), y))

        losses = [loss()]
        for step, _ in zip(range(1, setting.steps + 1), its.proceed(), strict=False):
            if step % setting.every == 0:
                losses.append(loss())
                if not isfinite(losses[-1]):
                    break
        return {"loss": losses}

    found = kept(lab, "grafting", setting, measured)["loss"]
    looks = setting.steps // setting.every + 1
    return [inf if one is None else float(one) for one in found] + [inf] * (looks - len(found))


def settings(plan: Plan, network: str, method: str) -> list[list[Setting]]:
    """Every training of a method on a network: [rates][seeds].

    >>> [[one.rate for one in row] for row in settings(PLANS["smoke"], "8 layers", "Adam")]
    [[0.003]]
    """
    model, options = NETWORKS[network]
    lengths, directions, over = METHODS[method]
    options = (*options, ("inputs", plan.inputs))
    return [
        [
            Setting(
                model, options, lengths, directions, over, rate, seed,
                steps=plan.steps, every=plan.every, batch=plan.batch, source=plan.source,
            )
            for seed in range(plan.seeds)
        ]
        for rate in plan.rates[lengths]
    ]  # fmt: skip


def curves(lab: Lab, network: str) -> Curves:
    """All trainings of a network."""
    plan = PLANS[lab.scale]
    losses = {
        method: np.array([[course(lab, one) for one in row] for row in settings(plan, network, method)])
        for method in METHODS
    }
    return Curves({method: plan.rates[of] for method, (of, _, _) in METHODS.items()}, losses, plan.every)


def closed(found: Curves, graft: str) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """The gap ln(worse/better) of the two optimizers, seed by seed, and how much of it a graft closes.

    Every method is at its own best rate. A graft that ends at the loss of the better optimizer closes all of it.
    """
    worse, better = ("SGD", "Adam") if found.end("SGD").min() >= found.end("Adam").min() else ("Adam", "SGD")
    return found.last(worse) - found.last(better), found.last(worse) - found.last(graft)


_LAYERWISE, _REVERSED = "Adam's lengths, SGD's directions", "SGD's lengths, Adam's directions"
_GLOBAL = {
    _LAYERWISE: "Adam's length, SGD's direction, global",
    _REVERSED: "SGD's length, Adam's direction, global",
}
# This share of the gap counts as closing it. A graft trains like an optimizer if its curve is nearer to that of this
# optimizer, and within this share of the distance between the two.
_CLOSED = 0.5
# Two curves within this many nats are alike: a factor of e^0.1, at least the distance between seeds.
_ALIKE = 0.1
_LOOKS = {
    "SGD": ("C0", "-"),
    "Adam": ("C3", "-"),
    _LAYERWISE: ("C1", "-"),
    _REVERSED: ("C2", "-"),
    _GLOBAL[_LAYERWISE]: ("C1", ":"),
    _GLOBAL[_REVERSED]: ("C2", ":"),
}


def conclude(lab: Lab) -> Report:
    """Report loss curves, their distances, and the share of the gap that grafting closes."""
    plan = PLANS[lab.scale]
    found = {network: curves(lab, network) for network in plan.networks}
    tables, verdicts = [], []
    for network, its in found.items():
        tables += [_distances(network, its), _ends(network, its)]
        verdicts += _verdicts(network, its)
    return Report(
        {"figure": _figure(found, plan.source.name)},
        tuple(tables),
        tuple(verdicts),
        {n: _numbers(c) for n, c in found.items()},
    )


def _distances(network: str, its: Curves) -> Table:
    rows = [
        (
            method,
            its.rates[method][its.best(METHODS[method][0])],
            its.distance(method, "SGD"),
            its.distance(method, "Adam"),
            its.distance(method, _GLOBAL[method]) if method in _GLOBAL else None,
        )
        for method in METHODS
    ]
    columns = ("method", "rate (best of its lengths)", "distance to SGD", "to Adam", "to the global graft")
    return Table(f"{network}: distance of loss curves, in nats", columns, tuple(rows))


def _ends(network: str, its: Curves) -> Table:
    rows = [(method, its.rates[method][its.best(method)], f"{its.end(method).min():.3g}") for method in METHODS]
    return Table(f"{network}: final loss, each at its own best rate", ("method", "rate", "training loss"), tuple(rows))


def _verdicts(network: str, its: Curves) -> list[Verdict]:
    better = "Adam" if its.end("Adam").min() <= its.end("SGD").min() else "SGD"
    graft = _LAYERWISE if better == "Adam" else _REVERSED
    (whole, part), (_, over) = closed(its, graft), closed(its, _GLOBAL[graft])
    gap, more = estimate(whole), gain(its.last(_GLOBAL[graft]), its.last(graft))
    apart = f"{gap.mean:.2f} nats{_sure(gap)}"
    what, both = f"no clear gap: {apart}", ""
    if gap.above:
        share, with_one = (100 * one.mean() / gap.mean for one in (part, over))
        what, both = f"{share:.0f} % of {apart}", f"{share:.0f} % of the gap, {with_one:.0f} % with one length: "
    return [
        _like(network, its, _LAYERWISE, of="Adam", other="SGD"),
        _like(network, its, _REVERSED, of="SGD", other="Adam"),
        Verdict(
            f"{network}: the layer lengths of {better}, which trains better, close the gap between the two",
            "the gap is closed on a variety of benchmarks",
            what,
            reproduced(whole, part, share=_CLOSED),
        ),
        Verdict(
            f"{network}: the lengths of layers are needed; one length for all of them closes less of the gap",
            "layerwise rescaling is what is important",
            f"{both}{more.mean:+.2f} nats{_sure(more)} layer by layer",
            more.above if gap.above else None,
        ),
    ]


def _sure(one: Estimate) -> str:
    return ", one seed" if one.error is None else f" ± {one.error:.2f}"


def _like(network: str, its: Curves, graft: str, *, of: str, other: str) -> Verdict:
    near, far, apart = its.distance(graft, of), its.distance(graft, other), its.distance(of, other)
    return Verdict(
        f"{network}: {graft} train like {of}",
        f"as {of}",
        f"{near:.2f} nats from {of}'s curve, {far:.2f} from {other}'s (these two: {apart:.2f})",
        None if apart < _ALIKE else near < far and near <= _CLOSED * apart,
    )


def _numbers(its: Curves) -> dict[str, Any]:
    kept = {
        method: {
            "rates": list(its.rates[method]),
            "end": [float(f"{one:.4g}") for one in its.end(method)],
            "curve": [float(f"{one:.4g}") for one in np.exp(its.logs(method).mean(axis=0))],
        }
        for method in METHODS
    }
    apart = {f"{a} | {b}": its.distance(a, b) for a in METHODS for b in METHODS if a < b}
    return {"every": its.every, "methods": kept, "distances": apart}


def _figure(found: dict[str, Curves], data: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 * max(2, len(found)), 4.6), layout="constrained")
    axes = figure.subplots(2, len(found), squeeze=False)
    for column, (network, its) in enumerate(found.items()):
        _draw_curves(axes[0, column], its)
        axes[0, column].set_title(network, fontsize=9)
        _draw_ends(axes[1, column], its)
    axes[0, 0].set_ylabel("training loss", fontsize=8)
    axes[1, 0].set_ylabel("final training loss", fontsize=8)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=7, frameon=False)
    figure.suptitle(f"Lengths of one optimizer, directions of another ({data})", fontsize=11)
    return figure


def _draw_curves(ax: Axes, its: Curves) -> None:
    for method, (color, style) in _LOOKS.items():
        logs = its.logs(method)
        steps = its.every * np.arange(logs.shape[1])
        ax.plot(steps, np.exp(logs.mean(axis=0)), style, color=color, label=method, linewidth=1.2)
    ax.set_yscale("log")
    ax.set_xlabel("step", fontsize=8)
    ax.tick_params(labelsize=7)
    ax.spines[["top", "right"]].set_visible(False)


def _draw_ends(ax: Axes, its: Curves) -> None:
    for method, (color, style) in _LOOKS.items():
        rates = np.array(its.rates[method])
        best = its.rates[method][its.best(METHODS[method][0])]
        end = np.where(np.isfinite(its.end(method)), its.end(method), np.nan)
        ax.plot(rates / best, end, style, color=color, marker="o", markersize=3, linewidth=1.2)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.tick_params(labelsize=7)
    ax.set_xlabel("rate / best rate of its lengths", fontsize=7)
    ax.spines[["top", "right"]].set_visible(False)


def _none(lab: Lab) -> Sequence[Trial]:
    """Return no trials: no recipe grafts, so the study has its own trainings."""
    lab.tasks(("mnist-mlp",))  # rejects a choice of tasks without this one
    return []


STUDIES = (
    Study("dynamics/grafting", "One optimizer's layer lengths with another's directions", _none, conclude,
          seeds={scale: plan.seeds for scale, plan in PLANS.items()}),
)  # fmt: skip
