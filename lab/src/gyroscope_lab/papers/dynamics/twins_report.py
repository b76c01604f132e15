"""The figure, the table and the verdicts on weight decay and the exponential schedule in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gyroscope.theory import effective_lr, shrinkage
from gyroscope_lab.papers.dynamics.twins import Setting, Twins, Way
from gyroscope_lab.papers.study import Report, Table, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Pair:
    """A training that is compared with that with weight decay, and its name."""

    name: str
    setting: Setting
    way: Way


# Outputs are the same that differ by no more, as a share of the largest: rounding of float64, magnified by training.
_SAME = 1e-9
# An effective learning rate stays that changes by no more than this factor, between means over quarters of the steps.
_STAYS = 1.1
# What draws the same line as rounding, up to a factor that chance accounts for.
_ALIKE = 100.0


def report(pairs: Sequence[Pair], found: Sequence[Twins]) -> Report:
    """What came of all pairs."""
    by_name = {pair.name: (pair, twins) for pair, twins in zip(pairs, found, strict=True)}
    rows = tuple(
        (pair.name, f"{max(twins.apart):.1g}", _step_apart(twins), 100 * twins.agree, None,
         f"{twins.rates[1][-1]:.3g}", f"{twins.norms[0][-1][0]:.3g}", f"{twins.norms[1][-1][0]:.3g}",
         100 * twins.tests[0], 100 * twins.tests[1])
        for pair, twins in by_name.values()
    )  # fmt: skip
    columns = ("beside weight decay in the same type", "outputs apart, at most", "1 % apart from step",
               "same class at the end, %", "paper", "last rate", "first layer's norm with decay", "without",
               "test % with decay", "without")  # fmt: skip
    one = pairs[0].setting
    title = (
        f"{one.source}, perceptron of 4 layers, {one.width} wide: {one.steps:,} steps at η = {one.rate:g}, "
        f"λ = {one.decay:g} (with momentum η = {one.rate / 10:g})"
    )
    return Report(
        {"figure": draw(by_name)},
        (Table(title, columns, rows),),
        _verdicts(by_name),
        {name: _numbers(twins) for name, (_, twins) in by_name.items()},
    )


def _step_apart(twins: Twins) -> int | None:
    """The first look at which outputs are a hundredth apart."""
    return next((step for step, apart in zip(twins.steps, twins.apart, strict=True) if apart > 0.01), None)


def _verdicts(by_name: dict[str, tuple[Pair, Twins]]) -> tuple[Verdict, ...]:
    pair, plain = by_name["float64"]
    heavy, neither = by_name["float64, momentum 0.9"][1], by_name["float64, neither"][1]
    usual, single = by_name["float64, ε = 1e-5"][1], by_name["float32"][1]
    jogged, jogged32 = by_name["float64, another last digit"][1], by_name["float32, another last digit"][1]
    worst = max(*plain.apart, *heavy.apart)
    scale = max(_scale_off(by_name[name]) for name in ("float64", "float64, momentum 0.9"))
    rates, falling = _effective(plain, 1), _effective(neither, 1)
    levels = [rates[0], *_quarters(rates)]
    rests = levels[-1] / levels[-2]
    return (
        Verdict(
            "weight decay and the exponential schedule without it train the same function",
            "exactly",
            f"in float64 outputs are at most {max(plain.apart):.1g} apart over {pair.setting.steps:,} steps, in which "
            f"the rate grows to {plain.rates[1][-1] / plain.rates[0][-1]:.2g} times what it was; with momentum "
            f"{max(heavy.apart):.1g}; without weight decay at a constant rate {max(neither.apart):.2g}",
            bool(worst < _SAME < max(neither.apart)),
        ),
        Verdict(
            "weights are a^t as long with weight decay as with the schedule",
            "exactly",
            f"within {scale:.1g} of it",
            scale < _SAME,
        ),
        Verdict(
            "an exponentially increasing learning rate makes up for the implicit decay: the effective one is constant",
            "in words",
            f"with it, α̂ goes from {levels[0]:.3g} to {levels[-1]:.3g}, the mean of the last quarter of the steps; "
            f"without it and without weight decay from {falling[0]:.3g} to {_quarters(falling)[-1]:.3g}",
            max(levels) < _STAYS * min(levels),
        ),
        Verdict(
            "the effective one comes to rest, as with weight decay",
            "–",
            f"α̂ of the last quarter of the steps is {rests:.2f} times that of the quarter before",
            True if 1 / _STAYS < rests < _STAYS else None,
        ),
        Verdict(
            "what is left apart is rounding, magnified by training",
            "–",
            f"{max(plain.apart):.1g} beside {max(jogged.apart):.1g} from another last digit of the first weights; in "
            f"float32 {max(single.apart):.1g} beside {max(jogged32.apart):.1g}, a hundredth {_said(single)} and "
            f"{_said(jogged32)}",
            max(plain.apart) < _ALIKE * max(jogged.apart) and max(single.apart) < _ALIKE * max(jogged32.apart),
        ),
        Verdict(
            "an ε in batch normalization breaks the scale invariance",
            "–",
            f"with ε = 1e-5 outputs are {max(usual.apart):.1g} apart in float64, a hundredth "
            f"{_said(usual)}; test accuracies are {100 * usual.tests[0]:.1f} and {100 * usual.tests[1]:.1f} %",
            max(usual.apart) > _SAME,
        ),
    )  # fmt: skip


def _said(twins: Twins) -> str:
    step = _step_apart(twins)
    return "at no step" if step is None else f"from step {step:,} on"


def _scale_off(known: tuple[Pair, Twins]) -> float:
    """How far ‖w_t‖ is from a^t ‖w̃_t‖, as a share, at worst."""
    one, twins = known[0].setting, known[1]
    a = 1 - shrinkage(one.rate, one.decay, momentum=one.momentum)
    with_decay, without = (np.array(norms) for norms in twins.norms)
    told = without * a ** np.array(twins.steps)[:, None]
    return float(np.abs(told / with_decay - 1).max())


def _effective(twins: Twins, which: int) -> list[float]:
    """η/‖w‖² of the first layer over the looks."""
    norms = [norm[0] for norm in twins.norms[which]]
    found: list[float] = effective_lr(twins.rates[which], norms).tolist()
    return found


def _quarters(rates: Sequence[float]) -> list[float]:
    """The means of the four quarters, or of as many parts as there are looks.

    >>> _quarters([1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0])
    [1.0, 2.0, 3.0, 4.0]
    """
    return [float(np.mean(part)) for part in np.array_split(rates, min(4, len(rates)))]


def _numbers(twins: Twins) -> dict[str, object]:
    at = sorted({round(place) for place in np.linspace(0, len(twins.steps) - 1, 41)})
    return {
        "steps": [twins.steps[i] for i in at],
        "apart": [float(f"{twins.apart[i]:.3g}") for i in at],
        "rates": [float(f"{twins.rates[1][i]:.6g}") for i in at],
        "effective_rates_with_decay": [float(f"{_effective(twins, 0)[i]:.5g}") for i in at],
        "effective_rates_without": [float(f"{_effective(twins, 1)[i]:.5g}") for i in at],
        "agree": twins.agree,
        "test": list(twins.tests),
    }


def draw(by_name: dict[str, tuple[Pair, Twins]]) -> Figure:
    """How far outputs are apart, the schedules, and effective learning rates."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 3.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.4, 1, 1))
    styles = dict(zip(by_name, ("C0-", "C2-", "C4-", "C3-", "C0:", "C3:", "k-"), strict=True))
    for name, (_, twins) in by_name.items():
        shown = [(step, apart) for step, apart in zip(twins.steps, twins.apart, strict=True) if apart > 0]
        left.plot(*zip(*shown, strict=True), styles[name], linewidth=1.3, label=name)
    left.set_ylim(1e-17, 1e6)
    left.legend(fontsize=7, loc="upper left", ncols=2, columnspacing=1.0, handlelength=1.5)
    _finish(left, "largest difference of outputs, relative", "Outputs beside those with weight decay")
    plain, neither = by_name["float64"][1], by_name["float64, neither"][1]
    middle.plot(plain.steps, plain.rates[0], "k--", label="with weight decay: η")
    middle.plot(plain.steps, plain.rates[1], "C0-", label="without: η a^−(2t+1)")
    middle.legend(fontsize=8, loc="upper left")
    _finish(middle, "learning rate", "Learning rates")
    right.plot(plain.steps, _effective(plain, 1), "C0-", linewidth=2.5, alpha=0.5, label="exponential schedule")
    right.plot(plain.steps, _effective(plain, 0), "k--", linewidth=1, label="weight decay")
    right.plot(neither.steps, _effective(neither, 1), color="0.5", label="neither")
    right.legend(fontsize=8, loc="center right")
    _finish(right, "effective learning rate η/‖w‖²", "Effective learning rates, first layer")
    return figure


def _finish(ax: Axes, says: str, title: str) -> None:
    ax.set_yscale("log")
    ax.set_xlabel("step t", fontsize=9)
    ax.set_ylabel(says, fontsize=9)
    ax.set_title(title, fontsize=10)
    ax.spines[["top", "right"]].set_visible(False)
