"""How fast each layer turns."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from gyroscope.figures.curves import curves
from gyroscope.figures.given import Layers, RunLike, as_run, choose, flag
from gyroscope.figures.predicted import predicted

# More than this many different equilibria would be a texture, not lines to read.
_EQUILIBRIA = 4


def rates(
    run: RunLike,
    *,
    quantity: str = "rate_per_step",
    predictions: bool = True,
    ax: Axes | None = None,
    layers: Layers = None,
    legend: bool | None = None,
    title: str | None = None,
) -> Axes:
    """Draw the angle by which each layer turns in a step, and return the axes.

    Weight decay brings scale-invariant layers to turn at a rate that only learning rate, decay and momentum
    determine, √(2ηλ) for plain SGD. That equilibrium, for the run's last values, is drawn dashed.

    Args:
        run: a run or its path.
        quantity: "rate_per_step", or "rate", the angle since the last measured step.
        predictions: whether to draw the equilibrium.
        ax: axes to draw on; those of a new figure if not given.
        layers: glob pattern or patterns on the layers' names; all if not given.
        legend: whether to say which colour is which layer; by default on own axes.
        title: text above.

    >>> from gyroscope.figures import example_run
    >>> rates(example_run(), predictions=False).get_yscale()
    'log'
    """
    run = as_run(run)
    ax = curves(run, quantity, ax=ax, layers=layers, legend=legend, title=title)
    if flag(predictions, "predictions") and quantity == "rate_per_step":
        names = run.layers
        found = predicted(run, {names[i] for i in choose(names, layers)}).values()
        equilibria = {float(f"{p.equilibrium_rate:.3g}") for p in found if p.equilibrium_rate > 0}
        if 0 < len(equilibria) <= _EQUILIBRIA:
            _draw(ax, sorted(equilibria))
    return ax


def _draw(ax: Axes, equilibria: list[float]) -> None:
    low, high = ax.get_ylim()
    for rate in equilibria:
        ax.axhline(rate, color="black", linewidth=1, linestyle="--")
    ax.annotate(
        "predicted equilibrium",
        (1, equilibria[-1]),
        xycoords=("axes fraction", "data"),
        xytext=(-2, 2),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        path_effects=[withStroke(linewidth=2, foreground="white")],
    )
    ax.set_ylim(min(low, equilibria[0] / 1.5), max(high, equilibria[-1] * 1.5))
