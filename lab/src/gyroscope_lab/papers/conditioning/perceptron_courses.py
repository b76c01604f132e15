"""The conditioning of perceptrons during training, as the monitor recorded it, and its figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gyroscope.conditioning import P, percent, quantity
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import recorded
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from gyroscope.figures.drawing import Color, Dash, Mark

Values = npt.NDArray[np.float64]
#: The two initializations: their names in models, and in the paper.
STARTS = {"uniform": "random", "he_normal": "He"}
#: The two matrices of a layer, Σx and Σ∇h.
FACTORS = {"x": "Σx", "g": "Σ∇h"}


@dataclass(frozen=True)
class Kind:
    """A network: its initialization, and whether its layers are normalized.

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
    """The training of a network that reached the lowest loss, and its layers over time.

    Attributes:
        kind: the network.
        rate: the learning rate of this training.
        result: its result.
        tried: the last training loss of every rate.
        steps: the iterations, counted from 1, at which layers were analyzed.
        lambdas: λmax of Σx ("x") and of Σ∇h ("g") at these, [steps, layers].
        kappas: κ_p of both by p, [steps, layers]; infinite where λ_p is 0, NaN where λmax is.
        looks: the iterations at which units were counted.
        units: the number of "dying" and of "full" units, [looks, layers with a ReLU].
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
        """The training loss of the last epoch."""
        return self.result.loss[-1]

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of every course as JSON holds them."""
        tried = {f"{rate:g}": loss for rate, loss in self.tried.items()}
        kept = {"network": self.kind.name, "initialization": self.kind.start, "rate": self.rate, "tried": tried}
        return kept | {"loss": rounded(self.result.loss), "train": 100 * self.result.train_accuracy}

    def magnitudes(self) -> dict[str, Any]:
        """Return λmax as JSON holds it."""
        return {"steps": self.steps} | {f"lambda_{name}": rounded(values) for name, values in self.lambdas.items()}

    def conditions(self) -> dict[str, Any]:
        """Return κ_p as JSON holds it."""
        found = {
            f"kappa_{name}": {percent(p): rounded(values) for p, values in by_p.items()}
            for name, by_p in self.kappas.items()
        }
        return {"steps": self.steps} | found

    def counts(self) -> dict[str, Any]:
        """Return dying and full units as JSON holds them."""
        return {"looks": self.looks} | {name: values.tolist() for name, values in self.units.items()}


def rounded(values: npt.ArrayLike) -> Any:
    """Return lists of numbers of four digits, which is more than a figure shows.

    >>> rounded([[1 / 3, 12345.6]])
    [[0.3333, 12350.0]]
    """
    array = np.asarray(values, dtype=np.float64)
    return [rounded(row) for row in array] if array.ndim > 1 else [float(f"{value:.4g}") for value in array]


def course(lab: Lab, kind: Kind, trials: Sequence[Trial]) -> Course:
    """Return the training of a network whose loss ends lowest among those of all rates."""
    results = dict(zip(trials, lab.run(trials), strict=True))
    best = min(results, key=lambda trial: _ending(results[trial]))
    run = recorded(lab, best)
    steps, looks = run.where("lambda_x"), run.where("dying")

    def series(name: str, at: Any = steps) -> Values:
        return run.series(name, steps=at).astype(np.float64)

    # The last layer has no ReLU, and so no dying units.
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
    """Return the best training of every network; where only `known` trials are shown, of those that have any."""
    held = {kind: lab.held(its) for kind, its in trials.items()}
    return {kind: course(lab, kind, its) for kind, its in held.items() if its}


def a_layer(values: Values, *, forward: bool) -> float:
    """Return the factor per layer by which λ changes in a pass: ln λ fitted by a line over the layers.

    In the forward pass the line goes over the inputs of all layers but the first, which are the images; in the backward
    pass over the output gradients of all but the last, from the last to the first.

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


Courses = Mapping[Kind, Course]
#: The κ_p that figures 5 and A6 show; the paper does not state its own. A report's numbers hold all of them.
SHARES = (0.5, 0.75)
_SYMBOLS = {"x": r"\Sigma_x", "g": r"\Sigma_{\nabla h}"}
_COLORS: dict[str, Color] = {"BN": (0.12, 0.47, 0.71, 1.0), "Plain": (0.84, 0.37, 0.0, 1.0)}
_MARKERS = {"BN": "o", "Plain": "s"}
_GRAY: Color = (0.25, 0.25, 0.25, 1.0)
_DASHES: tuple[Dash, ...] = (":", "--", "-")
_LETTERS = "abcdefghij"


@dataclass(frozen=True)
class About:
    """The paper's name of a figure; the network, its data and its training; and the unit of time of the losses."""

    label: str
    setting: str
    epoch: str

    @property
    def heading(self) -> str:
        """The heading of the figure."""
        return f"Figure {self.label}: {self.setting}"


def draw_magnitudes(courses: Courses, about: About) -> Figure:
    """Draw λmax(Σx), λmax(Σ∇h) and the training loss, one row per initialization: the layout of figure 3."""
    rows = _rows(courses)
    figure, axes = _grid(len(rows), 3, about)
    for number, (row, its) in enumerate(zip(axes, rows, strict=True)):
        letters = _LETTERS[3 * number :]
        for ax, name, letter in zip(row[:2], _SYMBOLS, letters, strict=False):
            _magnitude(ax, its, name, f"({letter}) {{}}, {its[0].kind.start} start")
        _losses(row[2], its, about, f"({letters[2]}) training loss, {its[0].kind.start} start")
    _legend(figure, [one for its in rows for one in its])
    return figure


def draw_conditions(courses: Courses, about: About) -> Figure:
    """Draw κ_p(Σx) and κ_p(Σ∇h) for two p, one row per initialization."""
    rows = _rows(courses)
    wanted = [(name, p) for name in _SYMBOLS for p in SHARES]
    figure, axes = _grid(len(rows), len(wanted), about)
    marks: list[Mark] = []
    for number, (row, its) in enumerate(zip(axes, rows, strict=True)):
        for column, (ax, (name, p)) in enumerate(zip(row, wanted, strict=True)):
            letter = _LETTERS[len(wanted) * number + column]
            marks += _kappa(ax, its, name, p, f"({letter}) {{}}, {its[0].kind.start} start")
    _legend(figure, [one for its in rows for one in its], marks)
    return figure


def draw_all(courses: Courses, about: About) -> Figure:
    """Draw λmax of both matrices, the training loss, and κ_p of both: the layout of figure A7."""
    its = list(courses.values())
    figure, axes = _grid(2, 3, about)
    for ax, name, letter in zip(axes[0], _SYMBOLS, "ab", strict=False):
        _magnitude(ax, its, name, f"({letter}) {{}}")
    _losses(axes[0, 2], its, about, "(c) training loss")
    marks: list[Mark] = []
    for ax, name, letter in zip(axes[1], _SYMBOLS, "de", strict=False):
        marks += _kappa(ax, its, name, SHARES[0], f"({letter}) {{}}")
    axes[1, 2].set_axis_off()
    _legend(figure, its, marks)
    return figure


def draw_units(courses: Courses, about: About) -> Figure:
    """Draw the number of dying and of full units: by layer above, over iterations below."""
    from gyroscope.figures.drawing import depth_bar, draw_lines, finish, span

    its = list(courses.values())
    figure, axes = _grid(2, 2, about)
    for column, name in enumerate(("dying", "full")):
        ax = axes[0, column]
        for one in its:
            for place, dash in _whens(one.units[name]):
                at = np.arange(1, one.units[name].shape[1] + 1)
                ax.plot(at, one.units[name][place], dash, color=_COLORS[one.kind.name], linewidth=1.3,
                        marker=_MARKERS[one.kind.name], markersize=3)  # fmt: skip
        finish(ax, xlabel="layer", ylabel=f"{name} neurons", title=f"({_LETTERS[column]}) {name} neurons, He start")
        _whole(ax)
        ax = axes[1, column]
        for one in its:
            if not one.kind.normalized:
                depth = np.linspace(0, 1, one.units[name].shape[1])
                draw_lines(ax, one.looks, one.units[name], depth=depth)
                ax.set_ylim(0, 1.08 * max(1.0, float(one.units[name].max())))
                span(ax, one.looks)
        title = f"({_LETTERS[2 + column]}) {name} neurons of Plain, He start"
        finish(ax, xlabel="iteration", ylabel=f"{name} neurons", title=title)
    layers = its[0].units["dying"].shape[1]
    depth_bar(list(axes[1]), layers)
    _legend(figure, its)
    return figure


def draw_iterations(courses: Courses, about: About) -> Figure:
    """Draw λmax of both matrices over the iterations, one line per layer and one row per initialization."""
    from gyroscope.figures.drawing import depth_bar, draw_lines, edged, finish, span

    rows = _rows(courses)
    figure, axes = _grid(len(rows), 4, about)
    for row, its in zip(axes, rows, strict=True):
        panels = [(name, one) for name in _SYMBOLS for one in its]
        for ax, (name, one) in zip(row, panels, strict=False):
            values = np.concatenate([other.lambdas[name].ravel() for other in its])
            draw_lines(
                ax, one.steps, one.lambdas[name], depth=np.linspace(0, 1, one.lambdas[name].shape[1]), positive=True
            )
            edged(ax, values)
            span(ax, one.steps)
            title = rf"$\lambda_{{\max}}({_SYMBOLS[name]})$, {one.kind.name}, {one.kind.start} start"
            finish(ax, xlabel="iteration", title=title)
            ax.title.set_fontsize(9)
        for ax in row[len(panels) :]:
            ax.set_axis_off()
    first = next(iter(courses.values()))
    depth_bar([ax for row in axes for ax in row], first.lambdas["x"].shape[1])
    return figure


def _rows(courses: Courses) -> list[list[Course]]:
    """The networks of each initialization."""
    inits = dict.fromkeys(kind.init for kind in courses)
    return [[one for kind, one in courses.items() if kind.init == init] for init in inits]


def _grid(rows: int, columns: int, about: About) -> tuple[Figure, np.ndarray[tuple[int, ...], np.dtype[np.object_]]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * columns + 0.6, 2.7 * rows + 1.0), layout="constrained")
    figure.suptitle(about.heading, fontsize=11)
    return figure, np.asarray(figure.subplots(rows, columns, squeeze=False))


def _whens(values: Values) -> Iterable[tuple[int, Dash]]:
    """The first, the middle and the last analysis, and their line styles."""
    return zip((0, len(values) // 2, len(values) - 1), _DASHES, strict=True)


def _magnitude(ax: Axes, its: Sequence[Course], name: str, title: str) -> None:
    _by_layer(ax, its, [one.lambdas[name] for one in its], rf"$\lambda_{{\max}}({_SYMBOLS[name]})$", title)


def _kappa(ax: Axes, its: Sequence[Course], name: str, p: float, title: str) -> list[Mark]:
    label = rf"$\kappa_{{{percent(p)}\%}}({_SYMBOLS[name]})$"
    return _by_layer(ax, its, [one.kappas[name][p] for one in its], label, title)


def _by_layer(ax: Axes, its: Sequence[Course], values: Sequence[Values], label: str, title: str) -> list[Mark]:
    from gyroscope.figures.drawing import Line, draw_marked, finish

    lines = [
        Line(its_values[place], number, _COLORS[one.kind.name], dash, _MARKERS[one.kind.name])
        for number, (one, its_values) in enumerate(zip(its, values, strict=True))
        for place, dash in _whens(its_values)
    ]
    marks = draw_marked(ax, lines)
    finish(ax, xlabel="layer", title=title.format(label))
    _whole(ax)
    return marks


def _losses(ax: Axes, its: Sequence[Course], about: About, title: str) -> None:
    from gyroscope.figures.drawing import edged, finish

    for one in its:
        loss = np.array(one.result.loss)
        ax.plot(np.arange(1, len(loss) + 1), loss, color=_COLORS[one.kind.name], linewidth=1.3,
                label=f"{one.kind.name}, rate {one.rate:g}")  # fmt: skip
    ax.axhline(np.log(10), color="0.7", linewidth=0.8, linestyle=":")
    edged(ax, [np.log(10), *(loss for one in its for loss in one.result.loss)])
    ax.legend(fontsize=8, frameon=False, loc="lower left")
    finish(ax, xlabel=about.epoch, title=title)
    _whole(ax)


def _whole(ax: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _legend(figure: Figure, its: Sequence[Course], marks: Iterable[Mark] = ()) -> None:
    from matplotlib.lines import Line2D

    from gyroscope.figures.drawing import SAYS

    handles: list[Line2D] = [
        Line2D([], [], color=_COLORS[name], marker=_MARKERS[name], markersize=4, label=name)
        for name in dict.fromkeys(one.kind.name for one in its)
    ]
    for dash, label in zip(_DASHES, ("first iteration", "half way", "end of training"), strict=True):
        handles.append(Line2D([], [], color=_GRAY, linestyle=dash, label=label))
    for mark in dict.fromkeys(marks):
        handles.append(Line2D([], [], color=_GRAY, linestyle="", marker=mark, markersize=4, label=SAYS[mark]))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)
