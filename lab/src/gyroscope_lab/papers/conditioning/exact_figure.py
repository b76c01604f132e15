"""The figures of the study of full and layer-wise conditioning: λmax of every matrix, and κ_p of each."""

from __future__ import annotations

from math import inf, nan

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from gyroscope.figures.drawing import colours, edged, finish, say
from gyroscope_lab.papers.conditioning.exact_result import PAPER_LARGEST, PAPER_MODEL, Line, Study

#: How networks are named in the figures, and their markers.
NETWORKS = {"plain": ("Plain", "o"), "bn": ("BN", "s")}
_COLOURS = dict(zip(NETWORKS, colours(2), strict=True))
# Panels side by side; more are put below each other.
_COLUMNS = 6


def draw(study: Study) -> Figure:
    """Draw λmax of each matrix in a first panel, then κ_p over p in a panel a matrix, and return the figure.

    Exact matrices are solid, Σx ⊗ Σ∇h is dashed. Above a dotted line κ_p is infinite: λ_p = 0.

    >>> p, settings = (0.5, 1.0), {}
    >>> lines = tuple(Line(name, "F", None, False, 1.0, (2.0, inf), 1, 2) for name in NETWORKS)
    >>> figure = draw(Study("fig1", "mlp-8x24", "digits", 200, settings, p, lines, 0.0))
    >>> [ax.get_title() for ax in figure.axes]
    ['$\\\\lambda_{\\\\max}$', '$F$']
    """
    groups = [panels(study, matrix) for matrix in dict.fromkeys(line.matrix for line in study.lines)]
    columns, rows = _grid(max(map(len, groups)) + 1, len(groups))
    figure = Figure(figsize=(2.0 * columns + 0.8, 2.1 * rows + 0.9), layout=ConstrainedLayoutEngine(wspace=0.04))
    axes = np.asarray(figure.subplots(rows, columns, squeeze=False))
    every = [nan if kappa is None else kappa for line in study.lines for kappa in line.kappa]
    for group, part in zip(groups, np.split(axes, len(groups)), strict=True):
        first, *others = part.ravel()
        _largest(first, study, group)
        for ax, lines in zip(others, group, strict=False):
            _kappa(ax, study, lines, every, leftmost=ax in (part[0, 1], *part[1:, 0]))
        for ax in others[len(group) :]:
            ax.set_axis_off()
    _legend(figure, study)
    figure.suptitle(_title(study), fontsize=10)
    return figure


def panels(study: Study, matrix: str) -> list[list[Line]]:
    """Return the lines of `matrix` that belong into one panel: the whole matrix first, then its blocks in order."""
    lines = [line for line in study.lines if line.matrix == matrix]
    layers = sorted({line.layer for line in lines}, key=lambda layer: layer or 0)
    return [[line for line in lines if line.layer == layer] for layer in layers]


def _grid(count: int, groups: int) -> tuple[int, int]:
    rows = -(-count // _COLUMNS)
    return -(-count // rows), rows * groups


def _largest(ax: Axes, study: Study, group: list[list[Line]]) -> None:
    for at, lines in enumerate(group):
        for line in lines:
            marker, colour = NETWORKS[line.network][1], _COLOURS[line.network]
            fill = "none" if line.approximate else colour
            size = 7 if line.approximate else 4
            ax.plot(at, line.largest, marker, color=colour, markerfacecolor=fill, markersize=size, linestyle="")
            if _known(study, line):
                ax.hlines(PAPER_LARGEST[line.network], at - 0.45, at + 0.45, color=colour, linestyle=":")
    symbols = [rf"${lines[0].symbol}$" for lines in group]
    ax.set_xticks(range(len(group)), symbols, fontsize=8)
    ax.set_xlim(-0.6, len(group) - 0.4)
    values = [line.largest for lines in group for line in lines]
    values += [PAPER_LARGEST[line.network] for lines in group for line in lines if _known(study, line)]
    edged(ax, values)
    finish(ax, xlabel="", title=r"$\lambda_{\max}$")


def _known(study: Study, line: Line) -> bool:
    return study.model == PAPER_MODEL and line.matrix == "F" and line.layer is None


def _kappa(ax: Axes, study: Study, lines: list[Line], every: list[float], *, leftmost: bool) -> None:
    share = 100 * np.array(study.p)
    # One row at infinity for each series, the same in every panel.
    series = sorted({_series(line) for line in study.lines})
    rows = edged(ax, every, above=len(series) if inf in every else 0).above
    for line in lines:
        kappa = np.array([nan if k is None else k for k in line.kappa])
        colour, dash = _COLOURS[line.network], "--" if line.approximate else "-"
        ax.plot(share, np.where(np.isinf(kappa), nan, kappa), dash, color=colour, linewidth=1.6)
        at = share[np.isinf(kappa)]
        if len(at):
            row, fill = rows[series.index(_series(line))], "none" if line.approximate else colour
            marks = Line2D(at, np.full(len(at), row), color=colour, marker="^", markerfacecolor=fill, linestyle="")
            marks.set(markersize=3, markeredgewidth=0.6)
            ax.add_line(marks)
    ax.set_xlim(0, 103)
    ax.set_xticks([0, 50, 100])
    finish(ax, xlabel="p (%)", ylabel=r"$\kappa_p$" if leftmost else "", title=rf"${lines[0].symbol}$")
    # All panels have the same axis: its numbers are said once a row.
    ax.tick_params(labelleft=leftmost)
    if leftmost:
        say(ax, "∞", rows)


def _series(line: Line) -> tuple[int, bool]:
    return list(NETWORKS).index(line.network), line.approximate


def _legend(figure: Figure, study: Study) -> None:
    handles = [
        Line2D([], [], color=_COLOURS[name], marker=marker, markersize=4, label=label)
        for name, (label, marker) in NETWORKS.items()
    ]
    if any(line.approximate for line in study.lines):
        approximation = r"$\Sigma_x\otimes\Sigma_{\nabla h}$"
        handles.append(
            Line2D([], [], color="0.3", linestyle="--", marker="o", markerfacecolor="none", label=approximation)
        )
    if any(_known(study, line) for line in study.lines):
        handles.append(Line2D([], [], color="0.3", linestyle=":", label=r"$\lambda_{\max}$ in the paper, “around”"))
    if any(kappa == inf for line in study.lines for kappa in line.kappa):
        label = r"infinite: $\lambda_p=0$"
        handles.append(Line2D([], [], color="0.3", marker="^", markersize=3, linestyle="", label=label))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)


def _title(study: Study) -> str:
    depth, width = study.model.removeprefix("mlp-").split("x")
    said = f"{study.samples:,} images of {study.data}, 12×12"
    figure = study.figure.removeprefix("fig").upper()
    return f"Figure {figure}: {depth} layers of {width} units, {said}, at initialization"
