"""Lengths of one optimizer, directions of another (section 2.2 of Grosse's chapter, after Agarwal et al.).

Diagonal preconditioners rescale every element; it may be that rescaling every layer is all that matters. So take the
step D of one optimizer, and give it layer by layer the length of the step M of the other, ‖M‖ D/‖D‖, both fed with the
same gradients (`gyroscope.Graft`). If lengths are what matters, SGD's directions with Adam's lengths train like Adam,
and Adam's directions with SGD's lengths like SGD; and where one of the two trains better, its lengths close the gap.

Lengths are compared tensor by tensor, the weights of a layer and its biases apart; "global" is one length for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.dynamics.grafting_courses import METHODS, PLANS, Curves, closed, curves
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LAYERWISE, _REVERSED = "Adam's lengths, SGD's directions", "SGD's lengths, Adam's directions"
_GLOBAL = {
    _LAYERWISE: "Adam's length, SGD's direction, global",
    _REVERSED: "SGD's length, Adam's direction, global",
}
# This share of the gap counts as closing it; and a graft trains like an optimizer if it is nearer to that one's curve
# than to the other's, and at most this share of the distance between the two.
_CLOSED = 0.5
# Two curves train alike within so many nats: a factor of e^0.1, as far as seeds are apart at least.
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
    """Loss curves, their distances, and the share of the gap that grafting closes."""
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
    columns = ("method", "rate (best of whose lengths)", "distance to SGD's", "to Adam's", "to the global graft's")
    return Table(f"{network}: distance of loss curves, in nats", columns, tuple(rows))


def _ends(network: str, its: Curves) -> Table:
    rows = [(method, its.rates[method][its.best(method)], f"{its.end(method).min():.3g}") for method in METHODS]
    return Table(
        f"{network}: loss in the end, each at its own best rate", ("method", "rate", "training loss"), tuple(rows)
    )


def _verdicts(network: str, its: Curves) -> list[Verdict]:
    better = "Adam" if its.end("Adam").min() <= its.end("SGD").min() else "SGD"
    graft = _LAYERWISE if better == "Adam" else _REVERSED
    gap, error, share = closed(its, graft)
    over = closed(its, _GLOBAL[graft])[2]
    told = "the gap is closed on a variety of benchmarks"
    more, noise = its.gap(_GLOBAL[graft], graft)
    apart, both = f"{gap:.2f} nats{_sure(error)}", f"{100 * share:.0f} % of the gap, {100 * over:.0f} % with one length"
    no_gap = gap <= 2 * error if np.isfinite(error) else gap < _ALIKE
    return [
        _like(network, its, _LAYERWISE, of="Adam", other="SGD"),
        _like(network, its, _REVERSED, of="SGD", other="Adam"),
        Verdict(
            f"{network}: the layer lengths of {better}, which trains better, close the gap between the two",
            told,
            f"no clear gap: {apart}" if no_gap else f"{100 * share:.0f} % of {apart}",
            None if no_gap else share >= _CLOSED,
        ),
        Verdict(
            f"{network}: it takes the lengths of layers, one length for all of them does less",
            "layerwise rescaling is what is important",
            f"{'' if no_gap else both + ': '}{more:+.2f} nats{_sure(noise)} layer by layer",
            None if no_gap or abs(more) <= 2 * noise else more > 0,
        ),
    ]  # fmt: skip


def _sure(error: float) -> str:
    return f" ± {error:.2f}" if np.isfinite(error) else ", one seed"


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
    axes[1, 0].set_ylabel("training loss in the end", fontsize=8)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=7, frameon=False)
    figure.suptitle(f"Lengths of one optimizer, directions of another ({data})", fontsize=11)
    return figure


def _draw_curves(ax: Axes, its: Curves) -> None:
    for method, (colour, style) in _LOOKS.items():
        logs = its.logs(method)
        steps = its.every * np.arange(logs.shape[1])
        ax.plot(steps, np.exp(logs.mean(axis=0)), style, color=colour, label=method, linewidth=1.2)
    ax.set_yscale("log")
    ax.set_xlabel("step", fontsize=8)
    ax.tick_params(labelsize=7)
    ax.spines[["top", "right"]].set_visible(False)


def _draw_ends(ax: Axes, its: Curves) -> None:
    for method, (colour, style) in _LOOKS.items():
        rates = np.array(its.rates[method])
        best = its.rates[method][its.best(METHODS[method][0])]
        end = np.where(np.isfinite(its.end(method)), its.end(method), np.nan)
        ax.plot(rates / best, end, style, color=colour, marker="o", markersize=3, linewidth=1.2)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.tick_params(labelsize=7)
    ax.set_xlabel("rate / best of whose lengths it takes", fontsize=7)
    ax.spines[["top", "right"]].set_visible(False)


def _none(lab: Lab) -> Sequence[Trial]:
    """No recipe grafts: the trainings are the study's own."""
    lab.tasks(("mnist-mlp",))  # refuses a choice of tasks that has not this one
    return []


STUDIES = (Study("dynamics/grafting", "One optimizer's layer lengths with another's directions", _none, conclude),)
