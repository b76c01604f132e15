"""Do steered networks need a warm-up?

Transformers that normalize sums (post-LN, the first ones) are known to need a warm-up under Adam, those that normalize
what is added (pre-LN) less so. Both are trained by AdamW and by steering, without a warm-up and with one over the first
tenth of the steps: what the warm-up gains, at the same rate, is what a training without it lacks.

The rotation paper's ResNet-110 does not start to learn under SGD without a warm-up, and does under Layca. The
conditioning paper cures very deep networks that stall by batch normalization before the last layer (LastBN). The trials
of `rotation/lastbn` put the three cures next to each other: if LastBN cures the same network, both failures are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from gyroscope_lab.engine.laboratory import Lab
from gyroscope_lab.papers.beyond.problems import (
    GPT,
    NATS,
    Gain,
    adamw,
    decided,
    mean,
    raw,
    score,
    seeds,
    untuned,
    warmed,
)
from gyroscope_lab.papers.cells import Cell, cells, some
from gyroscope_lab.papers.chance import all_exceed, all_hold, gain, opposite
from gyroscope_lab.papers.rotation.warmup import LASTBN, SHOWN, cures
from gyroscope_lab.papers.study import Report, Study, Table, Verdict
from gyroscope_lab.training.recipe import Recipe
from gyroscope_lab.training.result import Result
from gyroscope_lab.training.task import Task
from gyroscope_lab.training.trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The share of the steps of a warm-up.
SHARE = 0.1
#: The learning rates of AdamW: one that is usual at this size, and one that is high.
RATES = (3e-3, 1e-2)
#: Blocks of the transformers by scale: deeper than elsewhere, because depth is what makes post-LN hard to start.
DEPTHS = {"smoke": 2, "small": 6, "full": 12}
_KINDS = {"pre-LN": False, "post-LN": True}
_DECAY = 0.1
# A network starts if its training accuracy by epoch `SHOWN` is less than this many points below that with a warm-up.
_STARTS = 5.0


def transformer(lab: Lab, kind: str) -> Task:
    """Return the character GPT with its normalization before or after the sums."""
    base = GPT.at(lab)
    options = dict(base.options) | {"depth": DEPTHS[lab.scale], "post_norm": _KINDS[kind]}
    if lab.scale == "small":
        options["width"] = 32
    return replace(base, name=f"{base.name}-{kind.lower()}", options=tuple(options.items()))


def recipes(lab: Lab, task: Task) -> list[Recipe]:
    """AdamW at each of its rates, and steering with AdamW and with Muon inside."""
    found = [*(adamw(task, rate, _DECAY) for rate in RATES), *(untuned(task, inner) for inner in ("adamw", "muon"))]
    return found[1:3] if lab.scale == "smoke" else found


def transformers(lab: Lab) -> list[Trial]:
    """Return the trials of transformers: every recipe without a warm-up and with one."""
    return [
        Trial(its, recipe, seed)
        for kind in _KINDS
        for recipe in recipes(lab, transformer(lab, kind))
        for its in (transformer(lab, kind), warmed(transformer(lab, kind), SHARE))
        for seed in seeds(lab)
    ]


def residual(lab: Lab) -> list[Trial]:
    """Return the trials of `rotation/lastbn`, from all seeds."""
    first = list(dict.fromkeys((trial.task, trial.recipe) for trial in cures(lab)))
    return [Trial(task, recipe, seed) for task, recipe in first for seed in seeds(lab)]


def trials(lab: Lab) -> list[Trial]:
    """Return the trials of transformers and of residual networks.

    >>> from gyroscope_lab.training.archive import Archive
    >>> len(trials(Lab(Archive("runs"), "full")))
    63
    """
    return [*transformers(lab), *residual(lab)]


@dataclass(frozen=True)
class WarmUp(Gain):
    """A recipe on a transformer, without a warm-up and with one."""

    kind: str

    @property
    def needed(self) -> bool | None:
        """True if the warm-up gains more than the tolerance, False if it does not; None where that may be chance."""
        return self.over_seeds.exceeds(NATS)

    @property
    def is_steered(self) -> bool:
        """True under Layca."""
        return self.without.recipe.optimizer == "steer"


def gains(lab: Lab) -> list[WarmUp]:
    """Return what a warm-up gains, for each transformer and recipe of which both trainings are known."""
    found = {(cell.task, cell.recipe): cell for cell in cells(lab, transformers(lab))}
    result = []
    for kind in _KINDS:
        task = transformer(lab, kind)
        for recipe in recipes(lab, task):
            without, warm = (found.get((its, recipe)) for its in (task, warmed(task, SHARE)))
            if without is not None and warm is not None:
                result.append(WarmUp(without, warm, kind))
    return result


def conclude(lab: Lab) -> Report:
    """Report what a warm-up gains, and the three cures of a deep residual network."""
    its, deep = gains(lab), cells(lab, residual(lab))
    some([*its, *deep])
    return Report(
        {"figure": _draw(its, deep)},
        (_table(its), _of_residual(deep)),
        (*_verdicts(lab, its), *_cures(lab, deep)),
        {
            "transformers": [raw(cell) for gain in its for cell in (gain.without, gain.changed)],
            "residual": [cell.numbers() for cell in deep],
        },
    )


def _table(its: Sequence[WarmUp]) -> Table:
    rows = tuple(
        (
            gain.kind,
            gain.without.recipe.name,
            f"{score(gain.without):.3f}",
            f"{score(gain.changed):.3f}",
            f"{gain.value:+.3f}",
            None if gain.noise is None else f"{gain.noise:.3f}",
            {True: "yes", False: "no", None: "undecided"}[gain.needed],
        )
        for gain in its
    )
    columns = ("transformer", "recipe", "best test loss", "with a warm-up", "gain", "± (standard error)", "needed")
    return Table("What a warm-up gains (nats)", columns, rows)


def _of_residual(deep: Sequence[Cell]) -> Table:
    rows = tuple((_named(cell), mean(_started(cell)), cell.test, len(cell.results)) for cell in deep)
    columns = ("network", f"train % by epoch {SHOWN}", "test %", "seeds")
    return Table("Three cures of a deep residual network", columns, rows)


def _named(cell: Cell) -> str:
    network = cell.task.model.replace("-lastbn", "") + (" (Keras)" if dict(cell.task.options).get("keras") else "")
    cure = "LastBN" if cell.task.model.startswith(LASTBN) else "Layca" if cell.recipe.control else ""
    if cell.task.schedule.warmup:
        cure = f"warm-up of {cell.task.schedule.warmup:g} epochs"
    return f"{network}, {cell.recipe.name}: {cure or 'no cure'}"


def _verdicts(lab: Lab, its: Sequence[WarmUp]) -> list[Verdict]:
    if len(its) < len(_KINDS) * len(recipes(lab, transformer(lab, "pre-LN"))):
        return []
    known = decided(lab, [cell for gain in its for cell in (gain.without, gain.changed)])

    def told(chosen: Sequence[WarmUp]) -> str:
        return ", ".join(f"{gain.kind} {gain.without.recipe.name} {gain.value:+.3f}" for gain in chosen) + " nats"

    plain = [gain for gain in its if not gain.is_steered]
    post = [gain for gain in plain if gain.kind == "post-LN"]
    under_layca = [gain for gain in its if gain.is_steered]
    does_without, steered_do = (_none_needed(part) if known else None for part in (post, under_layca))
    return [
        Verdict(
            "a post-LN transformer needs a warm-up under AdamW",
            "it does (published)",
            told(post),
            opposite(does_without),
        ),
        Verdict(
            "steered transformers need no warm-up, pre-LN or post-LN",
            f"a warm-up gains at most {NATS} nats (our aim)",
            told(under_layca),
            steered_do,
        ),
    ]


def _none_needed(its: Sequence[WarmUp]) -> bool | None:
    """Return whether no warm-up gains more than the tolerance; None where that may be chance."""
    return all_exceed([-gain.over_seeds for gain in its], -NATS)


def _cures(lab: Lab, deep: Sequence[Cell]) -> list[Verdict]:
    if len(deep) < 5:
        return []
    failing, warm, steady, plain, cured = map(_started, deep)
    says = "the ResNet that does not start without a warm-up is the one that LastBN cures: both failures are one"
    here = (
        f"training accuracy by epoch {SHOWN}: {mean(failing):.1f} % without a cure, {mean(warm):.1f} % with a warm-up, "
        f"{mean(steady):.1f} % under Layca; {mean(plain):.1f} % without LastBN and {mean(cured):.1f} % with it"
    )
    # A network that starts without a cure says nothing about cures.
    holds = None
    if decided(lab, deep) and gain(warm, failing).exceeds(_STARTS):
        as_warm = [gain(one, warm).exceeds(-_STARTS) for one in (cured, steady)]
        holds = all_hold([gain(cured, plain).exceeds(_STARTS), *as_warm])
    return [Verdict(says, "the papers do not compare", here, holds)]


def _first(result: Result) -> list[float]:
    """The training accuracy of the first epochs in percent; a training that was stopped keeps its last."""
    known = [100 * one for one in result.accuracy[:SHOWN]]
    return known + known[-1:] * (SHOWN - len(known))


def _started(cell: Cell) -> list[float]:
    """The training accuracy by epoch `SHOWN` in percent, seed by seed."""
    return [_first(result)[-1] for result in cell.results]


def _draw(its: Sequence[WarmUp], deep: Sequence[Cell]) -> Figure:
    """Draw what a warm-up gains, and the training accuracy of the residual networks over the first epochs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.0, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_gains(left, its)
    for place, cell in enumerate(deep):
        accuracy = np.mean([_first(result) for result in cell.results], axis=0)
        right.plot(range(1, len(accuracy) + 1), accuracy, color=f"C{place}", label=_named(cell), linewidth=1.2)
    right.set(xlabel="epoch", ylabel="training accuracy (%)", ylim=(0, 101))
    right.set_title("Residual networks: the first epochs, mean over seeds", fontsize=9)
    right.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_gains(ax: Axes, its: Sequence[WarmUp]) -> None:
    ax.axvspan(-NATS, NATS, color="0.93")
    ax.axvline(0, color="0.5", linewidth=0.8)
    for place, one in enumerate(reversed(its)):
        color = "C0" if one.is_steered else "black"
        if isfinite(one.value):
            ax.errorbar(one.value, place, xerr=one.over_seeds.span, fmt="o", color=color, markersize=4, linewidth=1)
    ax.set_yticks(range(len(its)), [f"{one.kind}, {one.without.recipe.name}" for one in reversed(its)], fontsize=8)
    ax.set_xlabel("gain of a warm-up (nats, intervals at 95 %)")
    ax.set_title("Transformers: right of the gray, a warm-up is needed", fontsize=9)


STUDIES = (
    Study(
        "beyond/warmup",
        "No warm-up: transformers and a deep residual network under AdamW, SGD and Layca, and with LastBN",
        trials,
        conclude,
    ),
)
