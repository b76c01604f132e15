"""Spectra of layers: all eigenvalues of Σx, Σ∇h and F, and their condition numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from gyroscope.conditioning import Conditioning, Spectra
from gyroscope.conditioning.spectra import product_at
from gyroscope.errors import FigureError
from gyroscope.figures.conditioning_by_layer import TITLES, as_conditioning
from gyroscope.figures.curves import note_layers
from gyroscope.figures.drawing import DEPTH, MANY, NAMED, as_picture, depth_bar, depth_key, draw_lines, finish
from gyroscope.figures.log_axis import edged, say
from gyroscope.figures.run_data import Layers, choose

Values = npt.NDArray[np.float64]
Which = Literal["x", "g", "f"]

# λ_p is evaluated at this many p, about one per pixel; λmax is at p = 0.
_POINTS = 200


def spectra(
    conditioning: Conditioning,
    *,
    which: Which | Sequence[Which] = ("x", "g", "f"),
    layers: Layers = None,
    title: str | None = None,
) -> Figure:
    """Draw the eigenvalues of each layer's Σx, Σ∇h and F ≈ Σx ⊗ Σ∇h, and κ_p, and return the figure.

    Above is λ_p, the eigenvalue at the share p of all in descending order: at 0 % the largest, at 100 % the smallest.
    Below is κ_p = λmax/λ_p, as in figures 1 and 2 of the layer-wise conditioning paper: the flatter, the easier the
    layer is to train. There is one line per layer, dark for the first; it ends in a mark where the other
    eigenvalues are zero.

    Args:
        conditioning: the result of `gyroscope.condition(..., spectra=True)`.
        which: "x" for Σx, "g" for Σ∇h, "f" for F, or several of them.
        layers: glob pattern or patterns on the layers' names; all by default.
        title: title above the figure.

    >>> import gyroscope, torch
    >>> net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    >>> batch = torch.randn(64, 8), torch.arange(64) % 4
    >>> found = gyroscope.condition(net, torch.nn.functional.cross_entropy, batch, spectra=True)
    >>> figure = spectra(found, which="x")
    >>> [ax.get_yscale() for ax in figure.axes], len(figure.axes[0].lines)
    (['log', 'log'], 2)
    """
    found = as_conditioning(conditioning).spectra
    if found is None:
        raise FigureError(
            "`conditioning` must hold spectra, got none. Keep them with gyroscope.condition(..., spectra=True), or "
            "draw conditioning_by_layer, which needs none."
        )
    matrices = [which] if isinstance(which, str) else list(which)
    if not matrices or any(matrix not in get_args(Which) for matrix in matrices):
        raise FigureError(f"`which` must be one or several of 'x', 'g', 'f', got {which!r:.80}.")
    every = conditioning.layers
    chosen = choose(every, layers)
    names, depth = [every[i] for i in chosen], np.array(chosen) / max(len(every) - 1, 1)

    width = 2.9 * len(matrices) + (1.9 if len(names) <= NAMED else 1.0)
    figure = as_picture(Figure(figsize=(width, 5.4), layout="constrained"))
    grid: list[list[Axes]] = figure.subplots(2, len(matrices), squeeze=False, sharex=True).tolist()
    for matrix, above, below in zip(matrices, *grid, strict=True):
        first = above is grid[0][0]
        values = _read([found[name] for name in names], matrix)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = values[0] / values
        _draw(above, values, depth)
        _draw(below, ratios, depth)
        dead, broken = int((values[0] == 0).sum()), int(np.isnan(values[0]).sum())
        note_layers(above, dead + broken, "0 throughout" if not broken else "0 or not finite" if dead else "not finite")
        note_layers(below, dead + broken, "undefined", low=True)
        finish(above, xlabel="", ylabel=r"$\lambda_p$" if first else "", title=TITLES[matrix])
        finish(below, xlabel="p (%)", ylabel=r"$\kappa_p=\lambda_{\max}/\lambda_p$" if first else "")
        below.set_xlim(0, 1)
        below.xaxis.set_major_formatter(PercentFormatter(1, symbol=""))
    if len(names) <= NAMED:
        depth_key(grid[0][-1], names, depth, len(every))
    else:
        depth_bar([ax for row in grid for ax in row], len(every))
    if title is not None:
        figure.suptitle(title, fontsize=11)
    return figure


def _read(found: Sequence[Spectra], matrix: Which) -> Values:
    """Return λmax, and λ_p at equally spaced p, [1 + points, layers]."""
    if matrix == "f":
        x, g = [both.x for both in found], [both.g for both in found]
        largest = [a.largest * b.largest for a, b in zip(x, g, strict=True)]
        rest = product_at(x, g, [(point + 1) / _POINTS for point in range(_POINTS)])
        return np.concatenate([[largest], rest.T])
    values = np.empty((_POINTS + 1, len(found)))
    for layer, both in enumerate(found):
        spectrum = both.x if matrix == "x" else both.g
        # ⌈p·d⌉ in integer arithmetic, at least 1.
        places = -(-np.arange(_POINTS + 1) * spectrum.dimension // _POINTS)
        values[:, layer] = spectrum.full()[np.maximum(places, 1) - 1]
    return values


def _draw(ax: Axes, values: Values, depth: Values) -> None:
    """Draw λ_p or κ_p, with a mark at the edge where they become zero or infinite."""
    p = np.arange(_POINTS + 1) / _POINTS
    infinite, zero = np.isposinf(values), (values == 0) & (values[0] > 0)
    edges = edged(ax, values, above=int(infinite.any()), below=int(zero.any()))
    draw_lines(ax, p, np.where(infinite, np.nan, values), depth=depth, positive=True)
    many = len(depth) > MANY
    for where, rows, marker in ((infinite, edges.above, "^"), (zero, edges.below, "v")):
        for layer in np.flatnonzero(where.any(axis=0)) if rows else []:
            ax.plot(
                p[where[:, layer].argmax()],
                rows[0],
                color=DEPTH(float(depth[layer])),
                marker=marker,
                markersize=3 if many else 4.5,
                alpha=0.5 if many else 1.0,
                clip_on=False,
                zorder=3,
            )
    say(ax, "∞", edges.above)
    say(ax, "0", edges.below)
