"""Full and layer-wise conditioning of small perceptrons: figures 1, 2 and A1 to A4 of the conditioning paper.

Huang, Qin, Liu, Zhu, Shao: Layer-wise Conditioning Analysis in Exploring the Learning Dynamics of DNNs (2020),
section 3 and appendix B. The perceptrons are small enough for their whole Fisher matrix F. They are measured before
training, with batch normalization and without. Does the spectrum of each layer's block F_k tell what that of F does
(figures 1, A1), also for the second moments M (A2) and in networks of other sizes (A3, A4)? Does Σx ⊗ Σ∇h tell what
F_k does (figure 2)?

These studies train nothing. The paper does not state how many images it takes, how they are normalized, whether the
normalization of its networks has a gain, and what "the gradient of a sample" is under batch normalization: `Choices`
holds what is chosen here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from math import inf, isinf, nan, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gyroscope_lab.data.official import DATA
from gyroscope_lab.data.source import Source
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.errors import LabError
from gyroscope_lab.papers.at_hand import at_hand
from gyroscope_lab.papers.conditioning.exact_spectra import Choices, Line, Plan, measure, network, small_images
from gyroscope_lab.papers.study import Report, Study, Table, Verdict, no_trials

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The number of images at each scale. More hardly move λmax: they raise the smallest eigenvalues.
SAMPLES: dict[str, int] = {"smoke": 200, "small": 2_000, "full": 10_000}
#: The figures.
PLANS: dict[str, Plan] = {
    "fig1": Plan("mlp-8x24", layers=(3, 6)),
    "fig2": Plan("mlp-8x24", layers=(1, 2, 3, 4, 5, 6, 7, 8), whole=False, approximate=True),
    "a1": Plan("mlp-8x24", layers=(1, 2, 3, 4, 5, 6, 7, 8)),
    "a2": Plan("mlp-8x24", ("M",), layers=(1, 2, 3, 4, 5, 6, 7, 8)),
    "a3": Plan("mlp-4x24", ("F", "M"), layers=(1, 2, 3, 4)),
    "a4": Plan("mlp-4x36", ("F", "M"), layers=(1, 2, 3, 4)),
}
TITLES = {
    "fig1": "Figure 1: spectra of the Fisher matrix and of two of its blocks, with batch normalization and without",
    "fig2": "Figure 2: blocks of the Fisher matrix compared with Σx ⊗ Σ∇h",
    "a1": "Figure A1: spectra of the Fisher matrix and of all its blocks",
    "a2": "Figure A2: spectra of the second moments of the gradients, and of all their blocks",
    "a3": "Figure A3: both in networks of 4 layers of 24 units",
    "a4": "Figure A4: both in networks of 4 layers of 36 units",
}
# Seconds to measure and to save: CPU time of one thread on a core of an AMD EPYC. They were not measured at full scale.
_SECONDS = {
    "fig1": {"smoke": 4.3, "small": 104.0},
    "fig2": {"smoke": 4.4, "small": 26.0},
    "a1": {"smoke": 7.5, "small": 110.0},
    "a2": {"smoke": 1.7, "small": 6.3},
    "a3": {"smoke": 6.7, "small": 54.0},
    "a4": {"smoke": 9.5, "small": 165.0},
}
# The condition numbers of the table; the report's numbers hold all of them.
_PERCENTS = (10, 25, 50, 75, 100)
#: λmax of the full Fisher matrix of the 8-layer network in section 3 of the paper: "around".
PAPER_LARGEST = {"plain": 1e-5, "bn": 1.0}
#: The network of those numbers.
PAPER_MODEL = "mlp-8x24"
# The paper gives orders of magnitude; "around" is taken to mean within a factor of ten.
_AROUND = 10.0
# "Match well" is taken to mean within a factor of two.
_CLOSE = 2.0
#: The names of networks in the figures, and their markers.
NETWORKS = {"plain": ("Plain", "o"), "bn": ("BN", "s")}
# Panels side by side; more are put below each other.
_COLUMNS = 6


@dataclass(frozen=True)
class Spectra:
    """The numbers of one figure: `lines`, one for each matrix of each network, at the shares `p`.

    Attributes:
        figure: its name.
        model: the networks.
        data: the images, "MNIST" or "digits".
        samples: how many of them.
        settings: everything that was chosen, by name.
        p: the shares at which κ_p is given.
        lines: the spectra.
        seconds: the time it took to measure them.
    """

    figure: str
    model: str
    data: str
    samples: int
    settings: dict[str, Any]
    p: tuple[float, ...]
    lines: tuple[Line, ...]
    seconds: float

    def find(self, network: str, matrix: str = "F", layer: int | None = None, *, approximate: bool = False) -> Line:
        """Return one line; `layer` counts from 1, None is the whole matrix."""
        wanted = (network, matrix, layer, approximate)
        for one in self.lines:
            if (one.network, one.matrix, one.layer, one.approximate) == wanted:
                return one
        raise LabError(f"{self.figure} has no line {wanted}; it has {[(o.network, o.symbol) for o in self.lines]}.")

    def numbers(self) -> dict[str, Any]:
        """Return every number and every setting as strict JSON can hold them: "inf" for infinity."""
        return {
            "seconds": round(self.seconds, 1),
            "model": self.model,
            "data": self.data,
            "samples": self.samples,
            "settings": self.settings,
            "p": list(self.p),
            "lines": [asdict(one) | {"kappa": [in_json(k) for k in one.kappa]} for one in self.lines],
        }


def in_json(kappa: float | None) -> float | str | None:
    """Return a condition number as strict JSON can hold it.

    >>> in_json(2.0), in_json(float("inf")), in_json(None)
    (2.0, 'inf', None)
    """
    return "inf" if kappa is not None and isinf(kappa) else kappa


def spectra(
    figure: str,
    *,
    scale: str = "small",
    data: Path | str | None = None,
    seed: int = 0,
    choices: Choices = Choices(),  # noqa: B008  (frozen)
) -> Spectra:
    """Measure what one figure of `PLANS` shows of the plain and of the batch normalized network.

    Args:
        figure: its name.
        scale: the number of images: "smoke" is 200 and takes seconds, "small" 2,000 and minutes, "full" 10,000.
        data: the folder of MNIST; without it scikit-learn's 1,797 digits stand in, and the result says so.
        seed: of the weights; both networks start from the same.
        choices: what the paper does not state.

    >>> found = spectra("a3", choices=Choices(samples=20))
    >>> found.data, found.samples, found.find("plain").dimension
    ('digits', 20, 4848)
    """
    count = SAMPLES[scale] if choices.samples is None else choices.samples
    images = small_images(count, data=data, crop=choices.crop, normalization=choices.normalization)
    settings = {"scale": scale, "seed": seed, **asdict(choices), "p": list(choices.p)}
    plan, start = PLANS[figure], time.perf_counter()
    lines: list[Line] = []
    for name in NETWORKS:
        made = network(plan.model, images, batch_norm=name == "bn", seed=seed, choices=choices)
        lines += measure(made, images, plan, name=name, choices=choices)
    seconds = time.perf_counter() - start
    return Spectra(figure, plan.model, images.name, len(images.x), settings, choices.p, tuple(lines), seconds)


def report(measured: Spectra) -> Report:
    """Return the report of a figure.

    >>> found = report(spectra("fig1", choices=Choices(samples=20)))
    >>> list(found.figures), found.tables[0].columns[:4]
    (['figure'], ('network', 'matrix', 'λmax', 'paper'))
    """
    shown = [place for place, share in enumerate(measured.p) if round(100 * share) in _PERCENTS]
    columns = ("network", "matrix", "λmax", "paper", *(f"κ at {100 * measured.p[place]:g} %" for place in shown))
    rows = tuple(
        (line.network, _symbol(line), f"{line.largest:.3g}",
         f"around {PAPER_LARGEST[line.network]:g}" if _is_in_paper(measured, line) else None,
         *(_kappa_text(line.kappa[place]) for place in shown), f"{line.rank} of {line.dimension}")
        for line in measured.lines
    )  # fmt: skip
    title = f"{measured.model} on {measured.samples} images of {measured.data}"
    table = Table(title, (*columns, "rank"), rows)
    return Report({"figure": draw(measured)}, (table,), tuple(verdicts(measured)), measured.numbers())


def _symbol(line: Line) -> str:
    return f"{line.symbol} as Σx ⊗ Σ∇h" if line.approximate else line.symbol


def _is_in_paper(measured: Spectra, line: Line) -> bool:
    """Return whether the paper prints this λmax, which it does for the whole F of its 8-layer network alone."""
    return measured.model == PAPER_MODEL and line.matrix == "F" and line.layer is None


def _kappa_text(value: float | None) -> str | None:
    return None if value is None else "∞" if isinf(value) else f"{value:.3g}"


def verdicts(measured: Spectra) -> list[Verdict]:
    """Return the verdicts on the claims of the paper that the lines can decide.

    >>> plain = Line("plain", "F", None, False, 2e-5, (9.0, inf), 1, 2)
    >>> bn = Line("bn", "F", None, False, 2.0, (8.0, 9.0), 2, 2)
    >>> for verdict in verdicts(Spectra("fig1", "mlp-8x24", "digits", 9, {}, (0.5, 1.0), (plain, bn), 0.0)):
    ...     print(verdict.says, "|", verdict.here, "|", verdict.holds)
    λmax of F, plain | 2e-05 | True
    λmax of F, bn | 2 | True
    κ_p of F is lower with BN | at 2 of 2 shares p | True
    """
    found = []
    for matrix in dict.fromkeys(line.matrix for line in measured.lines):
        exact = [line for line in measured.lines if line.matrix == matrix and not line.approximate]
        whole = [line for line in exact if line.layer is None]
        blocks = [line for line in exact if line.layer is not None]
        if measured.model == PAPER_MODEL and matrix == "F":
            found += [_around(line) for line in whole]
        if whole:
            found.append(_better(f"κ_p of {matrix} is lower with BN", _pairs(whole)))
        if blocks:
            found.append(_better(f"κ_p of the {matrix}_k is lower with BN", _pairs(blocks)))
        found += _matching(measured, matrix, blocks)
    return found


def _around(line: Line) -> Verdict:
    paper = PAPER_LARGEST[line.network]
    holds = paper / _AROUND <= line.largest <= paper * _AROUND
    return Verdict(f"λmax of F, {line.network}", f"around {paper:g}", f"{line.largest:.2g}", holds)


def _pairs(lines: Iterable[Line]) -> list[tuple[float, float]]:
    """κ_p of the plain network and of the normalized one, wherever at least one of them is finite."""
    by_layer: dict[int | None, dict[str, Line]] = {}
    for line in lines:
        by_layer.setdefault(line.layer, {})[line.network] = line
    both = [pair for pair in by_layer.values() if len(pair) == len(PAPER_LARGEST)]
    values = [
        (inf if a is None else a, inf if b is None else b)
        for pair in both
        for a, b in zip(pair["plain"].kappa, pair["bn"].kappa, strict=True)
    ]
    return [(a, b) for a, b in values if min(a, b) < inf]


def _better(says: str, pairs: list[tuple[float, float]]) -> Verdict:
    lower = sum(bn < plain for plain, bn in pairs)
    return Verdict(says, "yes", f"at {lower} of {len(pairs)} shares p", bool(pairs) and lower == len(pairs))


def _matching(measured: Spectra, matrix: str, blocks: list[Line]) -> list[Verdict]:
    approximations = {
        (one.network, one.layer): one for one in measured.lines if one.matrix == matrix and one.approximate
    }
    found = []
    for name in PAPER_LARGEST:
        both = [
            (line, near)
            for line in blocks
            if line.network == name and (near := approximations.get((name, line.layer))) is not None
        ]
        if not both:
            continue
        found.append(_ratios(f"λmax of the approximated {matrix}_k, {name}", [
            near.largest / exact.largest for exact, near in both if exact.largest > 0
        ]))  # fmt: skip
        found.append(_ratios(f"κ_p of the approximated {matrix}_k, {name}", [
            b / a
            for exact, near in both
            for a, b in zip(exact.kappa, near.kappa, strict=True)
            if a is not None and b is not None and max(a, b) < inf
        ]))  # fmt: skip
    return found


def _ratios(says: str, ratios: list[float]) -> Verdict:
    """The verdict on ratios of approximate to exact values, from their middle; it names the two ends."""
    if not ratios:
        return Verdict(says, "matches well", "nothing finite to compare", False)
    ordered = sorted(ratios)
    middle = sqrt(ordered[(len(ordered) - 1) // 2] * ordered[len(ordered) // 2])
    here = f"{middle:.2g} times the exact one in the middle, {ordered[0]:.2g} to {ordered[-1]:.2g}"
    return Verdict(says, "matches well", here, 1 / _CLOSE <= middle <= _CLOSE)


def draw(measured: Spectra) -> Figure:
    """Draw λmax of each matrix in a first panel, then κ_p over p in one panel per matrix, and return the figure.

    Exact matrices are solid, Σx ⊗ Σ∇h is dashed. Above a dotted line κ_p is infinite: λ_p = 0.

    >>> p, settings = (0.5, 1.0), {}
    >>> lines = tuple(Line(name, "F", None, False, 1.0, (2.0, inf), 1, 2) for name in NETWORKS)
    >>> figure = draw(Spectra("fig1", "mlp-8x24", "digits", 200, settings, p, lines, 0.0))
    >>> [ax.get_title() for ax in figure.axes]
    ['$\\\\lambda_{\\\\max}$', '$F$']
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    groups = [_panels(measured, matrix) for matrix in dict.fromkeys(line.matrix for line in measured.lines)]
    columns, rows = _grid(max(map(len, groups)) + 1, len(groups))
    figure = Figure(figsize=(2.0 * columns + 0.8, 2.1 * rows + 0.9), layout=ConstrainedLayoutEngine(wspace=0.04))
    axes = np.asarray(figure.subplots(rows, columns, squeeze=False))
    every = [nan if kappa is None else kappa for line in measured.lines for kappa in line.kappa]
    for group, part in zip(groups, np.split(axes, len(groups)), strict=True):
        first, *others = part.ravel()
        _largest(first, measured, group)
        for ax, lines in zip(others, group, strict=False):
            _kappa(ax, measured, lines, every, leftmost=ax in (part[0, 1], *part[1:, 0]))
        for ax in others[len(group) :]:
            ax.set_axis_off()
    _legend(figure, measured)
    figure.suptitle(_title(measured), fontsize=10)
    return figure


def _panels(measured: Spectra, matrix: str) -> list[list[Line]]:
    """Return the lines of `matrix` that belong in one panel: the whole matrix first, then its blocks in order."""
    lines = [line for line in measured.lines if line.matrix == matrix]
    layers = sorted({line.layer for line in lines}, key=lambda layer: layer or 0)
    return [[line for line in lines if line.layer == layer] for layer in layers]


def _grid(count: int, groups: int) -> tuple[int, int]:
    rows = -(-count // _COLUMNS)
    return -(-count // rows), rows * groups


def _colors() -> dict[str, Any]:
    from gyroscope.figures.drawing import colors

    return dict(zip(NETWORKS, colors(2), strict=True))


def _largest(ax: Axes, measured: Spectra, group: list[list[Line]]) -> None:
    from gyroscope.figures.drawing import edged, finish

    colors = _colors()
    for at, lines in enumerate(group):
        for line in lines:
            marker, color = NETWORKS[line.network][1], colors[line.network]
            fill = "none" if line.approximate else color
            size = 7 if line.approximate else 4
            ax.plot(at, line.largest, marker, color=color, markerfacecolor=fill, markersize=size, linestyle="")
            if _is_in_paper(measured, line):
                ax.hlines(PAPER_LARGEST[line.network], at - 0.45, at + 0.45, color=color, linestyle=":")
    symbols = [rf"${lines[0].symbol}$" for lines in group]
    ax.set_xticks(range(len(group)), symbols, fontsize=8)
    ax.set_xlim(-0.6, len(group) - 0.4)
    values = [line.largest for lines in group for line in lines]
    values += [PAPER_LARGEST[line.network] for lines in group for line in lines if _is_in_paper(measured, line)]
    edged(ax, values)
    finish(ax, xlabel="", title=r"$\lambda_{\max}$")


def _kappa(ax: Axes, measured: Spectra, lines: list[Line], every: list[float], *, leftmost: bool) -> None:
    from matplotlib.lines import Line2D

    from gyroscope.figures.drawing import edged, finish, say

    colors, share = _colors(), 100 * np.array(measured.p)
    # One row at infinity for each series, the same in every panel.
    series = sorted({_series(line) for line in measured.lines})
    rows = edged(ax, every, above=len(series) if inf in every else 0).above
    for line in lines:
        kappa = np.array([nan if k is None else k for k in line.kappa])
        color, dash = colors[line.network], "--" if line.approximate else "-"
        ax.plot(share, np.where(np.isinf(kappa), nan, kappa), dash, color=color, linewidth=1.6)
        at = share[np.isinf(kappa)]
        if len(at):
            row, fill = rows[series.index(_series(line))], "none" if line.approximate else color
            marks = Line2D(at, np.full(len(at), row), color=color, marker="^", markerfacecolor=fill, linestyle="")
            marks.set(markersize=3, markeredgewidth=0.6)
            ax.add_line(marks)
    ax.set_xlim(0, 103)
    ax.set_xticks([0, 50, 100])
    finish(ax, xlabel="p (%)", ylabel=r"$\kappa_p$" if leftmost else "", title=rf"${lines[0].symbol}$")
    # All panels have the same axis: its numbers are printed once per row.
    ax.tick_params(labelleft=leftmost)
    if leftmost:
        say(ax, "∞", rows)


def _series(line: Line) -> tuple[int, bool]:
    return list(NETWORKS).index(line.network), line.approximate


def _legend(figure: Figure, measured: Spectra) -> None:
    from matplotlib.lines import Line2D

    colors = _colors()
    handles = [
        Line2D([], [], color=colors[name], marker=marker, markersize=4, label=label)
        for name, (label, marker) in NETWORKS.items()
    ]
    if any(line.approximate for line in measured.lines):
        approximation = r"$\Sigma_x\otimes\Sigma_{\nabla h}$"
        handles.append(
            Line2D([], [], color="0.3", linestyle="--", marker="o", markerfacecolor="none", label=approximation)
        )
    if any(_is_in_paper(measured, line) for line in measured.lines):
        handles.append(Line2D([], [], color="0.3", linestyle=":", label=r"$\lambda_{\max}$ in the paper, “around”"))
    if any(kappa == inf for line in measured.lines for kappa in line.kappa):
        label = r"infinite: $\lambda_p=0$"
        handles.append(Line2D([], [], color="0.3", marker="^", markersize=3, linestyle="", label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)


def _title(measured: Spectra) -> str:
    depth, width = measured.model.removeprefix("mlp-").split("x")
    said = f"{measured.samples:,} images of {measured.data}, 12×12"
    figure = measured.figure.removeprefix("fig").upper()
    return f"Figure {figure}: {depth} layers of {width} units, {said}, at initialization"


def _conclude(figure: str) -> Callable[[Lab], Report]:
    def conclude(lab: Lab) -> Report:
        # The report says where digits stand in. At full scale they do so only if no folder of MNIST is named at all.
        data = os.environ.get(DATA) if lab.data is None and lab.scale == "full" else lab.data
        taken = data if at_hand(lab, Source("mnist")).name == "mnist" else None
        return report(spectra(figure, scale=lab.scale, data=taken))

    return conclude


STUDIES = tuple(
    Study(f"conditioning/{name}", title, no_trials, _conclude(name), beside=_SECONDS[name])
    for name, title in TITLES.items()
)
