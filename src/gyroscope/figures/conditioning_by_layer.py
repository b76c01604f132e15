"""Conditioning over depth: the largest eigenvalue and the condition numbers of each layer's matrices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from gyroscope.base.accepted import real
from gyroscope.conditioning import Conditioning
from gyroscope.conditioning.result import percent
from gyroscope.errors import FigureError
from gyroscope.figures.drawing import as_picture, finish
from gyroscope.figures.looks import short_names
from gyroscope.figures.over_depth import SAYS, Color, Dash, Line, Mark, colors, draw_marked, layer_axis
from gyroscope.figures.run_data import Layers, choose

Values = npt.NDArray[np.float64]

# Without the markers that mean infinite, zero or undefined.
_MARKERS = "osDP*"
_DASHES: tuple[Dash, ...] = ("-", "--", ":", "-.")
_GRAY = (0.25, 0.25, 0.25, 1.0)
# More lines than this in one panel cannot be told apart, for several networks.
_LINES = 4
_SHARES = 8
# Width of the legend below the panels, in letters.
_LETTERS = 150
_MATHS = re.compile(r"\\[a-z]|[${}]")


def conditioning_by_layer(
    conditioning: Several,
    *,
    labels: str | Sequence[str] | None = None,
    p: float | Sequence[float] | None = None,
    layers: Layers = None,
    title: str | None = None,
) -> Figure:
    """Draw λmax and κ_p = λmax/λ_p of each layer's Σx, Σ∇h and F over depth, and return the figure.

    As figures 3 and 5 of the layer-wise conditioning paper, with F_k ≈ Σx ⊗ Σ∇h next to its factors: λmax above, where
    a slope is a signal that vanishes or explodes with depth, and κ_p below. One network has a color per p; of several,
    each has a color and a marker, and each p a line style. Marks above a dotted line are infinite (λ_p = 0); marks
    below one are zero, or undefined (λmax = 0).

    Args:
        conditioning: the result of `gyroscope.condition`, or several results: by label, or in a sequence.
        labels: their names in the legend.
        p: the shares to show, of those that were measured; by default all for one network, and for several as many as
            can be told apart: the middle one, and the last.
        layers: glob pattern or patterns on the layers' names; all by default.
        title: title above the figure.

    >>> import gyroscope, torch
    >>> plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> normal = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), plain[2])
    >>> loss, batch = torch.nn.functional.cross_entropy, (torch.randn(64, 8), torch.arange(64) % 4)
    >>> found = {name: gyroscope.condition(net, loss, batch) for name, net in [("plain", plain), ("BN", normal)]}
    >>> figure = conditioning_by_layer(found, p=0.5)
    >>> [text.get_text() for text in figure.legends[0].get_texts()]
    ['plain', 'BN', 'p = 50 %']
    """
    shown = _networks(conditioning, labels, most=len(_MARKERS))
    shares = _shares(shown, p)
    chosen = [choose(one.layers, layers) for one in shown.values()]
    rows = [[one.rows()[i] for i in where] for one, where in zip(shown.values(), chosen, strict=True)]
    names = [tuple(row["layer"] for row in found) for found in rows]

    high = 2 if shares else 1
    figure = as_picture(Figure(figsize=(10.5, 2.5 * high + 0.9), layout="constrained"))
    grid: list[list[Axes]] = figure.subplots(high, 3, squeeze=False, sharex=True).tolist()
    marks: list[Mark] = []
    for column, matrix in enumerate(TITLES):
        ax, first = grid[0][column], column == 0
        lines = [Line(_values(found, f"lambda_{matrix}"), i, *_largest(i, len(rows))) for i, found in enumerate(rows)]
        marks += draw_marked(ax, lines)
        finish(ax, xlabel="", ylabel=r"$\lambda_{\max}$" if first else "", title=TITLES[matrix])
        if shares:
            lines = [
                Line(_values(found, f"kappa_{matrix}", share), i, *_style(i, len(rows), k, len(shares)))
                for i, found in enumerate(rows)
                for k, share in enumerate(shares)
            ]
            marks += draw_marked(grid[1][column], lines)
            finish(grid[1][column], xlabel="", ylabel=r"$\kappa_p=\lambda_{\max}/\lambda_p$" if first else "")
        _depth_axis(grid[-1][column], names)
    grid[-1][1].set_xlabel("layer, in forward order" if layers is None else "chosen layers, in forward order")
    _key(figure, list(shown), shares, [mark for mark in SAYS if mark in marks])
    if title is not None:
        figure.suptitle(title, fontsize=11)
    return figure


def _shares(shown: Mapping[str, Conditioning], p: float | Sequence[float] | None) -> list[float]:
    every = list(shown.values())
    measured = sorted(set(every[0].p).intersection(*(one.p for one in every)))
    if p is None:
        if len(every) == 1 or not measured:
            return measured[-_SHARES:]
        middle, last = measured[len(measured) // 2], measured[-1]
        return sorted({middle, last} if _LINES // len(every) > 1 else {middle})
    given: Any = p
    asked = list(given) if isnan(real(given)) else [real(given)]
    missing = [share for share in asked if share not in measured]
    if missing:
        had = ", ".join(f"{share:g}" for share in measured) or "none"
        raise FigureError(
            f"`p` must be shares that were measured ({had}), got {missing[0]!r:.80}. Measure it with "
            "gyroscope.condition(..., p=...)."
        )
    most = _SHARES if len(every) == 1 else len(_DASHES)
    if len(asked) > most:
        raise FigureError(f"`p` must be at most {most} shares, got {len(asked)}: more cannot be told apart.")
    return asked


def _values(rows: Sequence[Mapping[str, Any]], key: str, share: float | None = None) -> Values:
    found = [row[key] if share is None else row[key][share] for row in rows]
    return np.array([np.nan if value is None else value for value in found], dtype=float)


def _largest(network: int, of: int) -> tuple[Color, Dash, str]:
    # For one network colors stand for p, and λmax has none.
    return (_GRAY, "-", "o") if of == 1 else (colors(of)[network], "-", _MARKERS[network])


def _style(network: int, of: int, share: int, shares: int) -> tuple[Color, Dash, str]:
    if of == 1:
        return colors(shares)[share], "-", _MARKERS[share % len(_MARKERS)]
    return colors(of)[network], _DASHES[share], _MARKERS[network]


def _depth_axis(ax: Axes, names: list[tuple[str, ...]]) -> None:
    deepest = max(names, key=len)
    layer_axis(ax, deepest)
    # Names only if all networks share them, and if they still differ when shortened.
    if len(set(names)) > 1 or len(set(short_names(deepest, longest=18))) < len(deepest):
        ax.tick_params(axis="x", rotation=0)
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        ax.xaxis.set_major_formatter("{x:.0f}")


def _key(figure: Figure, labels: list[str], shares: list[float], marks: list[Mark]) -> None:
    handles: list[Line2D] = []
    if labels != [""]:
        for i, label in enumerate(labels):
            color, dash, marker = _largest(i, len(labels))
            handles.append(_handle(label if len(label) <= 60 else f"{label[:59]}…", color, dash, marker))
    for k, share in enumerate(shares):
        color, dash, marker = _style(0, len(labels), k, len(shares))
        says = f"p = {percent(share)} %"
        handles.append(_handle(says, _GRAY, dash, "") if len(labels) > 1 else _handle(says, color, dash, marker))
    handles += [_handle(SAYS[mark], _GRAY, "", mark) for mark in marks]
    if handles:
        letters = [len(_MATHS.sub("", str(handle.get_label()))) + 9 for handle in handles]
        columns = len(handles) if sum(letters) <= _LETTERS else max(_LETTERS // max(letters), 1)
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def _handle(label: str, color: Color, dash: Dash, marker: str) -> Line2D:
    return Line2D([], [], color=color, linestyle=dash, marker=marker, markersize=4.5, label=label)


Several = Conditioning | Mapping[str, Conditioning] | Iterable[Conditioning]

#: Titles of a layer's matrices, by their letter in the names of quantities.
TITLES = {
    "x": r"layer input, $\Sigma_x$",
    "g": r"output-gradient, $\Sigma_{\nabla h}$",
    "f": r"Fisher block, $F\approx\Sigma_x\otimes\Sigma_{\nabla h}$",
}


def as_conditioning(given: Conditioning) -> Conditioning:
    """Return `given` if it is a conditioning of at least one layer.

    >>> as_conditioning("mlp")
    Traceback (most recent call last):
    ...
    gyroscope.errors.FigureError: `conditioning` must be a result of gyroscope.condition(...), got a str.
    """
    if not hasattr(given, "rows") or not hasattr(given, "spectra"):
        raise FigureError(f"`conditioning` must be a result of gyroscope.condition(...), got a {type(given).__name__}.")
    if not given.layers:
        raise FigureError("`conditioning` must have at least one layer, got none. Its .untreated says why.")
    return given


def _networks(given: Several, labels: str | Sequence[str] | None, *, most: int) -> dict[str, Conditioning]:
    """Return conditionings by their labels: "" for a single one without a label, numbers for several without labels.

    >>> _networks([], None, most=5)
    Traceback (most recent call last):
    ...
    gyroscope.errors.FigureError: `conditioning` must be at least one result of gyroscope.condition, got none.
    """
    # A conditioning is iterable as well.
    if hasattr(given, "rows") or not isinstance(given, Iterable):
        names, found = [""], [cast(Conditioning, given)]
    elif isinstance(given, Mapping):
        names, found = list(given), list(given.values())
    else:
        found = list(given)
        names = [f"network {i}" for i in range(1, len(found) + 1)] if len(found) > 1 else [""]
    if not found:
        raise FigureError("`conditioning` must be at least one result of gyroscope.condition, got none.")
    found = [as_conditioning(one) for one in found]
    if len(found) > most:
        raise FigureError(
            f"`conditioning` must be at most {most} networks, got {len(found)}: more cannot be told apart."
        )
    if labels is not None:
        names = [labels] if isinstance(labels, str) else list(labels)
        if len(names) != len(found) or len(set(names)) < len(names):
            raise FigureError(
                f"`labels` must be {len(found)} different texts, one per conditioning, got {labels!r:.80}."
            )
    return dict(zip(names, found, strict=True))
