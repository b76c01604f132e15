"""The drawing of figures A8 and A9: condition numbers by layer, and the training loss beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gyroscope.conditioning import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from gyroscope.figures.drawing import Colour, Dash, Mark
    from gyroscope_lab.papers.conditioning.trained_convolutions import Network

_COLOURS: dict[str, Colour] = {"BN": (0.12, 0.47, 0.71, 1.0), "Plain": (0.84, 0.37, 0.0, 1.0)}
_MARKERS = {"BN": "o", "Plain": "s"}
_GREY: Colour = (0.25, 0.25, 0.25, 1.0)
# Places among the analyses of a training.
_WHEN: tuple[tuple[int, Dash, str], ...] = ((0, ":", "end of the first epoch"), (-1, "-", "of the last"))


def draw(networks: Sequence[Network], others: Sequence[Network], *, shares: Sequence[float], heading: str) -> Figure:
    """Draw κ_p(Σx) (a) and κ_p(Σ∇h) (b) by layer, dotted after one epoch and solid in the end, and the loss (c).

    Of `others`, such as networks at rates that do not suit them, there is the loss alone.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    from gyroscope.figures.drawing import Line, draw_marked, finish

    figure = Figure(figsize=(11.0, 2.4 * len(shares) + 1.0), layout="constrained")
    grid = figure.add_gridspec(len(shares), 3)
    marks: list[Mark] = []
    for row, share in enumerate(shares):
        for column, (factor, symbol) in enumerate((("x", r"\Sigma_x"), ("g", r"\Sigma_{\nabla h}"))):
            ax = figure.add_subplot(grid[row, column])
            marks += draw_marked(
                ax,
                [
                    Line(one.kappa[factor][share][place], number, _COLOURS[one.name], dash, _MARKERS[one.name])
                    for number, one in enumerate(networks)
                    for place, dash, _ in _WHEN
                ],
            )
            label = rf"$\kappa_{{{percent(share)}\%}}({symbol})$"
            last = row == len(shares) - 1
            title = f"({'ab'[column]}) $\\kappa_p({symbol})$" if row == 0 else None
            finish(ax, xlabel="layer" if last else "", ylabel=label, title=title)
            ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    right = figure.add_subplot(grid[:, 2])
    for one in networks:
        _curve(right, one, dash="-")
    for one in others:
        _curve(right, one, dash="--")
    right.set_yscale("log")
    finish(right, xlabel="epoch", ylabel="training loss", title="(c) training loss")
    right.legend(fontsize=8)
    _key(figure, networks, marks)
    figure.suptitle(heading, fontsize=11)
    return figure


def _key(figure: Figure, networks: Sequence[Network], marks: Sequence[Mark]) -> None:
    from matplotlib.lines import Line2D

    from gyroscope.figures.drawing import SAYS

    handles = [
        Line2D([], [], color=_COLOURS[one.name], marker=_MARKERS[one.name], markersize=4, label=one.name)
        for one in networks
    ]
    handles += [Line2D([], [], color=_GREY, linestyle=dash, label=label) for _, dash, label in _WHEN]
    handles += [
        Line2D([], [], color=_GREY, linestyle="", marker=mark, markersize=4, label=SAYS[mark])
        for mark in dict.fromkeys(marks)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8, frameon=False)


def _curve(ax: Axes, one: Network, *, dash: Dash) -> None:
    loss = np.array(one.result.loss)
    alone = "o" if np.isfinite(loss).sum() < 2 else ""
    ax.plot(
        np.arange(1, len(loss) + 1), loss, color=_COLOURS[one.name], linestyle=dash, linewidth=1.3, marker=alone,
        markersize=3, label=f"{one.name}, rate {one.rate:g}",
    )  # fmt: skip
