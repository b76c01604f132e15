"""Adam's second moments, layer by layer (figure 5 of the rotation paper, figure 11 of the paper on speed).

Adam divides each element's step by √v, v ← β₂ v + (1 − β₂) g². The papers show the 10th, 50th and 90th percentile of v
in each layer of C10-CNN1, and conclude that v "varies much more across layers than inside layers": what adapts to
single parameters sets the rates of layers in the first place.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from gyroscope.theory import Percentiles, share_between, spans
from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.cells import recorded
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The epochs that the papers show.
EPOCHS = (1, 10, 50)
# The papers do not say which rate; this is the nearest to Adam's own of 10⁻³ on their grid, and the best one for its
# kin RMSprop. The digits take the one that they are trained with elsewhere.
_POWERS = {"c10-cnn1": -6}
_OTHERWISE = -5
_NAMES = ("moment_p10", "moment_p50", "moment_p90")


@dataclass(frozen=True)
class Moments:
    """The percentiles of every layer after some epochs."""

    epoch: float
    percentiles: Percentiles


def trials(lab: Lab) -> list[Trial]:
    """Adam on C10-CNN1.

    >>> from gyroscope_lab.training.archive import Archive
    >>> [trial] = trials(Lab(Archive("runs"), "full"))
    >>> trial.task.name, trial.recipe.optimizer
    ('c10-cnn1', 'adam')
    """
    # Adam may have learned its training set before epoch 50, and is to go on.
    task = replace(lab.task("c10-cnn1"), stop_at=None)
    power = _POWERS.get(task.name, _OTHERWISE)
    recipe = Recipe("Adam", rate=3.0**power, optimizer="adam")
    # The digits' Adam is recorded to be copied anyway: one training does for both.
    return [Trial(task, recipe if task.name in _POWERS else replace(recipe, records=True))]


@cache
def of_paper() -> dict[int, Percentiles]:
    """The papers' percentiles by epoch, [25 layers, 3].

    >>> of_paper()[1][0].tolist()
    [0.0002069, 0.002385, 0.009206]
    """
    content = json.loads(files("gyroscope_lab.papers.rotation").joinpath("adam_moments.json").read_bytes())
    return {int(epoch): np.array(rows) for epoch, rows in content["epochs"].items()}


def moments(lab: Lab, trial: Trial) -> list[Moments]:
    """Return the moments in a trial's run nearest to each of `EPOCHS`: a monitor measures them only now and then."""
    [result] = lab.run([trial])
    with recorded(lab, trial) as run:
        steps = run.where(_NAMES[1])
        table = np.stack([run.series(name, steps=steps).astype(float) for name in _NAMES], axis=-1)
        epochs = steps * len(result.loss) / run.steps[-1]
    rows = dict.fromkeys(int(np.abs(epochs - wanted).argmin()) for wanted in EPOCHS)
    return [Moments(float(epochs[row]), table[row]) for row in rows]


def figure5(lab: Lab) -> Report:
    """Report the percentiles of each layer, and the share of their spread that lies between layers."""
    [trial] = trials(lab)
    found = moments(lab, trial)
    known = of_paper() if trial.task.name in _POWERS else {}
    paired = [(one, known.get(_nearest(one.epoch))) for one in found]
    lines, verdicts = [], []
    for one, told in paired:
        here, there = share_between(one.percentiles), None if told is None else share_between(told)
        far, near = spans(one.percentiles)
        far_told, near_told = (None, None) if told is None else spans(told)
        lines.append((_number(one.epoch), 100 * here, None if there is None else 100 * there, far, far_told, near,
                      near_told))  # fmt: skip
        verdicts.append(
            Verdict(
                f"after epoch {_number(one.epoch)} the second moments vary more between layers than inside them",
                _in_percent(share_between(of_paper()[_nearest(one.epoch)])),
                f"{_in_percent(here)}; medians differ by a factor of {far:.3g}, p90 and p10 of a layer by {near:.3g}",
                here > 0.5,
            )
        )
    columns = ("epoch", "between layers % here", "paper", "medians' max/min", "paper", "p90/p10 inside", "paper")
    tables = [Table(f"{trial.task.name}: share of the variance of log v between layers", columns, tuple(lines))]
    if known:
        tables.append(_by_layer(paired))
    numbers = [{"epoch": one.epoch, "percentiles": one.percentiles.tolist()} for one in found]
    figure = draw(trial.task.name, paired)
    return Report({"figure": figure}, tuple(tables), tuple(verdicts), {"task": trial.task.name, "moments": numbers})


def _nearest(epoch: float) -> int:
    return min(EPOCHS, key=lambda wanted: abs(wanted - epoch))


def _number(epoch: float) -> int | float:
    return round(epoch) if isfinite(epoch) and abs(epoch - round(epoch)) < 0.05 else round(epoch, 2)


def _in_percent(share: float) -> str:
    return f"{100 * share:.0f} % of the variance between layers"


def _by_layer(paired: list[tuple[Moments, Percentiles | None]]) -> Table:
    """Medians layer by layer, ours and the paper's."""
    names: list[str] = ["layer"]
    rows: list[list[object]] = [[str(number)] for number in range(1, len(paired[0][0].percentiles) + 1)]
    for one, told in paired:
        names += [f"epoch {_number(one.epoch)}", "paper"]
        for layer, row in enumerate(rows):
            row += [f"{one.percentiles[layer, 1]:.2e}", None if told is None else f"{told[layer, 1]:.2e}"]
    return Table("Medians of v", tuple(names), tuple(map(tuple, rows)))


def draw(task: str, paired: list[tuple[Moments, Percentiles | None]]) -> Figure:
    """Draw one panel per epoch: our percentiles, and the paper's where there are any.

    >>> figure = draw("c10-cnn1", [(Moments(1.0, of_paper()[1]), of_paper()[1])])
    >>> figure.axes[0].get_title()
    'epoch 1'
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.8 + 3.1 * len(paired), 3.2), layout="constrained")
    axes = figure.subplots(1, len(paired), squeeze=False, sharey=True)[0]
    for ax, (one, told) in zip(axes, paired, strict=True):
        shift = 0.0 if told is None else 0.17
        if told is not None:
            _bars(ax, told, at=shift, color="0.6", label="paper")
        _bars(ax, one.percentiles, at=-shift, color="C0", label="here")
        ax.set_title(f"epoch {_number(one.epoch)}", fontsize=10)
        ax.set_xlabel("layer, in forward order", fontsize=9)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
    axes[0].set_yscale("log")
    axes[0].set_ylabel("second moment v\n(10th, 50th, 90th percentile)", fontsize=9)
    if any(told is not None for _, told in paired):
        axes[0].legend(fontsize=8)
    figure.suptitle(f"Second moments of Adam, layer by layer ({task})", fontsize=11)
    return figure


def _bars(ax: Axes, percentiles: Percentiles, *, at: float, color: str, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    low, middle, high = percentiles.T
    places = np.arange(1, len(middle) + 1) + at
    ax.errorbar(places, middle, yerr=np.stack([middle - low, high - middle]), fmt="o", markersize=3, capsize=2,
                elinewidth=1, color=color, label=label)  # fmt: skip
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))


STUDIES = (
    Study("rotation/fig5", "Figure 5: Adam's second moments in each layer", trials, figure5, reads_runs=True),
    Study("speed/fig11", "Figure 11: Adam's second moments in each layer", trials, figure5, reads_runs=True),
)
