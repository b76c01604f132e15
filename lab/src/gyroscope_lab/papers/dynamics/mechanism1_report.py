"""What copied effective learning rates gained, beside the weight decay that they were copied from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gyroscope_lab.papers.dynamics.gain import gain, reproduced
from gyroscope_lab.papers.dynamics.loop import mean_curve
from gyroscope_lab.papers.study import Report, Table, Verdict
from gyroscope_lab.training.schedule import Schedule

_NAMES = {
    "none": "no decay",
    "all": "decay of all layers",
    "normalized": "decay of normalized layers",
    "last": "decay of the last layer",
    "copied": "no decay, copied effective rates",
}
_COLOURS = {"none": "C0", "all": "C3", "normalized": "C1", "last": "C2", "copied": "C4"}
# Copied rates give back what decay gains from this share of it; an effective rate is raised from this factor on.
_MOST, _RAISED = 0.5, 1.1


@dataclass(frozen=True)
class Arm:
    """A method with one kind of decay, over seeds.

    Attributes:
        rule: of the optimizer.
        decayed: which layers are decayed, "none", or "copied".
        tests: test accuracies in percent, seed by seed.
        loss: of every epoch, the mean over seeds.
        effective: [epochs + 1], effective learning rates before the first and after every epoch: geometric means over
            layers and seeds.
    """

    rule: str
    decayed: str
    tests: list[float]
    loss: npt.NDArray[np.float64]
    effective: npt.NDArray[np.float64]

    @classmethod
    def of(cls, rule: str, decayed: str, runs: Sequence[dict[str, Any]]) -> Arm:
        """From what the runs of all seeds told.

        >>> run = {"test": 90.0, "loss": [1.0], "effective": [[0.1, 0.4], [0.2, 0.2]]}
        >>> Arm.of("SGD", "none", [run]).effective.round(3).tolist()
        [0.2, 0.2]
        """
        effective = np.exp(np.mean(np.log([run["effective"] for run in runs]), axis=(0, 2)))
        loss = mean_curve([run["loss"] for run in runs], len(runs[0]["loss"]))
        return cls(rule, decayed, [run["test"] for run in runs], loss, effective)

    @property
    def test(self) -> float:
        """The mean over seeds."""
        return float(np.mean(self.tests))

    def numbers(self) -> dict[str, Any]:
        """What is kept of it as JSON."""
        kept = {"rule": self.rule, "decayed": self.decayed, "tests": self.tests}
        return {**kept, "loss": self.loss.tolist(), "effective": self.effective.tolist()}


def report(arms: list[Arm], schedule: Schedule) -> Report:
    """The figure, the table and the verdicts, of arms that were all trained with a schedule."""
    cut = first_cut(schedule)
    columns = ("optimizer", "", "test %", "gain over no decay", "last loss", "effective rate before the first cut",
               "relative to no decay")  # fmt: skip
    rows, verdicts = [], []
    for rule in dict.fromkeys(arm.rule for arm in arms):
        by = {arm.decayed: arm for arm in arms if arm.rule == rule}
        none = by["none"]
        for arm in by.values():
            at = float(arm.effective[cut])
            rows.append((rule, _NAMES[arm.decayed], arm.test, gain(arm.tests, none.tests).told, float(arm.loss[-1]),
                         f"{at:.3g}", at / float(none.effective[cut])))  # fmt: skip
        verdicts += _verdicts(rule, by, cut)
    table = Table("Test accuracy by what is decayed", columns, tuple(rows))
    numbers = {"arms": [arm.numbers() for arm in arms]}
    return Report({"figure": _figure(arms)}, (table,), tuple(verdicts), numbers)


def first_cut(schedule: Schedule) -> int:
    """How many epochs have the first learning rate: all, where it is not cut.

    >>> first_cut(Schedule(epochs=200, cuts=(0.3, 0.6))), first_cut(Schedule(epochs=20, cuts=()))
    (60, 20)
    """
    return min([*schedule.milestones, schedule.epochs])


def _verdicts(rule: str, by: dict[str, Arm], cut: int) -> list[Verdict]:
    none, normalized, copied = by["none"], by["normalized"], by["copied"]
    decay, last, whole = (gain(by[kind].tests, none.tests) for kind in ("normalized", "last", "all"))
    times = float(normalized.effective[cut] / none.effective[cut])
    apart = [float(np.abs(np.log(arm.loss / normalized.loss)).mean()) for arm in (copied, none)]
    off = float(np.abs(np.log(copied.effective[1:] / normalized.effective[1:])).max())
    return [
        Verdict(
            f"{rule}: decay of normalized layers raises their effective learning rate",
            "a larger λ leads to a higher one",
            f"{times:.1f} times that without decay before the first cut, after {cut} epochs",
            times > _RAISED,
        ),
        Verdict(
            f"{rule}: weight decay raises test accuracy",
            "improves generalization",
            f"{whole.told} points with decay of all layers",
            whole.above,
        ),
        Verdict(
            f"{rule}: it does so through normalized layers, whose size does not matter",
            "most of the gain is theirs",
            f"{decay.told} points with decay of these alone, {last.told} of the last, {whole.told} of all",
            None if decay.above is None else decay.mean > max(last.mean, _MOST * whole.mean),
        ),
        Verdict(
            f"{rule}: its effective learning rates, copied onto a run without decay, make it train alike",
            "nothing to do with capacity",
            f"losses are off by a factor of {np.exp(apart[0]):.2f} on average, without the copy by "
            f"{np.exp(apart[1]):.2f}; effective rates agree within {np.exp(off):.2f}",
            apart[0] < _MOST * apart[1],
        ),
        Verdict(
            f"{rule}: and give it the same gain",
            "all that it does",
            f"{gain(copied.tests, none.tests).told} of {decay.told} points",
            reproduced(decay, gain(copied.tests, none.tests), share=_MOST),
        ),
    ]


def _figure(arms: Sequence[Arm]) -> Any:
    from matplotlib.figure import Figure

    rules = list(dict.fromkeys(arm.rule for arm in arms))
    figure = Figure(figsize=(10.5, 3.4 * len(rules)), layout="constrained")
    for (left, right), rule in zip(figure.subplots(len(rules), 2, squeeze=False), rules, strict=True):
        mine = [arm for arm in arms if arm.rule == rule]
        for arm in mine:
            colour, label = _COLOURS[arm.decayed], _NAMES[arm.decayed]
            # Curves lie on each other in pairs: one of each is wide, and that of the copy is dashed.
            if arm.decayed == "copied":
                left.semilogy(arm.effective, linestyle=(0, (2, 2)), color=colour, linewidth=2, zorder=3, label=label)
            else:
                wide = arm.decayed in ("none", "all")
                left.semilogy(arm.effective, color=colour, linewidth=4 if wide else 1.4, label=label,
                              alpha=0.5 if wide else 1.0)  # fmt: skip
        power = "^2" if rule == "SGD" else ""
        left.set(xlabel="epoch", ylabel=rf"$\alpha/\|w\|{power}$, mean over layers", title=f"{rule}: effective rates")
        left.legend(fontsize=7)
        names = [_NAMES[arm.decayed].replace(" of ", " of\n").replace(", ", ",\n") for arm in mine]
        right.barh(names, [arm.test for arm in mine], color=[_COLOURS[arm.decayed] for arm in mine], height=0.6)
        for place, arm in enumerate(mine):
            right.plot(arm.tests, [place] * len(arm.tests), "k|", markersize=7)
        lowest, highest = min(min(arm.tests) for arm in mine), max(max(arm.tests) for arm in mine)
        around = max(0.3 * (highest - lowest), 0.5)
        right.set(xlabel="test accuracy (%)", xlim=(lowest - around, min(100, highest + around)), title=rule)
        right.tick_params(axis="y", labelsize=8)
        right.invert_yaxis()
        for ax in (left, right):
            ax.title.set_fontsize(10)
            ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Weight decay with batch normalization: the schedule of effective learning rates, copied")
    return figure
