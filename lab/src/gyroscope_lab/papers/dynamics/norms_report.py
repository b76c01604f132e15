"""The figure, the table and the verdicts on implicit decay in networks that are trained at several rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log
from typing import TYPE_CHECKING

import numpy as np

from gyroscope.theory import decay_time
from gyroscope_lab.papers.dynamics.norms import Course, Values, spread
from gyroscope_lab.papers.dynamics.schedules import over_steps, spaced
from gyroscope_lab.papers.study import Report, Table, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The trainings of a task with the classifier as drawn, and with the classifier trained.
Both = tuple[Sequence[Course], Sequence[Course]]

# Rates have become alike where of the logarithm of their ratio so little is left; not, where more than that is.
_ALIKE, _APART = 0.25, 0.5
# Norms are those of equation 19: over thousands of steps float32 and the ε of batch normalization leave about 1e-3.
_EXACT = 5e-3
# A law fits that explains so much, and does not that explains less than half.
_FITS = 0.9
# Test accuracies within so many points are the same.
_NEAR = 2.0


def report(tasks: Mapping[str, Both]) -> Report:
    """What came of all tasks; the figure is of the first, its middle layer."""
    several = {name: both for name, both in tasks.items() if len(both[0]) > 1}  # of one rate there is nothing to say
    verdicts = [one for name, both in several.items() for one in _verdicts(name if len(tasks) > 1 else "", *both)]
    return Report(
        {("figure" if i == 0 else name): draw(name, both) for i, (name, both) in enumerate(tasks.items())},
        tuple(_table(name, its, says) for name, both in tasks.items() for its, says in _named(both)),
        tuple(verdicts),
        {name: {says: [one.numbers() for one in its] for its, says in _named(both)} for name, both in tasks.items()},
    )


def _named(both: Both) -> list[tuple[Sequence[Course], str]]:
    return [(its, says) for its, says in zip(both, ("classifier as drawn", "classifier trained"), strict=True) if its]


def _table(name: str, courses: Sequence[Course], says: str) -> Table:
    rows = tuple(
        (f"{one.rate:g}", f"{_mean(one.norms[0]):.3g}", f"{_mean(one.norms[-1]):.3g}", f"{_mean(one.rates[0]):.3g}",
         f"{_mean(one.rates[-1]):.3g}", f"{_mean(one.typical()):.3g}", f"{_mean(_k0(one)):.3g}",
         f"{_mean(np.array([law.k0 for law in one.laws()])):.3g}", min(law.r2 for law in one.laws()), None,
         100 * one.result.test_accuracy)
        for one in courses
    )  # fmt: skip
    columns = ("α", "‖w‖ at first", "at the end", "α̂ at first", "at the end", "g̃", "k₀ = ‖w₁‖⁴/(2α²g̃²)", "k₀ fitted",
               "least R²", "paper", "test %")  # fmt: skip
    steps = int(courses[0].steps[-1])
    return Table(f"{name}, {says}: {steps:,} steps, geometric means over layers", columns, rows)


def _k0(one: Course) -> Values:
    pairs = zip(one.norms[1], one.typical(), strict=True)
    return np.array([decay_time(one.rate, norm=float(norm), gradient=float(g)) for norm, g in pairs])


def _mean(values: Values) -> float:
    """The geometric mean."""
    return float(np.exp(np.log(values).mean()))


def _verdicts(name: str, drawn: Sequence[Course], trained: Sequence[Course]) -> list[Verdict]:
    where = f"{name}: " if name else ""
    grown = [_mean(one.norms[-1] / one.norms[0]) for one in drawn]
    off = max(one.off() for one in (*drawn, *trained))
    exact = (np.diff(drawn[0].steps) == 1).all()
    found = [
        Verdict(
            f"{where}norms grow as equation 19 says",
            "exactly, for scale-invariant layers",
            f"within {off:.1g} of it at every step of {len(drawn) + len(trained)} trainings"
            + ("" if exact else ", from the gradients of some steps"),
            off < _EXACT if exact else None,
        ),
        Verdict(
            f"{where}for larger α norms grow more rapidly",
            "figure 6",
            f"{', '.join(f'{one:.2f}' for one in grown)} times as long in the end for α = {_rates(drawn)}",
            bool((np.diff(grown) > 0).all()),
        ),
        _alike(where, drawn),
        _law(where, drawn),
        _matters_little(where, drawn),
    ]
    return [*found, _last_layer(where, trained)] if trained else found


def _alike(where: str, drawn: Sequence[Course]) -> Verdict:
    first, second, last = (_mean(spread(drawn, at)) for at in (0, 1, -1))
    left = log(last) / log(first)
    passed = sum(_mean(_k0(one)) < one.steps[-1] for one in drawn)
    return Verdict(
        f"{where}regardless of α, effective learning rates come to the same trend",
        "figure 6, asymptotically",
        f"the largest is {first:.0f} times the smallest at first, {second:.1f} times after {drawn[0].steps[1]:,} and "
        f"{last:.2f} times after {drawn[0].steps[-1]:,} steps, by when k₀ has passed in {passed} of "
        f"{len(drawn)} trainings",
        True if left < _ALIKE else False if left > _APART else None,
    )


def _law(where: str, drawn: Sequence[Course]) -> Verdict:
    r2 = np.array([law.r2 for one in drawn for law in one.laws()])
    falls = [_mean(one.gradients[-max(1, len(one.steps) // 10) :].mean(axis=0) / one.gradients[1]) for one in drawn]
    return Verdict(
        f"{where}effective learning rates fall about as 1/√(1 + k/k₀)",
        "where ‖∇J(ŵ)‖ is constant",
        f"R² is {r2.min():.2f} to {r2.max():.2f}, a median of {np.median(r2):.2f}; ‖∇J(ŵ)‖ is not constant: in the "
        f"last tenth of the steps it is {min(falls):.2f} to {max(falls):.2f} times what it was in the first step",
        True if np.median(r2) > _FITS else None if np.median(r2) > 0.5 else False,
    )


def _matters_little(where: str, drawn: Sequence[Course]) -> Verdict:
    tests = [100 * one.result.test_accuracy for one in drawn]
    return Verdict(
        f"{where}the explicit learning rate matters for a transient phase at the start alone",
        "in words",
        f"test accuracies are {', '.join(f'{one:.1f}' for one in tests)} % for α = {_rates(drawn)}",
        True if max(tests) - min(tests) < _NEAR else None,
    )


def _last_layer(where: str, trained: Sequence[Course]) -> Verdict:
    first, last = (_mean(spread(trained, at)) for at in (0, -1))
    ends = [_mean(one.rates[-1]) for one in trained]
    typical = [_mean(one.typical()) for one in trained]
    return Verdict(
        f"{where}implicit decay does not apply to the output layer: α goes on to matter where that is trained too",
        "in words",
        f"the gradients that reach the other layers grow with α, to {typical[-1]:.3g} from {typical[0]:.3g}, and "
        f"effective learning rates are {last:.1f} times apart in the end, {first:.0f} at first: the largest α has "
        f"{ends[-1]:.2g}, the smallest {ends[0]:.2g}",
        typical[-1] > 2 * typical[0],
    )


def _rates(courses: Sequence[Course]) -> str:
    return ", ".join(f"{one.rate:g}" for one in courses)


def draw(name: str, both: Both) -> Figure:
    """Norms on the left, effective learning rates on the right, as in figure 6; below with the classifier trained."""
    from matplotlib.figure import Figure

    rows = _named(both)
    figure = Figure(figsize=(7.2, 2.5 * len(rows)), layout="constrained")
    for (left, right), (its, says) in zip(figure.subplots(len(rows), 2, squeeze=False), rows, strict=True):
        for i, one in enumerate(its):
            _lines(left, right, one, colour=f"C{i}")
        layer = its[0].layers[len(its[0].layers) // 2].removesuffix(".weight")
        over_steps(left, "norm ‖w‖", f"{name}, {layer}: {says}")
        over_steps(right, "effective learning rate α/‖w‖²", "dotted: the law 1/√(1 + k/k₀) fitted")
        right.legend(fontsize=8, loc="upper right")
    return figure


def _lines(left: Axes, right: Axes, one: Course, *, colour: str) -> None:
    layer, at = len(one.layers) // 2, spaced(len(one.steps), points=150)
    steps = one.steps[at] + 1
    left.plot(steps, one.norms[at, layer], color=colour)
    right.plot(steps, one.rates[at, layer], color=colour, label=f"α = {one.rate:g}")
    right.plot(steps[at > 0], one.laws()[layer].curve[at[at > 0] - 1], color=colour, linestyle=":", linewidth=1.2)
